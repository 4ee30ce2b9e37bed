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

TENTHS = tuple(tenth / 10 for tenth in range(11))
"""A sweep over probabilities, for learned routers; also the paper's continuation rates."""

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
    if (values < 0).any():
        raise ValueError(f"scores are entropies or probabilities, 0 or more, not {values.min():g}.")
    return np.where(np.isnan(values), np.inf, values)


def as_thresholds(thresholds: ArrayLike, rounds: int) -> Floats:
    """(T, S - 1): a number stands for every round, a row gives one for each round but the last."""
    try:
        values = np.asarray(thresholds, np.float64)
    except ValueError:
        raise ValueError(
            "thresholds are numbers, or rows of equal length with one for each round but the last."
        ) from None
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
    return routed_counts(scores, np.ones(np.shape(scores), bool), thresholds)


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
    as_thresholds(thresholds, rounds)
    asked = np.asarray(thresholds, np.float64)
    shares = exit_counts(values, asked) / count
    top1, top5 = (
        None if marks is None else routed_counts(values, marks, asked).sum(axis=1) / count
        for marks in (correct, correct5)
    )
    return [
        OperatingPoint(
            threshold=float(asked[t]) if asked.ndim == 1 else tuple(asked[t].tolist()),
            top1=None if top1 is None else float(top1[t]),
            top5=None if top5 is None else float(top5[t]),
            gmacs=float(shares[t] @ np.asarray(gmacs)),
            exit_shares=tuple(shares[t].tolist()),
        )
        for t in range(len(shares))
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
    thresholds = every_threshold(values)  # the first is 0, the full path
    right = routed_counts(values, correct, thresholds).sum(axis=1)
    allowed = np.floor(max_drop * len(values) + 1e-9)  # compared as counts
    good = np.flatnonzero(right >= right[0] - allowed)
    spent = exit_counts(values, thresholds) @ np.asarray(gmacs, np.float64)
    return operating_point(values, correct, gmacs, float(thresholds[good[np.argmin(spent[good])]]))


def every_threshold(scores: ArrayLike) -> Floats:
    """0, then one threshold between any two neighbouring scores and one above all: no other gives anything new."""
    values = as_scores(scores)[:, :-1]
    distinct = np.unique(values[np.isfinite(values)])
    if not len(distinct):
        return np.zeros(1)
    between = (distinct[:-1] + distinct[1:]) / 2
    between = np.where(between > distinct[:-1], between, distinct[1:])  # two neighbouring floats have no middle
    above = np.nextafter(np.float32(distinct[-1]), np.float32(np.inf))
    return np.concatenate([[0.0], between, [max(float(above), np.nextafter(distinct[-1], np.inf))]])


def routed_counts(scores: ArrayLike, marks: ArrayLike, thresholds: ArrayLike) -> Counts:
    """Marked images among those that leave after each round: (N, S), (N, S) -> (T, S).

    What counts is an image's mark for the round in which it leaves: hits, harms, or a mark on all.
    """
    values = as_scores(scores)
    flags = np.asarray(marks)
    if flags.shape != values.shape:
        raise ValueError(f"scores of shape {values.shape} with marks of shape {flags.shape}; both are images x rounds.")
    flags = flags.astype(bool)
    limits = as_thresholds(thresholds, values.shape[1])
    shared = bool((limits == limits[:, :1]).all())
    return _count_shared(values, flags, limits) if shared else _count_each(values, flags, limits)


def _count_each(scores: Floats, marks: NDArray[np.bool_], limits: Floats) -> Counts:
    counts = np.zeros((len(limits), scores.shape[1]), np.int64)
    columns, flags = np.asfortranarray(scores), np.asfortranarray(marks)
    for t, row in enumerate(limits):
        staying = np.ones(len(scores), bool)
        for s, limit in enumerate(row):
            leaving = staying & (columns[:, s] < limit)
            counts[t, s] = np.count_nonzero(leaving & flags[:, s])
            staying &= ~leaving
        counts[t, -1] = np.count_nonzero(staying & flags[:, -1])
    return counts


def _count_shared(scores: Floats, marks: NDArray[np.bool_], limits: Floats) -> Counts:
    """With one threshold for all rounds an image has left by round s if its lowest score so far is below it.

    So two sorts a round give every threshold at once: those who have left by this round, less those who had before.
    """
    thresholds = limits[:, 0] if limits.shape[1] else np.zeros(len(limits))
    counts = np.zeros((len(thresholds), scores.shape[1]), np.int64)
    lowest = np.minimum.accumulate(scores[:, :-1], axis=1)  # (N, S - 1)
    for s in range(scores.shape[1]):
        counts[:, s] = _count_below(lowest[:, s], marks[:, s], thresholds) if s < lowest.shape[1] else marks[:, s].sum()
        if s > 0:
            counts[:, s] -= _count_below(lowest[:, s - 1], marks[:, s], thresholds)
    return counts


def _count_below(scores: Floats, marks: NDArray[np.bool_], thresholds: Floats) -> Counts:
    """Marked scores strictly below each threshold: (N,), (N,), (T,) -> (T,)."""
    below: Counts = np.searchsorted(np.sort(scores[marks]), thresholds, side="left")
    return below


def _first_bad(values: Floats) -> float:
    return float(values[np.isnan(values) | (values < 0)][0])
