"""Triton kernels for the blocks of a 16-bit round, where launches and memory traffic cost more than arithmetic.

``BlockKernel`` is everything between two attentions in one kernel, for narrow rounds: the projection of the attention,
the MLP and the next block's qkv. A tile of rows stays on the chip while the weights stream from the L2 cache, so the
hidden layer and the norms never reach memory. ``rows_linear`` is for few rows: a linear layer with the norm before it
and GELU or the residual after it.

They run on a GPU, or on a CPU with ``TRITON_INTERPRET=1``. Sums are float32. Letters: M rows (images times tokens),
d channels. Matrices are (inputs, outputs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from progresvit.model.blocks import NORM_EPS


@dataclass(frozen=True)
class Tiles:
    """How ``BlockKernel`` is divided."""

    many: int
    """Rows of a tile."""
    chunk: int
    """Hidden channels at a time; they divide 4d."""
    out: int
    """Channels of qkv at a time; they divide 3d."""
    num_warps: int
    num_stages: int
    described: bool = False
    """Whether weights are loaded by descriptor (TMA)."""
    tanh: bool = False
    """Whether GELU takes the GPU's tanh instruction, exact to 11 bits; the interpreter has none."""


TILES = (
    (2048, Tiles(many=16, chunk=64, out=64, num_warps=4, num_stages=2)),
    (32768, Tiles(many=64, chunk=64, out=64, num_warps=4, num_stages=2, described=True, tanh=True)),
    (None, Tiles(many=128, chunk=64, out=64, num_warps=8, num_stages=3, described=True, tanh=True)),
)
"""By the largest number of rows: few rows are divided among more processors, many rows share the loads of weights.

H200, 192 channels: 18,560 rows take 66 µs in tiles of 64 and 71 in tiles of 128; 74,240 rows 222 and 195.
"""
FULL_WAVE = 0.75
"""If the last tiles keep a smaller share of the processors busy, their rows are divided into smaller tiles."""
DESCRIBED_WIDTH = 128
"""Narrower weights are not loaded by descriptor: with 64 channels results are wrong (Triton 3.6)."""


@dataclass(frozen=True)
class RowTiles:
    """How ``rows_linear`` is divided: rows and columns of a tile, inputs at a time."""

    many: int
    wide: int
    step: int
    num_warps: int
    num_stages: int


ROW_TILES = RowTiles(many=16, wide=64, step=64, num_warps=4, num_stages=4)
DEEP_ROW_TILES = RowTiles(many=16, wide=32, step=128, num_warps=4, num_stages=3)
"""For layers with many inputs: the second layer of an MLP."""
DEEP = 768


@triton.jit
def _gelu(x, tanh: tl.constexpr):
    """GELU in its tanh form, as in kernels.py."""
    if tanh:
        half = 0.5 * x
        bent = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x * (0.7978845608 + 0.0356774081 * x * x)],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        y = half + half * bent
    else:
        y = x / (1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * x * x)))
    return y


@triton.jit
def _tile(
    matrix, row, col, stride: tl.constexpr, height: tl.constexpr, width: tl.constexpr, described: tl.constexpr
):  # fmt: skip
    """(height, width) of a matrix of constants, from this row and column on."""
    if described:
        part = matrix.load([row, col])
    else:
        part = tl.load(matrix + (row + tl.arange(0, height))[:, None] * stride + (col + tl.arange(0, width))[None, :])
    return part


@triton.jit
def _product(
    y, far, weight, far_weight, col, stride: tl.constexpr, near: tl.constexpr, rest: tl.constexpr,
    width: tl.constexpr, described: tl.constexpr,
):  # fmt: skip
    """Rows in one or two parts times some columns of a matrix: (many, d), (d, width) -> (many, width)."""
    if rest:
        total = tl.dot(far, _tile(far_weight, near, col, stride, rest, width, described))
        total = tl.dot(y, _tile(weight, 0, col, stride, near, width, described), total)
    else:
        total = tl.dot(y, _tile(weight, 0, col, stride, near, width, described))
    return total


