"""DynaBERT: its slices written out, its MACs by hand, shared weights, and the order of heads and neurons."""

import copy

import pytest
import torch
import torch.nn.functional as F

from progresvit.baselines.dynabert import DynaBERT, DynaBERTConfig, importance, permute, reorder
from progresvit.config import plain_vit
from progresvit.model import ProgResViT
from progresvit.training.recipe import load_recipe
from tests.baselines.literal import plain_embedding


def widths(*shares, resolution=32):
    return [{"resolution": resolution, "share": share} for share in shares]


TINY = {"rounds": widths(0.25, 0.5, 1), "heads": 3, "depth": 2, "num_classes": 5}
WIDTH = 192


@pytest.fixture
def model(randomize):
    return randomize(DynaBERT(DynaBERTConfig(**TINY)))


@pytest.fixture
def batches(images):
    return [(images, torch.tensor([0, 4, 2])), (images.flip(0), torch.tensor([1, 1, 3]))]


def literal_round(model, images, heads, neurons, mask=None):
    """Logits and residual stream with the leading heads and neurons; ``mask`` multiplies them, per block."""
    x, states = plain_embedding(model, images), []
    for number, block in enumerate(model.blocks):
        seen, attn, mlp = F.layer_norm(x, (WIDTH,), block.norm1.weight, block.norm1.bias, 1e-6), block.attn, block.mlp
        update = attn.proj.bias
        for head in range(heads):
            rows = [slice(part * WIDTH + 64 * head, part * WIDTH + 64 * head + 64) for part in range(3)]
            q, k, v = (seen @ attn.qkv.weight[row].T + attn.qkv.bias[row] for row in rows)
            mixed = (q @ k.mT / 8).softmax(dim=-1) @ v
            scale = 1 if mask is None else mask[0][number, head]
            update = update + scale * mixed @ attn.proj.weight[:, rows[0]].T
        x = x + update
        seen = F.layer_norm(x, (WIDTH,), block.norm2.weight, block.norm2.bias, 1e-6)
        hidden = F.gelu(seen @ mlp.fc1.weight[:neurons].T + mlp.fc1.bias[:neurons])
        hidden = hidden if mask is None else hidden * mask[1][number]
        x = x + hidden @ mlp.fc2.weight[:, :neurons].T + mlp.fc2.bias
        states.append(x)
    normed = F.layer_norm(x[:, 0], (WIDTH,), model.norm.weight, model.norm.bias, 1e-6)
    return normed @ model.head.weight.T + model.head.bias, states


@pytest.mark.parametrize(
    ("s", "shape", "message"),
    [
        (3, (1, 3, 32, 32), "there is no round 3"),
        (-1, (1, 3, 32, 32), "there is no round -1"),
        (0, (1, 3, 16, 16), "16"),
        (0, (1, 1, 32, 32), "channel"),
    ],
)
def test_hidden_states_of_a_wrong_round_or_of_wrong_images_are_refused(model, s, shape, message):
    with pytest.raises(ValueError, match=message):
        model.run_with_hidden(s, torch.zeros(shape))


@pytest.mark.parametrize(("s", "heads", "neurons"), [(0, 1, 192), (1, 2, 384), (2, 3, 768)])
def test_every_round_equals_its_slices_written_out(model, images, s, heads, neurons):
    logits, states = literal_round(model, images, heads, neurons)
    output, hidden = model.run_with_hidden(s, images)
    torch.testing.assert_close(output.logits, logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(list(hidden), states, atol=2e-5, rtol=1e-5)
    assert torch.equal(model(images)[s].logits, output.logits)
    assert output.tokens.shape == (3, 5, WIDTH)


def test_the_last_round_is_the_plain_vit_to_the_bit(model, images):
    plain = ProgResViT(plain_vit(resolution=32, heads=3, depth=2, num_classes=5)).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(images)[-1].logits, plain(images)[0].logits)


def changed_rounds(model, images, change):
    before = [output.logits for output in model(images)]
    with torch.no_grad():
        change(model.blocks[0])
    return [not torch.equal(old, new.logits) for old, new in zip(before, model(images))]


@pytest.mark.parametrize(
    ("neuron", "channel", "expected"),
    [(0, 0, [True, True, True]), (200, 64, [False, True, True]), (767, 191, [False, False, True])],
)
def test_rounds_share_their_weights_and_nothing_outside_of_their_slices(model, images, neuron, channel, expected):
    assert changed_rounds(model, images, lambda block: block.mlp.fc1.weight[neuron, 191].add_(1)) == expected
    assert changed_rounds(model, images, lambda block: block.mlp.fc2.weight[191, neuron].add_(1)) == expected
    for part in range(3):
        row = part * WIDTH + channel
        assert changed_rounds(model, images, lambda block: block.attn.qkv.weight[row, 191].add_(1)) == expected  # noqa: B023
    assert changed_rounds(model, images, lambda block: block.attn.proj.weight[191, channel].add_(1)) == expected


