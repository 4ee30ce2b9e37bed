"""A model under corruption: each round and each setting on damaged pictures, beside the clean ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from progresvit.evaluation import shift
from progresvit.evaluation.records import Records
from progresvit.results.format_shift import SeverityFrontier, ShiftedAt, ShiftedSet
from progresvit.results.measure import Threshold, measure_frontier, measure_point
from progresvit.results.measure_settings import NEAR_LOSSLESS, calibrate_within_reach

SETTINGS = (NEAR_LOSSLESS, "drop-1")
"""Those that are followed under shift, by name."""


def shift_settings(clean: Records) -> dict[str, Threshold]:
    """Thresholds of clean pictures, near-lossless and a certified point; none for a model of one round."""
    if clean.rounds == 1:
        return {}
    found = calibrate_within_reach(clean)
    return {name: found[name].threshold for name in SETTINGS if name in found}


def measure_shift(
    clean: Records,
    found: Mapping[str, Records],
    sets: Sequence[shift.ShiftedSet],
    settings: Mapping[str, Threshold] | None = None,
) -> dict[str, Any]:
    """The fields of a ShiftResult that pictures decide, by their names.

    ``sets`` is the plan of ``evaluation.shift`` and ``found`` its records by the sets' names. Unless ``settings`` are
    given, their thresholds are calibrated on the clean pictures. Severity 0 are the clean pictures.
    """
    thresholds = shift_settings(clean) if settings is None else settings
    for one in sets:
        _check(one, clean, found)
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
    records: Records, corruption: str | None, severity: int, thresholds: Mapping[str, Threshold]
) -> ShiftedSet:
    at = []
    for name, threshold in thresholds.items():
        point = measure_point(records, threshold)
        at.append(
            ShiftedAt(setting=name, top1=point.top1, gmacs_paper=point.gmacs_paper, exit_shares=point.exit_shares)
        )
    return ShiftedSet(
        corruption=corruption,
        severity=severity,
        pictures=len(records),
        top1=tuple(records.correct.mean(axis=0).tolist()),
        at=tuple(at),
    )


def _check(one: shift.ShiftedSet, clean: Records, found: Mapping[str, Records]) -> None:
    if one.corruption is None or not one.severity:
        raise ValueError(f"{one.name} has no corruption and severity; plan sets of the suite generated or imagenet-c.")
    if one.name not in found:
        raise ValueError(f"there are no records of {one.name}; evaluate it, or leave it out of the sets.")
    records = found[one.name]
    if records.header.weights != clean.header.weights:
        raise ValueError(f"the records of {one.name} are of other weights than the clean ones; evaluate one model.")
    if _pictures(records) != _pictures(clean):
        raise ValueError(f"the records of {one.name} are of other pictures than the clean ones; evaluate the same.")


def _pictures(records: Records) -> list[str]:
    """Class and file name: ImageNet-C has corruption and severity in front of them."""
    return sorted("/".join(name.split("/")[-2:]) for name in records.ids.tolist())
