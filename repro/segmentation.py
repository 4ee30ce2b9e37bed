"""Segmentation of several runs: their points on the test images, and how one run, at the same GMACs, differs from each.

Thresholds are chosen on the validation images, or by a budget, which needs no labels. mIoU is nearly a mean over
images: to first order it changes with the weight of an image by that image's influence. So each image gets the mIoU
plus its influence as its value. The mean of these values is the mIoU, and intervals over seeds and images follow as for
accuracies (``repro.compare``). Frames of a video are not independent draws, so blocks of them are drawn instead.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

from progresvit.metrics.arrays import Floats
from progresvit.metrics.interval import LIKELY
from progresvit.metrics.miou import ClassCounts, influence_values, iou, mean_iou, pixel_accuracy
from progresvit.routing import MeanIoU, metric_near_lossless
from progresvit.routing.calibrate import threshold_for_budget
from progresvit.routing.certify import certified_threshold
from progresvit.routing.decide import exit_rounds
from repro.compare import POWER, CrossedDifference, PointRow, crossed_difference, find_row, paired_difference
from repro.equal import check_compute, check_seeds, training_pmacs
from repro.formats import Results, SegmentationResult, SegmentedImages, check_comparable
from repro.outcomes import verdict_of
from repro.study import Segmentation, Study

FIRST, FULL, ROUTED, ALONE = "round 1", "every round", "routed", "the model"
ROUNDING = 1e-9
"""Relative error that an average of GMACs may have."""


@dataclass(frozen=True, kw_only=True)
class SegmentationPointOfRun:
    """A way to run a model on all test images."""

    threshold: float
    """0 runs every round."""
    gmacs: float
    """Average over the images, paper convention."""
    exit_share: float
    """Images that exit before the last round."""
    miou: float
    pixel_accuracy: float
    values: Floats
    """A value for each image, with the mIoU as their mean: (N,)."""


class Measured:
    """A trained model: its points."""

    def __init__(self, result: SegmentationResult) -> None:
        self.result = result
        self.val, self.test = _Images(result, result.val), _Images(result, result.test)

    def at(self, threshold: float) -> SegmentationPointOfRun:
        """On the test images."""
        exits = exit_rounds(self.test.scores, threshold)  # (N,)
        rows = np.arange(len(exits))
        counts = ClassCounts(*(part[rows, exits] for part in self.test.counts))  # (N, K) each
        total = ClassCounts(*(part.sum(axis=0) for part in counts))
        return SegmentationPointOfRun(
            threshold=threshold,
            gmacs=float(self.test.gmacs[rows, exits].mean()),
            exit_share=float((exits < self.rounds - 1).mean()),
            miou=float(mean_iou(total)),
            pixel_accuracy=float(pixel_accuracy(total)),
            values=influence_values(counts),
        )

    @property
    def rounds(self) -> int:
        return len(self.result.gmacs_paper)

    @cached_property
    def first(self) -> SegmentationPointOfRun:
        """Round 1 alone."""
        return self.at(self.all_exit)

    @cached_property
    def full(self) -> SegmentationPointOfRun:
        """Every round."""
        return self.at(0.0)

    @property
    def all_exit(self) -> float:
        """A threshold above every entropy."""
        return math.log(len(self.result.labels)) + 1

    def routed(self, max_drop: float) -> SegmentationPointOfRun:
        """The threshold that costs least on the validation images with at most this drop of mIoU there."""
        val = self.val
        threshold = metric_near_lossless(val.scores, MeanIoU(val.counts), val.gmacs, max_drop).threshold
        assert isinstance(threshold, float)
        return self.at(threshold)

    def within(self, gmacs: float) -> SegmentationPointOfRun:
        """The most refinement that an average of these GMACs allows, on the test images, without labels."""
        if gmacs >= self.full.gmacs * (1 - ROUNDING):
            return self.full
        return self.at(threshold_for_budget(self.test.scores, self.test.gmacs, gmacs))

    def class_iou(self, s: int) -> Floats:
        """IoU of each class in a round on the test images: (K,)."""
        return iou(ClassCounts(*(part[:, s].sum(axis=0) for part in self.test.counts)))


class _Images:
    def __init__(self, result: SegmentationResult, images: SegmentedImages) -> None:
        self.scores, self.counts = images.score_array(), images.counts()
        self.gmacs = images.windows[:, None] * np.asarray(result.gmacs_paper)  # (N, S)
        pixels = np.maximum(self.counts.labelled.sum(axis=-1), 1)
        self.error = 1 - self.counts.intersection.sum(axis=-1) / pixels
        """Share of the labelled pixels that are wrong, (N, S)."""

    @property
    def growth(self) -> Floats:
        """Pixel error of round 1 minus the error of the last round, at least 0: (N,)."""
        more: Floats = np.maximum(self.error[:, 0] - self.error[:, -1], 0)
        return more


@dataclass(frozen=True, kw_only=True)
class SegmentationRow(PointRow):
    """A point of a run of segmentation."""

    exit_share: float
    """Mean over seeds, as is the pixel accuracy."""
    miou: CrossedDifference
    """mIoU with its interval over seeds and images."""
    pixel_accuracy: float
    drop: CrossedDifference | None
    """mIoU minus the mIoU of every round of the same models; None for every round."""
    saving: float
    """Share of the GMACs of every round that is not spent."""


@dataclass(frozen=True, kw_only=True)
class ExitOrder:
    """How much mIoU a saving costs, by the order in which images exit."""

    label: str
    saving: float
    gap: float
    """mIoU of round 1 minus mIoU of every round."""
    by_score: CrossedDifference
    """Change of mIoU if the images of lowest scores exit, over seeds and images."""
    by_chance: float
    """If images exit at random; expected counts."""
    by_error: float
    """If those exit whose pixel error grows least, which only labels tell."""
    correlation: float
    """Spearman's, of the score with the growth of the pixel error."""
    not_worse: float
    """Share of the images whose pixel error does not grow."""


