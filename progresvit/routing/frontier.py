"""What a threshold gives: accuracy and compute of any number of thresholds at once, and the near-lossless point.

An image leaves after the first round whose score is below the threshold, else after the last. Scores are entropies or
what a learned router says; NaN counts as infinitely unsure. Letters: N images, S rounds, T thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

PAPER_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0, 5.0, 10.0)
"""The sweep that the paper tabulates."""

NEAR_LOSSLESS_DROP = 0.0003
"""Share of the images by which top-1 may fall: 0.03 points, 15 of 50,000."""


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """One threshold, or one per round but the last, and what it gives."""

    threshold: float | tuple[float, ...]
    top1: float | None
    """Share of the images that are right; None without labels."""
    top5: float | None = None
    gmacs: float
    exit_shares: tuple[float, ...]


def as_scores(scores: ArrayLike) -> Floats:
    """(N, S) in float64, checked; NaN becomes infinity."""
    values = np.asarray(scores, np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"scores are one row per image and one column per round, not of shape {values.shape}.")
    return np.where(np.isnan(values), np.inf, values)


def as_thresholds(thresholds: ArrayLike, rounds: int) -> Floats:
    """(T, S - 1): a number stands for every round, a row gives one for each round but the last."""
    values = np.asarray(thresholds, np.float64)
    if values.ndim == 1:
        values = np.repeat(values[:, None], rounds - 1, axis=1)  # (T,) -> (T, S - 1)
    if values.ndim != 2 or values.shape[1] != rounds - 1:
        raise ValueError(
            f"thresholds per round are one for each round but the last, so {rounds - 1} for {rounds} rounds, "
            f"not {values.shape[-1] if values.ndim else 'a single number'}."
        )
    if np.isnan(values).any() or (values < 0).any():
        raise ValueError(f"a threshold is 0 (every round runs) or more, not {_first_bad(values)}.")
    return values


def exit_rounds(scores: ArrayLike, threshold: float | Sequence[float]) -> Counts:
    """The round, from 0, after which each image leaves: (N, S) -> (N,). What the last round says is not asked."""
    values = as_scores(scores)
    limits = as_thresholds([threshold], values.shape[1])[0]  # (S - 1,)
    leaves = np.ones(values.shape, bool)
    leaves[:, :-1] = values[:, :-1] < limits
    rounds: Counts = leaves.argmax(axis=1)
    return rounds


def exit_counts(scores: ArrayLike, thresholds: ArrayLike) -> Counts:
    """Images that leave after each round: (T, S)."""
    values = as_scores(scores)
    return _route(values, np.ones((*values.shape, 1), np.int64), as_thresholds(thresholds, values.shape[1]))[..., 0]


def frontier(
    scores: ArrayLike,
    correct: ArrayLike | None,
    gmacs: Sequence[float],
    thresholds: ArrayLike,
    *,
    correct5: ArrayLike | None = None,
) -> list[OperatingPoint]:
    """Accuracy and compute at each threshold.

    ``scores``, ``correct`` and ``correct5`` (is the label among the five likeliest?) are (N, S), ``gmacs`` cumulative.
    """
    values = as_scores(scores)
    count, rounds = values.shape
    if len(gmacs) != rounds:
        raise ValueError(f"scores of {rounds} rounds with the compute of {len(gmacs)}; are they of the same model?")
    asked = np.asarray(thresholds, np.float64)
    limits = as_thresholds(asked, rounds)
    hits = [np.ones(values.shape, np.int64)]
    for marks in (correct, correct5):
        if marks is not None:
            hits.append(_as_hits(marks, values.shape))
    totals = _route(values, np.stack(hits, axis=-1), limits)  # (T, S, 1 to 3)
    shares = totals[..., 0] / count
    top1 = totals[..., 1].sum(axis=1) / count if correct is not None else None
    top5 = totals[..., -1].sum(axis=1) / count if correct5 is not None else None
    return [
        OperatingPoint(
            threshold=float(asked[t]) if asked.ndim == 1 else tuple(asked[t].tolist()),
            top1=None if top1 is None else float(top1[t]),
            top5=None if top5 is None else float(top5[t]),
            gmacs=float(shares[t] @ np.asarray(gmacs)),
            exit_shares=tuple(shares[t].tolist()),
        )
        for t in range(len(limits))
    ]


def operating_point(
    scores: ArrayLike, correct: ArrayLike | None, gmacs: Sequence[float], threshold: float | Sequence[float]
) -> OperatingPoint:
    """Accuracy and compute at one threshold, or one per round."""
    return frontier(scores, correct, gmacs, [threshold])[0]


def near_lossless(
    scores: ArrayLike, correct: ArrayLike, gmacs: Sequence[float], max_drop: float = NEAR_LOSSLESS_DROP
) -> OperatingPoint:
    """The threshold of lowest compute whose top-1 stays within ``max_drop`` of the full path, the bound included."""
    values = as_scores(scores)
    hits = _as_hits(correct, values.shape)
    thresholds = every_threshold(values)
    totals = _route(values, np.stack([np.ones_like(hits), hits], axis=-1), as_thresholds(thresholds, values.shape[1]))
    right = totals[..., 1].sum(axis=1)
    allowed = np.floor(max_drop * len(values) + 1e-9)  # compared as counts
    good = np.flatnonzero(right >= hits[:, -1].sum() - allowed)
    spent = totals[..., 0] @ np.asarray(gmacs, np.float64)
    return operating_point(values, hits, gmacs, float(thresholds[good[np.argmin(spent[good])]]))


def every_threshold(scores: ArrayLike) -> Floats:
    """0, then one threshold between any two neighbouring scores and one above all: no other gives anything new."""
    values = as_scores(scores)[:, :-1]
    distinct = np.unique(values[np.isfinite(values)])
    if not len(distinct):
        return np.zeros(1)
    between = (distinct[:-1] + distinct[1:]) / 2
    between = np.where(between > distinct[:-1], between, distinct[1:])  # two neighbouring floats have no middle
    above = np.nextafter(np.float32(distinct[-1]), np.float32(np.inf))
    return np.concatenate([[0.0], np.maximum(between, 0.0), [max(float(above), np.nextafter(distinct[-1], np.inf))]])


def _route(scores: Floats, marks: Counts, limits: Floats) -> Counts:
    """Sums of the marks of the images that leave after each round: (N, S), (N, S, M), (T, S - 1) -> (T, S, M)."""
    if (limits == limits[:, :1]).all():
        return _route_shared(scores, marks, limits[:, 0] if limits.shape[1] else np.zeros(len(limits)))
    totals = np.zeros((len(limits), scores.shape[1], marks.shape[2]), np.int64)
    for t, row in enumerate(limits):
        staying = np.ones(len(scores), bool)
        for s, limit in enumerate(row):
            leaving = staying & (scores[:, s] < limit)
            totals[t, s] = marks[leaving, s].sum(axis=0)
            staying &= ~leaving
        totals[t, -1] = marks[staying, -1].sum(axis=0)
    return totals


def _route_shared(scores: Floats, marks: Counts, thresholds: Floats) -> Counts:
    """With one threshold for all rounds an image has left by round s if its lowest score so far is below it.

    So two sorts a round give every threshold at once: those who have left by this round, less those who had before.
    """
    totals = np.zeros((len(thresholds), scores.shape[1], marks.shape[2]), np.int64)
    lowest = np.minimum.accumulate(scores[:, :-1], axis=1)  # (N, S - 1)
    gone_before = None
    for s in range(scores.shape[1]):
        mine = marks[:, s]  # (N, M)
        now = _sum_below(lowest[:, s], mine, thresholds) if s < lowest.shape[1] else mine.sum(axis=0)
        before = 0 if gone_before is None else _sum_below(gone_before, mine, thresholds)
        totals[:, s] = now - before
        gone_before = lowest[:, s] if s < lowest.shape[1] else None
    return totals


def _sum_below(scores: Floats, marks: Counts, thresholds: Floats) -> Counts:
    """Sums of the marks of scores strictly below each threshold: (N,), (N, M), (T,) -> (T, M)."""
    order = np.argsort(scores, kind="stable")
    sums = np.concatenate([np.zeros((1, marks.shape[1]), np.int64), marks[order].cumsum(axis=0)])  # (N + 1, M)
    below: Counts = sums[np.searchsorted(scores[order], thresholds, side="left")]
    return below


def _as_hits(correct: ArrayLike, shape: tuple[int, ...]) -> Counts:
    hits = np.asarray(correct)
    if hits.shape != shape:
        raise ValueError(f"scores of shape {shape} with hits of shape {hits.shape}; both are images x rounds.")
    return hits.astype(np.int64)


def _first_bad(values: Floats) -> float:
    return float(values[np.isnan(values) | (values < 0)][0])
