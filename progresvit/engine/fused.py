"""A folded round for a GPU: matrix products of the vendor's library, and few kernels between them.

Differences from ``FoldedRound``: it takes bytes, which one or two passes resize, normalise and cut into patches. One
product embeds the image and the previous tokens. Residuals are added inside the products. Norm, bias and output gate
are one pass. GELU is part of the product before it (in its tanh form, in bfloat16 and float16 only, where the
difference of at most 5e-4 is below rounding). Narrow rounds run everything between two attentions in one kernel; for
few rows, norms and residuals are part of the products. Nothing waits for the host, so a round can be captured as one
CUDA graph.

Letters as in fold.py; R is the side of the input images, M rows: images times tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from progresvit.config import HEAD_WIDTH, ModelConfig
from progresvit.engine import kernels
from progresvit.engine.block_kernel import BlockKernel, fits, rows_linear
from progresvit.engine.fold import Dense, FoldedBlock, FoldedRound
from progresvit.model import RoundOutput
from progresvit.model.backbone import resizing_matrix
from progresvit.model.blocks import NORM_EPS

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_WIDTH = 256
"""Narrower rounds run in bfloat16, since fp8 is slower there (H200, 192 channels: 4.8 against 4.1 ms)."""
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

FEW_TOKENS = 192
"""Up to this number our attention kernel is faster (H200, 512 images: 145 tokens 51 against 112 µs, 226 tokens 205
against 169)."""
ATTEND_TOKENS = 256
"""The most tokens that our attention kernel takes; for a few images it is the faster one up to here."""
ATTEND_ROWS = 1024
"""So many rows (images times tokens) are a few images."""
NARROW = 192
"""Up to this width one kernel runs between two attentions: a tile of rows and its hidden layer fit one processor."""
MANY_ROWS = 4096
"""From this number of rows (images times tokens) on it is faster than products (H200, 192 channels, 12 blocks: 9,280
rows 0.61 against 0.70 ms; 1,160 rows 0.33 against 0.31 ms)."""
FEW_ROWS = 320
"""Up to this number of rows launches cost more than products, and norms are computed in the products of narrow rounds
(H200, 192 channels: 290 rows 0.24 against 0.27 ms, 580 rows 0.31 against 0.28; 384 channels: 0.56 against 0.39)."""

Way = Literal["auto", "products", "block kernel", "few rows"]
"""How the blocks run: the library's products with kernels between, ``BlockKernel``, or ``rows_linear``."""


@dataclass(frozen=True)
class Filter:
    """A linear map along one axis as taps: output i is the sum over t of weight[i, t] * input[start[i] + t]."""

    start: Tensor
    weight: Tensor

    @classmethod
    def of(cls, matrix: Tensor, device: torch.device) -> Filter:
        """From the matrix (out, in) of a map with few non-zero weights per row."""
        used = matrix != 0
        first = used.int().argmax(dim=1)
        last = matrix.shape[1] - 1 - used.flip(1).int().argmax(dim=1)
        taps = int((last - first).max()) + 1
        start = first.clamp(max=matrix.shape[1] - taps)
        weight = matrix.gather(1, start[:, None] + torch.arange(taps))
        return cls(start.int().to(device), weight.float().contiguous().to(device))

    @classmethod
    def resampling(cls, old: int, new: int, device: torch.device) -> Filter:
        """The resampling of token grids: bilinear, without antialias."""
        lines = F.interpolate(torch.eye(old)[None], size=new, mode="linear", align_corners=False)[0]
        return cls.of(lines.mT.contiguous(), device)  # (old, new) -> (new, old)


@dataclass(frozen=True)
class RowFilter:
    """The same map for a product: tiles of columns of the result, each made of a window of columns of the input."""

    start: Tensor
    """First column of each window."""
    weight: Tensor | None
    """(tiles, window, columns); None if the map is the identity."""

    @classmethod
    def of(cls, matrix: Tensor, dtype: torch.dtype, device: torch.device, *, columns: int = 64) -> RowFilter:
        """From the matrix (out, in) of a map with few non-zero weights per row."""
        out, width = matrix.shape
        if out == width and bool((matrix == torch.eye(out)).all()):
            return cls(torch.zeros(1, dtype=torch.int32, device=device), None)
        used = [(matrix[first : first + columns] != 0).any(dim=0).nonzero() for first in range(0, out, columns)]
        start = torch.tensor([int(places[0]) for places in used])
        needed = max(int(places[-1] - places[0]) + 1 for places in used)
        window = max(16, 1 << (needed - 1).bit_length())  # a power of two
        weight = torch.zeros(len(used), window, columns)
        for tile, first in enumerate(start.tolist()):
            part = matrix[tile * columns : (tile + 1) * columns, first : first + window].mT  # (window, columns) or less
            weight[tile, : part.shape[0], : part.shape[1]] = part
        return cls(start.int().to(device), weight.to(device, dtype))


