"""Attention, MLP and the gated block. A block runs at the width of its input tokens.

Letters: B images, N tokens, d active channels, h active heads, W channels of the whole backbone, r tokens merged in a
block.
"""

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from progresvit.config import HEAD_WIDTH, MLP_RATIO
from progresvit.model import slicing
from progresvit.model.psg import BlockGates
from progresvit.model.token_merging import Merging, merge

NORM_EPS = 1e-6


class Attention(nn.Module):
    """Multi-head self-attention over the leading heads."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.heads(x))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads: (B, N, d) -> 3 x (B, h, N, 64)."""
        d = x.shape[-1]
        x = slicing.qkv(x, self.qkv)  # (B, N, d) -> (B, N, 3d)
        x = x.unflatten(-1, (3, d // HEAD_WIDTH, HEAD_WIDTH))  # (B, N, 3d) -> (B, N, 3, h, 64)
        q, k, v = x.permute(2, 0, 3, 1, 4)  # (B, N, 3, h, 64) -> 3 x (B, h, N, 64)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attention, with a bias of its logits if given: 3 x (B, h, N, 64) -> (B, N, d)."""
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x.transpose(1, 2).flatten(2)  # (B, h, N, 64) -> (B, N, d)
        return slicing.linear(x, self.proj, x.shape[-1])


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        d = x.shape[-1]
        x = F.gelu(slicing.linear(x, self.fc1, MLP_RATIO * d))  # (B, N, d) -> (B, N, 4d)
        return slicing.linear(x, self.fc2, d)  # (B, N, 4d) -> (B, N, d)


class LayerScale(nn.Module):
    """DeiT-III's per-channel scale of a residual update; distinct from the scales of PSG."""

    def __init__(self, *, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma[: x.shape[-1]]


class Block(nn.Module):
    """One Transformer block; gates of the current stage multiply its two updates and its output."""

    def __init__(self, *, width: int, layer_scale: float | None, drop_path: float) -> None:
        super().__init__()

        def scale() -> nn.Module:
            return nn.Identity() if layer_scale is None else LayerScale(width=width, start=layer_scale)

        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width=width)
        self.ls1 = scale()
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width=width)
        self.ls2 = scale()
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, gates: BlockGates, merging: Merging | None = None) -> Any:
        """The new tokens (B, N, d); with ``merging``, fewer of them (B, N - r, d), and how far they are merged now."""
        if merging is not None:
            return self._merge_tokens(x, gates, merging)
        x = x + self.drop_path(gates.attn * self.ls1(self.attn(slicing.layer_norm(x, self.norm1))))
        x = x + self.drop_path(gates.mlp * self.ls2(self.mlp(slicing.layer_norm(x, self.norm2))))
        return gates.out * x

    def _merge_tokens(self, x: Tensor, gates: BlockGates, merging: Merging) -> tuple[Tensor, Merging]:
        """The block with tokens merged between attention and MLP."""
        q, k, v = self.attn.heads(slicing.layer_norm(x, self.norm1))
        update = self.attn.attend(q, k, v, merging.attention_bias(q.dtype))
        x = x + self.drop_path(gates.attn * self.ls1(update))
        x, merging = merge(x, k, merging)  # (B, N, d) -> (B, N - r, d)
        x = x + self.drop_path(gates.mlp * self.ls2(self.mlp(slicing.layer_norm(x, self.norm2))))
        return gates.out * x, merging
