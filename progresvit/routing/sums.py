"""Sums over routed images at many thresholds at once: how many exit, how many of them are correct, what they cost.

The module ``decide`` defines the exit rule. Letters: N images, S rounds, T thresholds, M numbers per image and round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from progresvit.metrics.arrays import Floats, Ints
from progresvit.routing.decide import as_scores, as_thresholds, exits


def exit_counts(scores: ArrayLike, thresholds: ArrayLike) -> Ints:
    """Images that exit after each round: (N, S) -> (T, S)."""
    values = as_scores(scores)
    limits = as_thresholds(thresholds, values.shape[1])
    continuing = np.full((len(limits), values.shape[1] + 1), len(values))  # before each round
    continuing[:, -1] = 0  # after the last
    if (limits == limits[:, :1]).all():  # an image has exited by a round if its lowest score so far is below
        lowest = np.minimum.accumulate(values[:, :-1], axis=1)  # (N, S - 1)
        for s, column in enumerate(lowest.T):
            continuing[:, s + 1] -= np.searchsorted(np.sort(column), limits[:, 0], side="left")  # strictly, as in exits
        return continuing[:, :-1] - continuing[:, 1:]
    columns = np.ascontiguousarray(values.T)
    for t, row in enumerate(limits):
        left = np.ones(len(values), bool)
        for s, limit in enumerate(row):
            left &= ~exits(columns[s], limit)
            continuing[t, s + 1] = np.count_nonzero(left)
    return continuing[:, :-1] - continuing[:, 1:]


def every_threshold(scores: ArrayLike) -> Floats:
    """0, one threshold between any two neighbouring scores, and one above all: every other gives the same results."""
    values = as_scores(scores)[:, :-1]
    distinct = np.unique(values[np.isfinite(values)])
    if not len(distinct):
        return np.zeros(1)
    between = (distinct[:-1] + distinct[1:]) / 2
    between = np.where(between > distinct[:-1], between, distinct[1:])  # two neighbouring floats have no middle
    above = np.nextafter(np.float32(distinct[-1]), np.float32(np.inf))
    return np.concatenate([[0.0], between, [max(float(above), np.nextafter(distinct[-1], np.inf))]])


def routed_sums(scores: ArrayLike, values: ArrayLike, thresholds: ArrayLike) -> NDArray[Any]:
    """Sum each image's values in the round after which it exits: (N, S) or (N, S, M) -> (T,) or (T, M).

    Sums of booleans and integers are exact, in int64; sums of other numbers are float64.

    Args:
        scores: Entropies or router probabilities, (N, S).
        values: Finite numbers of each image in each round, (N, S) or (N, S, M).
        thresholds: (T,), or (T, S - 1) for one per round.
    """
    checked = as_scores(scores)
    numbers = np.asarray(values)
    if numbers.shape[:2] != checked.shape or numbers.ndim > 3:
        raise ValueError(
            f"scores of shape {checked.shape} with values of shape {numbers.shape}; values are images x rounds, or "
            "images x rounds x numbers."
        )
    limits = as_thresholds(thresholds, checked.shape[1])
    by_round = [numbers[:, s] for s in range(checked.shape[1])]  # views of (N,) or (N, M)
    if not all(np.isfinite(column).all() for column in by_round):
        raise ValueError("values to sum are finite; leave out images that have none, or give them 0.")
    floating = np.issubdtype(numbers.dtype, np.floating)
    sums = np.zeros((len(limits), *numbers.shape[2:]), np.float64 if floating else np.int64)
    add = _add_shared if (limits == limits[:, :1]).all() else _add_each
    add(sums, checked, by_round, limits)
    return sums


def _add_each(sums: NDArray[Any], scores: Floats, by_round: list[NDArray[Any]], limits: Floats) -> None:
    columns = np.ascontiguousarray(scores.T)
    if by_round[0].dtype == bool and by_round[0].ndim == 1:
        by_round = list(np.ascontiguousarray(by_round))
    for t, row in enumerate(limits):
        continuing = np.ones(len(scores), bool)
        for s, limit in enumerate(row):
            exiting = continuing & exits(columns[s], limit)
            sums[t] += _sum_rows(by_round[s], exiting, sums.dtype)
            continuing &= ~exiting
        sums[t] += _sum_rows(by_round[-1], continuing, sums.dtype)


def _sum_rows(values: NDArray[Any], rows: NDArray[np.bool_], dtype: np.dtype[Any]) -> Any:
    """The sum of these rows. Marks are counted, which is several times as fast as selecting them."""
    if values.dtype == bool and values.ndim == 1:
        return np.count_nonzero(values & rows)
    return values[rows].sum(axis=0, dtype=dtype)


def _add_shared(sums: NDArray[Any], scores: Floats, by_round: list[NDArray[Any]], limits: Floats) -> None:
    """The last round's sum, plus, for the images that have exited by round s, the difference of rounds s and s + 1.

    The differences are cumulative sums in the order of the lowest scores so far: one sort per round for all thresholds.
    """
    sums += by_round[-1].sum(axis=0, dtype=sums.dtype)
    lowest = np.full(len(scores), np.inf)
    for s in range(scores.shape[1] - 1):
        lowest = np.minimum(lowest, scores[:, s])
        order = np.argsort(lowest)
        below = np.searchsorted(lowest, limits[:, 0], side="left", sorter=order)  # (T,), strictly below as in exits
        more = by_round[s][order].astype(sums.dtype)  # (N,) or (N, M)
        more -= by_round[s + 1][order].astype(sums.dtype, copy=False)
        np.cumsum(more, axis=0, out=more)
        sums[below > 0] += more[below[below > 0] - 1]


def total_gmacs(scores: ArrayLike, gmacs: ArrayLike, thresholds: ArrayLike) -> Floats:
    """GMACs of all images together at each threshold: (T,).

    Args:
        scores: Entropies or router probabilities, (N, S).
        gmacs: Cumulative GMACs of the rounds, (S,); (N, S) if images differ.
        thresholds: (T,), or (T, S - 1) for one per round.
    """
    costs = np.asarray(gmacs, np.float64)
    return routed_sums(scores, costs, thresholds) if costs.ndim == 2 else exit_counts(scores, thresholds) @ costs
