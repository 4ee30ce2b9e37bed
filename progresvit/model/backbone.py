"""The ViT that ProgResViT and the baselines share: patch embedding, blocks, final norm and head, sliced to any width.

Parameters have timm's names, so that a plain ViT's weights load by name.

Letters: B images, C image channels, r resolution, g side of the patch grid, N tokens (g * g patches and the class
token), d active channels, W channels of the whole backbone, K classes, s a round counted from 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from progresvit import compute
from progresvit.config import BackboneConfig, Round
from progresvit.io.model_folder import Source, find_folder
from progresvit.io.parse import count_of
from progresvit.model import registry, slicing
from progresvit.model.blocks import NORM_EPS, Block
from progresvit.model.interface import RoundFeatures, RoundModel, RoundOutput
from progresvit.model.psg import BlockGates


class PatchEmbed(nn.Module):
    """Holds the patch embedding, shared by all rounds."""

    def __init__(self, *, in_channels: int, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, kernel_size=patch_size, stride=patch_size)


class Backbone(nn.Module):
    """A plain ViT whose layers run at the width of their input. A model adds ``run_round``.

    The constructor reads the config once: a round runs on ``resolutions[s]``, ``grids[s]`` and ``widths[s]``.
    """

    config: BackboneConfig
    one_head: ClassVar[bool] = True
    """Whether ``head`` reads the tokens of every round, which are normalised."""

    def __init__(self, config: BackboneConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.grad_checkpointing = False
        width, stored_grid = config.width, config.stored_grid
        self.resolutions = tuple(round_.resolution for round_ in config.rounds)
        self.grids = tuple(config.grid(round_) for round_ in config.rounds)
        """Side of each round's patch grid."""
        self.widths = tuple(round_.width if isinstance(round_, Round) else width for round_ in config.rounds)
        """Channels of each round's tokens."""
        self.patch_embed = PatchEmbed(in_channels=config.in_channels, width=width, patch_size=config.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, stored_grid**2 + 1, width))
        self.blocks = nn.ModuleList(
            Block(width=width, layer_scale=config.layer_scale, drop_path=drop)
            for drop in _drop_paths(drop_path, config.depth)
        )
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = new_head(width, config.num_classes)
        _init_weight(self.pos_embed)
        if not self.cls_token.is_meta:  # nothing to initialise, and torch would import its compiler for normal_
            nn.init.normal_(self.cls_token, std=1e-6)
        self.apply(init_linear)

    @classmethod
    def from_pretrained(cls, source: Source, *, revision: str | None = None) -> Self:
        """A trained model of this class, in evaluation mode.

        Args:
            source: A model folder, the name of a bundled model, or a hub id.
            revision: Branch, tag or commit of the hub repository.
        """
        from progresvit.model.saving import load_folder

        model = load_folder(find_folder(source, revision=revision))
        if not isinstance(model, cls):
            raise ValueError(f"{source} is a {type(model).__name__}, not a {cls.__name__}; use progresvit.load.")
        return model

    def forward(self, images: Tensor) -> tuple[RoundOutput, ...]:
        """Every round, first to last, with no early exit. Images are (B, C, H, H), H the highest resolution or more."""
        check_images(images, channels=self.config.in_channels, smallest=max(self.resolutions))
        outputs: list[RoundOutput] = []
        for s in range(len(self.resolutions)):
            previous = outputs[-1].tokens if outputs and self.config.routable else None
            outputs.append(self.run_round(s, images, previous))
        return tuple(outputs)

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0; ``previous`` holds the tokens of the round before, if rounds build on each other."""
        raise NotImplementedError

    def features(self, images: Tensor) -> tuple[RoundFeatures, ...]:
        """Class token, patch tokens and grid of every round, first to last; images as ``forward`` takes them."""
        return tuple(self._features(s, output.tokens) for s, output in enumerate(self(images)))

    def _features(self, s: int, tokens: Tensor) -> RoundFeatures:
        """The features in the tokens that round s returned: (B, N, d) -> (B, d) and (B, g * g, d)."""
        return RoundFeatures(tokens[:, 0], tokens[:, 1:], math.isqrt(tokens.shape[1] - 1))

    def class_tokens(self, images: Tensor, blocks: int) -> list[Tensor]:
        """Class tokens after the last blocks of every round, each after the round's final norm, side by side.

        DINO's linear probe (Caron et al. 2021) reads four blocks of a ViT-S. (B, C, H, H) -> S times (B, blocks * d)
        """
        last: deque[Tensor] = deque(maxlen=blocks)

        def keep(block: nn.Module, arguments: Any, output: Any) -> None:
            tokens = output[0] if isinstance(output, tuple) else output  # a block that merges tokens returns two
            last.append(tokens[:, 0].clone())  # (B, N, d) -> (B, d)

        handles = [block.register_forward_hook(keep) for block in self.blocks]
        try:
            rounds: list[Tensor] = []
            previous = None
            for s in range(len(self.resolutions)):
                tokens = self.run_round(s, images, previous).tokens
                previous = tokens if self.config.routable else None
                if (ran := len(last)) < blocks:
                    raise ValueError(f"round {s + 1} ends after {count_of(ran, 'block')}; pass blocks={ran} or fewer.")
                rounds.append(torch.cat([self.normalise(s, token) for token in last], dim=1))
        finally:
            for handle in handles:
                handle.remove()
        return rounds

    def normalise(self, s: int, tokens: Tensor) -> Tensor:
        """The final norm of round s: (…, d) -> (…, d)."""
        return slicing.layer_norm(tokens, self.norm)

    def embed(self, images: Tensor, *, resolution: int, width: int) -> Tensor:
        """Tokens of the image at a resolution and width: (B, C, H, H) -> (B, N, d)."""
        grid = resolution // self.config.patch_size
        images = resize(images, resolution)  # (B, C, H, H) -> (B, C, r, r)
        x = slicing.patches(images, self.patch_embed.proj, width)  # (B, C, r, r) -> (B, g * g, d)
        class_token = self.cls_token[..., :width].expand(x.shape[0], -1, -1)  # (1, 1, W) -> (B, 1, d)
        position = resample_position(self.pos_embed[..., :width], grid)  # (1, M, d) -> (1, N, d)
        return torch.cat([class_token.to(x.dtype), x], dim=1) + position

    def run_block(self, block: Callable[..., Any], x: Tensor, gates: BlockGates, **options: Any) -> Any:
        """One block, recomputed in the backward pass if gradient checkpointing is on; returns what the block does."""
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, x, gates, use_reentrant=False, **options)
        return block(x, gates, **options)

    def run_ungated(self, x: Tensor, **options: Any) -> RoundOutput:
        """All blocks without gates, the final norm and the head; ``options`` are a block's: (B, N, d) -> (B, N, d)."""
        for block in self.blocks:
            x = self.run_block(block, x, BlockGates(), **options)
        tokens = slicing.layer_norm(x, self.norm)
        return RoundOutput(logits=self.classify(tokens), tokens=tokens)

    def classify(self, tokens: Tensor) -> Tensor:
        """Logits of the class token, from any round's width: (B, N, d) -> (B, K); in segmentation, of every patch."""
        if self.config.task == "segmentation":
            return decode_patches(tokens, cast(nn.Linear, self.head))
        class_token = tokens[:, 0]  # (B, N, d) -> (B, d)
        return slicing.linear(class_token, self.head) if isinstance(self.head, nn.Linear) else class_token

    def reset_classifier(self, num_classes: int) -> None:
        """Fresh heads for another set of classes; 0 removes them. The class names of the old heads are removed."""
        self.config = self.config.replace(num_classes=num_classes, class_ids=None, labels=None)
        for module in [module for module in self.modules() if hasattr(module, "head")]:
            module.head = new_head(self.config.width, num_classes).to(self.cls_token)
            init_linear(module.head)

    def keep_classes(self, rows: Sequence[int]) -> RoundModel:
        """A copy with only these classes, in this order."""
        count = self.config.num_classes
        if not rows or len(set(rows)) < len(rows) or not all(row in range(count) for row in rows):
            raise ValueError(f"give distinct rows of the head, from 0 to {count - 1}, not {list(rows)}.")
        names = {
            name: None if values is None else tuple(values[row] for row in rows)
            for name, values in (("class_ids", self.config.class_ids), ("labels", self.config.labels))
        }
        index = torch.tensor(rows)
        weights = {
            key: value[index.to(value.device)] if is_head(key) else value for key, value in self.state_dict().items()
        }
        kept = registry.build(self.config.replace(num_classes=len(rows), **names)).to(self.cls_token)
        kept.load_state_dict(weights)
        return kept.train(self.training)

    def round_macs(self, convention: compute.Convention = "paper") -> Sequence[compute.RoundMacs]:
        """MACs that each round adds to the rounds before it; MACs of each round alone if rounds are alternatives."""
        return [
            compute.stack_macs(self.config, convention, resolution=resolution, width=width)
            for resolution, width in zip(self.resolutions, self.widths)
        ]

    def gmacs(self, convention: compute.Convention = "paper") -> list[float]:
        """GMACs spent on an image that exits after each round; GMACs of each round alone if rounds are alternatives."""
        macs = self.round_macs(convention)
        return compute.accumulated_gmacs(macs) if self.config.routable else [round_.total / 1e9 for round_ in macs]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block's activations in the backward pass instead of storing them."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that no optimizer should decay, besides vectors and biases."""
        return {"pos_embed", "cls_token"}

    def check_round(self, s: int, images: Tensor, previous: Tensor | None) -> None:
        """Refuse a round that does not exist, and images or tokens of the previous round that it cannot take."""
        rounds = len(self.resolutions)
        if not 0 <= s < rounds:
            raise ValueError(f"there is no round {s}; this model has rounds 0 to {rounds - 1}.")
        check_images(images, channels=self.config.in_channels, smallest=self.resolutions[s])
        if previous is not None and not self.config.routable:
            raise ValueError(
                f"the rounds of {type(self).__name__} are alternatives that start from the image alone; "
                f"call round {s} without previous."
            )
        if previous is not None and s == 0:
            raise ValueError("round 0 starts from the image alone; call it without previous.")
        if s == 0 or not self.config.routable:
            return
        expected = (images.shape[0], self.grids[s - 1] ** 2 + 1, self.widths[s - 1])  # (B, N, d) of the round before
        if previous is None or tuple(previous.shape) != expected:
            got = "nothing" if previous is None else tuple(previous.shape)
            raise ValueError(
                f"round {s} needs the tokens of round {s - 1} for the same images, shaped {expected}, and got {got}; "
                f"pass previous=model.run_round({s - 1}, ...).tokens."
            )


