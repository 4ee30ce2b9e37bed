"""The tables of models under corruption, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from repro.compare import Difference, paired_difference
from repro.formats import FULL, ShiftedAt, ShiftedSet, ShiftResult, flags_of
from repro.shift_seeds import ShiftMean, ShiftTest, mean_setting, sets_of, verdict
from repro.tables import Row, gmacs, interval, percent, table


def mean_top1(result: ShiftResult, severity: int, place: int = FULL) -> float:
    """Top-1 of a round at a severity, mean over corruptions."""
    return float(np.mean([one.top1[place] for one in sets_of(result, severity)]))


def mean_at(result: ShiftResult, severity: int, setting: str) -> ShiftedAt | None:
    """A setting at a severity, mean over corruptions; None if not all have it."""
    return mean_setting(sets_of(result, severity), setting)


def refined_gain(result: ShiftResult, severity: int, setting: str) -> float:
    """Share of the images that continue after round 1 which later rounds turn from wrong to right, net of the reverse.

    At a setting, mean over corruptions.
    """
    at = mean_at(result, severity, setting)
    if at is None:
        raise ValueError(f"{result.name} has no setting {setting} at severity {severity}; measure it, or name another.")
    return (at.top1 - mean_top1(result, severity, 0)) / (1 - at.exit_shares[0])


def routed_change(result: ShiftResult, severity: int, setting: str) -> Difference:
    """Top-1 at a setting minus top-1 of the full path, mean over corruptions, with its 95 % interval over images."""
    routed, full = [], []
    for one in sets_of(result, severity):
        place = [at.setting for at in one.at].index(setting)
        if one.bits is None:
            raise ValueError(f"{result.name} has no answers image by image; delete its file and measure it again.")
        full.append(flags_of(one.bits[0], one.pictures))
        routed.append(flags_of(one.bits[1 + place], one.pictures))
    return paired_difference(np.mean(routed, axis=0), np.mean(full, axis=0))


def beyond_bound(result: ShiftResult, severity: int, setting: str) -> int:
    """Corruptions of a severity whose harm at a setting is above the bound that it guarantees for clean images."""
    found = [at for one in sets_of(result, severity) for at in one.at if at.setting == setting]
    return sum(at.harm > at.epsilon for at in found if at.harm is not None and at.epsilon is not None)


def severity_tables(models: Mapping[str, ShiftResult]) -> list[str]:
    """Accuracy and cost by severity, means over corruptions; at each severity one row per model."""
    settings = _settings(models)
    accuracy: list[Row] = []
    cost: list[Row] = []
    for severity in _severities(models):
        for label, result in models.items():
            name, model = str(severity or "clean"), label if len(models) > 1 else None
            found = [mean_at(result, severity, setting) for setting in settings]
            first = percent(mean_top1(result, severity, 0)) if len(result.gmacs_paper) > 1 else None
            tops = [percent(at.top1) if at else None for at in found]
            accuracy.append([name, model, first, percent(mean_top1(result, severity)), *tops])
            if any(found):
                costs = [f"{gmacs(at.gmacs_paper)} ({percent(at.exit_shares[0])} %)" if at else None for at in found]
                cost.append([name, model, *costs])
    heads = ["severity", "<model"]
    of_top1 = ["round 1 alone (%)", "full path (%)", *(f"{setting} (%)" for setting in settings)]
    made = [table("Top-1 by severity, mean over corruptions", [*heads, *of_top1], accuracy)]
    title = "GMACs by severity, and the share that exits after round 1, mean over corruptions"
    return [*made, table(title, [*heads, *settings], cost)] if cost else made


def corruption_tables(models: Mapping[str, ShiftResult]) -> list[str]:
    """A row for each corruption: top-1 of the full path, and of the first setting, at each severity."""
    made = [_corruption_table("Top-1 of the full path by corruption (%)", models, None)]
    for setting in _settings(models)[:1]:
        title = f"Top-1 by corruption at {setting}, calibrated on clean images (%)"
        made.append(_corruption_table(title, models, setting))
    return made


def harm_table(models: Mapping[str, ShiftResult]) -> str | None:
    """Share of images that early exit turns from right to wrong, by severity; None if it was not measured."""
    bounds = {
        at.setting: at.epsilon
        for result in models.values()
        for one in result.sets
        for at in one.at
        if at.harm is not None
    }
    if not bounds:
        return None
    rows: list[Row] = []
    for severity in _severities(models):
        for label, result in models.items():
            cells = [_harm(sets_of(result, severity), setting) for setting in bounds]
            if any(cells):
                rows.append([str(severity or "clean"), label if len(models) > 1 else None, *cells])
    heads = [name if bound is None else f"{name}, bound {100 * bound:g} %" for name, bound in bounds.items()]
    title = "Harm by severity (%): mean over corruptions, and the highest of any corruption"
    return table(title, ["severity", "<model", *heads], rows)


def _harm(sets: Sequence[ShiftedSet], setting: str) -> str | None:
    mean = mean_setting(sets, setting)
    if mean is None or mean.harm is None:
        return None
    if sets[0].corruption is None:
        return percent(mean.harm, 2)
    each = {one.corruption: at.harm for one in sets for at in one.at if at.setting == setting and at.harm is not None}
    worst = max(each, key=lambda corruption: each[corruption])
    return f"{percent(mean.harm, 2)}, {percent(each[worst], 2)} ({str(worst).replace('_', ' ')})"


def tests_table(tests: Sequence[ShiftTest], ours: str, theirs: str) -> str:
    """One model against another at each severity."""
    rows = [
        [
            str(one.severity or "clean"),
            f"{one.seeds} × {one.images:,}",
            _spent(one.full),
            _spent(one.budget) if one.budget else None,
            _spent(one.theirs),
            interval(one.full_difference, 2),
            verdict(one.full_difference),
            interval(one.budget_difference, 2) if one.budget_difference else None,
            verdict(one.budget_difference) if one.budget_difference else None,
        ]
        for one in tests
    ]
    heads = ["severity", "seeds × images", f"{ours}, full path", f"{ours}, at the budget", theirs]
    heads += ["full path, difference (points)", "<full path", "at the budget, difference (points)", "<at the budget"]
    title = f"{ours} minus {theirs}: top-1 (%) at average GMACs, mean over corruptions and seeds, and 95 % intervals"
    return table(title, heads, rows)


def _spent(mean: ShiftMean) -> str:
    return f"{percent(mean.top1, 2)} at {gmacs(mean.gmacs_paper)}"


def _corruption_table(title: str, models: Mapping[str, ShiftResult], setting: str | None) -> str:
    columns = [(label, severity) for label in models for severity in _severities(models) if severity]
    cells = {
        (one.corruption, label, one.severity): percent(top1)
        for label, result in models.items()
        for one in result.sets
        for top1 in ([one.top1[FULL]] if setting is None else [at.top1 for at in one.at if at.setting == setting])
    }
    kinds = dict.fromkeys(one.corruption for result in models.values() for one in result.sets if one.corruption)
    rows = [[kind.replace("_", " "), *(cells.get((kind, *column)) for column in columns)] for kind in kinds]
    several = len(models) > 1
    heads = [f"{label}, severity {severity}" if several else f"severity {severity}" for label, severity in columns]
    return table(title, ["<corruption", *heads], rows)


def _severities(models: Mapping[str, ShiftResult]) -> list[int]:
    return sorted({one.severity for result in models.values() for one in result.sets})


def _settings(models: Mapping[str, ShiftResult]) -> list[str]:
    return list(dict.fromkeys(at.setting for result in models.values() for one in result.sets for at in one.at))
