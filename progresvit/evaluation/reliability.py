"""Reliability of the probabilities: expected calibration error, per round and routed, and temperature scaling.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_softmax

from progresvit import table
from progresvit.evaluation.records import Records
from progresvit.io.parse import count_of
from progresvit.metrics.arrays import Float32s, Floats, Ints
from progresvit.routing import Router
from progresvit.routing.decide import at_exit
from progresvit.table import Column, Row, Table

BINS = 15
COLDEST, HOTTEST = 0.05, 20.0
"""Lowest and highest temperature that is searched."""


@dataclass(frozen=True)
class Reliability:
    """Images in bins of equal width by the probability of their prediction; (BINS,) each."""

    images: Ints
    probability: Floats
    """Mean in the bin; NaN in an empty bin."""
    accuracy: Floats

    @property
    def error(self) -> float:
        """Expected calibration error: the mean gap between probability and accuracy, weighted by images."""
        filled = self.images > 0
        gaps = np.abs(self.probability - self.accuracy)[filled]
        return float((gaps * self.images[filled]).sum() / self.images.sum())


def reliability_bins(probability: ArrayLike, correct: ArrayLike, bins: int = BINS) -> Reliability:
    """Bins (low, high] from the probability of each image's prediction and whether it is correct."""
    values, hits = np.asarray(probability, np.float64), np.asarray(correct, np.float64)
    if values.shape != hits.shape or values.ndim != 1 or not len(values):
        raise ValueError(f"probabilities {values.shape} and hits {hits.shape} must be one per image.")
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("probabilities are between 0 and 1; exclude images whose logits are not finite.")
    place = np.clip(np.ceil(values * bins).astype(int) - 1, 0, bins - 1)
    images = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(place, weights=weights, minlength=bins) / images for weights in (values, hits)]
    return Reliability(images, *means)


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """The temperature that divides logits (N, K) for the lowest negative log-likelihood of the labels (N,)."""
    from scipy.optimize import minimize_scalar

    values, classes = np.asarray(logits, np.float64), np.asarray(labels)

    def loss(log_temperature: float) -> float:
        scaled = log_softmax(values / np.exp(log_temperature), axis=1)
        return float(-scaled[np.arange(len(classes)), classes].mean())

    best = minimize_scalar(loss, bounds=(np.log(COLDEST), np.log(HOTTEST)), method="bounded")
    return float(np.exp(best.x))


def fit_temperatures(records: Records) -> tuple[float, ...]:
    """One temperature per round, from records that kept the logits."""
    logits, labels = _logits(records), records.need_labels()
    if records.header.classes is not None:
        labels = np.searchsorted(records.header.classes, labels)
    finite = np.isfinite(logits).all(axis=(1, 2))
    if not finite.any():
        raise ValueError("no image has finite logits in every round; there is nothing to fit temperatures on.")
    return tuple(fit_temperature(logits[finite, s], labels[finite]) for s in range(records.rounds))


def probabilities(records: Records, temperatures: Sequence[float] | None = None) -> Float32s:
    """Probability of the prediction of every round: (N, S). A temperature changes it, but never the prediction."""
    if temperatures is None:
        return records.top5_probabilities[..., 0]
    logits = _logits(records)
    with np.errstate(invalid="ignore"):  # of logits that are not finite
        highest = np.exp(log_softmax(logits / np.asarray(temperatures)[None, :, None], axis=-1).max(axis=-1))
    finite = np.isfinite(records.top5_probabilities[..., 0])  # the same images as without temperatures
    return np.where(finite, highest, np.nan)


def reliabilities(
    records: Records,
    *,
    threshold: float | Sequence[float] | None = None,
    router: Router | None = None,
    temperatures: Sequence[float] | None = None,
) -> dict[str, Reliability]:
    """Reliability of each round and routed; the threshold is near-lossless by default."""
    rounds = records.answer_rounds(threshold, router)
    probability, correct = probabilities(records, temperatures), records.correct
    bins = {}
    for name, exits in rounds.items():
        values, hits = at_exit(probability, exits), at_exit(correct, exits)
        finite = np.isfinite(values)
        if not finite.any():
            raise ValueError(f"no image has finite logits ({name}); there is nothing to calibrate.")
        bins[name] = reliability_bins(values[finite], hits[finite])
    return bins


@dataclass(frozen=True)
class ReliabilityReport:
    """A table, and the bins of its last column."""

    table: Table
    bins: Mapping[str, Reliability]
    temperatures: tuple[float, ...] | None = None


def measure_reliability(
    records: Records, *, threshold: float | Sequence[float] | None = None, router: Router | None = None
) -> ReliabilityReport:
    """Expected calibration error of the model's own probabilities."""
    bins = reliabilities(records, threshold=threshold, router=router)
    rows: list[Row] = [_row(name, of_answers, None) for name, of_answers in bins.items()]
    return ReliabilityReport(
        Table(f"Expected calibration error, {BINS} bins, {count_of(len(records), 'image')}", _columns(), rows), bins
    )


def measure_scaled_reliability(
    records: Records,
    *,
    threshold: float | Sequence[float] | None = None,
    router: Router | None = None,
    share: float = 0.5,
    seed: int = 0,
) -> ReliabilityReport:
    """The error on one part of the images, with temperatures (and the threshold, by default) fitted on the other."""
    fitted, report = records.split(share, seed)
    temperatures = fit_temperatures(fitted)
    if threshold is None:
        threshold = fitted.near_lossless_threshold(router)
    before = reliabilities(report, threshold=threshold, router=router)
    after = reliabilities(report, threshold=threshold, router=router, temperatures=temperatures)
    used = dict(zip(before, (*temperatures, None)))
    rows = [_row(name, before[name], after[name], used[name]) for name in before]
    title = (
        f"Expected calibration error, {BINS} bins; temperatures from {len(fitted)} images, "
        f"results on {len(report)} others"
    )
    return ReliabilityReport(Table(title, _columns(), rows), after, temperatures)


def _row(name: str, before: Reliability, after: Reliability | None, temperature: float | None = None) -> Row:
    return {
        "answers": name,
        "images": int(before.images.sum()),
        "ece": before.error,
        "temperature": temperature,
        "scaled_ece": None if after is None else after.error,
    }


def _columns() -> list[Column]:
    return [
        Column("answers", "answers"),
        Column("images", "images"),
        Column("ece", "calibration error (%)", table.percent),
        Column("temperature", "temperature", table.decimals),
        Column("scaled_ece", "after scaling (%)", table.percent),
    ]


def _logits(records: Records) -> Float32s:
    """Logits of the classes that predictions choose among: (N, S, K)."""
    if records.logits is None:
        raise ValueError(
            "temperature scaling needs the logits; evaluate again with keep_logits=True (progresvit evaluate)."
        )
    classes = records.header.classes  # predictions choose among these
    return records.logits if classes is None else records.logits[..., list(classes)]
