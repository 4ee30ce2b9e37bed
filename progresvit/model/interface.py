"""``RoundModel``: what training, evaluation, routing and analysis ask of a model."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from progresvit.compute import Convention
from progresvit.model.outputs import RoundOutput


@runtime_checkable
class RoundModel(Protocol):
    """A model that predicts in rounds. Implementations are ``nn.Module`` too."""

    config: Any
    """Plain data: ``rounds``, ``num_classes``, ``class_ids``, preprocessing."""

    def __call__(self, images: Tensor) -> tuple[RoundOutput, ...]:
        """Every round, first to last, with no early exit."""
        ...

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0; ``previous`` holds the tokens of the round before."""
        ...

    def gmacs(self, convention: Convention = "paper") -> list[float]:
        """GMACs of one image after each round, cumulative."""
        ...
