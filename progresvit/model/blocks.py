"""Attention, MLP and the gated block. A block runs at the width of its input tokens.

Attention and MLP are as wide as the tokens, unless the call asks for fewer heads or hidden channels.

Letters: B images, N tokens, d active channels, h active heads, a channels of these heads (64 h), m hidden channels of
the MLP, W channels of the whole backbone, r tokens merged in a block.
"""

from typing import Any

import torch
import torch.nn.functional as F
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

    def forward(
        self, x: Tensor, attention_width: int | None = None, merging: Merging | None = None
    ) -> tuple[Tensor, Tensor]:
        """The update of the tokens (B, N, d), and the keys (B, h, N, 64), by which tokens are merged."""
        q, k, v = self.heads(x, attention_width)
        bias = None if merging is None else merging.attention_bias(q.dtype)
        values = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        values = values.transpose(1, 2).flatten(2)  # (B, h, N, 64) -> (B, N, a)
        return slicing.linear(values, self.proj, x.shape[-1]), k  # (B, N, a) -> (B, N, d)

    def heads(self, x: Tensor, attention_width: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads: (B, N, d) -> 3 x (B, h, N, 64)."""
        a = x.shape[-1] if attention_width is None else attention_width
        x = slicing.qkv(x, self.qkv, a)  # (B, N, d) -> (B, N, 3a)
        x = x.unflatten(-1, (3, a // HEAD_WIDTH, HEAD_WIDTH))  # (B, N, 3a) -> (B, N, 3, h, 64)
        q, k, v = x.permute(2, 0, 3, 1, 4)  # (B, N, 3, h, 64) -> 3 x (B, h, N, 64)
        return q, k, v


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(self, x: Tensor, hidden: int | None = None) -> Tensor:
        d = x.shape[-1]
        m = MLP_RATIO * d if hidden is None else hidden
        x = F.gelu(slicing.linear(x, self.fc1, m))  # (B, N, d) -> (B, N, m)
        return slicing.linear(x, self.fc2, d)  # (B, N, m) -> (B, N, d)


class LayerScale(nn.Module):
    """DeiT-III's per-channel scale of a residual update; distinct from the scales of PSG."""

    def __init__(self, *, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma[: x.shape[-1]]


class Block(nn.Module):
    """One Transformer block; gates of the current stage multiply its two updates and its output."""

    def __init__(self, *, width: int, layer_scale: float | None, drop_path: nn.Module) -> None:
        super().__init__()

        def scale() -> nn.Module:
            return nn.Identity() if layer_scale is None else LayerScale(width=width, start=layer_scale)

        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width=width)
        self.ls1 = scale()
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = Mlp(width=width)
        self.ls2 = scale()
        self.drop_path = drop_path

    def forward(
        self,
        x: Tensor,
        gates: BlockGates,
        *,
        attention_width: int | None = None,
        hidden: int | None = None,
        merging: Merging | None = None,
    ) -> Any:
        """The new tokens (B, N, d); with ``merging``, fewer of them (B, N - r, d), and how far they are merged now."""
        update, keys = self.attn(slicing.layer_norm(x, self.norm1), attention_width, merging)
        x = x + self.drop_path(gates.attn * self.ls1(update))
        if merging is not None:
            x, merging = merge(x, keys, merging)  # (B, N, d) -> (B, N - r, d)
        x = x + self.drop_path(gates.mlp * self.ls2(self.mlp(slicing.layer_norm(x, self.norm2), hidden)))
        x = gates.out * x
        return x if merging is None else (x, merging)
