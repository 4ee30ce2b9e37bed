"""Whether guarantees hold, with the records as the population, whose true shares are known.

Letters: N images, S rounds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from progresvit.evaluation import Records
from progresvit.routing import certified_thresholds
from progresvit.routing.settings import Loss
from progresvit.routing.sums import exit_counts, routed_sums
from repro.formats import DrawsResult

DRAWS = 500
"""Calibration sets that are drawn to check a certificate."""


def check_certificate(
    records: Records,
    *,
    epsilon: float,
    delta: float,
    loss: Loss = "labelled",
    images: int,
    draws: int = DRAWS,
    seed: int = 0,
) -> DrawsResult:
    """How often a certificate is wrong.

    Each draw takes calibration images from the records with replacement, certifies a threshold on them, and looks up
    the share of all records that this threshold harms, or whose answer it changes.

    Args:
        records: The population.
        epsilon: The certified bound.
        delta: The probability with which it may be exceeded.
        loss: As in ``calibrate_guarantee``.
        images: Calibration images of a draw.
        draws: Their number.
        seed: Of the draws. Certificates with the same seed see the same images.
    """
    scores, gmacs, losses = records.scores(), records.gmacs(), losses_of(records, loss)
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, len(records), images) for _ in range(draws)]
    thresholds = [certified_thresholds(scores[r], losses[r], gmacs, epsilon, delta).threshold for r in drawn]
    lost = routed_sums(scores, losses, thresholds) / len(records)  # (draws,)
    spent = exit_counts(scores, thresholds) @ np.array(gmacs) / len(records)
    return DrawsResult(
        draws=draws,
        images=images,
        exceeded=int((lost > epsilon).sum()),
        mean=float(lost.mean()),
        highest=float(lost.max()),
        saving=float(1 - spent.mean() / gmacs[-1]),
    )


def losses_of(records: Records, loss: Loss) -> NDArray[np.bool_]:
    """Whether an exit after each round loses a correct answer, or changes the answer: (N, S)."""
    if loss == "unlabelled":
        return np.asarray(records.predictions != records.predictions[:, -1:])
    return ~records.correct & records.correct[:, -1:]
