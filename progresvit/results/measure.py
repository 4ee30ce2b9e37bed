"""From records to what every results file holds: each round's hits, points of thresholds, and which pictures it was.

Letters: N images, S rounds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from progresvit.evaluation.records import Records
from progresvit.results.format import Data, Point, Rounds, pack
from progresvit.routing import HIGHEST, OperatingPoint, near_lossless
from progresvit.routing.frontier import every_threshold, exit_counts, frontier

POINTS = 60
"""Of a frontier, about: two may fall together."""

Threshold = float | tuple[float, ...]


def data_of(records: Records, *, name: str, train: int | None = None, learned: str | None = None) -> Data:
    """Which pictures these are. ``train`` and ``learned`` are of the training run, if there was one."""
    return Data(
        name=name,
        train=train,
        val=len(records),
        classes=records.config.num_classes,
        names=hash_names(records.ids.tolist()),
        learned=learned,
    )


def hash_names(names: Sequence[str]) -> str:
    """The same for the same names, whatever their order."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def measure_rounds(records: Records) -> Rounds:
    """Cost of each round and whether it is right, the pictures in the order of their names."""
    correct = records.correct[np.argsort(records.ids, kind="stable")]  # (N, S)
    rounds = records.config.rounds
    return Rounds(
        resolutions=tuple(one.resolution for one in rounds),
        heads=tuple(one.heads for one in rounds),
        gmacs_paper=tuple(records.gmacs("paper")),
        gmacs_executed=tuple(records.gmacs("executed")),
        right=tuple(correct.sum(axis=0).tolist()),
        bits=tuple(pack(column) for column in correct.T),
    )


def measure_point(records: Records, threshold: float | Sequence[float]) -> Point:
    """Where a threshold of the entropy leads, or one for each round but the last.

    JSON has no infinity: a threshold above every entropy is written as the lowest such, which does the same.
    """
    return _point(records, frontier(records.scores(), records.correct, records.gmacs(), [_finite(threshold)])[0])


def measure_near_lossless(records: Records) -> Point:
    """The cheapest point whose top-1 is the full path's, but for 0.03 points."""
    return _point(records, near_lossless(records.scores(), records.correct, records.gmacs()))


def measure_frontier(records: Records, points: int = POINTS) -> tuple[Point, ...]:
    """From the cheapest to the full path, thresholds at evenly spread costs, both ends included.

    One threshold is shared by all rounds. The cheapest is round 1 alone, but for images whose logits are not finite.
    """
    if points < 2:
        raise ValueError(f"a frontier has both its ends, so 2 points at least, not {points}.")
    scores, correct, gmacs = records.scores(), records.correct, records.gmacs()
    thresholds = every_threshold(scores)  # rising, so costs fall
    spent = exit_counts(scores, thresholds)[::-1] @ np.asarray(gmacs)  # cheapest first
    wanted = np.linspace(spent[0], spent[-1], points)
    chosen = np.unique([0, *np.searchsorted(spent, wanted[1:-1]), len(spent) - 1])
    return tuple(_point(records, one) for one in frontier(scores, correct, gmacs, thresholds[::-1][chosen]))


def _point(records: Records, found: OperatingPoint) -> Point:
    assert found.top1 is not None
    return Point(
        threshold=found.threshold,
        top1=found.top1,
        gmacs_paper=found.gmacs,
        gmacs_executed=float(np.dot(found.exit_shares, records.gmacs("executed"))),
        exit_shares=found.exit_shares,
    )


def _finite(threshold: float | Sequence[float]) -> Threshold:
    highest = math.nextafter(HIGHEST, math.inf)  # above every entropy
    return min(threshold, highest) if isinstance(threshold, float | int) else tuple(min(t, highest) for t in threshold)
