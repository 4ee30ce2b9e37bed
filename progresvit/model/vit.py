"""ProgResViT: one shared backbone that processes an image in rounds.

Letters: B images, C image channels, r resolution, g side of the patch grid, N tokens (g * g patches and the class
token), d active channels, W channels of the whole backbone, K classes, S rounds, s a round counted from 0.
"""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from timm.layers import calculate_drop_path_rates, resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from progresvit import compute
from progresvit.config import ModelConfig
from progresvit.model import slicing
from progresvit.model.blocks import NORM_EPS, Block
from progresvit.model.outputs import RoundOutput
from progresvit.model.projector import TokenProjector
from progresvit.model.psg import PSG, FusionGates, RoundGates


class PatchEmbed(nn.Module):
    """Holds the patch embedding, shared by all rounds."""

    def __init__(self, *, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, kernel_size=patch_size, stride=patch_size)


class ProgResViT(nn.Module):
    """A Vision Transformer that refines its prediction round by round, on more pixels and with more channels."""

    config: ModelConfig

    def __init__(self, config: ModelConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.grad_checkpointing = False
        width, rounds = config.width, config.rounds
        self.patch_embed = PatchEmbed(in_channels=config.in_channels, width=width, patch_size=config.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.stored_grid**2 + 1, width))
        self.blocks = nn.ModuleList(
            Block(width=width, layer_scale=config.layer_scale, drop_path=rate)
            for rate in calculate_drop_path_rates(drop_path, config.depth)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = _new_head(width, config.num_classes)
        self._init_backbone()
        self.projectors = nn.ModuleList(
            TokenProjector(source_width=a.width, target_width=b.width, target_grid=config.grid(b))
            for a, b in pairwise(rounds)
        )
        self.psg = (
            PSG(
                resolutions=[round_.resolution for round_ in rounds],
                widths=[round_.width for round_ in rounds],
                depth=config.depth,
                full_width=width,
            )
            if config.psg
            else None
        )

    def forward(self, images: Tensor) -> tuple[RoundOutput, ...]:
        """Every round, first to last, with no early exit. Images are (B, C, H, H), H the highest resolution or more."""
        _check_images(images, channels=self.config.in_channels, smallest=self.config.resolution)
        outputs: list[RoundOutput] = []
        for s in range(len(self.config.rounds)):
            outputs.append(self.run_round(s, images, previous=outputs[-1].tokens if outputs else None))
        return tuple(outputs)

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0. From the second round on, ``previous`` holds the tokens of the round before."""
        self._check_round(s, images, previous)
        gates = self.gates(s)
        x = self.embed(s, images)  # (B, N, d)
        if previous is not None:
            x = self.fuse(s, x, previous, gates.fusion)
        for block, block_gates in zip(self.blocks, gates.blocks):
            if self.grad_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, block_gates, use_reentrant=False)
            else:
                x = block(x, block_gates)
        tokens = slicing.layer_norm(x, self.norm)
        return RoundOutput(logits=self.classify(tokens), tokens=tokens)

    def gmacs(self, convention: compute.Convention = "paper") -> list[float]:
        """GMACs spent on an image that exits after each round."""
        return compute.cumulative_gmacs(self.config, convention)

    def gates(self, s: int) -> RoundGates:
        """The multipliers of round s; all one without PSG."""
        gates: RoundGates = RoundGates.off(self.config.depth) if self.psg is None else self.psg(s)
        return gates

    def embed(self, s: int, images: Tensor) -> Tensor:
        """Tokens of the image at the round's resolution and width: (B, C, H, H) -> (B, N, d)."""
        round_ = self.config.rounds[s]
        d, grid = round_.width, self.config.grid(round_)
        images = resize(images, round_.resolution)  # (B, C, H, H) -> (B, C, r, r)
        x = slicing.patches(images, self.patch_embed.proj, d)  # (B, C, r, r) -> (B, g * g, d)
        class_token = self.cls_token[..., :d].expand(x.shape[0], -1, -1)  # (1, 1, W) -> (B, 1, d)
        position: Tensor = resample_abs_pos_embed(self.pos_embed[..., :d], new_size=[grid, grid])  # -> (1, N, d)
        return torch.cat([class_token.to(x.dtype), x], dim=1) + position

    def fuse(self, s: int, x: Tensor, previous: Tensor, gates: FusionGates) -> Tensor:
        """Fuse the new tokens of round s with the projected tokens of the previous round: both (B, N, d)."""
        projected: Tensor = self.projectors[s - 1](previous)  # to the grid and the width of round s
        return gates.image * x + gates.previous * projected

    def classify(self, tokens: Tensor) -> Tensor:
        """Logits of the class token, from any round's width: (B, N, d) -> (B, K)."""
        class_token = tokens[:, 0]  # (B, N, d) -> (B, d)
        return slicing.linear(class_token, self.head) if isinstance(self.head, nn.Linear) else class_token

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh head for another set of classes; 0 removes it. The class names of the old head are removed."""
        self.config = self.config.replace(num_classes=num_classes, class_ids=None, labels=None)
        self.head = _new_head(self.config.width, num_classes).to(self.cls_token)
        _init_linear(self.head)

    def keep_classes(self, rows: Sequence[int]) -> ProgResViT:
        """A copy with only these classes, in this order."""
        known = range(self.config.num_classes)
        if not rows or len(set(rows)) < len(rows) or not all(row in known for row in rows):
            raise ValueError(f"give distinct rows of the head, from 0 to {len(known) - 1}, not {list(rows)}.")
        names = {
            name: None if values is None else tuple(values[row] for row in rows)
            for name, values in (("class_ids", self.config.class_ids), ("labels", self.config.labels))
        }
        chosen = torch.tensor(rows)
        weights = {
            key: value[chosen.to(value.device)] if key.startswith("head.") else value
            for key, value in self.state_dict().items()
        }
        kept = ProgResViT(self.config.replace(num_classes=len(rows), **names)).to(self.cls_token)
        kept.load_state_dict(weights)
        return kept.train(self.training)

    def start_quiet(self) -> None:
        """Begin with rounds that ignore the round before, so that the last one is the plain ViT of the backbone."""
        for projector in self.projectors:
            cast(TokenProjector, projector).start_quiet()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block's activations in the backward pass instead of storing them."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that no optimizer should decay, besides vectors and biases."""
        return {"pos_embed", "cls_token"}

    def _init_backbone(self) -> None:
        """As timm initialises a ViT. PSG and the projectors initialise themselves."""
        trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        self.apply(_init_linear)

    def _check_round(self, s: int, images: Tensor, previous: Tensor | None) -> None:
        rounds = self.config.rounds
        if not 0 <= s < len(rounds):
            raise ValueError(f"there is no round {s}; this model has rounds 0 to {len(rounds) - 1}.")
        _check_images(images, channels=self.config.in_channels, smallest=rounds[s].resolution)
        if s == 0:
            if previous is not None:
                raise ValueError("round 0 starts from the image alone; call it without previous.")
            return
        before = rounds[s - 1]
        expected = (images.shape[0], self.config.grid(before) ** 2 + 1, before.width)
        if previous is None or tuple(previous.shape) != expected:
            got = "nothing" if previous is None else tuple(previous.shape)
            raise ValueError(
                f"round {s} needs the tokens of round {s - 1} for the same images, shaped {expected}, and got {got}; "
                f"pass previous=model.run_round({s - 1}, ...).tokens."
            )


def _check_images(images: Tensor, *, channels: int, smallest: int) -> None:
    if images.ndim != 4 or images.shape[1] != channels:
        raise ValueError(
            f"images are a batch shaped (B, {channels}, H, H), not {tuple(images.shape)}; "
            f"this model takes {channels} channels (change in_channels to build another)."
        )
    height, width = images.shape[-2:]
    if height != width:
        raise ValueError(f"images must be square, not {height}x{width}; crop or pad them first.")
    if height < smallest:
        raise ValueError(
            f"images of {height} pixels are too small; give at least {smallest}, "
            "the resolution of the rounds, or resize them first."
        )
    if not images.is_floating_point():
        raise ValueError(
            f"images are normalised floating-point pixels, not {images.dtype}; "
            "scale them to 0..1, subtract config.mean and divide by config.std."
        )


def resize(images: Tensor, resolution: int) -> Tensor:
    """Bicubic with antialias, in float32 (on a CPU there is no kernel of lower precision)."""
    if images.shape[-1] == resolution:
        return images
    size = (resolution, resolution)
    resized = F.interpolate(images.float(), size=size, mode="bicubic", antialias=True, align_corners=False)
    return resized.to(images.dtype)


def resizing_matrix(source: int, target: int) -> Tensor:
    """``resize`` along one side as a matrix, with the same float32 weights: (target, source)."""
    identity = torch.eye(source)[None, None]  # resized in one direction only, it becomes the matrix
    size = (target, source)
    return F.interpolate(identity, size=size, mode="bicubic", antialias=True, align_corners=False)[0, 0]


def _new_head(width: int, num_classes: int) -> nn.Module:
    return nn.Linear(width, num_classes) if num_classes else nn.Identity()


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
