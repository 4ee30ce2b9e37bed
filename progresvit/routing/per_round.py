"""The best threshold of each round: the frontier of models of three or more rounds, and what it gives on other images.

One threshold shared by all rounds leaves only one way to spend a budget. With one for each round, the search is by
prices. At a price of GMACs, correct answers less their cost are maximised over one threshold at a time, the others
fixed, from the best shared threshold and from the vector of the price before, until none changes. All vectors on the
way are kept, the cheapest of each number of correct answers. It is a local search: better vectors may exist.

Thresholds that are chosen on the images that they are reported on are too good there. ``cross_fitted_exits`` chooses
them on the other half of the images, and thresholds of a round are tried at quantiles of its scores, not at every
score: on few images that only fits their chance. Letters: N images, S rounds, T points, C choices, K cuts of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from progresvit.metrics.arrays import Bools, Floats, Ints
from progresvit.routing.calibrate import OutOfReachError
from progresvit.routing.decide import as_scores, exit_rounds, exits
from progresvit.routing.frontier import NEAR_LOSSLESS_DROP
from progresvit.routing.sums import every_threshold, exit_counts, routed_sums

PRICES = 40
"""Number of prices, in correct answers per GMAC: from one for the full path of all images to one for the shortest step
of one image."""
SWEEPS = 20
"""Passes over the rounds at a price, at most."""
GAP, LEAST_CUTS = 64, 16
"""A round's thresholds are tried every ``GAP`` images, or ``LEAST_CUTS`` of them if that is more."""
LEAST_ROUNDS = 3
"""Models of fewer rounds have a single threshold."""


@dataclass(frozen=True, kw_only=True)
class PerRoundFrontier:
    """Threshold vectors that no other vector of the search beats, by rising compute and accuracy."""

    thresholds: Floats
    """(T, S - 1)"""
    right: Ints
    """Correctly classified images at each point: (T,), rising."""
    gmacs: Floats
    """Average over the images: (T,), rising."""
    full_right: int
    """Images that the full path classifies correctly; a point may have more."""
    images: int

    def within(self, budget: float) -> tuple[float, ...]:
        """The most accurate thresholds within an average of ``budget`` GMACs."""
        affordable = np.flatnonzero(self.gmacs <= budget * (1 + 1e-9))
        if not len(affordable):
            raise OutOfReachError(
                f"a budget of {budget:g} GMACs is out of reach: the cheapest thresholds spend {self.gmacs[0]:.3f}; "
                "choose a higher one."
            )
        return tuple(self.thresholds[affordable[-1]].tolist())

    def near_lossless(self, max_drop: float = NEAR_LOSSLESS_DROP) -> tuple[float, ...]:
        """The cheapest thresholds whose top-1 stays within ``max_drop`` of the full path, the bound included."""
        allowed = np.floor(max_drop * self.images + 1e-9)  # compared as counts
        good = np.flatnonzero(self.right >= self.full_right - allowed)
        return tuple(self.thresholds[good[0]].tolist())


Choice = Callable[[PerRoundFrontier], tuple[float, ...]]
"""Thresholds from a frontier, such as those within a budget."""


def per_round_frontier(scores: ArrayLike, correct: ArrayLike, gmacs: Sequence[float]) -> PerRoundFrontier:
    """The frontier over vectors of thresholds, on these images.

    Args:
        scores: Entropies or router probabilities, (N, S).
        correct: Whether each round is correct, (N, S).
        gmacs: Cumulative GMACs of the rounds, rising.
    """
    search = _Search(as_scores(scores), np.asarray(correct, bool), np.asarray(gmacs, np.float64))
    shared = every_threshold(search.scores)
    right = routed_sums(search.scores, search.correct, shared)
    spent = exit_counts(search.scores, shared) @ search.gmacs
    search.keep(np.repeat(shared[:, None], search.rounds - 1, axis=1), right, spent)  # (K,) -> (K, S - 1)
    steps = np.diff(search.gmacs)
    best: Floats | None = None
    for price in np.geomspace(1 / (len(search.scores) * steps.sum()), 1 / steps.min(), PRICES) if len(steps) else ():
        start = np.full(search.rounds - 1, shared[np.argmax(right - price * spent)])
        starts = [start] if best is None else [start, best]
        best, _ = max((search.ascend(vector, price) for vector in starts), key=lambda end: end[1])
    return search.result()


def within_or_cheapest(frontier: PerRoundFrontier, budget: float) -> tuple[float, ...]:
    """Thresholds within a budget, or the cheapest if images that never exit early make even those cost more."""
    return frontier.within(max(budget, float(frontier.gmacs[0])))


def cross_fitted_exits(
    scores: ArrayLike,
    correct: ArrayLike,
    gmacs: Sequence[float],
    first_half: Bools,
    choices: Sequence[Choice],
) -> Ints:
    """The round, from 0, after which each image exits with thresholds that were chosen on the other half: (C, N).

    Args:
        scores: Entropies or router probabilities, (N, S).
        correct: Whether each round is correct, (N, S).
        gmacs: Cumulative GMACs of the rounds.
        first_half: Whether an image is in the first of two halves, (N,).
        choices: How thresholds are chosen from the frontier of a half.
    """
    values, right = as_scores(scores), np.asarray(correct, bool)
    rounds = np.zeros((len(choices), len(values)), np.int64)
    for half in (first_half, ~first_half):
        frontier = per_round_frontier(values[half], right[half], gmacs)
        for number, choose in enumerate(choices):
            rounds[number, ~half] = exit_rounds(values[~half], choose(frontier))
    return rounds


