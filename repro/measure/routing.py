"""The fields of a routing result: one model's thresholds, routers and withheld answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from progresvit.evaluation import Records
from progresvit.evaluation.iso_accuracy import equal_accuracy_table, rules
from progresvit.evaluation.selective import RiskCoverage, risk_coverage_curves
from progresvit.evaluation.table import Row
from progresvit.routing.calibrate import OutOfReachError
from repro.formats import EqualAccuracy, RiskCurve
from repro.measure.records import measure_frontier, measure_rounds
from repro.measure.routers import FITS, fit_on, measure_matched
from repro.measure.settings import HALVES, calibrate_within_reach, measure_groups, measure_settings

CURVE_POINTS = 100
SPLITS = 20
"""Random splits of the images, for compute at equal accuracy."""


def measure_routing(
    val: Records,
    learned: Records | None = None,
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    seed: int = 0,
    fits: int = FITS,
    halves: int = HALVES,
    splits: int = SPLITS,
) -> dict[str, Any]:
    """The fields of a RoutingResult that depend on the records.

    Args:
        val: Records of held-out images.
        learned: Records of the training images, to fit routers on them too.
        groups: Class ids by group, reported separately.
        seed: Of halves, folds and routers.
        fits: Routers fitted for each target.
        halves: Random halves that each setting is calibrated on.
        splits: Random splits for compute at equal accuracy.

    Settings that the images do not allow are left out, as are routers without examples.
    """
    if val.rounds == 1:
        raise ValueError("a model of one round has no routing to measure; leave it out of the study.")
    _check_same_model(val, learned)
    settings = calibrate_within_reach(val)
    return {
        "rounds": measure_rounds(val),
        "frontier": measure_frontier(val),
        "settings": tuple(measure_settings(val, settings, halves=halves)),
        "groups": tuple(measure_groups(val, groups or {}, settings)),
        "matched": tuple(measure_matched(val, learned, fits=fits, seed=seed)),
        "abstention": tuple(measure_abstention(val)),
        "equal_accuracy": tuple(measure_equal_accuracy(val, learned, seed=seed, splits=splits)),
    }


def _check_same_model(val: Records, learned: Records | None) -> None:
    if learned is None:
        return
    if learned.header.weights != val.header.weights:
        raise ValueError("the two records are of different weights; evaluate one model on both splits.")
    both = np.intersect1d(learned.ids, val.ids)
    if len(both):
        raise ValueError(
            f"{len(both)} images are in both records, such as {both[0]}; evaluate the model on two splits."
        )


def measure_abstention(records: Records) -> list[RiskCurve]:
    """Risk and coverage of round 1, of the last round and at the near-lossless threshold."""
    curves = risk_coverage_curves(records)
    return [_thin(name, curves[name]) for name in ("round 1", f"round {records.rounds}", "routed")]


def _thin(name: str, curve: RiskCoverage) -> RiskCurve:
    """A hundred of its points, both ends included; the area is of all points."""
    rows = np.unique(np.linspace(0, len(curve.risk) - 1, CURVE_POINTS).round().astype(int))
    return RiskCurve(
        name=name,
        coverage=tuple(curve.coverage[rows].tolist()),
        risk=tuple(curve.risk[rows].tolist()),
        area=curve.area,
    )


def measure_equal_accuracy(
    val: Records, learned: Records | None, *, seed: int = 0, splits: int = SPLITS
) -> list[EqualAccuracy]:
    """Compute of each rule at the same allowed drop; thresholds from one part of ``val``, figures of another.

    Means over random splits, because a near-lossless threshold depends on a few images. Each split fits its own
    routers, on ``learned`` or, without it, on half of ``val``, which is then not used otherwise. Empty where routers
    have no examples.
    """
    try:
        tables = [_equal_accuracy_rows(val, learned, seed=one) for one in range(seed, seed + splits)]
    except OutOfReachError:
        return []
    return [_mean_row(rows) for rows in zip(*tables)]


def _equal_accuracy_rows(val: Records, learned: Records | None, *, seed: int) -> list[Row]:
    fitting, tested = (learned, val) if learned is not None else val.split(0.5, seed)
    unrecoverable = fit_on(fitting, target="unrecoverable", seed=seed)
    compared = rules(unrecoverable=unrecoverable, benefit=fit_on(fitting, target="benefit", seed=seed))
    table = equal_accuracy_table(tested, compared, seed=seed + 1)  # with the same seed, one part would be empty
    return list(table.rows)


def _mean_row(rows: Sequence[Row]) -> EqualAccuracy:
    def mean(key: str) -> float | None:
        known = [row[key] for row in rows if row[key] is not None]
        return round(float(np.mean(known)), 12) + 0.0 if known else None  # 0, and not a little less, for every round

    top1, gmacs, saving = mean("top1"), mean("gmacs_paper"), mean("saving")
    assert top1 is not None
    assert gmacs is not None
    assert saving is not None
    return EqualAccuracy(
        rule=rows[0]["rule"],
        splits=len(rows),
        drop=rows[0]["drop"],
        top1=top1,
        gmacs_paper=gmacs,
        saving=saving,
        given_up=mean("given_up_share"),
        given_up_wrong=_wrong_among_given_up(rows),
    )


def _wrong_among_given_up(rows: Sequence[Row]) -> float | None:
    """Over all given-up images, not a mean over splits, most of which give up few."""
    known = [(row["given_up_share"], row["given_up_wrong"]) for row in rows if row["given_up_wrong"] is not None]
    given_up = sum(share for share, _ in known)
    return float(sum(share * wrong for share, wrong in known) / given_up) if given_up else None
