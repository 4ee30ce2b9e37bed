"""What every results file takes from records: each round's hits, points of thresholds, and which images these are.

Letters: N images, S rounds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np

from progresvit.evaluation import Records, SegmentationRecords
from progresvit.routing import HIGHEST, OperatingPoint, near_lossless
from progresvit.routing.frontier import frontier
from progresvit.routing.sums import every_threshold, exit_counts
from repro.formats import Data, Point, Probe, Rounds

POINTS = 60
"""Approximate number of points of a frontier: two may coincide."""

Thresholds = float | tuple[float, ...]


def data_of(
    records: Records | SegmentationRecords, *, name: str, train: int | None = None, learned: str | None = None
) -> Data:
    """Which images these are. ``train`` and ``learned`` are of the training run, if there was one."""
    probe = records.header.probe  # the classes of the data, not of the model's head
    return Data(
        name=name,
        train=train,
        val=len(records),
        classes=records.config.num_classes if probe is None else len(probe["classes"]),
        names=hash_names(records.ids.tolist()),
        learned=learned,
    )


def hash_names(names: Iterable[str]) -> str:
    """Hash of the names of images, in any order."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def measure_probe(records: Records, words: Sequence[str]) -> Probe | None:
    """What predicted from the features, by the header; None if it was the head. ``words`` are of the command."""
    header = records.header
    if header.probe is None:
        return None
    settings = {key: value for key, value in header.probe.items() if key not in ("task", "classes")}
    result = None if header.probe_result is None else dict(header.probe_result)
    return Probe(task=header.probe["task"], words=tuple(words), settings=settings, chosen=result)


def measure_rounds(records: Records) -> Rounds:
    """Cost of each round, whether it is right, its log-loss and its entropy, images in the order of their names."""
    order = np.argsort(records.ids, kind="stable")
    correct = records.correct[order]  # (N, S)
    rounds = records.config.rounds
    losses = records.log_probability
    heads = tuple(getattr(round_, "heads", None) for round_ in rounds)  # not every kind's rounds have heads
    return Rounds(
        resolutions=tuple(round_.resolution for round_ in rounds),
        heads=None if None in heads else heads,
        gmacs_paper=tuple(records.gmacs("paper")),
        gmacs_executed=tuple(records.gmacs("executed")),
        right=tuple(correct.sum(axis=0).tolist()),
        bits=tuple(correct.T),
        log_loss=None if losses is None or not np.isfinite(losses).all() else tuple(-losses[order].T),
        entropy=tuple(records.scores()[order, :-1].T) if records.header.routable and len(rounds) > 1 else None,
    )


def measure_point(records: Records, threshold: float | Sequence[float]) -> Point:
    """The outcome of an entropy threshold, or of one for each round but the last.

    A threshold above every entropy is written as the lowest such, which does the same as infinity.
    """
    return _point(records, frontier(records.scores(), records.correct, records.gmacs(), [_finite(threshold)])[0])


def measure_near_lossless(records: Records) -> Point | None:
    """The cheapest point within 0.03 points of the full path's top-1; None if the rounds are alternatives."""
    if not records.header.routable:
        return None
    return _point(records, near_lossless(records.scores(), records.correct, records.gmacs()))


def measure_frontier(records: Records, points: int = POINTS) -> tuple[Point, ...]:
    """From the cheapest point to the full path, both included, at evenly spread costs.

    All rounds share one threshold. The cheapest point is round 1 alone, but for images whose logits are not finite.
    Rounds that are alternatives have no frontier.
    """
    if not records.header.routable:
        return ()
    scores, correct, gmacs = records.scores(), records.correct, records.gmacs()
    thresholds = every_threshold(scores)  # rising, so costs fall
    spent = exit_counts(scores, thresholds)[::-1] @ np.asarray(gmacs)  # cheapest first
    wanted = np.linspace(spent[0], spent[-1], points)
    places = np.unique([0, *np.searchsorted(spent, wanted[1:-1]), len(spent) - 1])
    return tuple(_point(records, point) for point in frontier(scores, correct, gmacs, thresholds[::-1][places]))


def _point(records: Records, point: OperatingPoint) -> Point:
    assert point.top1 is not None
    return Point(
        threshold=point.threshold,
        top1=point.top1,
        gmacs_paper=point.gmacs,
        gmacs_executed=float(np.dot(point.exit_shares, records.gmacs("executed"))),
        exit_shares=point.exit_shares,
    )


def _finite(threshold: float | Sequence[float]) -> Thresholds:
    highest = math.nextafter(HIGHEST, math.inf)  # above every entropy
    return min(threshold, highest) if isinstance(threshold, float | int) else tuple(min(t, highest) for t in threshold)