class _Search:
    """The images in the order of each round's scores, and the cheapest vector for each number of correct answers."""

    def __init__(self, scores: Floats, correct: Bools, gmacs: Floats) -> None:
        if scores.shape != correct.shape or scores.shape[1] != len(gmacs):
            raise ValueError(
                f"scores of shape {scores.shape}, correct answers of shape {correct.shape} and the compute of "
                f"{len(gmacs)} rounds; are they of the same model?"
            )
        if (np.diff(gmacs) <= 0).any():
            raise ValueError("cumulative GMACs rise from round to round; rounds that are alternatives are not routed.")
        self.scores, self.correct, self.gmacs = scores, correct, gmacs
        self.rounds = len(gmacs)
        self.columns = [np.ascontiguousarray(column) for column in scores.T]  # (N,) of each round
        self.orders = [np.argsort(column) for column in self.columns[:-1]]
        tried = [_cuts(column) for column in self.columns[:-1]]
        self.cuts, self.below = [cuts for cuts, _ in tried], [below for _, below in tried]  # (K,) of each round
        self.hits = [np.ascontiguousarray(column).astype(np.int32) for column in correct.T]
        count = len(scores)
        self.spent = np.full(count + 1, np.inf)  # the cheapest vector's GMACs, by its number of correct answers
        self.vectors = np.zeros((count + 1, self.rounds - 1))

    def ascend(self, start: Floats, price: float) -> tuple[Floats, float]:
        """Change one threshold at a time for more correct answers less the price of their compute."""
        vector, value = start.copy(), -np.inf
        for _ in range(SWEEPS):
            before = value
            for s in range(self.rounds - 1):
                right, spent = self.along(vector, s)
                vectors = np.repeat(vector[None], len(right), axis=0)
                vectors[:, s] = self.cuts[s]
                self.keep(vectors, right, spent)
                values = right - price * spent
                best = int(np.argmax(values))
                vector[s], value = self.cuts[s][best], float(values[best])
            if value <= before:
                break
        return vector, value

    def along(self, vector: Floats, s: int) -> tuple[Ints, Floats]:
        """Correct answers and total GMACs at every cut of round s, the other thresholds fixed: (K,) each."""
        last = self.rounds - 1
        hits, spent = self.hits[last], np.full(len(self.scores), self.gmacs[last])
        for later in range(last - 1, s, -1):  # images that continue after round s
            exiting = exits(self.columns[later], vector[later])
            hits, spent = np.where(exiting, self.hits[later], hits), np.where(exiting, self.gmacs[later], spent)
        more_right, more_spent = self.hits[s] - hits, self.gmacs[s] - spent  # if they exit after round s instead
        for earlier in range(s - 1, -1, -1):  # images that exit before round s
            exiting = exits(self.columns[earlier], vector[earlier])
            hits, spent = np.where(exiting, self.hits[earlier], hits), np.where(exiting, self.gmacs[earlier], spent)
            more_right[exiting], more_spent[exiting] = 0, 0.0
        order, below = self.orders[s], self.below[s]
        right = np.concatenate([[0], np.cumsum(more_right[order], dtype=np.int64)])[below] + int(hits.sum())
        total = np.concatenate([[0.0], np.cumsum(more_spent[order])])[below] + float(spent.sum())
        return right, total

    def keep(self, vectors: Floats, right: Ints, spent: Floats) -> None:
        """Keep the cheapest vector for each number of correct answers. Costs fall along a path of rising thresholds."""
        last = np.full(len(self.spent), -1)
        last[right] = np.arange(len(right))  # the last vector with a number of correct answers is the cheapest
        candidates = last[last >= 0]
        cheaper = candidates[spent[candidates] < self.spent[right[candidates]] - 1e-9]
        self.spent[right[cheaper]], self.vectors[right[cheaper]] = spent[cheaper], vectors[cheaper]

    def result(self) -> PerRoundFrontier:
        """The vectors with more correct answers than every cheaper vector."""
        dearer = np.minimum.accumulate(self.spent[::-1])[::-1]  # the least GMACs for this many correct answers or more
        better = np.isfinite(self.spent) & (self.spent < np.append(dearer[1:], np.inf))
        right = np.flatnonzero(better)
        return PerRoundFrontier(
            thresholds=self.vectors[right],
            right=right,
            gmacs=self.spent[right] / len(self.scores),
            full_right=int(self.correct[:, -1].sum()),
            images=len(self.scores),
        )


def _cuts(scores: Floats) -> tuple[Floats, Ints]:
    """Thresholds of a round that are tried, and how many scores are below each: (N,) -> (K,), (K,), both rising."""
    cuts = every_threshold(np.stack([scores, scores], axis=1))
    below = np.searchsorted(np.sort(scores), cuts, side="left")
    ranks = np.linspace(0, below[-1], max(LEAST_CUTS, len(scores) // GAP) + 1)
    index = np.unique(np.minimum(np.searchsorted(below, ranks), len(cuts) - 1))  # includes both ends
    return cuts[index], below[index]
