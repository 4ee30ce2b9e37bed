"""Which threshold to use: for a budget of compute or for a share of early exits. Neither needs labels.

The near-lossless rule is in ``frontier``, the one with a guarantee in ``guarantee``. Letters: N images, S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from progresvit.routing.frontier import as_scores, every_threshold, exit_counts


class OutOfReachError(ValueError):
    """What is asked for cannot be had of these images; of others, or of more, perhaps."""


ROUNDING = 0.0005
"""A budget may be given as tables show it, in three decimals."""


def threshold_for_budget(scores: ArrayLike, gmacs: Sequence[float], budget: float) -> float:
    """The lowest threshold, so the most refined images, whose average GMACs stay within the budget."""
    values = as_scores(scores)
    if not gmacs[0] - ROUNDING <= budget <= gmacs[-1] + ROUNDING:
        raise ValueError(
            f"a budget of {budget:g} GMACs is out of reach: round 1 alone costs {gmacs[0]:.3f} and all rounds "
            f"{gmacs[-1]:.3f}; choose one in between."
        )
    thresholds = every_threshold(values)
    spent = exit_counts(values, thresholds) @ np.asarray(gmacs) / len(values)
    within = np.flatnonzero(spent <= max(budget, gmacs[0]) + 1e-9)
    if not len(within):
        stuck = int(np.isinf(values[:, :-1]).all(axis=1).sum())
        raise OutOfReachError(
            f"a budget of {budget:g} GMACs is out of reach: {stuck} of {len(values)} images have NaN or infinite "
            f"logits and never leave early, so the average is at least {spent.min():.3f}."
        )
    return float(thresholds[within[0]])


def threshold_for_exit_share(scores: ArrayLike, share: float) -> float:
    """The lowest threshold at which at least this share of the images leaves before the last round."""
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
            f"only {early.max()} of {len(values)} images can leave early; the others have NaN or infinite logits."
        )
    return float(thresholds[enough[0]])
