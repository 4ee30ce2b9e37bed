"""``model.features``: class token, patch tokens and grid of every round, after the norm that its head reads."""

import pytest
import torch
import torch.nn.functional as F

from progresvit.analysis.hooks import recorded_calls
from progresvit.baselines.early_exit import EarlyExit, EarlyExitConfig
from progresvit.config import ModelConfig, make_rounds
from progresvit.interop import start_from_timm
from progresvit.model import ProgResViT, RoundFeatures
from tests.interop.test_start import random_vit

SMALL = {"heads": 3, "depth": 2, "patch_size": 8, "num_classes": 12}
THREE = ModelConfig(rounds=make_rounds([16, 24, 32], [1, 2, 3]), **SMALL)


@pytest.mark.parametrize("fields", [{}, {"num_classes": 0}, {"task": "segmentation"}], ids=str)
def test_features_are_the_tokens_of_every_round(fields, randomize):
    model = randomize(ProgResViT(THREE.replace(**fields)))
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        features, outputs = model.features(images), model(images)
    assert len(features) == 3
    for (class_token, patch_tokens, grid), output, side, width in zip(features, outputs, (2, 3, 4), (64, 128, 192)):
        assert class_token.shape == (4, width)
        assert patch_tokens.shape == (4, side * side, width)
        assert grid == side
        assert torch.equal(torch.cat([class_token[:, None], patch_tokens], dim=1), output.tokens)


def test_the_head_reads_the_class_token(small_model, images):
    with torch.no_grad():
        for features, output in zip(small_model.features(images), small_model(images)):
            weight = small_model.head.weight[:, : features.class_token.shape[1]]
            logits = F.linear(features.class_token, weight, small_model.head.bias)
            assert torch.allclose(logits, output.logits, atol=1e-5)


def test_patches_are_row_by_row(small_config, randomize):
    """With blocks that do nothing, only the patch whose pixels change has other features."""
    model = randomize(ProgResViT(small_config.replace(psg=False)))
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.attn.proj, block.mlp.fc2):
                layer.weight.zero_()
                layer.bias.zero_()
        images = torch.randn(1, 3, 32, 32)
        changed = images.clone()
        changed[:, :, 8:16, 24:32] += 1  # row 1, column 3
        model.projectors[0].widen_patches.weight.zero_()  # the previous round has no effect
        first, second = model.features(images)[-1], model.features(changed)[-1]
    differs = (first.patch_tokens != second.patch_tokens).any(dim=2)[0].view(first.grid, first.grid)
    assert differs.nonzero().tolist() == [[1, 3]]


def test_class_tokens_of_a_plain_vit_are_those_of_dinos_probe():
    """timm's get_intermediate_layers with the final norm is that of DINO."""
    vit = random_vit(embed_dim=128, num_heads=2, depth=6, img_size=32, patch_size=8, num_classes=0)
    config = ModelConfig(rounds=make_rounds([32], [2]), heads=2, depth=6, patch_size=8, num_classes=0, psg=False)
    model = ProgResViT(config).eval()
    start_from_timm(model, vit)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        (tokens,) = model.class_tokens(images, 4)
        layers = vit.get_intermediate_layers(images, n=4, norm=True, return_prefix_tokens=True)
    expected = torch.cat([prefix[:, 0] for _, prefix in layers], dim=-1)
    assert tokens.shape == (3, 4 * 128)
    assert torch.allclose(tokens, expected, atol=1e-5)


@pytest.mark.parametrize("merge", [None, [0, 1, 3]], ids=["whole", "merged"])
def test_class_tokens_of_a_round_are_those_of_its_last_blocks(randomize, merge):
    config = THREE.replace(depth=3)
    model = randomize(ProgResViT(config if merge is None else config.with_merge(merge)))
    images, seen = torch.randn(2, 3, 32, 32), []
    with torch.no_grad(), recorded_calls(model.blocks) as calls:
        outputs = model(images)
        seen = [call.tokens for call in calls]
    with torch.no_grad():
        rounds = model.class_tokens(images, 2)
    assert not any(block._forward_hooks for block in model.blocks)
    for s, (tokens, output, width) in enumerate(zip(rounds, outputs, (64, 128, 192), strict=True)):
        weight, bias = model.norm.weight[:width], model.norm.bias[:width]
        last = [F.layer_norm(x[:, 0], (width,), weight, bias, 1e-6) for x in seen[3 * s + 1 : 3 * s + 3]]
        assert torch.allclose(tokens, torch.cat(last, dim=1), atol=1e-6)
        assert torch.allclose(tokens[:, width:], output.tokens[:, 0], atol=1e-6)


def test_merged_patches_share_their_features(randomize):
    model = randomize(ProgResViT(THREE.with_merge([0, 1, 3])))
    with torch.no_grad():
        features = model.features(torch.randn(2, 3, 32, 32))
    assert [len(round_.patch_tokens[0].unique(dim=0)) for round_ in features] == [4, 9 - 2 * 1, 16 - 2 * 3]


def test_the_features_of_early_exits_are_normalised_by_the_norm_of_each_exit(randomize, images):
    config = EarlyExitConfig(
        rounds=[{"resolution": 32, "blocks": blocks} for blocks in (1, 2, 4)], heads=2, depth=4, patch_size=8,
        num_classes=12,
    )  # fmt: skip
    model = randomize(EarlyExit(config))
    norms = [*(exit_.norm for exit_ in model.exits), model.norm]
    heads = [*(exit_.head for exit_ in model.exits), model.head]
    with torch.no_grad():
        features, outputs = model.features(images), model(images)
        for round_features, output, norm, head in zip(features, outputs, norms, heads, strict=True):
            assert isinstance(round_features, RoundFeatures)
            assert torch.allclose(round_features.class_token, norm(output.tokens[:, 0]), atol=1e-6)
            assert torch.allclose(round_features.patch_tokens, norm(output.tokens[:, 1:]), atol=1e-6)
            assert torch.allclose(head(round_features.class_token), output.logits, atol=1e-5)
            assert not torch.allclose(round_features.class_token, output.tokens[:, 0], atol=0.1)
            assert round_features.grid == 4


def test_images_are_checked_as_by_forward(small_model):
    with pytest.raises(ValueError, match="give at least 32"):
        small_model.features(torch.randn(1, 3, 16, 16))


def test_gradients_reach_the_backbone(small_model, images):
    small_model.features(images)[-1].patch_tokens.sum().backward()
    assert small_model.patch_embed.proj.weight.grad.abs().sum() > 0