@triton.jit
def _moments(x, far, d: tl.constexpr, rest: tl.constexpr, eps):
    """Mean and 1 / deviation of rows in one or two parts: (many,) twice."""
    mean = tl.sum(x, 1)
    if rest:
        mean += tl.sum(far, 1)
    mean = mean / d
    centred = x - mean[:, None]
    variance = tl.sum(centred * centred, 1)
    if rest:
        far_centred = far - mean[:, None]
        variance += tl.sum(far_centred * far_centred, 1)
    return mean, tl.rsqrt(variance / d + eps)


@triton.jit
def _between_attentions(
    stream, attended, target, proj, proj_far, fc1, fc1_far, fc2, fc2_far, qkv, qkv_far, vectors, rows, eps,
    d: tl.constexpr, near: tl.constexpr, rest: tl.constexpr, has_next: tl.constexpr,
    many: tl.constexpr, chunk: tl.constexpr, out: tl.constexpr,
    described: tl.constexpr, tanh: tl.constexpr,
):  # fmt: skip
    """d channels are held as ``near`` and ``rest`` of them (none if 0), both powers of two.

    ``vectors``: bias of the projection, gate, bias of the MLP's second layer (d each), of its first (4d), of qkv (3d).
    """
    first = tl.program_id(0).to(tl.int64) * many
    line = tl.arange(0, many)
    real = (first + line < rows)[:, None]
    c = tl.arange(0, near)
    element = stream.dtype.element_ty
    stream += first * d
    attended += first * d
    place = line[:, None] * d + c[None, :]
    x = tl.load(stream + place, real, other=0).to(tl.float32) + tl.load(vectors + c)[None, :]
    far = x
    if rest:
        b = near + tl.arange(0, rest)
        far_place = line[:, None] * d + b[None, :]
        far = tl.load(stream + far_place, real, other=0).to(tl.float32) + tl.load(vectors + b)[None, :]
    step: tl.constexpr = 64
    deep = tl.arange(0, step)
    for k in tl.range(0, d, step):  # x += attended @ proj
        a = tl.load(attended + line[:, None] * d + k + deep[None, :], real, other=0)
        x = tl.dot(a, _tile(proj, k, 0, d, step, near, described), x)
        if rest:
            far = tl.dot(a, _tile(proj_far, k, near, d, step, rest, described), far)
    mean, scale = _moments(x, far, d, rest, eps)
    y = ((x - mean[:, None]) * scale[:, None]).to(element)
    x = x * tl.load(vectors + d + c)[None, :] + tl.load(vectors + 2 * d + c)[None, :]
    y_far = y
    if rest:
        y_far = ((far - mean[:, None]) * scale[:, None]).to(element)
        far = far * tl.load(vectors + d + b)[None, :] + tl.load(vectors + 2 * d + b)[None, :]
    for n in tl.range(0, 4 * d, chunk):  # x += gelu(y @ fc1) @ fc2
        hidden = _product(y, y_far, fc1, fc1_far, n, 4 * d, near, rest, chunk, described)
        hidden += tl.load(vectors + 3 * d + n + tl.arange(0, chunk))[None, :]
        active = _gelu(hidden, tanh).to(element)
        x = tl.dot(active, _tile(fc2, n, 0, d, chunk, near, described), x)
        if rest:
            far = tl.dot(active, _tile(fc2_far, n, near, d, chunk, rest, described), far)
    tl.store(stream + place, x.to(element), real)
    if rest:
        tl.store(stream + far_place, far.to(element), real)
    if has_next:
        target += first * 3 * d
        mean, scale = _moments(x, far, d, rest, eps)
        y = ((x - mean[:, None]) * scale[:, None]).to(element)
        if rest:
            y_far = ((far - mean[:, None]) * scale[:, None]).to(element)
        o = tl.arange(0, out)
        for n in tl.range(0, 3 * d, out):  # target = y @ qkv
            total = _product(y, y_far, qkv, qkv_far, n, 3 * d, near, rest, out, described)
            total += tl.load(vectors + 7 * d + n + o)[None, :]
            tl.store(target + line[:, None] * (3 * d) + n + o[None, :], total.to(element), real)


