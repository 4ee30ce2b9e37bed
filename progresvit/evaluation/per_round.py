"""One threshold for each round, measured on images that it was not chosen on. Letters: N images, C choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import numpy as np

from progresvit.compute import Convention
from progresvit.evaluation.records import Records, RoutedRecords, split_by_id
from progresvit.routing import Router
from progresvit.routing.decide import at_exit
from progresvit.routing.per_round import (
    LEAST_ROUNDS,
    Choice,
    PerRoundFrontier,
    cross_fitted_exits,
    per_round_frontier,
    within_or_cheapest,
)

OTHER_HALF = "on_the_other_half"
"""Key of ``Setting.expected``: the results of thresholds on the half of the images that they were not chosen on."""
LEAST_IMAGES = 100
"""Half of fewer images shows little but chance."""


@dataclass(frozen=True, kw_only=True)
class CrossFittedPoint:
    """All images, each with the thresholds that were chosen on the half that it is not in."""

    top1: float
    top5: float
    gmacs: float
    exit_shares: tuple[float, ...]
    threshold: None = None
    """There are two vectors, one for each half."""


def has_per_round(records: RoutedRecords) -> TypeGuard[Records]:
    """Whether thresholds per round can be chosen on one half of the images and measured on the other."""
    enough = records.rounds >= LEAST_ROUNDS and len(records) >= LEAST_IMAGES
    return enough and isinstance(records, Records) and records.labelled and records.header.routable


def need_classification(records: RoutedRecords) -> Records:
    """The records, refused if they are of a segmentation model."""
    if not isinstance(records, Records):
        raise ValueError(
            "thresholds per round are chosen by top-1, of a classification model; leave out per_round=True."
        )
    return records


def find_thresholds(
    records: Records, router: Router | None = None, convention: Convention = "paper"
) -> PerRoundFrontier:
    """The frontier over vectors of thresholds on all of these images; an error if they do not allow it."""
    records.header.check_routable()
    if records.rounds < LEAST_ROUNDS:
        raise ValueError(
            f"thresholds per round are for {LEAST_ROUNDS} rounds or more, and these records have {records.rounds}; "
            "leave out per_round=True."
        )
    if len(records) < LEAST_IMAGES:
        raise ValueError(
            f"{len(records)} images are too few for thresholds per round, which need {LEAST_IMAGES}; evaluate on more, "
            "or leave out per_round=True."
        )
    return per_round_frontier(records.exit_scores(router), records.correct, records.gmacs(convention))


def cross_fitted(
    records: Records, choices: Sequence[Choice], router: Router | None = None, convention: Convention = "paper"
) -> list[CrossFittedPoint]:
    """Accuracy and compute of each choice of thresholds, on images that it was not chosen on.

    Which half an image is in depends on its id alone.
    """
    first_half = split_by_id(records.ids, 0.5, seed=0)
    scores, gmacs = records.exit_scores(router), records.gmacs(convention)
    exits = cross_fitted_exits(scores, records.correct, gmacs, first_half, choices)  # (C, N)
    shares = [np.bincount(rounds, minlength=records.rounds) / len(records) for rounds in exits]
    return [
        CrossFittedPoint(
            top1=float(at_exit(records.correct, rounds).mean()),
            top5=float(at_exit(records.correct5, rounds).mean()),
            gmacs=float(share @ np.asarray(gmacs)),
            exit_shares=tuple(share.tolist()),
        )
        for rounds, share in zip(exits, shares)
    ]


def cross_fitted_curve(
    records: Records, budgets: Sequence[float], router: Router | None = None, convention: Convention = "paper"
) -> tuple[list[CrossFittedPoint], CrossFittedPoint]:
    """The points of budgets, and the near-lossless point. Budgets that give the same point give it once."""
    choices = [partial(within_or_cheapest, budget=budget) for budget in budgets]
    *points, lossless = cross_fitted(records, [*choices, PerRoundFrontier.near_lossless], router, convention)
    return list(dict.fromkeys(points)), lossless
