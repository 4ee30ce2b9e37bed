"""The accuracy of routed images: top-1 in classification, mIoU in segmentation. All else in routing is common to both.

Letters: N images, S rounds, T thresholds, K classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from progresvit.metrics.arrays import Bools, Floats
from progresvit.metrics.interval import Interval, mean_interval, share_interval
from progresvit.metrics.miou import ClassCounts, bootstrap_ends, influence_values, mean_iou, pixel_accuracy
from progresvit.routing.decide import Threshold, at_exit, exit_rounds
from progresvit.routing.sums import routed_sums


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """A threshold and the accuracy and compute of a classification model at it."""

    threshold: Threshold
    top1: float | None = None
    """Share of the images that are classified correctly; None without labels."""
    top5: float | None = None
    gmacs: float
    """Average over the images."""
    exit_shares: tuple[float, ...]

    @property
    def accuracy(self) -> float | None:
        return self.top1


@dataclass(frozen=True, kw_only=True)
class SegmentationPoint:
    """A threshold and the accuracy and compute of a segmentation model at it."""

    threshold: Threshold
    miou: float
    """Mean intersection over union of the routed predictions, over all images together."""
    pixel_accuracy: float
    gmacs: float
    """Average over the images, of all their windows."""
    exit_shares: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        return self.miou


P = TypeVar("P", OperatingPoint, SegmentationPoint)


class Metric(ABC, Generic[P]):
    """The accuracy of images, each in the round after which it exits."""

    labels: ClassVar[Mapping[str, str]]
    """The values of a point: their names in tables by their attribute. The first one is the accuracy."""
    point: ClassVar[type[Any]]
    """The class of its operating points."""
    has_fast_interval: ClassVar[bool]
    """Whether the interval of the accuracy takes so little time that every row of a table has it."""

    @abstractmethod
    def at(self, scores: ArrayLike, thresholds: ArrayLike) -> Mapping[str, Floats | None]:
        """The values of ``labels`` at each threshold, (T,) each; None without labels."""

    @abstractmethod
    def is_within(self, scores: ArrayLike, thresholds: Floats, max_drop: float) -> Bools:
        """Whether the accuracy at each threshold is at most ``max_drop`` below that at the first one: (T,)."""

    @abstractmethod
    def single_rounds(self) -> Mapping[str, Floats]:
        """The values of ``labels`` in each round, without early exits: (S,) each."""

    @abstractmethod
    def intervals(self, scores: ArrayLike, thresholds: ArrayLike, *, fast: bool = False) -> list[Interval]:
        """The accuracy at each threshold with its 95 % interval over images.

        ``fast`` takes an approximation where the interval takes long.
        """


class Top1(Metric[OperatingPoint]):
    """The share of the images whose class is predicted correctly.

    Args:
        correct: Whether each round is correct, (N, S); None without labels.
        correct5: Whether the label is among the five most probable classes, (N, S).
    """

    labels: ClassVar = {"top1": "top-1", "top5": "top-5"}
    point = OperatingPoint
    has_fast_interval = True

    def __init__(self, correct: ArrayLike | None, correct5: ArrayLike | None = None) -> None:
        marks = {"top1": correct, "top5": correct5}
        self.marks = {name: None if values is None else np.asarray(values, bool) for name, values in marks.items()}

    def at(self, scores: ArrayLike, thresholds: ArrayLike) -> Mapping[str, Floats | None]:
        count = len(np.asarray(scores))
        return {
            name: None if marks is None else routed_sums(scores, marks, thresholds) / count
            for name, marks in self.marks.items()
        }

    def is_within(self, scores: ArrayLike, thresholds: Floats, max_drop: float) -> Bools:
        right = self._right(scores, thresholds)
        allowed = np.floor(max_drop * len(np.asarray(scores)) + 1e-9)  # compared as counts
        within: Bools = right >= right[0] - allowed
        return within

    def single_rounds(self) -> Mapping[str, Floats]:
        return {name: marks.mean(axis=0) for name, marks in self.marks.items() if marks is not None}

    def intervals(self, scores: ArrayLike, thresholds: ArrayLike, *, fast: bool = False) -> list[Interval]:
        """Wilson's intervals."""
        count = len(np.asarray(scores))
        return [share_interval(right, count) for right in self._right(scores, thresholds).tolist()]

    def _right(self, scores: ArrayLike, thresholds: ArrayLike) -> Any:
        """Correct images at each threshold: (T,)."""
        assert self.marks["top1"] is not None
        return routed_sums(scores, self.marks["top1"], thresholds)


class MeanIoU(Metric[SegmentationPoint]):
    """Mean intersection over union of all routed predictions together; it is not a mean over images.

    Args:
        counts: Pixels of each class, (N, S, K) each.
    """

    labels: ClassVar = {"miou": "mIoU", "pixel_accuracy": "pixel accuracy"}
    point = SegmentationPoint
    has_fast_interval = False

    def __init__(self, counts: ClassCounts) -> None:
        self.counts = counts

    def at(self, scores: ArrayLike, thresholds: ArrayLike) -> Mapping[str, Floats | None]:
        routed = self._routed(scores, thresholds)
        return {"miou": mean_iou(routed), "pixel_accuracy": pixel_accuracy(routed)}

    def is_within(self, scores: ArrayLike, thresholds: Floats, max_drop: float) -> Bools:
        miou = mean_iou(self._routed(scores, thresholds))
        within: Bools = miou >= miou[0] - max_drop - 1e-12
        return within

    def single_rounds(self) -> Mapping[str, Floats]:
        totals = ClassCounts(*(part.sum(axis=0) for part in self.counts))  # (S, K) each
        return {"miou": mean_iou(totals), "pixel_accuracy": pixel_accuracy(totals)}

    def intervals(self, scores: ArrayLike, thresholds: ArrayLike, *, fast: bool = False) -> list[Interval]:
        """Intervals by a bootstrap over images, or, faster, to first order from the influence of each image."""
        ends = []
        for threshold in np.asarray(thresholds):
            exits = exit_rounds(scores, threshold)  # (N,)
            counts = ClassCounts(*(at_exit(part, exits) for part in self.counts))  # (N, K) each
            if fast:
                mean = mean_interval(influence_values(counts))
                ends.append(Interval(mean=mean.mean, lowest=max(0.0, mean.lowest), highest=min(1.0, mean.highest)))
            else:
                total = mean_iou(ClassCounts(*(part.sum(axis=0) for part in counts)))
                lowest, highest = bootstrap_ends(counts, mean_iou)
                ends.append(Interval(mean=float(total), lowest=float(lowest), highest=float(highest)))
        return ends

    def _routed(self, scores: ArrayLike, thresholds: ArrayLike) -> ClassCounts:
        """Pixels of each class at each threshold: (T, K) each."""
        return ClassCounts(*(routed_sums(scores, part, thresholds) for part in self.counts))
