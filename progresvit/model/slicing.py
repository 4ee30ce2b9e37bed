"""Prefix views: every layer of the shared backbone, sliced to the width of its input.

Letters: B images, C image channels, r resolution, p patch size, g side of the patch grid, d active channels, a channels
of queries, keys and values, W channels of the whole backbone.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, layer: nn.Linear, width: int | None = None) -> Tensor:
    """The first ``width`` outputs of a linear layer (all if None), on the leading inputs that x has."""
    bias = layer.bias[:width] if layer.bias is not None else None
    return F.linear(x, layer.weight[:width, : x.shape[-1]], bias)


def qkv(x: Tensor, layer: nn.Linear, width: int | None = None) -> Tensor:
    """Queries, keys and values, from the first ``width`` rows (a; d if None) of each of the three blocks of rows."""
    d, full = x.shape[-1], layer.in_features
    a = d if width is None else width
    weight = layer.weight.view(3, full, full)[:, :a, :d].reshape(3 * a, d)  # (3W, W) -> (3, a, d) -> (3a, d)
    bias = layer.bias.view(3, full)[:, :a].reshape(3 * a)  # (3W,) -> (3, a) -> (3a,)
    return F.linear(x, weight, bias)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Layer norm with statistics over the d active channels; weight and bias are prefixes."""
    d = x.shape[-1]
    return F.layer_norm(x, (d,), norm.weight[:d], norm.bias[:d], norm.eps)


def patches(images: Tensor, layer: nn.Conv2d, width: int) -> Tensor:
    """The first ``width`` channels of the patch embedding, whose patches do not overlap: (B, C, r, r) -> (B, g * g, d).

    One matrix product: as a convolution it took a tenth of the GPU time of a training step.
    """
    bias = layer.bias[:width] if layer.bias is not None else None
    cut = F.pixel_unshuffle(images, layer.kernel_size[0])  # (B, C, r, r) -> (B, C * p * p, g, g)
    cut = cut.flatten(2).mT  # (B, C * p * p, g, g) -> (B, g * g, C * p * p)
    return F.linear(cut, layer.weight[:width].flatten(1), bias)
