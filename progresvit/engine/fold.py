"""A round in which everything is folded that does not depend on the image.

For a given round, gates, PSG's scales, LayerScale, the slices of the weights, the affine part of the norms and the
resampled position embedding are constants. They are folded once, in float64. The result is a plain dense ViT: only the
output gate of a block remains a vector, because a norm follows it.

Letters: B images, C image channels, r resolution, g side of the patch grid, N tokens, d channels of the round, d'
channels of the previous round, h heads, K classes, G_... gates, M tokens with a query.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from progresvit.config import HEAD_WIDTH, MLP_RATIO
from progresvit.model import ProgResViT, RoundOutput
from progresvit.model.backbone import resample_position, resize
from progresvit.model.blocks import NORM_EPS, Block, LayerScale
from progresvit.model.projector import TokenProjector
from progresvit.model.psg import BlockGates
from progresvit.model.token_merging import Merging, merge, unmerge


class Dense(nn.Module):
    """A linear layer of constants."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().float().clone(memory_format=torch.contiguous_format))
        self.register_buffer("bias", bias.detach().float().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class FoldedBlock(nn.Module):
    """One block: norms without an affine part; gates and scales are folded into the last layer of each update."""

    out_gate: Tensor

    def __init__(self, block: Block, gates: BlockGates, width: int) -> None:
        super().__init__()
        attn, mlp = block.attn, block.mlp
        full = attn.qkv.in_features
        qkv_weight = attn.qkv.weight.double().view(3, full, full)[:, :width, :width].reshape(3 * width, width)
        qkv_bias = attn.qkv.bias.double().view(3, full)[:, :width].reshape(3 * width)
        hidden = MLP_RATIO * width
        self.qkv = _after_norm(block.norm1, qkv_weight, qkv_bias)
        self.proj = _gated(attn.proj, width, width, gates.attn, block.ls1)
        fc1_weight, fc1_bias = mlp.fc1.weight.double()[:hidden, :width], mlp.fc1.bias.double()[:hidden]
        self.fc1 = _after_norm(block.norm2, fc1_weight, fc1_bias)
        self.fc2 = _gated(mlp.fc2, width, hidden, gates.mlp, block.ls2)
        self.register_buffer("out_gate", _vector(gates.out, width).float().to(qkv_weight.device))

    def forward(self, x: Tensor, merging: Merging | None = None) -> tuple[Tensor, Merging | None]:
        """(B, N, d) -> (B, N, d), with fewer tokens if some are merged."""
        qkv = self.qkv(_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))  # (B, N, 3d) -> (B, N, 3, h, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, N, 3, h, 64) -> 3 x (B, h, N, 64)
        x = x + self.proj(_attend(q, k, v, merging))
        if merging is not None:
            x, merging = merge(x, k, merging)  # (B, N, d) -> fewer tokens
        x = x + self.fc2(F.gelu(self.fc1(_norm(x))))
        return self.out_gate * x, merging

    def class_token_only(self, x: Tensor, merging: Merging | None = None) -> Tensor:
        """The block's output for the class token only; all tokens are keys and values: (B, N, d) -> (B, 1, d).

        It merges no tokens, which would change only the patches.
        """
        d = x.shape[-1]
        seen = _norm(x)
        q = F.linear(seen[:, :1], self.qkv.weight[:d], self.qkv.bias[:d])  # (B, N, d) -> (B, 1, d)
        kv = F.linear(seen, self.qkv.weight[d:], self.qkv.bias[d:])  # (B, N, d) -> (B, N, 2d)
        q = q.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)  # (B, 1, d) -> (B, h, 1, 64)
        k, v = kv.unflatten(-1, (2, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)  # (B, N, 2d) -> 2 x (B, h, N, 64)
        x = x[:, :1] + self.proj(_attend(q, k, v, merging))  # (B, h, 1, 64) -> (B, 1, d)
        x = x + self.fc2(F.gelu(self.fc1(_norm(x))))
        return self.out_gate * x


class FoldedProjector(nn.Module):
    """Tokens of the previous round at this round's grid and width, times G_prev."""

    depthwise: Tensor

    def __init__(self, projector: TokenProjector, gate: Tensor, source_grid: int) -> None:
        super().__init__()
        self.source_grid, self.target_grid = source_grid, projector.target_grid
        self.register_buffer("depthwise", projector.depthwise.weight.detach().float().clone())
        patches, class_token = projector.widen_patches, projector.widen_class
        assert patches.bias is not None
        self.patches = Dense(gate[:, None] * patches.weight.double()[:, :, 0, 0], gate * patches.bias.double())
        self.class_token = Dense(gate[:, None] * class_token.weight.double(), gate * class_token.bias.double())

    def forward(self, tokens: Tensor) -> Tensor:
        grid = tokens[:, 1:].mT.unflatten(2, (self.source_grid, self.source_grid))  # (B, N - 1, d') -> (B, d', g, g)
        if self.source_grid != self.target_grid:
            size = (self.target_grid, self.target_grid)
            grid = F.interpolate(grid, size=size, mode="bilinear", align_corners=False)
        grid = F.conv2d(grid, self.depthwise, padding=1, groups=grid.shape[1])
        patches = self.patches(grid.flatten(2).mT)  # (B, d', g, g) -> (B, N - 1, d)
        return torch.cat([self.class_token(tokens[:, :1]), patches], dim=1)


class FoldedRound(nn.Module):
    """Round s of a model, counted from 0; later changes to the model have no effect.

    Args:
        model: The model.
        s: The round.
        head: Whether to compute logits. Without a head they are the class token, as in a model that has none.
        patches: Whether the last block computes all tokens or only the class token. By default all, except in the last
            round of a classification model, where the patches are not used.
    """

    position: Tensor
    norm_weight: Tensor
    norm_bias: Tensor

    @torch.no_grad()
    def __init__(self, model: ProgResViT, s: int, *, head: bool = True, patches: bool | None = None) -> None:
        super().__init__()
        config = model.config
        round_ = config.rounds[s]
        d = model.widths[s]
        self.resolution, self.patch_size = round_.resolution, config.patch_size
        self.is_last = s == len(config.rounds) - 1
        self.segments = config.task == "segmentation"
        self.gives_patches = self.segments or not self.is_last if patches is None else patches
        self.merge = round_.merge
        gates = model.gates(s)
        embed = model.patch_embed.proj
        assert embed.bias is not None
        image_gate = _vector(gates.fusion.image, d).to(embed.weight.device)
        self.embed = Dense(
            image_gate[:, None] * embed.weight.double()[:d].flatten(1), image_gate * embed.bias.double()[:d]
        )
        position = resample_position(model.pos_embed[..., :d], model.grids[s]).double().clone()  # (1, N, d)
        position[:, :1] += model.cls_token.double()[..., :d]  # added to the class token, which is 0 in the input
        self.register_buffer("position", (image_gate * position).float())
        self.projector = None
        if s:
            previous_gate = _vector(gates.fusion.previous, d).to(embed.weight.device)
            projector = model.projectors[s - 1]
            assert isinstance(projector, TokenProjector)
            self.projector = FoldedProjector(projector, previous_gate, model.grids[s - 1])
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        self.blocks = nn.ModuleList(FoldedBlock(block, own, d) for block, own in zip(blocks, gates.blocks))
        self.register_buffer("norm_weight", model.norm.weight.detach()[:d].float().clone())
        self.register_buffer("norm_bias", model.norm.bias.detach()[:d].float().clone())
        self.head = None
        if head and isinstance(model.head, nn.Linear):
            self.head = Dense(model.head.weight.detach()[:, :d], model.head.bias.detach())

    def forward(self, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Normalised images (B, C, H, H), and after the first round the tokens of the previous round.

        The tokens are the class token only, (B, 1, d), if it gives no patches.
        """
        images = resize(images, self.resolution)  # (B, C, H, H) -> (B, C, r, r)
        cut = F.pixel_unshuffle(images, self.patch_size).flatten(2).mT  # (B, C, r, r) -> (B, g * g, C * p * p)
        x = F.pad(self.embed(cut), (0, 0, 1, 0)) + self.position  # (B, N, d); the class token is in the position
        if self.projector is not None:
            assert previous is not None
            x = x + self.projector(previous)
        merging = Merging.start(x, self.merge) if self.merge else None
        blocks = list(self.blocks)
        for block in blocks if self.gives_patches else blocks[:-1]:
            x, merging = block(x, merging)
        if not self.gives_patches:
            last = blocks[-1]
            assert isinstance(last, FoldedBlock)
            x = last.class_token_only(x, merging)  # (B, N, d) -> (B, 1, d)
        elif merging is not None:
            x = unmerge(x, merging)
        tokens = F.layer_norm(x, (x.shape[-1],), self.norm_weight, self.norm_bias, NORM_EPS)
        if self.head is None:
            return RoundOutput(logits=tokens[:, 0], tokens=tokens)
        logits = self.head(tokens[:, 1:] if self.segments else tokens[:, 0])  # (B, g * g, K) or (B, K)
        if self.segments:
            g = self.resolution // self.patch_size
            logits = logits.mT.unflatten(2, (g, g))  # (B, g * g, K) -> (B, K, g, g)
        return RoundOutput(logits=logits, tokens=tokens)


def fold(model: ProgResViT) -> nn.ModuleList:
    """Every round of a model, folded."""
    return nn.ModuleList(FoldedRound(model, s) for s in range(len(model.config.rounds))).eval()


def fold_features(model: ProgResViT, rounds: int, *, patches: bool) -> nn.ModuleList:
    """The first rounds of a model, folded without the head. The last one gives patch tokens only if ``patches``."""
    return nn.ModuleList(
        FoldedRound(model, s, head=False, patches=patches or s < rounds - 1) for s in range(rounds)
    ).eval()


def _attend(q: Tensor, k: Tensor, v: Tensor, merging: Merging | None) -> Tensor:
    """(B, h, M, 64) and 2 x (B, h, N, 64) -> (B, M, d)"""
    bias = None if merging is None else merging.attention_bias(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


def _norm(x: Tensor) -> Tensor:
    """Over all channels, without weight and bias, which are folded into the next layer."""
    return F.layer_norm(x, (x.shape[-1],), eps=NORM_EPS)


def _after_norm(norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> Dense:
    """A linear layer that includes the affine part of the norm before it."""
    inputs = weight.shape[1]
    scale, shift = norm.weight.double()[:inputs], norm.bias.double()[:inputs]
    return Dense(weight * scale, bias + weight @ shift)


def _gated(layer: nn.Linear, outputs: int, inputs: int, gate: Tensor | float, layer_scale: nn.Module) -> Dense:
    """A slice of a linear layer, each output times its gate and its LayerScale."""
    scale = layer_scale.gamma.detach().double()[:outputs] if isinstance(layer_scale, LayerScale) else 1.0
    gate = (_vector(gate, outputs) * scale).to(layer.weight.device)
    return Dense(gate[:, None] * layer.weight.double()[:outputs, :inputs], gate * layer.bias.double()[:outputs])


def _vector(gate: Tensor | float, width: int) -> Tensor:
    """A gate as a vector; without PSG it is the number 1."""
    if isinstance(gate, Tensor):
        return gate.detach().double()
    return torch.full((width,), gate, dtype=torch.float64)
