"""ThinkingViT: rounds of growing width on the same image; the tokens of a round are added to the next embedding.

    x = embed(image) + alpha * Linear(tokens of the previous round), alpha = 0 at the start

It has no gates and no change of resolution. It shares ProgResViT's exit rule and mean loss over the rounds.

Letters: B images, C image channels, H side of the images, N tokens, d active channels of a round, d' of the previous
round, s a round counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from progresvit import compute
from progresvit.config import BackboneConfig, Round, check_growing, check_one_resolution
from progresvit.model import slicing
from progresvit.model.backbone import Backbone
from progresvit.model.interface import RoundOutput


class ThinkingViTConfig(BackboneConfig):
    """Rounds that differ in heads and share one resolution."""

    kind: Literal["thinkingvit"] = "thinkingvit"
    rounds: tuple[Round, ...]
    """Rounds from narrow to wide."""

    @model_validator(mode="after")
    def _check_rounds(self) -> Self:
        check_growing(self.rounds)
        check_one_resolution(self.rounds)
        return self


class Transition(nn.Module):
    """The tokens of the previous round at the width of the last round, times a learned scalar; sliced to the next."""

    def __init__(self, *, source_width: int, target_width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(source_width, target_width)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, width: int) -> Tensor:
        return self.alpha * slicing.linear(tokens, self.widen, width)  # (B, N, d') -> (B, N, d)


class ThinkingViT(Backbone):
    """A ViT that looks at the image again with more heads while it is not sure."""

    config: ThinkingViTConfig

    def __init__(self, config: ThinkingViTConfig, *, drop_path: float = 0.0) -> None:
        super().__init__(config, drop_path=drop_path)
        self.transitions = nn.ModuleList(
            Transition(source_width=width, target_width=self.widths[-1]) for width in self.widths[:-1]
        )

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0. From the second round on, ``previous`` holds the tokens of the round before."""
        self.check_round(s, images, previous)
        x = self.embed(images, resolution=self.resolutions[s], width=self.widths[s])  # (B, C, H, H) -> (B, N, d)
        if previous is not None:
            x = x + self.transitions[s - 1](previous, self.widths[s])
        return self.run_ungated(x)

    def start_quiet(self) -> None:
        """Nothing to do: alpha is 0 at the start, so the last round begins as the pretrained ViT in any case."""

    def round_macs(self, convention: compute.Convention = "paper") -> Sequence[compute.RoundMacs]:
        """MACs that each round adds to the rounds before it."""
        macs = []
        for stack, grid, width, before in zip(
            super().round_macs(convention), self.grids, self.widths, (0, *self.widths)
        ):
            widened = self.widths[-1] if convention == "paper" else width
            macs.append(replace(stack, projector=(grid**2 + 1) * before * widened))
        return macs
