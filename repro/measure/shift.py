"""The fields of a shift result: each round and each setting on corrupted images, beside the clean ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from progresvit.evaluation import Records, shift
from repro.formats import SeverityFrontier, ShiftedAt, ShiftedSet
from repro.measure.records import Thresholds, measure_frontier, measure_point
from repro.measure.settings import NEAR_LOSSLESS, calibrate_within_reach

SETTINGS = (NEAR_LOSSLESS, "drop-1")
"""Names of those that are measured under shift."""


def shift_settings(clean: Records) -> dict[str, Thresholds]:
    """Thresholds calibrated on clean images; none for a model of one round."""
    if clean.rounds == 1:
        return {}
    found = calibrate_within_reach(clean)
    return {name: found[name].threshold for name in SETTINGS if name in found}


def measure_shift(clean: Records, found: Mapping[str, Records], sets: Sequence[shift.ShiftedSet]) -> dict[str, Any]:
    """The fields of a ShiftResult that depend on the records.

    Args:
        clean: Records of the clean images, which are severity 0.
        found: Records by the names of the sets.
        sets: The plan of ``evaluation.shift``.
    """
    thresholds = shift_settings(clean)
    for one in sets:
        _check(one, clean, found[one.name])
    measured = [_measure_set(clean, None, 0, thresholds)]
    measured += [_measure_set(found[one.name], one.corruption, one.severity or 0, thresholds) for one in sets]
    pooled = {0: clean}
    for severity in sorted({one.severity for one in sets if one.severity is not None}):
        pooled[severity] = shift.pool({one.name: found[one.name] for one in sets if one.severity == severity})
    return {
        "gmacs_paper": tuple(clean.gmacs()),
        "sets": tuple(measured),
        "severities": tuple(
            SeverityFrontier(severity=severity, pictures=len(records), frontier=measure_frontier(records))
            for severity, records in pooled.items()
        ),
    }


def _measure_set(
    records: Records, corruption: str | None, severity: int, thresholds: Mapping[str, Thresholds]
) -> ShiftedSet:
    points = {name: measure_point(records, threshold) for name, threshold in thresholds.items()}
    return ShiftedSet(
        corruption=corruption,
        severity=severity,
        pictures=len(records),
        top1=tuple(records.correct.mean(axis=0).tolist()),
        at=tuple(
            ShiftedAt(setting=name, top1=point.top1, gmacs_paper=point.gmacs_paper, exit_shares=point.exit_shares)
            for name, point in points.items()
        ),
    )


def _check(one: shift.ShiftedSet, clean: Records, records: Records) -> None:
    if records.header.weights != clean.header.weights:
        raise ValueError(f"the records of {one.name} are of other weights than the clean ones; evaluate one model.")
    if _names(records) != _names(clean):
        raise ValueError(f"the records of {one.name} are of other images than the clean ones; evaluate the same.")


def _names(records: Records) -> list[str]:
    """Class and file name: ImageNet-C has corruption and severity in front of them."""
    return sorted("/".join(name.split("/")[-2:]) for name in records.ids.tolist())
