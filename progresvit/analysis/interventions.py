"""Interventions: change what round 1 sees or hands on, and measure the last round on the same images.

Round 1 runs once on all images; the later rounds run on the unchanged images with the tokens that an intervention made
of round 1's. Without a change, the predictions equal ``model(images)``.

Letters: N images, B images of a batch, C channels, H side of the images, T tokens of round 1, d its channels, K
classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from progresvit.analysis.model_checks import check_handover
from progresvit.analysis.sample import Sample
from progresvit.io.resumable import Progress
from progresvit.metrics.interval import Interval, mean_interval, paired_change
from progresvit.model.interface import RoundModel
from progresvit.plots import COLOURS
from progresvit.table import Column, Row, interval_cells, interval_columns, percent, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ChangeImages = Callable[[Tensor], Tensor]
"""Changes a batch of images, (B, C, H, H)."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Answers of the last round on every image."""

    correct: NDArray[np.bool_]
    """(N,)"""
    confidence: NDArray[np.float64]
    """Probability of the correct class, (N,)."""

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What an intervention does to the last round, with 95 % intervals over the images."""

    outcome: Outcome
    accuracy: Interval
    """Change of the accuracy from the untouched model, on the same images."""
    confidence: Interval
    """Change of the mean probability of the correct class."""

    @classmethod
    def of(cls, outcome: Outcome, untouched: Outcome) -> Effect:
        return cls(
            outcome=outcome,
            accuracy=paired_change(outcome.correct, untouched.correct),
            confidence=mean_interval(outcome.confidence - untouched.confidence),
        )

    def row(self) -> Row:
        """The cells below ``EFFECT_COLUMNS``."""
        return {
            "images": len(self.outcome.correct),
            "accuracy": self.outcome.accuracy,
            **interval_cells("accuracy_change", self.accuracy),
            "confidence": float(self.outcome.confidence.mean()),
            **interval_cells("confidence_change", self.confidence),
        }


EFFECT_COLUMNS = (
    Column("images", "images"),
    Column("accuracy", "top-1 (%)", percent),
    *interval_columns("accuracy_change", "change (points)", points),
    Column("confidence", "correct-class confidence (%)", percent),
    *interval_columns("confidence_change", "change (points)", points),
)
"""Shares stay shares in CSV; changes are differences of shares."""


class Interventions:
    """A model and a sample; counts the rounds that run for a progress bar.

    Args:
        model: A classifier whose rounds build on each other.
        sample: The images.
        name: The name of the analysis, for errors.
        runs: How often the last round will run.
        progress: Called after each batch.
    """

    def __init__(
        self, model: RoundModel, sample: Sample, *, name: str, runs: int, progress: Progress | None = None
    ) -> None:
        check_handover(model, name)
        self.model, self.sample, self.progress = model, sample, progress
        self.done, self.total = 0, runs * len(sample)

    def first_round(
        self, change: ChangeImages | None = None, during: AbstractContextManager[Any] | None = None
    ) -> Tensor:
        """The tokens that round 1 hands on, (N, T, d), on the CPU.

        Args:
            change: Changes the images that round 1 sees.
            during: Entered while round 1 runs: hooks on its blocks.
        """

        def tokens(rows: slice, images: Tensor) -> Tensor:
            return self.model.run_round(0, images if change is None else change(images)).tokens.cpu()

        with during or nullcontext():
            return torch.cat(self.sample.run(self.model, tokens))

    def untouched(self) -> Outcome:
        """The last round without an intervention."""
        return self.later_rounds(self.first_round().__getitem__)

    def later_rounds(self, tokens: Callable[[slice], Tensor]) -> Outcome:
        """The last round on the unchanged images; ``tokens`` gives the tokens of round 1 for a batch, (B, T, d)."""

        def last_round(rows: slice, images: Tensor) -> Tensor:
            previous, labels = tokens(rows).to(images.device), self.sample.labels[rows]
            for s in range(1, len(self.model.config.rounds)):
                output = self.model.run_round(s, images, previous)
                previous = output.tokens
            probabilities = output.logits.float().softmax(dim=-1).cpu()  # (B, K)
            right = probabilities.argmax(dim=-1) == labels
            return torch.stack([right.double(), probabilities.gather(1, labels[:, None])[:, 0].double()])  # (2, B)

        correct, confidence = torch.cat(self.sample.run(self.model, last_round, self._count), dim=1).numpy()
        self.done += len(self.sample)
        return Outcome(correct=correct.astype(bool), confidence=confidence)

    def _count(self, images: int, of_run: int) -> None:
        if self.progress:
            self.progress(self.done + images, self.total)


def check_strengths(strengths: Sequence[float], name: str, *, most: float = 1.0) -> None:
    """Refuse strengths outside of 0 to ``most``."""
    wrong = [strength for strength in strengths if not 0 <= strength <= most]
    if wrong or not strengths:
        raise ValueError(f"the strengths of {name} are from 0 to {most:g}, not {wrong[0] if wrong else 'none'}.")


LEAST_SPAN = 5.0
"""Points that an axis of accuracy shows at least, so that noise does not look like an effect."""


def draw_effects(axes: Axes, rows: Sequence[Row]) -> None:
    """Accuracy against strength, both in percent, with the interval of the change; the untouched model is a line."""
    shares, accuracy, change, low, high = (
        100 * np.array([row[key] for row in rows])
        for key in ("strength", "accuracy", "accuracy_change", "accuracy_change_low", "accuracy_change_high")
    )
    reach = np.stack([change - low, high - change])
    label = "changed, 95 % interval of the change"
    axes.axhline(accuracy[0] - change[0], color="0.6", linewidth=1, label="untouched")
    axes.errorbar(shares, accuracy, yerr=reach, color=COLOURS[0], marker="o", capsize=3, label=label)
    axes.set_ylim(widened(*axes.get_ylim()))


def effect_title(change: str, rows: Sequence[Row]) -> str:
    """What the largest strength does to top-1; ``change`` holds a place for the strength in percent."""
    last = max(rows, key=lambda row: float(row["strength"]))
    return f"{change.format(100 * last['strength'])} {effect_words(last)}"


def effect_words(row: Row) -> str:
    """What an intervention does to top-1, as the end of a title."""
    mean, low, high = (100 * row[key] for key in ("accuracy_change", "accuracy_change_low", "accuracy_change_high"))
    if high < 0:
        return f"lowers top-1 by {-mean:.2f} points ({-high:.2f} to {-low:.2f})"
    if low > 0:
        return f"raises top-1 by {mean:.2f} points ({low:.2f} to {high:.2f})"
    return f"does not clearly change top-1: {change_words(row)}"


def change_words(row: Row) -> str:
    """Change of top-1 with its interval, in points."""
    ends = (round(100 * row[f"accuracy_change{end}"], 2) or 0.0 for end in ("", "_low", "_high"))
    mean, low, high = (f"{end:+.2f}".replace("-", "−") if end else "0.00" for end in ends)
    return f"{mean} points ({low} to {high})"


def widened(low: float, high: float) -> tuple[float, float]:
    """Limits of an axis that show at least ``LEAST_SPAN``."""
    missing = max(0.0, LEAST_SPAN - (high - low)) / 2
    return low - missing, high + missing