def check_images(images: Tensor, *, channels: int, smallest: int) -> None:
    """Refuse anything but a batch of square, normalised images that are large enough."""
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
    """Resize images with antialiased bicubic interpolation, in float32 (a CPU has no kernel of lower precision)."""
    if images.shape[-1] == resolution:
        return images
    size = (resolution, resolution)
    resized = F.interpolate(images.float(), size=size, mode="bicubic", antialias=True, align_corners=False)
    return resized.to(images.dtype)


def resample_position(position: Tensor, grid: int) -> Tensor:
    """Position embeddings for another grid, the class token's first: (1, M, d) -> (1, N, d).

    It gives the same numbers as timm's ``resample_abs_pos_embed``, which takes seconds to import.
    """
    side = math.isqrt(position.shape[1] - 1)
    if side == grid:
        return position
    patches = position[:, 1:].mT.unflatten(2, (side, side))  # (1, M - 1, d) -> (1, d, side, side)
    patches = resize(patches, grid).flatten(2).mT  # (1, d, side, side) -> (1, N - 1, d)
    return torch.cat([position[:, :1], patches], dim=1)


def resizing_matrix(source: int, target: int) -> Tensor:
    """``resize`` along one side as a matrix, with the same float32 weights: (target, source)."""
    identity = torch.eye(source)[None, None]  # resized in one direction only, it becomes the matrix
    size = (target, source)
    return F.interpolate(identity, size=size, mode="bicubic", antialias=True, align_corners=False)[0, 0]


