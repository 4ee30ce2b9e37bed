"""Accuracy and compute at many thresholds at once, and the near-lossless point.

Letters: N images, S rounds, T thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from progresvit.metrics.arrays import Floats
from progresvit.routing.decide import as_scores, as_thresholds
from progresvit.routing.metric import Metric, OperatingPoint, P, Top1
from progresvit.routing.sums import every_threshold, exit_counts, routed_sums, total_gmacs

PAPER_THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0, 5.0, 10.0)
"""The thresholds that the paper tabulates."""

TENTHS = tuple(tenth / 10 for tenth in range(11))
"""Thresholds on probabilities, for learned routers; also the paper's continuation rates."""

NEAR_LOSSLESS_DROP = 0.0003
"""The allowed drop of top-1, as a share of the images: 0.03 points, 15 of 50,000; or of the mIoU."""


def frontier(
    scores: ArrayLike,
    correct: ArrayLike | None,
    gmacs: Sequence[float],
    thresholds: ArrayLike,
    *,
    correct5: ArrayLike | None = None,
) -> list[OperatingPoint]:
    """Top-1 and compute at each threshold.

    Args:
        scores: Entropies or router probabilities, (N, S).
        correct: Whether each round is correct, (N, S); None without labels.
        gmacs: Cumulative GMACs of the rounds.
        thresholds: (T,), or (T, S - 1) for one per round.
        correct5: Whether the label is among the five most probable classes, (N, S).
    """
    return metric_frontier(scores, Top1(correct, correct5), gmacs, thresholds)


def metric_frontier(scores: ArrayLike, metric: Metric[P], gmacs: ArrayLike, thresholds: ArrayLike) -> list[P]:
    """Accuracy and compute at each threshold.

    Args:
        scores: The uncertainty of each image after each round, (N, S).
        metric: The accuracy.
        gmacs: Cumulative GMACs of the rounds, (S,); (N, S) if images differ, for example in their windows.
        thresholds: (T,), or (T, S - 1) for one per round.
    """
    values = as_scores(scores)
    count, rounds = values.shape
    if np.shape(gmacs)[-1] != rounds:
        raise ValueError(
            f"scores of {rounds} rounds with the compute of {np.shape(gmacs)[-1]}; are they of the same model?"
        )
    as_thresholds(thresholds, rounds)
    limits = np.asarray(thresholds, np.float64)
    shares = exit_counts(values, limits) / count  # (T, S)
    spent = routed_gmacs(values, gmacs, limits, shares)
    accuracy = metric.at(values, limits)
    return [
        metric.point(
            threshold=float(limits[t]) if limits.ndim == 1 else tuple(limits[t].tolist()),
            **{name: None if column is None else float(column[t]) for name, column in accuracy.items()},
            gmacs=float(spent[t]),
            exit_shares=tuple(shares[t].tolist()),
        )
        for t in range(len(shares))
    ]


def routed_gmacs(scores: ArrayLike, gmacs: ArrayLike, thresholds: ArrayLike, shares: Floats) -> Floats:
    """GMACs of an image on average at each threshold, from the shares of the images that exit, (T, S): (T,)."""
    costs = np.asarray(gmacs, np.float64)
    if costs.ndim == 2:
        return routed_sums(scores, costs, thresholds) / len(costs)
    return np.array([share @ costs for share in shares])


def operating_point(
    scores: ArrayLike, correct: ArrayLike | None, gmacs: Sequence[float], threshold: float | Sequence[float]
) -> OperatingPoint:
    """Top-1 and compute at one threshold, or one per round."""
    return frontier(scores, correct, gmacs, [threshold])[0]


def near_lossless(
    scores: ArrayLike, correct: ArrayLike, gmacs: Sequence[float], max_drop: float = NEAR_LOSSLESS_DROP
) -> OperatingPoint:
    """The threshold of lowest compute whose top-1 stays within ``max_drop`` of the full path, the bound included."""
    return metric_near_lossless(scores, Top1(correct), gmacs, max_drop)


def metric_near_lossless(
    scores: ArrayLike, metric: Metric[P], gmacs: ArrayLike, max_drop: float = NEAR_LOSSLESS_DROP
) -> P:
    """The threshold of lowest compute whose accuracy stays within ``max_drop`` of the full path."""
    values = as_scores(scores)
    thresholds = every_threshold(values)  # the first is 0, the full path
    good = np.flatnonzero(metric.is_within(values, thresholds, max_drop))
    spent = total_gmacs(values, gmacs, thresholds)
    return metric_frontier(values, metric, gmacs, [float(thresholds[good[np.argmin(spent[good])]])])[0]
