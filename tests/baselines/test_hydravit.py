"""HydraViT: its rounds written out and as ViTs of their own, its MACs by hand, shared weights, and what it refuses."""

import pytest
import torch

from progresvit.baselines.hydravit import HydraViT, HydraViTConfig
from progresvit.baselines.sortednet import SortedNet, SortedNetConfig
from progresvit.config import make_rounds, plain_vit
from progresvit.model import ProgResViT
from tests.baselines.literal import plain_blocks, plain_embedding, plain_head

TINY = {"rounds": make_rounds([32, 32, 32], [1, 2, 3]), "heads": 3, "depth": 2, "num_classes": 5}


@pytest.fixture
def model(randomize):
    return randomize(HydraViT(HydraViTConfig(**TINY)))


def test_every_round_equals_the_products_written_out(model, images):
    embedded = plain_embedding(model, images)
    for d, output in zip((64, 128, 192), model(images), strict=True):
        x = plain_blocks(model, embedded[..., :d])
        torch.testing.assert_close(output.tokens, x, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(output.logits, plain_head(model, x), atol=1e-4, rtol=1e-4)


def narrow_weights(model, d):
    """The weights of a standalone ViT of d channels; the fused qkv layer holds three of the full width."""

    def cut(name, value):
        if name.startswith("head."):
            return value[..., :d] if value.ndim == 2 else value
        if ".qkv." in name:
            parts = [part[:d] for part in value.chunk(3)]
            return torch.cat([part[:, :d] if part.ndim == 2 else part for part in parts])
        if name in ("cls_token", "pos_embed"):
            return value[..., :d]
        if ".fc1." in name:
            return value[: 4 * d, :d] if value.ndim == 2 else value[: 4 * d]
        if ".fc2.weight" in name:
            return value[:d, : 4 * d]
        return value[:d, :d] if value.ndim == 2 else value[:d]

    return {name: cut(name, value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("s", [0, 1, 2])
def test_a_round_is_a_standalone_narrow_vit(model, images, s):
    alone = ProgResViT(plain_vit(resolution=32, heads=s + 1, depth=2, num_classes=5)).eval()
    alone.load_state_dict(narrow_weights(model, 64 * (s + 1)))
    torch.testing.assert_close(model.run_round(s, images).logits, alone(images)[0].logits, atol=1e-5, rtol=1e-5)


def test_a_weight_changes_the_rounds_that_hold_it_and_no_other(model, images):
    def changed(row):
        before = [output.logits for output in model(images)]
        with torch.no_grad():
            model.blocks[0].mlp.fc1.weight[row, 0] += 1
        return [not torch.equal(old, new.logits) for old, new in zip(before, model(images))]

    assert changed(0) == [True, True, True]
    assert changed(4 * 64) == [False, True, True]
    assert changed(4 * 128) == [False, False, True]


def test_rounds_may_differ_in_resolution(randomize):
    rounds = make_rounds([32, 64, 32], [1, 2, 2])
    model = randomize(HydraViT(HydraViTConfig(rounds=rounds, heads=2, depth=1, num_classes=5)))
    outputs = model(torch.randn(2, 3, 64, 64))
    assert [tuple(output.tokens.shape) for output in outputs] == [(2, 5, 64), (2, 17, 128), (2, 5, 128)]
    assert not torch.equal(outputs[1].logits, outputs[2].logits)


def test_macs_by_hand_for_deit_s():
    with torch.device("meta"):
        model = HydraViT(HydraViTConfig(rounds=make_rounds([224] * 4, [3, 4, 5, 6]), heads=6))

    def stack(d, embedded):
        return 196 * 768 * embedded + 12 * (197 * 12 * d * d + 2 * 197 * 197 * d) + 1000 * d

    widths = (192, 256, 320, 384)
    assert model.gmacs("executed") == [stack(d, d) / 1e9 for d in widths]
    assert model.gmacs("paper") == [stack(d, 384) / 1e9 for d in widths]
    assert [round(gmacs, 3) for gmacs in model.gmacs("paper")] == [1.283, 2.156, 3.261, 4.599]
    assert [round(gmacs, 3) for gmacs in model.gmacs("executed")] == [1.254, 2.136, 3.251, 4.599]


def test_the_sub_networks_of_sortednet_are_those_of_hydravit(model, images):
    other = SortedNet(SortedNetConfig(**TINY)).eval()
    other.load_state_dict(model.state_dict())
    for mine, theirs in zip(model(images), other(images), strict=True):
        assert torch.equal(mine.logits, theirs.logits)
    assert model.gmacs() == other.gmacs()
