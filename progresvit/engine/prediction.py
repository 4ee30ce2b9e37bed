"""What the engine says of an image."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the classes that a round holds likely."""

    index: int
    label: str | None
    """Its name, if the model knows names."""
    probability: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer of the round in which the image left."""

    index: int
    """The likeliest class; -1 if the logits were not finite, or there were none."""
    label: str | None
    """Its name, if the model knows names."""
    probability: float
    exit_round: int
    """From 1; 0 for a picture that could not be opened."""
    entropy: float
    """Top-10 entropy of that round."""
    gmacs: float
    """Spent on the image, in the paper's convention."""
    abstained: bool
    """The engine would rather not answer; index and label are its best guess."""
    top: tuple[Candidate, ...] = ()
    """The likeliest classes, the answer first, if the engine is to name several (``top_k``); else empty."""
    error: str | None = None
    """Why the picture could not be opened; then there is no answer."""

    @classmethod
    def failed(cls, error: str) -> Prediction:
        """For a picture that could not be opened."""
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
