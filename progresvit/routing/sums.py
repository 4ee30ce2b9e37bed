"""Sums over routed images at many thresholds at once: how many exit, how many of them are correct, what they cost.

The module ``decide`` defines the exit rule. Letters: N images, S rounds, T thresholds, M numbers per image and round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from progresvit.metrics.arrays import Bools, Floats, Ints
from progresvit.routing.decide import as_scores, as_thresholds, exits


def exit_counts(scores: ArrayLike, thresholds: ArrayLike) -> Ints:
    """Images that exit after each round: (T, S)."""
    return routed_counts(scores, np.ones(np.shape(scores), bool), thresholds)


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


def routed_counts(scores: ArrayLike, marks: ArrayLike, thresholds: ArrayLike) -> Ints:
    """Marked images among those that exit after each round: (N, S), (N, S) -> (T, S).

    An image counts if it is marked in the round after which it exits. Bools are correct answers, harms, or all images.
    """
    values = as_scores(scores)
    flags = np.asarray(marks)
    if flags.shape != values.shape:
        raise ValueError(f"scores of shape {values.shape} with marks of shape {flags.shape}; both are images x rounds.")
    flags = flags.astype(bool)
    limits = as_thresholds(thresholds, values.shape[1])
    shared = bool((limits == limits[:, :1]).all())
    return _count_shared(values, flags, limits) if shared else _count_each(values, flags, limits)


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
    shared = bool((limits == limits[:, :1]).all())
    return _sum_shared(checked, by_round, limits) if shared else _sum_each(checked, by_round, limits)


def total_gmacs(scores: ArrayLike, gmacs: ArrayLike, thresholds: ArrayLike) -> Floats:
    """GMACs of all images together at each threshold: (T,).

    Args:
        scores: Entropies or router probabilities, (N, S).
        gmacs: Cumulative GMACs of the rounds, (S,); (N, S) if images differ.
        thresholds: (T,), or (T, S - 1) for one per round.
    """
    costs = np.asarray(gmacs, np.float64)
    return routed_sums(scores, costs, thresholds) if costs.ndim == 2 else exit_counts(scores, thresholds) @ costs


def _sum_each(scores: Floats, by_round: list[NDArray[Any]], limits: Floats) -> NDArray[Any]:
    dtype = _dtype_of_sums(by_round[0])
    sums = np.zeros((len(limits), *by_round[0].shape[1:]), dtype)
    columns = np.asfortranarray(scores)
    for t, row in enumerate(limits):
        continuing = np.ones(len(scores), bool)
        for s, limit in enumerate(row):
            exiting = continuing & exits(columns[:, s], limit)
            sums[t] += by_round[s][exiting].sum(axis=0, dtype=dtype)
            continuing &= ~exiting
        sums[t] += by_round[-1][continuing].sum(axis=0, dtype=dtype)
    return sums


def _sum_shared(scores: Floats, by_round: list[NDArray[Any]], limits: Floats) -> NDArray[Any]:
    """The last round's sum, plus, for the images that have exited by round s, the difference of rounds s and s + 1.

    The differences are cumulative sums in the order of the lowest scores so far: one sort per round for all thresholds.
    """
    dtype = _dtype_of_sums(by_round[0])
    sums = np.zeros((len(limits), *by_round[0].shape[1:]), dtype)
    sums += by_round[-1].sum(axis=0, dtype=dtype)
    lowest = np.full(len(scores), np.inf)
    for s in range(scores.shape[1] - 1):
        lowest = np.minimum(lowest, scores[:, s])
        order = np.argsort(lowest)
        below = np.searchsorted(lowest, limits[:, 0], side="left", sorter=order)  # (T,), strictly below as in exits
        more = by_round[s][order].astype(dtype)  # (N,) or (N, M)
        more -= by_round[s + 1][order].astype(dtype, copy=False)
        np.cumsum(more, axis=0, out=more)
        sums[below > 0] += more[below[below > 0] - 1]
    return sums


def _dtype_of_sums(values: NDArray[Any]) -> type[np.int64 | np.float64]:
    return np.float64 if np.issubdtype(values.dtype, np.floating) else np.int64


def _count_each(scores: Floats, marks: Bools, limits: Floats) -> Ints:
    counts = np.zeros((len(limits), scores.shape[1]), np.int64)
    columns, flags = np.asfortranarray(scores), np.asfortranarray(marks)
    for t, row in enumerate(limits):
        continuing = np.ones(len(scores), bool)
        for s, limit in enumerate(row):
            exiting = continuing & exits(columns[:, s], limit)
            counts[t, s] = np.count_nonzero(exiting & flags[:, s])
            continuing &= ~exiting
        counts[t, -1] = np.count_nonzero(continuing & flags[:, -1])
    return counts


def _count_shared(scores: Floats, marks: Bools, limits: Floats) -> Ints:
    """With one threshold for all rounds, an image has exited by round s if its lowest score so far is below it.

    So two sorts per round give the counts of all thresholds: images that exited by this round, less those before it.
    """
    thresholds = limits[:, 0] if limits.shape[1] else np.zeros(len(limits))
    counts = np.zeros((len(thresholds), scores.shape[1]), np.int64)
    lowest = np.minimum.accumulate(scores[:, :-1], axis=1)  # (N, S - 1)
    for s in range(scores.shape[1]):
        counts[:, s] = count_exits(lowest[:, s], marks[:, s], thresholds) if s < lowest.shape[1] else marks[:, s].sum()
        if s > 0:
            counts[:, s] -= count_exits(lowest[:, s - 1], marks[:, s], thresholds)
    return counts


def count_exits(scores: Floats, marks: Bools, thresholds: Floats) -> Ints:
    """Count the marked scores that are strictly below each threshold, as in ``exits``: (N,), (N,), (T,) -> (T,)."""
    below: Ints = np.searchsorted(np.sort(scores[marks]), thresholds, side="left")
    return below
