"""The fields of a shift result: each round and each setting on corrupted images, beside the clean ones.

Letters: N images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit.evaluation import Records, shift
from progresvit.routing.calibrate import threshold_for_budget
from progresvit.routing.decide import exit_rounds
from repro.formats import BUDGET, SeverityFrontier, ShiftedAt, ShiftedSet, ShiftResult, budget_setting
from repro.measure.records import Thresholds, measure_frontier, measure_point
from repro.measure.settings import DROPS, NEAR_LOSSLESS, calibrate_within_reach

SETTINGS = (NEAR_LOSSLESS, *DROPS)
"""Names of the settings that are measured under shift."""


@dataclass(frozen=True, kw_only=True)
class ShiftSetting:
    """A threshold that is measured under shift."""

    threshold: Thresholds
    epsilon: float | None = None
    """Its guaranteed bound."""
    follows_severity: bool = False
    """Chosen at each severity by a budget, not on clean images."""


def shift_settings(clean: Records) -> dict[str, ShiftSetting]:
    """Settings calibrated on clean images; none for a model of one round or of rounds that are alternatives."""
    if clean.rounds == 1 or not clean.header.routable:
        return {}
    reached = calibrate_within_reach(clean)
    return {
        name: ShiftSetting(threshold=reached[name].threshold, epsilon=reached[name].epsilon)
        for name in SETTINGS
        if name in reached
    }


def has_budget(result: ShiftResult, budget: float | None) -> bool:
    """Whether a result was measured with this budget, or is of a model that is not routed."""
    routed = len(result.gmacs_paper) > 1 and all(of_severity.frontier for of_severity in result.severities)
    measured = {at.setting for shifted in result.sets for at in shifted.at if at.setting.startswith(BUDGET)}
    return not routed or measured == (set() if budget is None else {budget_setting(budget)})


def measure_shift(
    clean: Records,
    found: Mapping[str, Records],
    sets: Sequence[shift.ShiftedSet],
    budget: float | None = None,
) -> dict[str, Any]:
    """The fields of a ShiftResult that depend on the records.

    Args:
        clean: Records of the clean images, which are severity 0.
        found: Records by the names of the sets.
        sets: The plan of ``evaluation.shift``.
        budget: Average GMACs that a threshold, chosen at each severity without labels, keeps to; None: no such setting.
    """
    for planned in sets:
        _check(planned, clean, found[planned.name])
    pooled = {0: clean}
    for severity in sorted({planned.severity for planned in sets if planned.severity is not None}):
        names = [planned.name for planned in sets if planned.severity == severity]
        pooled[severity] = shift.pool({name: found[name] for name in names})
    settings = {severity: shift_settings(clean) for severity in pooled}
    if budget is not None and clean.rounds > 1 and clean.header.routable:
        for severity, records in pooled.items():
            threshold = threshold_for_budget(records.scores(), records.gmacs(), budget)
            settings[severity][budget_setting(budget)] = ShiftSetting(threshold=threshold, follows_severity=True)
    measured = [_measure_set(clean, None, 0, settings[0])]
    for planned in sets:
        severity = planned.severity or 0
        measured.append(_measure_set(found[planned.name], planned.corruption, severity, settings[severity]))
    return {
        "gmacs_paper": tuple(clean.gmacs()),
        "sets": tuple(measured),
        "severities": tuple(
            SeverityFrontier(severity=severity, pictures=len(records), frontier=measure_frontier(records))
            for severity, records in pooled.items()
        ),
    }


def _measure_set(
    records: Records, corruption: str | None, severity: int, settings: Mapping[str, ShiftSetting]
) -> ShiftedSet:
    order = np.argsort(records.ids, kind="stable")
    last = records.correct[:, -1]  # (N,)
    at, bits = [], [last[order]]
    for name, setting in settings.items():
        point, right = measure_point(records, setting.threshold), _routed(records, setting.threshold)
        at.append(
            ShiftedAt(
                setting=name,
                top1=point.top1,
                gmacs_paper=point.gmacs_paper,
                exit_shares=point.exit_shares,
                harm=None if setting.follows_severity else float((last & ~right).mean()),
                epsilon=setting.epsilon,
            )
        )
        bits.append(right[order])
    return ShiftedSet(
        corruption=corruption,
        severity=severity,
        pictures=len(records),
        top1=tuple(records.correct.mean(axis=0).tolist()),
        at=tuple(at),
        bits=tuple(bits),
    )


def _routed(records: Records, threshold: Thresholds) -> NDArray[np.bool_]:
    """Whether the answer of the round in which each image exits is right: (N,)."""
    rounds = exit_rounds(records.scores(), threshold)
    return records.correct[np.arange(len(records)), rounds]


def _check(planned: shift.ShiftedSet, clean: Records, records: Records) -> None:
    if records.header.weights_sha256 != clean.header.weights_sha256:
        raise ValueError(f"the records of {planned.name} are of other weights than the clean ones; evaluate one model.")
    if _names(records) != _names(clean):
        raise ValueError(f"the records of {planned.name} are of other images than the clean ones; evaluate the same.")


def _names(records: Records) -> list[str]:
    """Class and file name: ImageNet-C has corruption and severity in front of them."""
    return sorted("/".join(name.split("/")[-2:]) for name in records.ids.tolist())