class BlockKernel:
    """The constants of a block between its attention and the next block's attention.

    Args:
        proj, fc1, fc2, qkv: Weight (outputs, inputs) and bias of the block's layers; ``qkv`` is the next block's, or
            None after the last block. Gates are folded into all but ``gate``.
        gate: The output gate of the block, (d,).
        dtype: bfloat16 or float16; float32 works in the interpreter and for tests.
    """

    def __init__(
        self,
        *,
        proj: tuple[Tensor, Tensor],
        fc1: tuple[Tensor, Tensor],
        fc2: tuple[Tensor, Tensor],
        gate: Tensor,
        qkv: tuple[Tensor, Tensor] | None,
        dtype: torch.dtype,
    ) -> None:
        self.width = len(gate)
        self.near, self.rest = two_powers(self.width)
        self.has_next = qkv is not None
        layers = [proj, fc1, fc2] + ([qkv] if qkv is not None else [])
        self.weights = [weight.t().to(dtype).contiguous() for weight, _ in layers]  # (outputs, inputs) -> transposed
        vectors = [proj[1], gate, fc2[1], fc1[1], *([qkv[1]] if qkv is not None else [])]
        self.vectors = torch.cat([vector.float() for vector in vectors])
        self._operands: dict[tuple[int, int], list[Any]] = {}

    def __call__(self, stream: Tensor, attended: Tensor, tiles: Tiles | None = None) -> Tensor | None:
        """Change the stream in place; return the next block's qkv: (M, d) twice -> (M, 3d), or None."""
        rows, d = stream.shape
        target = stream.new_empty(rows, 3 * d) if self.has_next else None
        parts = [(0, rows, tiles)] if tiles is not None else divide_rows(rows, self.width, processors(stream.device))
        for first, last, tiles in parts:
            part = slice(first, last)
            self._run(stream[part], attended[part], stream if target is None else target[part], tiles)
        return target

    def _run(self, stream: Tensor, attended: Tensor, target: Tensor, tiles: Tiles) -> None:
        rows, d = stream.shape
        _between_attentions[(triton.cdiv(rows, tiles.many),)](
            stream, attended, target, *self.operands(tiles), self.vectors, rows, NORM_EPS,
            d, self.near, self.rest, self.has_next, tiles.many, tiles.chunk, tiles.out,
            tiles.described, tiles.tanh, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def operands(self, tiles: Tiles) -> list[Any]:
        """Both parts of each weight, as tensors or descriptors."""
        key = (tiles.chunk, tiles.out) if tiles.described else (0, 0)
        if key not in self._operands:
            parts = [weight for weight in self.weights for _ in range(2)]
            parts += parts[:2] if not self.has_next else []  # never read
            self._operands[key] = _described(parts, self.near, self.rest, tiles) if tiles.described else parts
        return self._operands[key]


def tiles_for(rows: int, width: int) -> Tiles:
    """The division for this number of rows."""
    tiles = next(tiles for most, tiles in TILES if most is None or rows <= most)
    return replace(tiles, described=tiles.described and width >= DESCRIBED_WIDTH)


def divide_rows(rows: int, width: int, processors: int) -> list[tuple[int, int, Tiles]]:
    """Parts of the rows, each with its tiles: many rows keep all processors busy, and the rest has smaller tiles."""
    tiles = tiles_for(rows, width)
    rest = rows % (tiles.many * processors)
    is_whole = rest in (0, rows) or rest > FULL_WAVE * tiles.many * processors
    if is_whole or tiles.many < TILES[-1][1].many:  # several of the smaller tiles share a processor
        return [(0, rows, tiles)]
    return [(0, rows - rest, tiles), (rows - rest, rows, tiles_for(rest, width))]


@cache
def fits(device: torch.device) -> bool:
    """Whether a GPU has room for the largest tile, 148 KB, and loads by descriptor; the interpreter has no limits."""
    if device.type != "cuda":
        return True
    about = torch.cuda.get_device_properties(device)
    room = getattr(about, "shared_memory_per_block_optin", about.shared_memory_per_block)
    return bool(about.major >= 9 and room >= 160 * 1024)


@cache
def processors(device: torch.device) -> int:
    """Number of a GPU's processors; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _described(parts: list[Tensor], near: int, rest: int, tiles: Tiles) -> list[Any]:
    """A descriptor for each part; without a rest, the second of each weight is never read."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    shapes: list[list[int]] = []
    for size in (near, rest or near):
        shapes += [[64, size], [size, tiles.chunk], [tiles.chunk, size], [size, tiles.out]]
    ordered = [shapes[layer + 4 * part] for layer in range(4) for part in range(2)]
    return [TensorDescriptor.from_tensor(part, shape) for part, shape in zip(parts, ordered, strict=True)]


@triton.jit
def _rows_linear(
    source, weight, bias, gate, target, rows, outputs, eps,
    inputs: tl.constexpr, block: tl.constexpr, norms: tl.constexpr, gelu: tl.constexpr, adds: tl.constexpr,
    gated: tl.constexpr, many: tl.constexpr, wide: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    """A tile of a linear layer; the weight is stored as (outputs, inputs)."""
    row = (tl.program_id(0) * many + tl.arange(0, many))[:, None]
    col = tl.program_id(1) * wide + tl.arange(0, wide)
    real = row < rows
    element = target.dtype.element_ty
    if norms:
        every = tl.arange(0, block)[None, :]
        x = tl.load(source + row * inputs + every, real & (every < inputs), other=0).to(tl.float32)
        mean = (tl.sum(x, 1) / inputs)[:, None]
        centred = tl.where(every < inputs, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 1) / inputs + eps)[:, None]
    total = tl.zeros((many, wide), tl.float32)
    deep = tl.arange(0, step)
    for k in tl.range(0, inputs, step):
        a = tl.load(source + row * inputs + k + deep[None, :], real, other=0)
        if norms:
            a = ((a.to(tl.float32) - mean) * scale).to(element)
        w = tl.load(weight + col[:, None] * inputs + k + deep[None, :], col[:, None] < outputs, other=0)
        total = tl.dot(a, tl.trans(w), total)
    seen = col < outputs
    total += tl.load(bias + col, seen, other=0)[None, :].to(tl.float32)
    if gelu:
        total = _gelu(total, False)
    inside = real & seen[None, :]
    place = row * outputs + col[None, :]
    if adds:
        held = tl.load(target + place, inside, other=0).to(tl.float32)
        if gated:
            held = held * tl.load(gate + col, seen, other=0)[None, :]
        total += held
    tl.store(target + place, total.to(element), inside)


def rows_linear(
    source: Tensor, weight: Tensor, bias: Tensor, *, eps: float | None = None, gelu: bool = False,
    into: Tensor | None = None, gate: Tensor | None = None, tiles: RowTiles | None = None,
) -> Tensor:  # fmt: skip
    """A linear layer for few rows: (M, inputs) -> (M, outputs).

    Args:
        source: Rows.
        weight: (inputs, outputs), stored as (outputs, inputs).
        bias: (outputs,)
        eps: If given, the rows are normalised first.
        gelu: Whether GELU follows.
        into: A stream to which the result is added in place, after it is multiplied by ``gate`` if given.
        gate: (outputs,)
        tiles: The division; chosen by the number of inputs if None.
    """
    (rows, inputs), outputs = source.shape, weight.shape[1]
    assert weight.stride() == (1, inputs)
    assert source.is_contiguous()
    if tiles is None:
        tiles = DEEP_ROW_TILES if inputs >= DEEP else ROW_TILES
    target = source.new_empty(rows, outputs) if into is None else into
    _rows_linear[(triton.cdiv(rows, tiles.many), triton.cdiv(outputs, tiles.wide))](
        source, weight, bias, bias if gate is None else gate, target, rows, outputs, eps or 0.0,
        inputs, triton.next_power_of_2(inputs), eps is not None, gelu, into is not None, gate is not None,
        tiles.many, tiles.wide, min(tiles.step, inputs & -inputs),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return target


def two_powers(width: int) -> tuple[int, int]:
    """A width as one power of two, or the sum of two: 128 -> (128, 0), 192 -> (128, 64)."""
    near = 1 << (width.bit_length() - 1)
    rest = width - near
    assert near >= 64, width
    assert not rest or (rest >= 64 and rest.bit_count() == 1), width
    return near, rest
