"""MatFormer: one ViT whose MLPs hold narrower MLPs.

A round runs the leading share of the hidden channels of every MLP. Tokens and attention keep their full width. The
rounds are alternatives: one of them is chosen before inference. Training minimises the sum of the cross entropies of
all rounds (:mod:`progresvit.training.tasks.subnetworks`).

Letters: B images, C image channels, H side of the images, N tokens, W channels of the whole backbone, m active hidden
channels of the MLPs (at most 4W), s a round counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import model_validator
from torch import Tensor

from progresvit import compute
from progresvit.config import MLP_RATIO, BackboneConfig, BaseRound, Number
from progresvit.model.backbone import Backbone
from progresvit.model.interface import RoundOutput

_ROUNDING = 0.01
"""Largest distance of share * 4W from a whole number: a share such as 1/3 has no exact decimals."""


class MatFormerRound(BaseRound):
    """How much of every MLP runs, and on what image."""

    mlp_share: Number
    """Share of the MLPs' hidden channels, above 0 and at most 1."""

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        if not 0 < self.mlp_share <= 1:
            raise ValueError(f"mlp_share is above 0 and at most 1, not {self.mlp_share!r}; 1 runs the whole MLP.")
        return self


class MatFormerConfig(BackboneConfig):
    """Rounds that differ in the share of the MLPs, in resolution, or in both."""

    kind: Literal["matformer"] = "matformer"
    rounds: tuple[MatFormerRound, ...]
    """Rounds in any order; the accuracy of the last one selects the best checkpoint."""

    routable: ClassVar[bool] = False

    def hidden(self, round_: MatFormerRound) -> int:
        """Active hidden channels of the MLPs in a round."""
        return round(round_.mlp_share * MLP_RATIO * self.width)

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        total = MLP_RATIO * self.width
        for number, round_ in enumerate(self.rounds, start=1):
            channels = round_.mlp_share * total
            if abs(channels - round(channels)) > _ROUNDING:
                nearest = [f"{m / total:.6g}" for m in (math.floor(channels), math.ceil(channels)) if m]
                raise ValueError(
                    f"round {number} runs {channels:.6g} of {total} hidden channels (mlp_share {round_.mlp_share:g}), "
                    f"which is not a whole number; the nearest mlp_share is {' or '.join(nearest)}."
                )
        return self


class MatFormer(Backbone):
    """A ViT that contains ViTs with narrower MLPs."""

    config: MatFormerConfig

    def __init__(self, config: MatFormerConfig, *, drop_path: float = 0.0) -> None:
        super().__init__(config, drop_path=drop_path)
        self.hidden = tuple(config.hidden(round_) for round_ in config.rounds)
        """Active hidden channels of the MLPs in each round."""

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0, on its own; it takes no ``previous``."""
        self.check_round(s, images, previous)
        x = self.embed(images, resolution=self.resolutions[s], width=self.widths[s])  # (B, C, H, H) -> (B, N, W)
        return self.run_ungated(x, hidden=self.hidden[s])

    def round_macs(self, convention: compute.Convention = "paper") -> Sequence[compute.RoundMacs]:
        """MACs of each round alone."""
        return [
            compute.stack_macs(self.config, convention, resolution=resolution, width=width, hidden=hidden)
            for resolution, width, hidden in zip(self.resolutions, self.widths, self.hidden)
        ]
