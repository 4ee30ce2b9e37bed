"""What a threshold gives: accuracy and compute of every threshold at once, and the near-lossless point.

Letters: N images, S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NEAR_LOSSLESS_DROP = 0.0003
"""Share of the images by which top-1 may fall: 0.03 points, 15 of 50,000."""


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """One threshold and what it gives."""

    threshold: float
    top1: float
    gmacs: float
    exit_shares: tuple[float, ...]


def exit_rounds(entropy: NDArray[np.float64], threshold: float) -> NDArray[np.int64]:
    """The round, from 0, after which each image leaves: the first whose entropy is below the threshold, else the last.

    ``entropy`` is (N, S); what the last round says of itself is not asked.
    """
    below = entropy < threshold
    below[:, -1] = True
    first: NDArray[np.int64] = below.argmax(axis=1)
    return first


def operating_point(entropy: ArrayLike, correct: ArrayLike, gmacs: Sequence[float], threshold: float) -> OperatingPoint:
    """Accuracy and compute at one threshold. ``entropy`` and ``correct`` are (N, S), ``gmacs`` cumulative."""
    scores, hits = np.asarray(entropy, np.float64), np.asarray(correct, bool)
    rounds = exit_rounds(scores, threshold)
    shares = np.bincount(rounds, minlength=len(gmacs)) / len(rounds)
    return OperatingPoint(
        threshold=threshold,
        top1=float(hits[np.arange(len(rounds)), rounds].mean()),
        gmacs=float(shares @ np.asarray(gmacs)),
        exit_shares=tuple(shares.tolist()),
    )


def near_lossless(
    entropy: ArrayLike, correct: ArrayLike, gmacs: Sequence[float], max_drop: float = NEAR_LOSSLESS_DROP
) -> OperatingPoint:
    """The threshold of lowest compute whose top-1 stays within ``max_drop`` of the full path, the bound included."""
    scores, hits = np.asarray(entropy, np.float64), np.asarray(correct, np.int64)
    thresholds, gained, spent = _sweep(scores, hits, np.asarray(gmacs, np.float64))
    allowed = np.floor(max_drop * len(scores) + 1e-9)  # compared as counts
    good = np.flatnonzero(gained >= -allowed)
    best = good[np.argmin(spent[good])]
    return operating_point(scores, hits, gmacs, float(thresholds[best]))


def _sweep(
    entropy: NDArray[np.float64], correct: NDArray[np.int64], gmacs: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Every threshold that changes anything, and the change in hits and in total GMACs against the full path.

    As the threshold rises past the entropy that an image has after a round, the image leaves there, unless it already
    left earlier: each such event moves it from the round where it left until then.
    """
    values, hits, cost = [], [], []
    last = entropy.shape[1] - 1
    for s in range(last):
        mine = entropy[:, s]
        takes_place = np.ones(len(mine), bool)
        came_from = np.full(len(mine), last)
        for other in range(last - 1, -1, -1):
            if other < s:
                takes_place &= entropy[:, other] > mine
            elif other > s:
                came_from = np.where(entropy[:, other] < mine, other, came_from)
        rows = np.flatnonzero(takes_place)
        values.append(mine[rows])
        hits.append(correct[rows, s] - correct[rows, came_from[rows]])
        cost.append(gmacs[s] - gmacs[came_from[rows]])
    if not values:
        return np.zeros(1), np.zeros(1, np.int64), np.zeros(1)
    order = np.argsort(np.concatenate(values), kind="stable")
    value = np.concatenate(values)[order]
    gained, spent = np.concatenate(hits)[order].cumsum(), np.concatenate(cost)[order].cumsum()
    ends = np.flatnonzero(np.append(value[1:] != value[:-1], True))  # equal entropies leave together
    above = np.nextafter(value[ends], np.inf)
    return np.append(0.0, above), np.append(0, gained[ends]), np.append(0.0, spent[ends])
