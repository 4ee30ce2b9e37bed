"""MatFormer: its rounds written out, its MACs by hand, shared weights, and what it refuses."""

import pytest
import torch

from progresvit.baselines.matformer import MatFormer, MatFormerConfig
from progresvit.config import plain_vit
from progresvit.model import ProgResViT
from progresvit.training.step import compile_blocks
from tests.baselines.literal import plain_blocks, plain_embedding, plain_head

SHARES = (0.125, 0.25, 0.5, 1)
TINY = {"heads": 2, "depth": 2, "num_classes": 5}


def rounds(*shares, resolution=32):
    return [{"resolution": resolution, "mlp_share": share} for share in shares]


@pytest.fixture
def model(randomize):
    return randomize(MatFormer(MatFormerConfig(rounds=rounds(*SHARES), **TINY)))


def test_every_round_equals_the_products_written_out(model, images):
    embedded = plain_embedding(model, images)
    for hidden, output in zip((64, 128, 256, 512), model(images), strict=True):
        x = plain_blocks(model, embedded, hidden)
        assert output.tokens.shape == (3, 5, 128)
        torch.testing.assert_close(output.logits, plain_head(model, x), atol=1e-4, rtol=1e-4)


def test_the_whole_share_is_the_plain_vit(model, images):
    alone = ProgResViT(plain_vit(resolution=32, **TINY)).eval()
    alone.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.run_round(3, images).logits, alone(images)[0].logits, atol=1e-5, rtol=1e-5)


def test_layer_scale_multiplies_the_sliced_mlp(randomize, images):
    config = MatFormerConfig(rounds=rounds(0.5, 1), layer_scale=0.1, **TINY)
    model = randomize(MatFormer(config))
    alone = ProgResViT(plain_vit(resolution=32, layer_scale=0.1, **TINY)).eval()
    alone.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(images)[1].logits, alone(images)[0].logits, atol=1e-5, rtol=1e-5)


def test_a_weight_changes_the_rounds_that_hold_it_and_no_other(model, images):
    def changed(layer, index):
        before = [output.logits for output in model(images)]
        with torch.no_grad():
            getattr(model.blocks[0].mlp, layer).weight[index] += 1
        return [not torch.equal(old, new.logits) for old, new in zip(before, model(images))]

    assert changed("fc1", (0, 0)) == [True, True, True, True]
    assert changed("fc1", (64, 0)) == [False, True, True, True]
    assert changed("fc2", (0, 256)) == [False, False, False, True]


@pytest.mark.parametrize("convention", ["paper", "executed"])
def test_macs_by_hand_for_deit_s(convention):
    """The residual width is the full one, so both conventions count the same."""
    with torch.device("meta"):
        model = MatFormer(MatFormerConfig(rounds=rounds(*SHARES, resolution=224), heads=6))
    outside = 196 * 768 * 384 + 1000 * 384
    attention = 12 * (197 * 4 * 384 * 384 + 2 * 197 * 197 * 384)
    mlps = [12 * 197 * 2 * 384 * hidden for hidden in (192, 384, 768, 1536)]
    assert model.gmacs(convention) == [(outside + attention + mlp) / 1e9 for mlp in mlps]
    assert [round(gmacs, 3) for gmacs in model.gmacs(convention)] == [2.159, 2.507, 3.205, 4.599]


def test_a_share_needs_whole_channels_and_the_nearest_are_named():
    with pytest.raises(ValueError, match=r"round 2 runs 51\.2 of 512 hidden channels .* 0\.0996094 or 0\.101562"):
        MatFormerConfig(rounds=rounds(1, 0.1), **TINY)
    named = MatFormerConfig(rounds=rounds(0.101562), **TINY)
    assert named.hidden(named.rounds[0]) == 52
    with pytest.raises(ValueError, match=r"nearest mlp_share is 0\.00195312\."):
        MatFormerConfig(rounds=rounds(0.001), **TINY)


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_a_share_outside_of_its_range_is_refused(share):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        MatFormerConfig(rounds=rounds(share), **TINY)


def test_recomputing_blocks_gives_the_same_gradients(model, images):
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        model.set_grad_checkpointing(recompute)
        model.run_round(1, images).logits.square().sum().backward()
        gradients.append(model.blocks[0].mlp.fc1.weight.grad.clone())
    assert torch.equal(*gradients)
    assert gradients[0][128:].count_nonzero() == 0


@pytest.mark.slow
def test_blocks_compiled_alone_answer_as_before(model, images):
    before = [output.logits for output in model(images)]
    compile_blocks(model)
    for output, logits in zip(model(images), before):
        torch.testing.assert_close(output.logits, logits, atol=1e-4, rtol=1e-4)
