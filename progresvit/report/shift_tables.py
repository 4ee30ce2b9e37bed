"""The tables of models under corruption: by severity, and by corruption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from progresvit.evaluation.table import Column, Row, Table
from progresvit.report.wording import gmacs, percent
from progresvit.results.format_shift import ShiftedSet, ShiftResult


def severity_name(severity: int) -> str:
    """Severity 0 is no corruption at all."""
    return str(severity) if severity else "clean"


def sets_of(result: ShiftResult, severity: int) -> list[ShiftedSet]:
    """All corruptions of a severity."""
    return [one for one in result.sets if one.severity == severity]


def severities_of(models: Mapping[str, ShiftResult]) -> list[int]:
    """In order, the clean pictures first."""
    return sorted({one.severity for result in models.values() for one in result.sets})


def settings_of(models: Mapping[str, ShiftResult]) -> list[str]:
    """That any model was measured at, in order."""
    return list(dict.fromkeys(at.setting for result in models.values() for one in result.sets for at in one.at))


def mean_top1(sets: Sequence[ShiftedSet], place: int) -> float:
    """Of a round, mean over sets."""
    return float(np.mean([one.top1[place] for one in sets]))


def mean_at(sets: Sequence[ShiftedSet], setting: str) -> dict[str, float] | None:
    """Top-1, GMACs and the share that leaves after round 1 at a setting, means over sets; None if not all have it."""
    found = [at for one in sets for at in one.at if at.setting == setting]
    if len(found) < len(sets) or not found:
        return None
    return {
        "top1": float(np.mean([at.top1 for at in found])),
        "gmacs": float(np.mean([at.gmacs_paper for at in found])),
        "exit1": float(np.mean([at.exit_shares[0] for at in found])),
    }


def severity_tables(models: Mapping[str, ShiftResult]) -> list[Table]:
    """Accuracy and cost by severity, means over the corruptions; models under each other at each severity."""
    settings = settings_of(models)
    accuracy: list[Row] = []
    cost: list[Row] = []
    for severity in severities_of(models):
        for label, result in models.items():
            sets = sets_of(result, severity)
            if not sets:
                continue
            row: Row = {"severity": severity_name(severity), "model": label if len(models) > 1 else None}
            several = len(result.gmacs_paper) > 1
            found = {setting: mean_at(sets, setting) for setting in settings}
            accuracy.append(
                row
                | {"round1": mean_top1(sets, 0) if several else None, "full": mean_top1(sets, -1)}
                | {setting: at and at["top1"] for setting, at in found.items()}
            )
            if any(found.values()):
                cost.append(row | {setting: at and (at["gmacs"], at["exit1"]) for setting, at in found.items()})
    heads = [Column("severity", "severity"), Column("model", "model", left=True)]
    tops = [Column("round1", "round 1 alone (%)", percent), Column("full", "full path (%)", percent)]
    tops += [Column(setting, f"{setting} (%)", percent) for setting in settings]
    made = [Table("Top-1 by severity, mean over corruptions", [*heads, *tops], accuracy)]
    if cost:
        costs = [Column(setting, setting, _cost) for setting in settings]
        title = "GMACs by severity, and the share that leaves after round 1, mean over corruptions"
        made.append(Table(title, [*heads, *costs], cost))
    return made


def _cost(pair: tuple[float, float]) -> str:
    return f"{gmacs(pair[0])} ({percent(pair[1])} %)"


def corruption_tables(models: Mapping[str, ShiftResult]) -> list[Table]:
    """A row for each corruption: top-1 of the full path, and of the first setting, at each severity."""
    severities = [severity for severity in severities_of(models) if severity]
    kinds = dict.fromkeys(one.corruption for result in models.values() for one in result.sets if one.corruption)
    made = [_corruption_table("Top-1 of the full path by corruption (%)", models, list(kinds), severities, None)]
    for setting in settings_of(models)[:1]:
        title = f"Top-1 by corruption at {setting}, calibrated on clean pictures (%)"
        made.append(_corruption_table(title, models, list(kinds), severities, setting))
    return made


def _corruption_table(
    title: str, models: Mapping[str, ShiftResult], kinds: Sequence[str], severities: Sequence[int], setting: str | None
) -> Table:
    cells = {
        (label, one.corruption, one.severity): _top1(one, setting)
        for label, result in models.items()
        for one in result.sets
    }
    rows: list[Row] = [
        {"corruption": kind.replace("_", " ")}
        | {f"{label}/{severity}": cells.get((label, kind, severity)) for label in models for severity in severities}
        for kind in kinds
    ]
    columns = [Column("corruption", "corruption", left=True)] + [
        Column(f"{label}/{severity}", _head(label, severity, len(models) > 1), percent)
        for label in models
        for severity in severities
    ]
    return Table(title, columns, rows)


def _head(label: str, severity: int, several: bool) -> str:
    return f"{label}, severity {severity}" if several else f"severity {severity}"


def _top1(one: ShiftedSet, setting: str | None) -> float | None:
    if setting is None:
        return one.top1[-1]
    return next((at.top1 for at in one.at if at.setting == setting), None)
