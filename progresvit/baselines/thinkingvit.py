"""ThinkingViT: rounds of growing width on the same image; the tokens of a round are added to the next embedding.

    x = embed(image) + alpha * Linear(tokens of the previous round), alpha = 0 at the start

It has no gates and no change of resolution. It shares ProgResViT's exit rule and mean loss over the rounds.

Letters: B images, C image channels, H side of the images, N tokens, d active channels of a round, d' of the previous
round, s a round counted from 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from progresvit import compute
from progresvit.config import BackboneConfig, Round, check_growing, check_one_resolution
from progresvit.model import slicing
from progresvit.model.backbone import Backbone
from progresvit.model.outputs import RoundOutput
from progresvit.model.psg import BlockGates


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
            Transition(source_width=before.width, target_width=config.rounds[-1].width) for before in config.rounds[:-1]
        )

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0. From the second round on, ``previous`` holds the tokens of the round before."""
        self.check_round(s, images)
        round_, before = self.config.rounds[s], self.config.rounds[max(0, s - 1)]
        self.check_previous(s, images, previous, tokens=self.config.grid(before) ** 2 + 1, width=before.width)
        x = self.embed(images, resolution=round_.resolution, width=round_.width)  # (B, C, H, H) -> (B, N, d)
        if previous is not None:
            x = x + self.transitions[s - 1](previous, round_.width)
        for block in self.blocks:
            x = self.run_block(block, x, BlockGates())
        tokens = slicing.layer_norm(x, self.norm)
        return RoundOutput(logits=self.classify(tokens), tokens=tokens)

    def start_quiet(self) -> None:
        """Nothing to do: alpha is 0 at the start, so the last round begins as the pretrained ViT in any case."""

    def gmacs(self, convention: compute.Convention = "paper") -> list[float]:
        """GMACs spent on an image that exits after each round."""
        rounds, macs = self.config.rounds, []
        for round_, before in zip(rounds, (None, *rounds[:-1])):
            stack = compute.stack_macs(self.config, convention, resolution=round_.resolution, width=round_.width)
            tokens = self.config.grid(round_) ** 2 + 1
            widened = rounds[-1].width if convention == "paper" else round_.width
            macs.append(replace(stack, projector=tokens * before.width * widened if before else 0))
        return compute.accumulated_gmacs(macs)
