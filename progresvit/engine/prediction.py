"""The engine's answer for an image."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the most probable classes."""

    index: int
    label: str | None
    """The name of the class, if the model has names."""
    probability: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer of the round after which the image exited."""

    index: int
    """The most probable class; -1 if the logits are not finite, or there are none."""
    label: str | None
    """The name of the class, if the model has names."""
    probability: float
    exit_round: int
    """From 1; 0 if the image could not be opened."""
    entropy: float
    """Top-10 entropy of that round."""
    gmacs: float
    """Compute spent on the image, in the paper's convention."""
    abstained: bool
    """The answer is withheld; index and label are the best guess."""
    out_of_distribution: bool = False
    """The image belongs to none of the model's classes, so the answer is withheld."""
    ood_score: float | None = None
    """Higher for more in-distribution images; None if the setting has no limit for it."""
    top: tuple[Candidate, ...] = ()
    """The ``top_k`` most probable classes, the answer first; empty if the engine reports one class only."""
    error: str | None = None
    """Why the image could not be opened; then there is no answer."""

    @classmethod
    def failed(cls, error: str) -> Prediction:
        """For an image that could not be opened."""
        return cls(
            index=-1,
            label=None,
            probability=math.nan,
            exit_round=0,
            entropy=math.nan,
            gmacs=0.0,
            abstained=True,
            error=error,
        )