class FusedLinear:
    """A linear layer for the GPU; in fp8 its inputs and weights are scaled."""

    def __init__(self, layer: Dense, dtype: torch.dtype, *, input_scale: float = 1.0, fp8: bool = False) -> None:
        self.bias = layer.bias.to(dtype)
        weight = layer.weight
        self.scales: tuple[Tensor, Tensor] | None = None
        if fp8:
            scale = FP8_LARGEST / weight.abs().max().clamp(min=1e-12)
            self.scales = (torch.tensor(1 / input_scale, device=weight.device), (1 / scale).float())
            self.weight = (weight * scale).to(FP8).t()
        else:
            self.weight = weight.to(dtype).t()

    def __call__(self, x: Tensor) -> Tensor:
        """(M, inputs) -> (M, outputs)"""
        if self.scales is None:
            return torch.addmm(self.bias, x, self.weight)
        return torch._scaled_mm(x, self.weight, *self.scales, bias=self.bias, out_dtype=self.bias.dtype)

    def gelu(self, x: Tensor) -> Tensor:
        if self.bias.dtype == torch.float32:
            return F.gelu(self(x))
        return torch._addmm_activation(self.bias, x, self.weight, use_gelu=True)


class FusedBlock:
    """The constants of one block."""

    def __init__(self, block: FoldedBlock, dtype: torch.dtype, *, norm_scale: float, fp8: bool) -> None:
        self.gate = block.out_gate.float()
        self.fp8, self.width = fp8, len(self.gate)
        self.qkv = FusedLinear(block.qkv, dtype, input_scale=norm_scale, fp8=fp8)
        self.fc1 = FusedLinear(block.fc1, dtype, input_scale=norm_scale, fp8=fp8)
        self.proj = block.proj.weight.to(dtype).t()
        fc2 = Dense(self.gate[:, None] * block.fc2.weight, self.gate * block.fc2.bias)
        self.fc2 = FusedLinear(fc2, dtype, fp8=fp8)
        self.proj_bias, self.fc2_bias = block.proj.bias.float(), fc2.bias.float()
        self.layers = {"proj": block.proj, "fc1": block.fc1, "fc2": fc2, "qkv": block.qkv}  # float32
        if fp8:  # the product adds its bias itself
            self.fc2_bias = torch.zeros_like(self.fc2_bias)

    def between(self, following: FusedBlock | None, dtype: torch.dtype) -> BlockKernel:
        """The kernel from this block's attention to that of the following one, if any."""
        parts = {name: (self.layers[name].weight, self.layers[name].bias) for name in ("proj", "fc1", "fc2")}
        qkv = None if following is None else following.layers["qkv"]
        after = None if qkv is None else (qkv.weight, qkv.bias)
        return BlockKernel(**parts, gate=self.gate, qkv=after, dtype=dtype)


class ClassTokenBlock(FusedBlock):
    """The last block of the last round, with queries for the class tokens only."""

    def __init__(self, block: FoldedBlock, dtype: torch.dtype, *, norm_scale: float, fp8: bool) -> None:
        super().__init__(block, dtype, norm_scale=norm_scale, fp8=fp8)
        parts = slice(0, self.width), slice(self.width, 3 * self.width)  # queries; keys and values
        q, kv = (Dense(block.qkv.weight[part], block.qkv.bias[part]) for part in parts)
        self.q, self.kv = (FusedLinear(one, dtype, input_scale=norm_scale, fp8=fp8) for one in (q, kv))