def decode_patches(tokens: Tensor, decoder: nn.Linear) -> Tensor:
    """Segmenter's linear decoder on the patch tokens, sliced to their width: (B, N, d) -> (B, K, g, g)."""
    logits = slicing.linear(tokens[:, 1:], decoder)  # (B, N, d) -> (B, g * g, K)
    g = math.isqrt(logits.shape[1])
    grid: Tensor = logits.mT.unflatten(2, (g, g))  # (B, g * g, K) -> (B, K, g, g)
    return grid


def is_head(key: str) -> bool:
    """Whether a weight belongs to a module with the name ``head``, so that it has a row for each class."""
    return "head" in key.split(".")


def new_head(width: int, num_classes: int) -> nn.Module:
    """A classifier; without classes, the features themselves."""
    return nn.Linear(width, num_classes) if num_classes else nn.Identity()


def init_linear(module: nn.Module) -> None:
    """Initialise a linear layer as timm does in a ViT."""
    if isinstance(module, nn.Linear):
        _init_weight(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _init_weight(weight: Tensor) -> None:
    """Initialise a weight as timm does in a ViT.

    On the meta device, where a model is built to be loaded, timm is not imported.
    """
    if weight.is_meta:
        return
    import progresvit._torchvision  # noqa: F401  (ahead of timm)

    # isort: split
    from timm.layers import trunc_normal_

    trunc_normal_(weight, std=0.02)


def _drop_paths(rate: float, depth: int) -> list[nn.Module]:
    """Stochastic depth of each block, up to this rate in the last; timm is imported only for a rate above 0."""
    if not rate:
        return [nn.Identity() for _ in range(depth)]
    import progresvit._torchvision  # noqa: F401  (ahead of timm)

    # isort: split
    from timm.layers import DropPath, calculate_drop_path_rates

    return [DropPath(block_rate) for block_rate in calculate_drop_path_rates(rate, depth)]
