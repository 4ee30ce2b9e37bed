"""ThinkingViT: its sum written out, its MACs by hand, shared weights, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F

from progresvit.baselines.thinkingvit import ThinkingViT, ThinkingViTConfig
from progresvit.config import make_rounds
from progresvit.interop import start_from_timm
from tests.baselines.literal import plain_blocks, plain_embedding, plain_head

TINY = {"rounds": make_rounds([32, 32], [1, 2]), "heads": 2, "depth": 2, "num_classes": 5}


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = ThinkingViT(ThinkingViTConfig(**TINY)).eval()
    with torch.no_grad():
        made.transitions[0].alpha.fill_(0.7)
    return made


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def literal_rounds(model, images):
    """The two rounds of ThinkingViT as METHOD describes them."""
    embedded = plain_embedding(model, images)
    first = plain_blocks(model, embedded[..., :64])
    step = model.transitions[0]
    second = plain_blocks(model, embedded + step.alpha * (first @ step.widen.weight.T + step.widen.bias))
    return [plain_head(model, x) for x in (first, second)]


def test_both_rounds_equal_the_sum_written_out(model, images):
    for output, literal in zip(model(images), literal_rounds(model, images), strict=True):
        torch.testing.assert_close(output.logits, literal, atol=1e-5, rtol=0)


def test_the_loss_is_the_mean_of_the_rounds_cross_entropies(model, images):
    from progresvit.data.augment.classification import Batch
    from progresvit.training.tasks.supervised import Supervised

    targets = F.one_hot(torch.tensor([0, 4, 2]), 5).float()
    losses = Supervised().losses(model(images), Batch(images, targets))
    literal = [-(targets * logits.log_softmax(-1)).sum(1).mean() for logits in literal_rounds(model, images)]
    torch.testing.assert_close(losses.mean(), sum(literal) / 2, atol=1e-5, rtol=0)


def test_at_the_start_the_last_round_is_the_plain_vit(images):
    torch.manual_seed(0)
    model = ThinkingViT(ThinkingViTConfig(**TINY)).eval()
    alone = ThinkingViT(ThinkingViTConfig(**{**TINY, "rounds": make_rounds([32], [2])})).eval()
    weights = {key: value for key, value in model.state_dict().items() if key in alone.state_dict()}
    alone.load_state_dict(weights)
    assert torch.equal(model(images)[1].logits, alone(images)[0].logits)


def test_rounds_share_their_weights(model, images):
    before = [output.logits for output in model(images)]
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, 0] += 1
    after = [output.logits for output in model(images)]
    assert not torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_alpha_learns_from_its_start_at_zero(images):
    torch.manual_seed(0)
    model = ThinkingViT(ThinkingViTConfig(**TINY))
    model(images)[1].logits.square().sum().backward()
    assert model.transitions[0].alpha.grad != 0


def test_macs_by_hand_for_deit_s():
    config = ThinkingViTConfig(rounds=make_rounds([224, 224], [3, 6]), heads=6)
    with torch.device("meta"):
        model = ThinkingViT(config)

    def stack(d, embedded):
        return 196 * 768 * embedded + 12 * (197 * 12 * d * d + 2 * 197 * 197 * d) + 1000 * d

    transition = 197 * 192 * 384
    executed = stack(192, 192) + stack(384, 384) + transition
    paper = stack(192, 384) + stack(384, 384) + transition
    assert model.gmacs("executed")[-1] == executed / 1e9
    assert model.gmacs("paper")[-1] == paper / 1e9
    assert [round(number / 1e9, 3) for number in (executed, paper)] == [5.867, 5.896]
    assert round((executed - transition) / 1e9, 2) == 5.85  # as published


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resolution": 64}, "one resolution, not at 32 and 64"),
        ({"merge": 1}, "kind thinkingvit does not merge tokens; remove merge from round 2"),
    ],
)
def test_rounds_of_two_resolutions_or_with_token_merging_are_refused(change, message):
    rounds = [{"resolution": 32, "heads": 1}, {"resolution": 32, "heads": 2, **change}]
    with pytest.raises(ValueError, match=message):
        ThinkingViTConfig(**{**TINY, "rounds": rounds})


def test_a_plain_vit_is_a_start_that_leaves_the_transitions_alone(model):
    alone = ThinkingViT(ThinkingViTConfig(**{**TINY, "rounds": make_rounds([32], [2])}))
    left = start_from_timm(model, alone.state_dict())
    assert left == ["transitions.0.alpha", "transitions.0.widen.weight", "transitions.0.widen.bias"]
    assert torch.equal(model.blocks[1].mlp.fc1.weight, alone.blocks[1].mlp.fc1.weight)
