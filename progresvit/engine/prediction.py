"""The engine's answer for an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from progresvit.routing.decide import Answers


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
    """The most probable class; -1 if the logits are not finite or the image could not be opened."""
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


@dataclass(frozen=True)
class PredictionMaker:
    """Makes predictions of the answers of a round."""

    labels: Sequence[str] | None
    gmacs: Sequence[float]
    """Compute up to each round."""
    top_k: int
    has_ood: bool

    def __call__(self, s: int, answers: Answers, rows: NDArray[np.int64]) -> list[Prediction]:
        facts = (
            *(answers.classes, answers.probabilities, answers.entropy, answers.abstains),
            *(answers.out_of_distribution, answers.ood_score),
        )
        predictions = []
        for classes, probabilities, entropy, abstained, unknown, score in zip(*(fact[rows].tolist() for fact in facts)):
            prediction = object.__new__(Prediction)
            # the constructor of a frozen dataclass takes three times as long, and a GPU waits for this loop
            prediction.__dict__.update(
                index=classes[0],
                label=self._label(classes[0]),
                probability=probabilities[0],
                exit_round=s + 1,
                entropy=entropy,
                gmacs=self.gmacs[s],
                abstained=abstained,
                out_of_distribution=unknown,
                ood_score=score if self.has_ood else None,
                top=(),
                error=None,
            )
            if self.top_k > 1 and classes[0] >= 0:
                prediction.__dict__["top"] = tuple(map(self._candidate, classes, probabilities))
            predictions.append(prediction)
        return predictions

    def _candidate(self, index: int, probability: float) -> Candidate:
        candidate = object.__new__(Candidate)
        candidate.__dict__.update(index=index, label=self._label(index), probability=probability)
        return candidate

    def _label(self, index: int) -> str | None:
        return self.labels[index] if self.labels and index >= 0 else None