def test_macs_by_hand_for_deit_s():
    config = DynaBERTConfig(rounds=widths(0.25, 0.5, 0.75, 1, resolution=224), heads=6)
    with torch.device("meta"):
        model = DynaBERT(config)

    def stack(heads, neurons):
        a = 64 * heads
        block = 197 * 4 * 384 * a + 2 * 197 * 197 * a + 197 * 2 * 384 * neurons
        return 196 * 768 * 384 + 12 * block + 384 * 1000

    by_hand = [stack(2, 384), stack(3, 768), stack(5, 1152), stack(6, 1536)]
    for convention in ("paper", "executed"):  # tokens are as wide as the backbone, so both are equal
        assert model.gmacs(convention) == [number / 1e9 for number in by_hand]
    assert [round(number, 3) for number in model.gmacs()] == [1.339, 2.329, 3.61, 4.599]


def test_importance_is_the_gradient_of_masks_written_out(model, batches):
    heads, neurons = torch.zeros(2, 3), torch.zeros(2, 768)
    for images, targets in batches:
        masks = (torch.ones(2, 3, requires_grad=True), torch.ones(2, 768, requires_grad=True))
        F.cross_entropy(literal_round(model, images, 3, 768, masks)[0], targets).backward()
        heads += masks[0].grad.abs()
        neurons += masks[1].grad.abs()
    measured = importance(model, batches)
    torch.testing.assert_close(measured.heads, heads, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(measured.neurons, neurons, atol=1e-5, rtol=1e-3)


def test_reordering_keeps_the_whole_backbone_and_changes_its_parts(model, images, batches):
    model, images = model.double(), images.double()
    batches = [(pixels.double(), targets) for pixels, targets in batches]
    before = [output.logits for output in model(images)]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    reorder(model.train(), batches)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    after = [output.logits for output in model(images)]
    torch.testing.assert_close(after[-1], before[-1], atol=1e-10, rtol=0)
    assert not torch.allclose(after[0], before[0], atol=1e-3)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, weights[key])}
    assert {key.partition(".")[2].partition(".")[2] for key in changed} == {
        *("attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight"),
        *("mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight"),
    }


def test_the_order_is_that_of_the_absolute_gradients(model, batches):
    reorder(model, batches)
    for sizes in importance(model, batches):
        assert (sizes[:, :-1] >= sizes[:, 1:] - 1e-4 * sizes.max()).all()


def test_the_head_and_the_neuron_that_matter_come_first(model, batches):
    """All but one head and one neuron of each block are removed from the function."""
    with torch.no_grad():
        for block, head, neuron in zip(model.blocks, (2, 1), (700, 9)):
            for weight, kept in (
                (block.attn.proj.weight, slice(64 * head, 64 * head + 64)),
                (block.mlp.fc2.weight, slice(neuron, neuron + 1)),
            ):
                column = weight[:, kept].clone()
                weight.zero_()
                weight[:, kept] = column
    full = [output.logits for output in model(batches[0][0])]
    assert not torch.allclose(full[0], full[2], atol=1e-3)
    reorder(model, batches)
    for block in model.blocks:
        assert (block.attn.proj.weight[:, :64] != 0).all()
        assert (block.attn.proj.weight[:, 64:] == 0).all()
        assert (block.mlp.fc2.weight[:, 0] != 0).all()
        assert (block.mlp.fc2.weight[:, 1:] == 0).all()
    small = model(batches[0][0])[0].logits
    torch.testing.assert_close(small, full[2], atol=1e-5, rtol=1e-5)  # a third of the heads is all that it needs


def test_a_permutation_moves_whole_heads(model):
    block = model.blocks[0]
    qkv, proj = block.attn.qkv.weight.clone(), block.attn.proj.weight.clone()
    permute(block, torch.tensor([2, 0, 1]), torch.arange(768))
    for part in range(3):
        moved = block.attn.qkv.weight[part * WIDTH : part * WIDTH + 64]
        assert torch.equal(moved, qkv[part * WIDTH + 128 : part * WIDTH + 192])
    assert torch.equal(block.attn.proj.weight[:, 64:], proj[:, :128])


def test_processes_agree_on_the_order_through_the_mean(model, batches):
    """Two processes with one batch each, against one process with both."""
    alone, first = copy.deepcopy(model), copy.deepcopy(model)
    reorder(alone, batches)
    others = iter(importance(model, batches[1:]))
    reorder(first, batches[:1], mean=lambda mine: (mine + next(others)) / 2)
    assert all(torch.equal(value, first.state_dict()[key]) for key, value in alone.state_dict().items())


def test_the_recipe_builds_deit_s():
    config = load_recipe("dynabert").model.config(num_classes=1000, class_ids=None, labels=None)
    assert [config.attention_width(round_) // 64 for round_ in config.rounds] == [2, 3, 5, 6]
    assert [config.hidden(round_) for round_ in config.rounds] == [384, 768, 1152, 1536]
    assert (config.depth, config.resolution) == (12, 224)


@pytest.mark.parametrize(
    ("rounds", "match"),
    [
        (widths(0, 1), r"above 0 and at most 1, such as 0\.25, not \[0, 1\]"),
        (widths(0.5, 1.5), "above 0 and at most 1"),
        (widths(0.5, 0.25, 1), "rise from round to round and end at 1"),
        (widths(0.25, 0.5), r"end at 1, the whole backbone, not \[0\.25, 0\.5\]"),
        ([*widths(0.5), *widths(1, resolution=64)], "one resolution, not at 32 and 64"),
    ],
)
def test_shares_that_make_no_sense_are_refused(rounds, match):
    with pytest.raises(ValueError, match=match):
        DynaBERTConfig(**{**TINY, "rounds": rounds})