class FusedRound:
    """Round s of a model for images of side R, in one precision, on one GPU.

    ``way`` is chosen by width and number of rows; "products" works for all rounds, the others in 16 bits.
    """

    def __init__(
        self,
        folded: FoldedRound,
        config: ModelConfig,
        *,
        side: int,
        dtype: torch.dtype,
        fp8: bool = False,
        way: Way = "auto",
    ) -> None:
        device = folded.position.device
        fp8 = fp8 and folded.position.shape[-1] >= FP8_WIDTH
        self.dtype, self.fp8, self.is_last = dtype, fp8, folded.is_last
        self.resolution, self.patch_size = folded.resolution, folded.patch_size
        self.position = folded.position[0].clone()  # (N, d)
        self.tokens, self.width = self.position.shape
        self.heads = self.width // HEAD_WIDTH
        self.norm_scale = FP8_LARGEST / self.width**0.5 if fp8 else 1.0  # no normalised value exceeds the root of d
        # float16 holds 0 to 255 to a sixteenth of a step, finer than any 16-bit input of the first product
        self.pixel_dtype = torch.float32 if dtype == torch.float32 else torch.float16
        matrix = resizing_matrix(side, self.resolution)
        self.columns, self.rows = Filter.of(matrix, device), RowFilter.of(matrix, self.pixel_dtype, device)
        mean, std = (torch.tensor(values, device=device) for values in (config.mean, config.std))
        self.scale, self.shift = 1 / (255 * std), -mean / std
        inputs = [folded.embed.weight]
        self.position[1:] += folded.embed.bias
        self.has_previous = folded.projector is not None
        if folded.projector is not None:
            projector = folded.projector
            inputs.append(projector.patches.weight)
            self.position[1:] += projector.patches.bias
            self.resampling = Filter.resampling(projector.source_grid, projector.target_grid, device)
            self.depthwise = projector.depthwise[:, 0].flatten(1).mT.contiguous()  # (d', 1, 3, 3) -> (9, d')
            self.class_token = FusedLinear(projector.class_token, dtype)
        self.pixels = folded.embed.weight.shape[1]
        self.embed = torch.cat(inputs, dim=1).to(dtype).t()  # (C * p * p and d', d)
        blocks = [block for block in folded.blocks if isinstance(block, FoldedBlock)]
        scaling: dict[str, Any] = {"norm_scale": self.norm_scale, "fp8": fp8}
        self.blocks = [FusedBlock(block, dtype, **scaling) for block in (blocks[:-1] if self.is_last else blocks)]
        self.last = ClassTokenBlock(blocks[-1], dtype, **scaling) if self.is_last else None
        self.between: list[BlockKernel] = []
        self.way = way
        if dtype != torch.float32 and not fp8 and self.width <= NARROW and fits(device):
            every = [*self.blocks, self.last]
            self.between = [block.between(after, dtype) for block, after in zip(self.blocks, every[1:], strict=True)]
        for block in [*self.blocks, *([] if self.last is None else [self.last])]:
            block.layers.clear()  # only their 16-bit copies are used from here on
        self.norm_weight, self.norm_bias = folded.norm_weight, folded.norm_bias
        assert folded.head is not None
        self.head = FusedLinear(folded.head, dtype)

    def __call__(self, pixels: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Bytes (B, C, R, R), and after the first round the tokens of the previous round."""
        images = pixels.shape[0]
        x, y = self._embed(self._rows(pixels, previous), previous)  # (M, d) twice: the stream, and its norm
        run = {"products": self._products, "block kernel": self._block_kernel, "few rows": self._few_rows}
        x, update = run[self._way(len(x))](x, y, images)
        tokens = torch.empty_like(x)
        kernels.norm(x, tokens, NORM_EPS, update=update, gain=self.norm_weight, bias=self.norm_bias)
        tokens = tokens.view(images, -1, self.width)
        tokens = tokens[:, :1] if self.is_last else tokens
        return RoundOutput(logits=self.head(tokens[:, 0]), tokens=tokens)

    def _rows(self, pixels: Tensor, previous: Tensor | None) -> Tensor:
        """The input of the first product, patch by patch: pixels, then the previous tokens. (B, g * g, …)"""
        b, channels, side, _ = pixels.shape
        rows = torch.empty(b, self.tokens - 1, self.embed.shape[0], device=pixels.device, dtype=self.dtype)
        source = pixels
        if side != self.resolution:
            source = torch.empty(b, channels, self.resolution, side, device=pixels.device, dtype=self.pixel_dtype)
            kernels.resize_columns(pixels, source, self.columns.start, self.columns.weight)
        kernels.resize_patchify(
            source, rows, self.rows.start, self.rows.weight, self.scale, self.shift, self.patch_size
        )
        if self.has_previous:
            assert previous is not None
            kernels.resample_tokens(
                previous, rows, self.resampling.start, self.resampling.weight, self.depthwise, self.pixels
            )
        return rows

    def _embed(self, rows: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        patches = rows.flatten(0, 1) @ self.embed  # (B * g * g, …) -> (B * g * g, d)
        class_token = None if previous is None else self.class_token(previous[:, 0])  # (B, N', d') -> (B, d)
        stream = torch.empty(rows.shape[0] * self.tokens, self.width, device=rows.device, dtype=self.dtype)
        target = self._normed_like(stream)
        kernels.embed_norm(patches, class_token, self.position, stream, target, NORM_EPS, self.norm_scale)
        return stream, target

    def _way(self, rows: int) -> str:
        if self.way != "auto":
            return self.way
        if self.dtype == torch.float32 or self.fp8:
            return "products"
        if rows <= FEW_ROWS and self.width <= NARROW:
            return "few rows"
        return "block kernel" if self.between and rows >= MANY_ROWS else "products"

    def _products(self, x: Tensor, y: Tensor, images: int) -> tuple[Tensor, Tensor | None]:
        """All blocks on the stream x, whose norm is y; an update that is not added yet, if any."""
        update = None
        for number, block in enumerate(self.blocks):
            if number:
                y = self._norm(x, update)
            update = self._block(block, x, y, images)
        if self.last is not None:
            y = self._norm(x, update) if self.blocks else y
            return self._class_token_only(self.last, x, y, images)  # (B, d)
        return x, update

    def _block_kernel(self, x: Tensor, y: Tensor, images: int) -> tuple[Tensor, Tensor | None]:
        """All blocks with one kernel between two attentions."""
        blocks = [*self.blocks, *([] if self.last is None else [self.last])]
        qkv: Tensor | None = blocks[0].qkv(y)  # (M, d) -> (M, 3d)
        for between in self.between:
            assert qkv is not None
            qkv = between(x, self._attend(qkv.view(images, self.tokens, -1)))
        if self.last is None:
            return x, None
        assert qkv is not None
        q, k, v = qkv.view(images, self.tokens, 3, self.heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        first = x.view(images, self.tokens, self.width)[:, 0].contiguous()  # (M, d) -> (B, d)
        first.addmm_(_sdpa(q[:, :, :1], k, v)[:, 0], self.last.proj)
        return first, self._mlp(self.last, first)

    def _few_rows(self, x: Tensor, y: Tensor, images: int) -> tuple[Tensor, None]:
        """All blocks for all tokens, the last one of the last round too: launches cost more than its products."""
        for number, block in enumerate([*self.blocks, *([] if self.last is None else [self.last])]):
            bias = block.proj_bias, block.fc2_bias
            qkv = rows_linear(x, block.qkv.weight, block.qkv.bias, eps=NORM_EPS) if number else block.qkv(y)
            attended = self._attend(qkv.view(images, self.tokens, -1))  # (B, N, 3d) -> (M, d)
            rows_linear(attended, block.proj, bias[0], into=x)
            hidden = rows_linear(x, block.fc1.weight, block.fc1.bias, eps=NORM_EPS, gelu=True)
            rows_linear(hidden, block.fc2.weight, bias[1], into=x, gate=block.gate)
        return x, None

    def _block(self, block: FusedBlock, x: Tensor, y: Tensor, images: int) -> Tensor | None:
        """Run the block on the stream x, in place; y is its norm. Returns an update that is not added yet, if any."""
        qkv = block.qkv(y).view(images, self.tokens, -1)  # (M, d) -> (B, N, 3d)
        x.addmm_(self._attend(qkv), block.proj)
        return self._mlp(block, x)

    def _attend(self, qkv: Tensor) -> Tensor:
        """(B, N, 3d) -> (M, d)"""
        most = ATTEND_TOKENS if len(qkv) * self.tokens <= ATTEND_ROWS else FEW_TOKENS
        if self.tokens <= most and self.dtype != torch.float32:
            return kernels.attend(qkv, self.heads).flatten(0, 1)
        q, k, v = qkv.unflatten(2, (3, self.heads, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)  # 3 x (B, h, N, 64)
        return _sdpa(q, k, v).flatten(0, 1)

    def _class_token_only(
        self, block: ClassTokenBlock, x: Tensor, y: Tensor, images: int
    ) -> tuple[Tensor, Tensor | None]:
        """The block for the class tokens only: (M, d) -> (B, d)."""
        q = block.q(y.view(images, -1)[:, : self.width]).view(images, self.heads, 1, HEAD_WIDTH)  # -> (B, h, 1, 64)
        kv = block.kv(y).view(images, self.tokens, 2, self.heads, HEAD_WIDTH)
        k, v = kv.permute(2, 0, 3, 1, 4)  # (B, N, 2, h, 64) -> 2 x (B, h, N, 64)
        first = x.view(images, self.tokens, self.width)[:, 0].contiguous()  # (M, d) -> (B, d)
        first.addmm_(_sdpa(q, k, v)[:, 0], block.proj)
        return first, self._mlp(block, first)

    def _mlp(self, block: FusedBlock, x: Tensor) -> Tensor | None:
        y = self._normed_like(x)
        kernels.bias_norm_gate(x, block.proj_bias, block.gate, block.fc2_bias, y, NORM_EPS, self.norm_scale)
        if not self.fp8:
            x.addmm_(block.fc1.gelu(y), block.fc2.weight)
            return None
        hidden = block.fc1(y)
        active = torch.empty_like(hidden, dtype=FP8)
        kernels.gelu(hidden, active, FP8_LARGEST)
        return block.fc2(active)

    def _norm(self, x: Tensor, update: Tensor | None) -> Tensor:
        y = self._normed_like(x)
        kernels.norm(x, y, NORM_EPS, self.norm_scale, update=update)
        return y

    def _normed_like(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=FP8 if self.fp8 else self.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, h, N, 64) three times -> (B, N, h * 64)"""
    with sdpa_kernel(ATTENTION, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