@dataclass(frozen=True, kw_only=True)
class Certified:
    """Thresholds certified on the validation images, one for each seed, and what they give on the test images."""

    label: str
    epsilon: float
    images: int
    """Validation images."""
    exit_share: float
    """Means over seeds, as are the others."""
    saving: float
    loss: float
    """Mean growth of an image's pixel error on the test images, gains counted as 0."""
    beyond: int
    """Seeds whose test loss is above epsilon."""


class SegmentationStudy:
    """The runs of a study of segmentation as far as they were measured.

    Refused if runs differ in their images, their precision or their seeds, or by more than the tolerance in their
    training compute.
    """

    def __init__(self, results: Results, study: Study) -> None:
        if study.segmentation is None:
            raise ValueError("the study has no section segmentation:, so its runs are not segmentation models.")
        self.plan: Segmentation = study.segmentation
        self.labels = {run: label for label, run in self.plan.rows.items()}
        measured = list(results.segmentation.values())
        self.runs = {
            run: [Measured(result) for result in sorted(measured, key=lambda one: one.seed or 0) if result.run == run]
            for run in self.plan.rows.values()
        }
        self.missing = [label for label, run in self.plan.rows.items() if not self.runs[run]]
        self.runs = {run: seeds for run, seeds in self.runs.items() if seeds}
        self._check()

    def _check(self) -> None:
        everything = [model.result for seeds in self.runs.values() for model in seeds]
        title = self.plan.title
        check_comparable(everything, title)
        for other in everything[1:]:
            for name in ("val", "test"):
                if getattr(other, name).names != getattr(everything[0], name).names:
                    raise ValueError(
                        f"{title}: {everything[0].name} and {other.name} were measured on other {name} images; measure "
                        "both on the same."
                    )
        check_seeds(everything, title)
        for run in self.runs if self.plan.ours in self.runs and self.plan.equal == "compute" else ():
            check_compute(self.ours[0].result, self.runs[run][0].result, title)

    @property
    def ours(self) -> list[Measured]:
        return self.runs[self.plan.ours]

    @property
    def drawn(self) -> tuple[str, ...]:
        """What intervals draw."""
        images = "images" if self.plan.block == 1 else f"blocks of {self.plan.block} images"
        return ("seeds", images) if self.seeds > 1 else (images,)

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.ours)

    def compute(self, run: str) -> float:
        """Training compute of a run divided by the training compute of ours."""
        return training_pmacs(self.runs[run][0].result) / training_pmacs(self.ours[0].result)

    @cached_property
    def rows(self) -> list[SegmentationRow]:
        """Every point of every run."""
        return [
            self._row(run, point, points)
            for run, seeds in self.runs.items()
            for point, points in self._points(seeds).items()
        ]

    def row(self, run: str, point: str) -> SegmentationRow:
        """The row of a run at a point."""
        return find_row(self.rows, run, point, self.plan.title)

    def miou_interval(self, points: Sequence[SegmentationPointOfRun]) -> CrossedDifference:
        """mIoU of a point of each seed, over seeds and images."""
        values = self._drawn(points)
        return _difference(values, np.zeros_like(values))

    def exit_order(self, run: str, saving: float) -> ExitOrder:
        """What orders of exits cost a run at a share of the GMACs saved; means over seeds."""
        seeds = self.runs[run]
        points = [model.within((1 - saving) * model.full.gmacs) for model in seeds]
        others = [_other_orders(model, point) for model, point in zip(seeds, points)]
        by_chance, by_error, correlation, not_worse = np.mean(others, axis=0).tolist()
        values, every = self._drawn(points), self._drawn([model.full for model in seeds])
        return ExitOrder(
            label=self.labels[run],
            saving=1 - sum(point.gmacs for point in points) / sum(model.full.gmacs for model in seeds),
            gap=float(np.mean([model.first.miou - model.full.miou for model in seeds])),
            by_score=_difference(values, every),
            by_chance=by_chance,
            by_error=by_error,
            correlation=correlation,
            not_worse=not_worse,
        )

    def certified(self, run: str, epsilon: float, delta: float) -> Certified:
        """A run at thresholds that bound the growth of the pixel error."""
        seeds, highest = self.runs[run], math.log(len(self.ours[0].result.labels))
        points, losses = [], []
        for model in seeds:
            scores, growth = model.val.scores[:, 0], model.val.growth
            threshold = certified_threshold(scores, growth, epsilon, delta, highest=highest, fractional=True).threshold
            assert isinstance(threshold, float)
            point = model.at(threshold)
            points.append(point)
            losses.append(float(np.where(model.test.scores[:, 0] < point.threshold, model.test.growth, 0).mean()))
        return Certified(
            label=self.labels[run],
            epsilon=epsilon,
            images=len(seeds[0].val.scores),
            exit_share=float(np.mean([point.exit_share for point in points])),
            saving=1 - float(np.mean([point.gmacs / model.full.gmacs for model, point in zip(seeds, points)])),
            loss=float(np.mean(losses)),
            beyond=sum(loss > epsilon for loss in losses),
        )

    @property
    def routed_runs(self) -> list[str]:
        """Runs with early exits."""
        return [run for run, seeds in self.runs.items() if seeds[0].rounds > 1]

    def _points(self, seeds: Sequence[Measured]) -> dict[str, list[SegmentationPointOfRun]]:
        if seeds[0].rounds == 1:
            return {ALONE: [model.full for model in seeds]}
        drop = self.plan.max_drop / 100
        return {
            FIRST: [model.first for model in seeds],
            ROUTED: [model.routed(drop) for model in seeds],
            FULL: [model.full for model in seeds],
        }

    def _drawn(self, points: Sequence[SegmentationPointOfRun]) -> Floats:
        """Values of what intervals draw, images or blocks of them, one row per seed; with the mean of the images."""
        values = np.stack([point.values for point in points])  # (seeds, N)
        starts = np.arange(0, values.shape[1], self.plan.block)
        blocks: Floats = np.add.reduceat(values, starts, axis=1) * (len(starts) / values.shape[1])
        return blocks

    def _row(self, run: str, point: str, points: Sequence[SegmentationPointOfRun]) -> SegmentationRow:
        full = [model.full for model in self.runs[run]]
        values, every = self._drawn(points), self._drawn(full)
        gmacs = float(np.mean([point.gmacs for point in points]))
        ours = None
        if run != self.plan.ours and gmacs >= self.ours[0].first.gmacs:
            ours = [measured.within(point.gmacs) for measured, point in zip(self.ours, points)]
        difference = None if ours is None else _difference(self._drawn(ours), values)
        return SegmentationRow(
            label=self.labels[run],
            run=run,
            point=point,
            gmacs=gmacs,
            exit_share=float(np.mean([point.exit_share for point in points])),
            miou=self.miou_interval(points),
            pixel_accuracy=float(np.mean([point.pixel_accuracy for point in points])),
            drop=None if point in (FULL, ALONE) else _difference(values, every),
            saving=1 - gmacs / float(np.mean([point.gmacs for point in full])),
            compute=self.compute(run),
            ours_gmacs=None if ours is None else float(np.mean([point.gmacs for point in ours])),
            difference=difference,
            verdict=None if difference is None else verdict_of(difference, self.plan.margin),
        )


