"""The Triton kernels of a fused round: everything between the matrix products, with one pass over memory each.

They run on a GPU, or on a CPU with ``TRITON_INTERPRET=1``. Arithmetic is float32, whatever is loaded and stored.
Letters: B images, C image channels, R side of the given image, r resolution of the round, p patch size, g side of the
patch grid, N tokens, d channels, M rows (images times tokens), T taps of a filter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROCESSORS = 128
"""About as many as a GPU has; with fewer programs, tiles are made smaller."""


@triton.jit
def _resize_columns(
    source, target, start, weight, side, r, block: tl.constexpr, taps: tl.constexpr, many: tl.constexpr
):
    """A column filter: planes of ``side`` lines -> planes of r lines of the same length."""
    plane, strip = tl.program_id(0).to(tl.int64), tl.program_id(1)
    y = strip * many + tl.arange(0, many)
    x = tl.arange(0, block)
    inside = (y[:, None] < r) & (x[None, :] < side)
    first = tl.load(start + y, y < r, other=0)
    above = source + plane * side * side
    total = tl.zeros((many, block), tl.float32)
    for t in tl.static_range(taps):
        share = tl.load(weight + y * taps + t, y < r, other=0.0)
        pixel = tl.load(above + (first[:, None] + t) * side + x[None, :], inside, other=0)
        total += share[:, None] * pixel.to(tl.float32)
    tl.store(target + plane * r * side + y[:, None] * side + x[None, :], total.to(target.dtype.element_ty), inside)


@triton.jit
def _resize_patchify(
    source, target, start, weight, scale, shift, lines, channels, side, r, stride, resizes: tl.constexpr,
    p: tl.constexpr, many: tl.constexpr, wide: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    """A row filter, normalisation, and the order of patches: B * C * r lines of ``side`` -> (B, g * g, stride).

    The filter is a product: a tile of ``wide`` columns is made of ``window`` columns of the source.
    """
    line, tile = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many), tl.program_id(1)
    real = (line < lines)[:, None]
    x = tile * wide + tl.arange(0, wide)
    if resizes:
        near = tl.load(start + tile) + tl.arange(0, window)
        part = tl.load(source + line[:, None] * side + near[None, :], real & (near < side)[None, :], other=0)
        share = (tile * window + tl.arange(0, window))[:, None] * wide + tl.arange(0, wide)[None, :]
        total = tl.dot(part, tl.load(weight + share), input_precision="ieee")
    else:
        total = tl.load(source + line[:, None] * side + x[None, :], real & (x < r)[None, :], other=0).to(tl.float32)
    plane, y = line // r, line % r
    b, c = plane // channels, plane % channels
    total = total * tl.load(scale + c)[:, None] + tl.load(shift + c)[:, None]
    grid = r // p
    patch = ((b * grid + y // p) * grid)[:, None] + (x // p)[None, :]
    place = (c * p * p + y % p * p)[:, None] + (x % p)[None, :]
    tl.store(target + patch * stride + place, total.to(target.dtype.element_ty), real & (x < r)[None, :])


@triton.jit
def _resample_grid(
    tokens, target, start, weight, old, new, d,
    taps: tl.constexpr, many: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Bilinear resampling of a grid of tokens, the class token left out: (B, 1 + old * old, d) -> (B, new * new, d)."""
    b, y = tl.program_id(0), tl.program_id(1)
    x = tl.arange(0, many)
    c = tl.arange(0, block)
    inside = (x[:, None] < new) & (c[None, :] < d)
    above = tokens + (b.to(tl.int64) * (old * old + 1) + 1) * d
    line, place = tl.load(start + y), tl.load(start + x, x < new, other=0)
    total = tl.zeros((many, block), tl.float32)
    for ty in tl.static_range(taps):
        up = tl.load(weight + y * taps + ty)
        for tx in tl.static_range(taps):
            across = tl.load(weight + x * taps + tx, x < new, other=0.0)
            cell = (line + ty) * old + place + tx
            seen = tl.load(above + cell[:, None] * d + c[None, :], inside, other=0)
            total += (up * across)[:, None] * seen.to(tl.float32)
    row = (b.to(tl.int64) * new + y) * new + x
    tl.store(target + row[:, None] * d + c[None, :], total.to(target.dtype.element_ty), inside)


