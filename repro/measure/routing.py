"""The fields of a routing result: one model's thresholds, routers and withheld answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit.evaluation import Records
from progresvit.evaluation.iso_accuracy import DROPS, RefinementRule, equal_accuracy_table, rules
from progresvit.evaluation.routers import fit_on
from progresvit.evaluation.selective import RiskCoverage, risk_coverage_curves
from progresvit.routing.calibrate import OutOfReachError
from progresvit.routing.decide import exit_or_reject
from progresvit.table import Row
from repro.formats import EqualAccuracy, RiskCurve, Spread
from repro.measure.certificates import DRAWS
from repro.measure.records import measure_frontier, measure_rounds
from repro.measure.routers import FITS, gain_interval, measure_matched, measure_rejection
from repro.measure.settings import (
    HALVES,
    MAX_ERROR,
    calibrate_within_reach,
    calibrations,
    label_free_calibrations,
    measure_groups,
    measure_settings,
)

CURVE_POINTS = 100
SPLITS = 20
"""Random splits of the images, for compute at equal accuracy."""

Added = dict[tuple[str, float], NDArray[np.float32]]
"""What rejection adds for each reported image, by rule and allowed drop: errors and saving, (N, 2)."""


def measure_routing(
    val: Records,
    learned: Records | None = None,
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    max_error: float = MAX_ERROR,
    seed: int = 0,
    fits: int = FITS,
    halves: int = HALVES,
    draws: int = DRAWS,
    splits: int = SPLITS,
) -> dict[str, Any]:
    """The fields of a RoutingResult that depend on the records.

    Args:
        val: Records of held-out images.
        learned: Records of the training images, to fit routers on them too.
        groups: Class ids by group, reported separately.
        max_error: Error rate among answered images at which the others are withheld.
        seed: Of halves, folds and routers.
        fits: Routers fitted for each target.
        halves: Random halves that each setting is calibrated on.
        draws: Bootstrap draws that check each guarantee.
        splits: Random splits for compute at equal accuracy.

    Settings that the images do not allow are left out, as are routers without examples.
    """
    if val.rounds == 1:
        raise ValueError("a model of one round has no routing to measure; leave it out of the study.")
    _check_same_model(val, learned)
    by_name = calibrations(max_error)
    settings = measure_settings(val, by_name | label_free_calibrations(), halves=halves, draws=draws)
    return {
        "rounds": measure_rounds(val),
        "frontier": measure_frontier(val),
        "max_error": max_error,
        "settings": tuple(settings),
        "groups": tuple(measure_groups(val, groups or {}, calibrate_within_reach(val, by_name))),
        "matched": tuple(measure_matched(val, learned, fits=fits, seed=seed)),
        "abstention": tuple(measure_abstention(val)),
        "equal_accuracy": tuple(measure_equal_accuracy(val, seed=seed, splits=splits)),
        "rejection": tuple(measure_rejection(val, fits=fits, seed=seed)),
    }


def _check_same_model(val: Records, learned: Records | None) -> None:
    if learned is None:
        return
    if learned.header.weights_sha256 != val.header.weights_sha256:
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


def measure_equal_accuracy(val: Records, *, seed: int = 0, splits: int = SPLITS) -> list[EqualAccuracy]:
    """Compute of each rule at the same allowed drop, and what giving up adds to errors and saving.

    Each split divides ``val`` into three parts at random: routers are fitted on the first, thresholds are chosen on the
    second, and figures are of the third. Training images would not do: a model has nearly all of them right, so they
    show few unrecoverable ones. Figures are means over splits, because a near-lossless threshold depends on a few
    images. Empty where routers have no examples.
    """
    try:
        measured = [_measure_split(val, seed=number) for number in range(seed, seed + splits)]
    except OutOfReachError:
        return []
    means = [_mean_row(rows) for rows in zip(*(rows for rows, _, _ in measured))]
    added = _added([(reported, added) for _, reported, added in measured], seed=seed)
    return [mean.model_copy(update=added.get((mean.rule, mean.drop), {})) for mean in means]


def _measure_split(val: Records, *, seed: int) -> tuple[list[Row], NDArray[np.bool_], Added]:
    """The rows, which images they report on, (N,), and what giving up adds on these."""
    fitting, others = val.split(1 / 3, seed)
    unrecoverable = fit_on(fitting, target="unrecoverable", seed=seed)
    compared = rules(unrecoverable=unrecoverable, benefit=fit_on(fitting, target="benefit", seed=seed))
    assert not unrecoverable.count_seen(others.ids)
    rows = list(equal_accuracy_table(others, compared, seed=seed + 1).rows)  # with the same seed, parts would be empty
    _, report = others.split(0.5, seed + 1)  # as the table does
    chosen = {(row["rule"], row["drop"]): row for row in rows}
    added = {}
    for keeping_on, giving_up in zip(compared[::2], compared[1::2]):
        for drop in DROPS:
            without, with_it = (_outcomes(report, rule, chosen[rule.name, drop]) for rule in (keeping_on, giving_up))
            added[giving_up.name, drop] = with_it - without
    return rows, np.isin(val.ids, report.ids), added


def _outcomes(report: Records, rule: RefinementRule, row: Row) -> NDArray[np.float32]:
    """Whether each image is wrong at a row's thresholds, and the share of compute that is saved: (N, 2)."""
    chances = None if rule.unrecoverable is None else rule.unrecoverable.scores(report.statistics)
    limit = np.inf if row["unrecoverable_from"] is None else row["unrecoverable_from"]
    rounds, _ = exit_or_reject(report.scores(rule.router), chances, row["threshold"], limit)
    gmacs = np.array(report.gmacs())
    wrong = ~report.correct[np.arange(len(report)), rounds]
    return np.stack([wrong, 1 - gmacs[rounds] / gmacs[-1]], axis=1).astype(np.float32)


def _added(
    splits: Sequence[tuple[NDArray[np.bool_], Added]], *, seed: int
) -> dict[tuple[str, float | None], dict[str, Spread]]:
    """Means of what giving up adds, with 95 % intervals over images and splits."""
    found: dict[tuple[str, float | None], dict[str, Spread]] = {}
    for key in splits[0][1]:
        gains = np.zeros((len(splits), len(splits[0][0]), 2), np.float32)  # images that are not reported on add nothing
        for number, (reported, added) in enumerate(splits):
            gains[number, reported] = added[key] / reported.mean()
        ends = zip(gains.mean(axis=(0, 1), dtype=np.float64), *gain_interval(gains, seed=seed))
        errors, saving = (Spread(mean=float(mean), lowest=float(low), highest=float(high)) for mean, low, high in ends)
        found[key] = {"errors_added": errors, "saving_added": saving}
    return found


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
    """Share over all given-up images; most splits give up few, so a mean over splits would be unreliable."""
    known = [(row["given_up_share"], row["given_up_wrong"]) for row in rows if row["given_up_wrong"] is not None]
    given_up = sum(share for share, _ in known)
    return float(sum(share * wrong for share, wrong in known) / given_up) if given_up else None
