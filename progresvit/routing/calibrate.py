"""The threshold for a compute budget or an early-exit rate, and the quantiles of entropies. None needs labels.

The near-lossless rule is in ``frontier``, the one with a guarantee in ``certify``. Letters: N images, S rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from progresvit.routing.decide import as_scores
from progresvit.routing.frontier import frontier
from progresvit.routing.metric import OperatingPoint
from progresvit.routing.scores import HIGHEST
from progresvit.routing.sums import every_threshold, exit_counts, total_gmacs


class OutOfReachError(ValueError):
    """These images cannot meet the request; other images, or more of them, may."""


ROUNDING = 0.0005
"""Tolerance of a budget in GMACs: tables show three decimals."""

STEPS = 200
"""Budgets between the first round alone and all rounds in a table of budgets."""

QUANTILE_STEPS = 100
"""Steps between the lowest and the highest quantile of entropies."""


def threshold_for_budget(scores: ArrayLike, gmacs: ArrayLike, budget: float) -> float:
    """The lowest threshold, so the most refined images, whose average GMACs stay within the budget.

    Args:
        scores: Entropies or router probabilities, (N, S).
        gmacs: Cumulative GMACs of the rounds, (S,); (N, S) if images differ.
        budget: Average GMACs per image.
    """
    values, costs = as_scores(scores), np.asarray(gmacs, np.float64)
    first, last = costs[:, [0, -1]].mean(axis=0) if costs.ndim == 2 else costs[[0, -1]]
    check_budget(budget, first, last)
    thresholds = every_threshold(values)
    spent = total_gmacs(values, costs, thresholds) / len(values)
    within = np.flatnonzero(spent <= max(budget, first) + 1e-9)
    if not len(within):
        stuck = int(np.isinf(values[:, :-1]).all(axis=1).sum())
        raise OutOfReachError(
            f"a budget of {budget:g} GMACs is out of reach: {stuck} of {len(values)} images have NaN or infinite "
            f"logits and never exit early, so the average is at least {spent.min():.3f}."
        )
    return float(thresholds[within[0]])


def check_budget(budget: float, first: float, last: float) -> None:
    """Refuse a budget below the GMACs of round 1 or above the GMACs of all rounds."""
    if not first - ROUNDING <= budget <= last + ROUNDING:
        raise ValueError(
            f"a budget of {budget:g} GMACs is out of reach: round 1 alone costs {first:.3f} and all rounds "
            f"{last:.3f}; choose one in between."
        )


def threshold_for_exit_share(scores: ArrayLike, share: float) -> float:
    """The lowest threshold at which at least this share of the images exits before the last round."""
    values = as_scores(scores)
    if not 0 <= share <= 1:
        raise ValueError(f"an exit share is between 0 and 1 (0.4 for 40 %), not {share:g}.")
    if values.shape[1] == 1:
        raise ValueError("a model of one round has no early exits.")
    thresholds = every_threshold(values)
    early = exit_counts(values, thresholds)[:, :-1].sum(axis=1)
    enough = np.flatnonzero(early >= share * len(values) - 1e-9)
    if not len(enough):
        raise ValueError(
            f"only {early.max()} of {len(values)} images can exit early; the others have NaN or infinite logits."
        )
    return float(thresholds[enough[0]])


def spread_points(scores: ArrayLike, correct: ArrayLike | None, gmacs: Sequence[float]) -> tuple[OperatingPoint, ...]:
    """Operating points at evenly spaced budgets, most GMACs first; (N, S) and (N, S), GMACs cumulative."""
    budgets = np.linspace(gmacs[-1], gmacs[0], STEPS + 1)
    thresholds = [threshold_for_budget(scores, gmacs, float(budget)) for budget in budgets[:-1]]
    always = max(math.nextafter(HIGHEST, math.inf), threshold_for_budget(scores, gmacs, gmacs[0]))  # every image exits
    return tuple(frontier(scores, correct, gmacs, sorted({*thresholds, always})))


def entropy_quantiles(entropies: ArrayLike) -> tuple[float, ...]:
    """The 0 %, 1 %, ..., 100 % quantiles: (N,) -> 101 ascending entropies; infinite entropies are the highest.

    The p % quantile is the lowest entropy such that p % of the images have this entropy or less.
    """
    ordered = np.sort(as_scores(np.asarray(entropies)[:, None])[:, 0])
    ranks = (np.arange(QUANTILE_STEPS + 1) * len(ordered) + QUANTILE_STEPS - 1) // QUANTILE_STEPS  # rounded up, from 1
    return tuple(ordered[np.maximum(ranks, 1) - 1].tolist())


def check_quantiles(quantiles: Sequence[float]) -> None:
    """Refuse what cannot be quantiles of entropies at evenly spaced levels from 0 to 1."""
    values = np.asarray(quantiles, np.float64)
    if values.ndim != 1 or len(values) < 2 or not (values >= 0).all() or (values[1:] < values[:-1]).any():
        raise ValueError(
            "quantiles of entropies are at least two ascending numbers of 0 or more; the command progresvit "
            "calibrate makes them with its option for entropies."
        )