@triton.jit
def _depthwise(source, target, weight, side, d, stride, offset, many: tl.constexpr, block: tl.constexpr):
    """A 3 x 3 filter for each channel, zeros around the grid, written from column ``offset`` on."""
    b, y = tl.program_id(0), tl.program_id(1)
    x = tl.arange(0, many)
    c = tl.arange(0, block)
    real = c < d
    above = source + b.to(tl.int64) * side * side * d
    total = tl.zeros((many, block), tl.float32)
    for dy in tl.static_range(3):
        line = tl.full((many,), y + dy - 1, tl.int32)
        for dx in tl.static_range(3):
            place = x + dx - 1
            inside = (line >= 0) & (line < side) & (place >= 0) & (place < side)
            cell = line * side + place
            seen = tl.load(above + cell[:, None] * d + c[None, :], inside[:, None] & real[None, :], other=0)
            total += tl.load(weight + (dy * 3 + dx) * d + c, real, other=0.0)[None, :] * seen.to(tl.float32)
    row = (b.to(tl.int64) * side + y) * side + x
    where = target + row[:, None] * stride + offset + c[None, :]
    tl.store(where, total.to(target.dtype.element_ty), (x[:, None] < side) & real[None, :])


@triton.jit
def _normalised(x, inside, d, eps):
    mean = tl.sum(x, 1) / d
    centred = tl.where(inside, x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / d
    return centred * tl.rsqrt(variance + eps)[:, None]


@triton.jit
def _embed_norm(
    patches, class_tokens, position, stream, target, rows, n, d, eps, scale,
    has_class: tl.constexpr, block: tl.constexpr, many: tl.constexpr,
):  # fmt: skip
    """Join class token and patches, add the position, and store the norm too: (B * (N - 1), d) -> (B * N, d)."""
    row = tl.program_id(0) * many + tl.arange(0, many)
    c = tl.arange(0, block)
    inside = (row[:, None] < rows) & (c[None, :] < d)
    b, token = row // n, row % n
    x = tl.load(position + token[:, None] * d + c[None, :], inside, other=0.0)
    patch = (b * (n - 1) + token - 1).to(tl.int64)
    x += tl.load(patches + patch[:, None] * d + c[None, :], inside & (token > 0)[:, None], other=0).to(tl.float32)
    if has_class:
        first = class_tokens + b[:, None] * d + c[None, :]
        x += tl.load(first, inside & (token == 0)[:, None], other=0).to(tl.float32)
    place = row[:, None].to(tl.int64) * d + c[None, :]
    tl.store(stream + place, x.to(stream.dtype.element_ty), inside)
    tl.store(target + place, (_normalised(x, inside, d, eps) * scale).to(target.dtype.element_ty), inside)


@triton.jit
def _norm(
    stream, update, target, gain, bias, rows, d, eps, scale,
    adds: tl.constexpr, affine: tl.constexpr, block: tl.constexpr, many: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * many + tl.arange(0, many)
    c = tl.arange(0, block)
    inside = (row[:, None] < rows) & (c[None, :] < d)
    place = row[:, None].to(tl.int64) * d + c[None, :]
    x = tl.load(stream + place, inside, other=0).to(tl.float32)
    if adds:
        x += tl.load(update + place, inside, other=0).to(tl.float32)
        tl.store(stream + place, x.to(stream.dtype.element_ty), inside)
    y = _normalised(x, inside, d, eps)
    if affine:
        y = y * tl.load(gain + c, c < d, other=0.0)[None, :] + tl.load(bias + c, c < d, other=0.0)[None, :]
    tl.store(target + place, (y * scale).to(target.dtype.element_ty), inside)


@triton.jit
def _bias_norm_gate(
    stream, before, gate, after, target, rows, d, eps, scale,
    block: tl.constexpr, many: tl.constexpr,
):  # fmt: skip
    """Between attention and MLP: add a bias, store the norm, then gate the stream and add the MLP's bias."""
    row = tl.program_id(0) * many + tl.arange(0, many)
    c = tl.arange(0, block)
    real = c < d
    inside = (row[:, None] < rows) & real[None, :]
    place = row[:, None].to(tl.int64) * d + c[None, :]
    x = tl.load(stream + place, inside, other=0).to(tl.float32) + tl.load(before + c, real, other=0.0)[None, :]
    tl.store(target + place, (_normalised(x, inside, d, eps) * scale).to(target.dtype.element_ty), inside)
    x = x * tl.load(gate + c, real, other=0.0)[None, :] + tl.load(after + c, real, other=0.0)[None, :]
    tl.store(stream + place, x.to(stream.dtype.element_ty), inside)


@triton.jit
def _gelu(source, target, count, limit, block: tl.constexpr):
    """GELU in its tanh form, clamped to what the target can hold."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(source + place, place < count, other=0).to(tl.float32)
    y = x / (1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * x * x)))
    y = tl.minimum(tl.maximum(y, -limit), limit)
    tl.store(target + place, y.to(target.dtype.element_ty), place < count)


@triton.jit
def _scores(q, k, begin, n: tl.constexpr, count: tl.constexpr):
    """Attention scores; minus infinity for keys beyond the last token: (many, 64), (count, 64) -> (many, count)."""
    score = tl.dot(q, tl.trans(k))
    if begin + count > n:
        score = tl.where((begin + tl.arange(0, count))[None, :] < n, score, float("-inf"))
    return score


@triton.jit
def _attend(
    qkv, target, scale, n: tl.constexpr, heads: tl.constexpr, many: tl.constexpr,
    few: tl.constexpr, rest: tl.constexpr, loops: tl.constexpr,
):  # fmt: skip
    """Attention of a head over all tokens of an image: (B, N, 3, h, 64) -> (B, N, h, 64).

    All keys are loaded at once, in two portions of ``few`` and ``rest`` (none if 0), so nothing is rescaled. A program
    ``loops`` over all tiles of queries, or does one.
    """
    b, h = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0) % heads
    width: tl.constexpr = 64
    stride: tl.constexpr = 3 * heads * width
    above = qkv + b * n * stride + h * width
    below = target + b * n * heads * width + h * width
    c = tl.arange(0, width)
    key = tl.arange(0, few)
    k = tl.load(above + heads * width + key[:, None] * stride + c[None, :], key[:, None] < n, other=0)
    v = tl.load(above + 2 * heads * width + key[:, None] * stride + c[None, :], key[:, None] < n, other=0)
    far_k, far_v = k, v
    if rest:
        far = few + tl.arange(0, rest)
        far_k = tl.load(above + heads * width + far[:, None] * stride + c[None, :], far[:, None] < n, other=0)
        far_v = tl.load(above + 2 * heads * width + far[:, None] * stride + c[None, :], far[:, None] < n, other=0)
    if loops:
        for begin in tl.range(0, n, many, num_stages=1):
            _attend_tile(above, below, begin, k, v, far_k, far_v, scale, n, heads, many, few, rest)
    else:
        _attend_tile(above, below, tl.program_id(1) * many, k, v, far_k, far_v, scale, n, heads, many, few, rest)


@triton.jit
def _attend_tile(
    above, below, begin, k, v, far_k, far_v, scale, n: tl.constexpr, heads: tl.constexpr, many: tl.constexpr,
    few: tl.constexpr, rest: tl.constexpr,
):  # fmt: skip
    """The queries from ``begin`` on."""
    c = tl.arange(0, 64)[None, :]
    row = (begin + tl.arange(0, many))[:, None]
    q = tl.load(above + row * (3 * heads * 64) + c, row < n, other=0)
    score = _scores(q, k, 0, n, few)
    highest = tl.max(score, 1)
    if rest:
        far_score = _scores(q, far_k, few, n, rest)
        highest = tl.maximum(highest, tl.max(far_score, 1))
    lift = highest * scale
    p = tl.exp2(score * scale - lift[:, None])
    mass = tl.sum(p, 1)
    total = tl.dot(p.to(v.dtype), v)
    if rest:
        far_p = tl.exp2(far_score * scale - lift[:, None])
        mass += tl.sum(far_p, 1)
        total = tl.dot(far_p.to(v.dtype), far_v, total)
    tl.store(below + row * (heads * 64) + c, (total / mass[:, None]).to(below.dtype.element_ty), row < n)


class _Rows:
    """How the rows of a matrix are distributed among programs."""

    def __init__(self, rows: int, d: int) -> None:
        self.block = triton.next_power_of_2(d)
        self.many = max(1, 1024 // self.block)
        self.grid = (triton.cdiv(rows, self.many),)


def resize_columns(source: Tensor, target: Tensor, start: Tensor, weight: Tensor) -> None:
    """Filter every column of pixels: (B, C, R, R) -> (B, C, r, R)."""
    planes, side, r = source.shape[0] * source.shape[1], source.shape[3], target.shape[2]
    many = 16
    _resize_columns[(planes, triton.cdiv(r, many))](
        source, target, start, weight, side, r, triton.next_power_of_2(side), weight.shape[1], many
    )


def resize_patchify(
    source: Tensor, target: Tensor, start: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor, patch: int
) -> None:
    """Filter every row, normalise, and store patch by patch: (B, C, r, R) -> (B, g * g, C * p * p or more).

    Args:
        source: Lines of pixels, in the type of ``weight``.
        target: The patches.
        start: First column of the source for each tile of columns.
        weight: (tiles, window, columns of a tile); None if nothing is resized.
        scale: Of each channel.
        shift: Of each channel.
        patch: p.
    """
    b, channels, r, side = source.shape
    lines, many = b * channels * r, 64
    wide, window = (64, 16) if weight is None else (weight.shape[2], weight.shape[1])
    _resize_patchify[(triton.cdiv(lines, many), triton.cdiv(r, wide))](
        source, target, start, source if weight is None else weight, scale, shift, lines, channels, side, r,
        target.shape[2], weight is not None, patch, many, wide, window,
    )  # fmt: skip


def resample_tokens(
    tokens: Tensor, target: Tensor, start: Tensor, weight: Tensor, depthwise: Tensor, offset: int
) -> None:
    """Resample tokens to the new grid and filter them, from column ``offset`` on: (B, N', d') -> (B, g * g, d')."""
    b, d, new = tokens.shape[0], tokens.shape[2], len(start)
    old = round((tokens.shape[1] - 1) ** 0.5)
    tile = triton.next_power_of_2(new), triton.next_power_of_2(d)
    grid = torch.empty(b, new * new, d, device=tokens.device, dtype=tokens.dtype)
    _resample_grid[(b, new)](tokens, grid, start, weight, old, new, d, weight.shape[1], *tile)
    _depthwise[(b, new)](grid, target, depthwise, new, d, target.shape[2], offset, *tile)


def embed_norm(
    patches: Tensor, class_tokens: Tensor | None, position: Tensor, stream: Tensor, target: Tensor,
    eps: float, scale: float,
) -> None:  # fmt: skip
    """Make the token stream of the blocks, (M, d), and its norm times ``scale``."""
    (rows, d), n = stream.shape, position.shape[0]
    over, has_class = _Rows(rows, d), class_tokens is not None
    _embed_norm[over.grid](
        patches, class_tokens if has_class else patches, position, stream, target, rows, n, d, eps, scale,
        has_class, over.block, over.many, num_warps=1,
    )  # fmt: skip


def norm(
    stream: Tensor, target: Tensor, eps: float, scale: float = 1.0, *, update: Tensor | None = None,
    gain: Tensor | None = None, bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the update to the stream, then target = norm(stream) * scale; all (M, d)."""
    rows, d = stream.shape
    over, adds, affine = _Rows(rows, d), update is not None, gain is not None
    _norm[over.grid](
        stream, update if adds else stream, target, gain if affine else stream, bias if affine else stream,
        rows, d, eps, scale, adds, affine, over.block, over.many, num_warps=1,
    )  # fmt: skip


def bias_norm_gate(
    stream: Tensor, before: Tensor, gate: Tensor, after: Tensor, target: Tensor, eps: float, scale: float
) -> None:
    """target = norm(stream + before) * scale; stream = gate * (stream + before) + after."""
    rows, d = stream.shape
    over = _Rows(rows, d)
    _bias_norm_gate[over.grid](
        stream, before, gate, after, target, rows, d, eps, scale, over.block, over.many, num_warps=1
    )  # fmt: skip


def gelu(source: Tensor, target: Tensor, limit: float) -> None:
    """GELU, clamped to -limit … limit, stored in the target's type."""
    block = 4096
    _gelu[(triton.cdiv(source.numel(), block),)](source, target, source.numel(), limit, block, num_warps=8)


def attend(qkv: Tensor, heads: int) -> Tensor:
    """(B, N, 3 * h * 64) -> (B, N, h * 64), for N up to 256"""
    b, n, _ = qkv.shape
    target = torch.empty(b, n, heads * 64, device=qkv.device, dtype=qkv.dtype)
    few = min(128, max(16, triton.next_power_of_2(n)))
    rest = max(16, triton.next_power_of_2(n - few)) if n > few else 0
    scale = 64**-0.5 * 1.4426950408889634  # times log2(e), so that exp2 gives exp
    many = 64 if b * heads * triton.cdiv(n, 64) >= PROCESSORS else 16
    loops = b * heads >= 2 * PROCESSORS  # a program that does all tiles loads the keys only once
    grid = (b * heads, 1 if loops else triton.cdiv(n, many))
    _attend[grid](qkv, target, scale, n, heads, many, few, rest, loops, num_warps=4)
    return target
