"""Layer-wise early exit: one ViT, with a classifier of its own after some of the blocks.

    round s: x = blocks of round s on x of the round before; logits = head_s(norm_s(class token of x))

A round continues the residual stream of the one before, so nothing is computed twice. The last exit is the backbone's
own norm and head. By default the backbone is frozen, and only the norms and heads are trained. The other exits start
fresh (norm with weight 1 and bias 0, head as in a new ViT): the backbone's own fit the features of the last block only.

Letters: B images, C image channels, H side of the images, K classes, N tokens, W channels of the backbone, s a round
counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, Literal, Self, cast

from pydantic import StrictBool, model_validator
from torch import Tensor, nn

from progresvit import compute
from progresvit.config import BackboneConfig, BaseRound, Count, ModelTask, check_one_resolution
from progresvit.model.backbone import Backbone, init_linear, new_head
from progresvit.model.blocks import NORM_EPS
from progresvit.model.interface import RoundFeatures, RoundOutput
from progresvit.model.psg import BlockGates


class ExitRound(BaseRound):
    """The blocks between two exits."""

    blocks: Count
    """The block after which the exit sits, counted from 1."""


class EarlyExitConfig(BackboneConfig):
    """Exits after some blocks of a ViT, the last after the last block."""

    kind: Literal["early_exit"] = "early_exit"
    rounds: tuple[ExitRound, ...]
    """First exit to last."""
    frozen: StrictBool = True
    """Train only the norms and heads of the exits."""

    tasks: ClassVar[tuple[ModelTask, ...]] = ("classification",)

    @model_validator(mode="after")
    def _check_rounds(self) -> Self:
        check_one_resolution(self.rounds)
        blocks = [round_.blocks for round_ in self.rounds]
        if any(a >= b for a, b in pairwise(blocks)):
            raise ValueError(f"the blocks of the exits must rise from round to round, not {blocks}; sort them.")
        if blocks[-1] != self.depth:
            raise ValueError(
                f"the last exit sits after the last block, {self.depth}, not after block {blocks[-1]}; "
                f"add a round with blocks={self.depth}, or set depth={blocks[-1]}."
            )
        return self


class Exit(nn.Module):
    """Norm and head of an exit."""

    def __init__(self, *, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = new_head(width, num_classes)
        init_linear(self.head)


class EarlyExit(Backbone):
    """A ViT whose images may exit between its blocks."""

    config: EarlyExitConfig
    one_head = False

    def __init__(self, config: EarlyExitConfig, *, drop_path: float = 0.0) -> None:
        if config.frozen and drop_path:
            raise ValueError(
                f"drop_path={drop_path} would only disturb a frozen backbone; set model.drop_path=0, or train the "
                "backbone too with frozen: false."
            )
        super().__init__(config, drop_path=drop_path)
        self.ends = tuple(round_.blocks for round_ in config.rounds)
        """The block after which each round exits, counted from 1."""
        self.exits = nn.ModuleList(Exit(width=config.width, num_classes=config.num_classes) for _ in config.rounds[:-1])
        if config.frozen:
            self.cls_token.requires_grad_(False)
            self.pos_embed.requires_grad_(False)
            self.patch_embed.requires_grad_(False)
            self.blocks.requires_grad_(False)

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0. From the second round on, ``previous`` holds the tokens of the round before."""
        self.check_round(s, images, previous)
        x = previous
        if x is None:
            x = self.embed(images, resolution=self.resolutions[s], width=self.widths[s])  # (B, C, H, H) -> (B, N, W)
        for block in self.blocks[self.ends[s - 1] if s else 0 : self.ends[s]]:
            x = self.run_block(block, x, BlockGates())
        return RoundOutput(logits=self.exit(s, x), tokens=x)

    def exit(self, s: int, x: Tensor) -> Tensor:
        """Logits of exit s: (B, N, W) -> (B, K)."""
        owner = self._owner(s)
        logits: Tensor = owner.head(owner.norm(x[:, 0]))  # (B, N, W) -> (B, W) -> (B, K)
        return logits

    def _owner(self, s: int) -> Exit:
        """The module with norm and head of exit s; for the last exit, the backbone itself."""
        return cast(Exit, self if s == len(self.exits) else self.exits[s])

    def _features(self, s: int, tokens: Tensor) -> RoundFeatures:
        return super()._features(s, self.normalise(s, tokens))  # a round returns the residual stream

    def normalise(self, s: int, tokens: Tensor) -> Tensor:
        normalised: Tensor = self._owner(s).norm(tokens)
        return normalised

    def round_macs(self, convention: compute.Convention = "paper") -> Sequence[compute.RoundMacs]:
        """MACs that each round adds to the rounds before it, with the head of its exit."""
        return [
            compute.stack_macs(
                self.config, convention, resolution=resolution, width=width, blocks=end - start, embeds=start == 0
            )
            for resolution, width, start, end in zip(self.resolutions, self.widths, (0, *self.ends), self.ends)
        ]
