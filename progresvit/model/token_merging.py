"""Token merging (ToMe, Bolya et al. 2023): similar patch tokens of an image are averaged, so later layers have fewer.

In each block, between attention and MLP, the patch tokens are split alternately into two halves. Each token of the
first half is matched with the most similar token of the second half, and the r most similar pairs are merged.
Similarity is the cosine of the keys, averaged over the heads. In averages and in attention, a token counts as often as
it stands for a patch. The class token is never merged. After the last block, every patch gets the token that it was
merged into, so the output of a round has its usual shape.

Equal similarities are ordered by position. On a GPU, sums of three tokens and more may be rounded differently from run
to run, unless ``torch.use_deterministic_algorithms`` is on.

Letters: B images, N tokens (the class token and the patch tokens), P patches of the image, A and C patch tokens of the
first and of the second half, r tokens merged in a block, d channels, h heads, M any number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Merging(NamedTuple):
    """How far the tokens of a round are merged."""

    r: int
    """Patch tokens merged in each block."""
    size: Tensor
    """Number of patches that each token stands for, 1 for the class token: (B, N)."""
    place: Tensor
    """The patch token of each patch, counted from 0 without the class token: (B, P)."""

    @classmethod
    def start(cls, x: Tensor, r: int) -> Merging:
        """Nothing is merged yet; x are the tokens, (B, N, d)."""
        images, tokens, _ = x.shape
        size = torch.ones(images, tokens, device=x.device)
        place = torch.arange(tokens - 1, device=x.device).expand(images, -1)  # (P,) -> (B, P)
        return cls(r, size, place)

    def attention_bias(self, dtype: torch.dtype) -> Tensor:
        """Added to the attention logits, so that a token attracts as much attention as its patches: (B, 1, 1, N)."""
        return self.size.log()[:, None, None].to(dtype)  # (B, N) -> (B, 1, 1, N)


class Matching(NamedTuple):
    """Pairs a token of the first half with the token of the second that it is merged into; positions within halves."""

    kept: Tensor
    """Unmerged tokens of the first half, in their order: (B, A - r)."""
    merged: Tensor
    """Merged tokens of the first half: (B, r)."""
    target: Tensor
    """The token of the second half that each merged token is added to: (B, r)."""


def match(keys: Tensor, r: int) -> Matching:
    """The r most similar pairs, from the keys of all tokens: (B, h, N, 64) -> indices.

    Computed in float32 without autocast: in bfloat16 the similarities of neighbours would be equal.
    """
    with torch.autocast("cpu" if keys.is_meta else keys.device.type, enabled=False):
        k = F.normalize(keys.detach().float().mean(dim=1), dim=-1)  # (B, h, N, 64) -> (B, N, 64)
        similarity = k[:, 1::2] @ k[:, 2::2].mT  # (B, A, C)
    best, target = similarity.max(dim=-1)  # (B, A, C) -> (B, A) twice
    order = best.argsort(dim=-1, descending=True, stable=True)  # (B, A)
    merged, kept = order[:, :r], order[:, r:].sort(dim=-1).values
    return Matching(kept=kept, merged=merged, target=target.gather(1, merged))


def merge(x: Tensor, keys: Tensor, merging: Merging) -> tuple[Tensor, Merging]:
    """One step, with the keys of the attention before it: (B, N, d) -> (B, N - r, d)."""
    matching = match(keys, merging.r)
    size = merging.size[..., None]  # (B, N) -> (B, N, 1), float32
    total = _reduce(size, matching)
    place = _new_places(merging.place, matching, size.shape[1])
    merged = _reduce(x * size, matching) / total  # (B, N, d) -> (B, N - r, d)
    return merged.to(x.dtype), Merging(merging.r, total[..., 0], place)


def unmerge(x: Tensor, merging: Merging) -> Tensor:
    """Every patch gets the token that it was merged into: (B, N, d) -> (B, P + 1, d)."""
    return torch.cat([x[:, :1], _rows(x[:, 1:], merging.place)], dim=1)


def _reduce(x: Tensor, matching: Matching) -> Tensor:
    """The class token, the kept tokens of the first half, and the second half with the merged tokens added to it.

    (B, N, d) -> (B, N - r, d)
    """
    first, second = x[:, 1::2], x[:, 2::2]  # (B, A, d) and (B, C, d)
    target = matching.target[..., None].expand(-1, -1, x.shape[-1])  # (B, r) -> (B, r, d)
    second = second.scatter_add(1, target, _rows(first, matching.merged))
    return torch.cat([x[:, :1], _rows(first, matching.kept), second], dim=1)


def _new_places(place: Tensor, matching: Matching, tokens: int) -> Tensor:
    """The places where ``_reduce`` puts the patch tokens of these places; ``tokens`` is N: (B, P) -> (B, P)."""
    images, kept = matching.kept.shape
    half = tokens // 2  # A
    order = torch.arange(half, device=place.device).expand(images, -1)  # (B, A)
    first = order.scatter(1, matching.kept, order[:, :kept])  # (B, A)
    first = first.scatter(1, matching.merged, kept + matching.target)
    second = kept + order[:, : tokens - 1 - half]  # (B, C)
    return torch.cat([first, second], dim=1).gather(1, place // 2 + place % 2 * half)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Tokens by position: (B, N, d) and (B, M) -> (B, M, d)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
