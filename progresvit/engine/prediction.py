"""What the engine says of an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The answer of the round in which the image left."""

    index: int
    """The likeliest class; -1 if the logits were not finite."""
    label: str | None
    """Its name, if the model knows names."""
    probability: float
    exit_round: int
    """From 1."""
    entropy: float
    """Top-10 entropy of that round."""
    gmacs: float
    """Spent on the image, in the paper's convention."""
    abstained: bool
    """The engine would rather not answer; index and label are its best guess."""