def _difference(ours: Floats, theirs: Floats) -> CrossedDifference:
    """Mean of the differences with its interval over seeds and draws, or over draws alone if there is one seed."""
    if len(ours) > 1:
        return crossed_difference(ours, theirs)
    over_draws = paired_difference(ours[0], theirs[0])
    error, freedom = over_draws.half_width / LIKELY, float(ours.shape[1] - 1)
    detectable = float(stats.t.ppf(0.975, freedom) + POWER) * error
    ends = {"mean": over_draws.mean, "lowest": over_draws.lowest, "highest": over_draws.highest}
    return CrossedDifference(**ends, error=error, freedom=freedom, shift=0.0, detectable=detectable)


def _other_orders(measured: Measured, point: SegmentationPointOfRun) -> tuple[float, float, float, float]:
    """Change of mIoU by chance and by error, the correlation and the share that is not worse, for as many exits."""
    counts, share, error = measured.test.counts, point.exit_share, measured.test.error
    growth = error[:, 0] - error[:, -1]
    mixed = ClassCounts(*(share * part[:, 0].sum(axis=0) + (1 - share) * part[:, -1].sum(axis=0) for part in counts))
    exits = np.full(len(growth), measured.rounds - 1)
    exits[np.argsort(growth, kind="stable")[: round(share * len(growth))]] = 0
    best = ClassCounts(*(part[np.arange(len(exits)), exits].sum(axis=0) for part in counts))
    full = measured.full.miou
    correlation = float(stats.spearmanr(measured.test.scores[:, 0], growth).statistic)
    return float(mean_iou(mixed)) - full, float(mean_iou(best)) - full, correlation, float((growth <= 0).mean())
