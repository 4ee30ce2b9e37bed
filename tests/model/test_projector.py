import torch
import torch.nn.functional as F

from progresvit.model.projector import TokenProjector


def test_projector_starts_by_copying_the_shared_channels():
    projector = TokenProjector(source_width=64, target_width=128, target_grid=3)
    tokens = torch.randn(2, 10, 64)
    with torch.no_grad():
        carried = projector(tokens)
    assert torch.equal(carried[..., :64], tokens)
    assert not carried[..., 64:].any()


def test_projector_resizes_patches_and_not_the_class_token():
    projector = TokenProjector(source_width=64, target_width=64, target_grid=5)
    tokens = torch.randn(2, 10, 64)
    with torch.no_grad():
        carried = projector(tokens)
    grid = tokens[:, 1:].mT.reshape(2, 64, 3, 3)
    resized = F.interpolate(grid, size=(5, 5), mode="bilinear", align_corners=False).flatten(2).mT
    assert torch.equal(carried[:, 0], tokens[:, 0])
    assert torch.allclose(carried[:, 1:], resized, atol=1e-6)


def test_projector_holds_no_bias_in_the_depthwise_convolution():
    names = {name for name, _ in TokenProjector(source_width=64, target_width=128, target_grid=3).named_parameters()}
    assert names == {
        "depthwise.weight",
        "widen_patches.weight",
        "widen_patches.bias",
        "widen_class.weight",
        "widen_class.bias",
    }
