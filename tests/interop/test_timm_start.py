"""A start from the weights of plain ViTs."""

import pytest
import timm
import torch

from progresvit.config import ModelConfig, make_rounds, plain_vit, preset
from progresvit.interop import start_from_timm
from progresvit.model import ProgResViT


def tiny_backbone(**changes):
    """192 channels, two blocks and two rounds, unless told otherwise."""
    return ModelConfig(**{"rounds": make_rounds([160, 224], [2, 3]), "heads": 3, "depth": 2, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {}),
        ("deit3_small_patch16_384", {"layer_scale": 1e-6, "heads": 6, "rounds": make_rounds([160, 384], [3, 6])}),
    ],
)
def test_the_last_rounds_backbone_is_the_source(name, changes):
    source = timm.create_model(name, depth=2).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.normal_(std=0.05)
    config = tiny_backbone(**changes)
    model = ProgResViT(config)
    fresh = start_from_timm(model, source)
    assert all(key.startswith(("psg.", "projectors.")) for key in fresh)
    fields = {"heads": config.heads, "depth": 2, "layer_scale": config.layer_scale}
    plain = ProgResViT(plain_vit(resolution=config.resolution, **fields))
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if key not in fresh})
    images = torch.randn(1, 3, config.resolution, config.resolution)
    with torch.no_grad():
        assert (plain.eval()(images)[0].logits - source(images)).abs().max() <= 1e-5


def test_deit_iii_has_no_class_position_and_ours_starts_at_zero():
    source = timm.create_model("deit3_small_patch16_384", depth=1)
    model = ProgResViT(preset("progresvit_small_192_240", depth=1, layer_scale=1e-6))
    start_from_timm(model, source)
    assert not model.pos_embed[:, 0].any()
    assert model.pos_embed[:, 1:].any()


def test_position_grid_is_resampled():
    source = timm.create_model("deit_small_patch16_224", depth=1)
    model = ProgResViT(preset("progresvit_small_192_240", depth=1))
    start_from_timm(model, source.state_dict())
    assert torch.equal(model.pos_embed[:, 0], source.pos_embed[:, 0])
    at_240 = timm.create_model("deit_small_patch16_224", depth=1)
    at_240.load_state_dict(source.state_dict())
    at_240.set_input_size(img_size=(240, 240))
    assert torch.allclose(model.pos_embed, at_240.pos_embed, atol=1e-6)


def test_a_head_of_other_classes_keeps_its_fresh_start():
    source = timm.create_model("deit_small_patch16_224", depth=1)
    model = ProgResViT(preset("progresvit_small_192_240", depth=1, num_classes=20))
    before = model.head.weight.clone()
    fresh = start_from_timm(model, source)
    assert {"head.weight", "head.bias"} <= set(fresh)
    assert torch.equal(model.head.weight, before)


def test_a_source_without_a_head_fits():
    source = timm.create_model("vit_small_patch16_224", depth=1, num_classes=0)
    model = ProgResViT(preset("progresvit_small_192_240", depth=1))
    assert "head.weight" in start_from_timm(model, source)


@pytest.mark.parametrize(
    ("name", "kwargs", "changes", "remedy"),
    [
        ("deit_small_patch16_224", {}, {}, "384 channels wide and the model 192"),
        ("deit_tiny_patch16_224", {"depth": 3}, {}, "source's depth and patch_size"),
        ("deit_tiny_patch16_224", {"depth": 1}, {}, "source's depth and patch_size"),
        ("deit_tiny_patch16_224", {"depth": 2, "patch_size": 32}, {}, "source's depth and patch_size"),
        ("deit_tiny_patch16_224", {"depth": 2}, {"layer_scale": 1e-6}, "layer_scale=None"),
        ("deit_tiny_patch16_224", {"depth": 2, "init_values": 0.1}, {}, "layer_scale=1e-6"),
        ("deit_tiny_distilled_patch16_224", {"depth": 2}, {}, "take the plain variant"),
        ("deit_tiny_patch16_224", {"depth": 2, "num_heads": 6}, {}, "take a source with 3"),
        ("resnet10t", {}, {}, "None channels wide"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(name, kwargs, changes, remedy):
    with pytest.raises(ValueError, match=remedy):
        start_from_timm(ProgResViT(tiny_backbone(**changes)), timm.create_model(name, **kwargs))


def test_a_name_that_timm_does_not_know_is_refused():
    with pytest.raises(ValueError, match="timm has no model 'deit_smal'"):
        start_from_timm(ProgResViT(tiny_backbone()), "deit_smal")
