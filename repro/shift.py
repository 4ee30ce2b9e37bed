"""Models under corruption, as a long table: a row for each seed, corruption, severity and setting.

Tables show means of rows.

Letters: K seeds, N images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro.compare import CrossedDifference, Difference, crossed_difference, paired_difference
from repro.formats import FULL, Results, ShiftResult, budget_setting, check_comparable, flags_of
from repro.outcomes import verdict_of
from repro.study import Study
from repro.tables import Row, gmacs, interval, percent, table

FULL_PATH, ROUND_1 = "the full path", "round 1"
"""Settings of every model, beside the calibrated ones. A model of one round has the first alone."""

Seeds = tuple[ShiftResult, ...]
"""The results of a model, one for each of its seeds."""
Models = Mapping[str, Seeds]


@dataclass(frozen=True, kw_only=True)
class ShiftRow:
    """A model on the images under a corruption; severity 0 is the clean images. Or a mean of such rows."""

    name: str
    """The measurement."""
    corruption: str | None
    severity: int
    setting: str
    top1: float
    gmacs_paper: float
    exit_shares: tuple[float, ...] | None = None
    """Share of the images that exit after each round; None for the full path and round 1."""
    harm: float | None = None
    """Share of the images that the full path has right and the routed answer has wrong."""
    epsilon: float | None = None
    """The bound on harm that the setting guarantees for clean images."""
    right: NDArray[np.bool_] | None = None
    """Which answers are right, (N,); None for round 1, for means and in files of earlier versions."""


def rows_of(model: ShiftResult | Seeds, severity: int, setting: str) -> list[ShiftRow]:
    """A row for each seed and corruption."""
    results = (model,) if isinstance(model, ShiftResult) else model
    return [row for result in results for row in _rows(result) if (row.severity, row.setting) == (severity, setting)]


def _rows(result: ShiftResult) -> list[ShiftRow]:
    rows = []
    for shifted in result.sets:
        columns: dict[str, dict[str, Any]]
        columns = {FULL_PATH: {"top1": shifted.top1[FULL], "gmacs_paper": result.gmacs_paper[FULL]}}
        columns |= {at.setting: at.model_dump(exclude={"setting"}) for at in shifted.at}
        for values, bits in zip(columns.values(), shifted.bits or ()):
            values["right"] = flags_of(bits, shifted.pictures)
        if len(result.gmacs_paper) > 1:
            columns[ROUND_1] = {"top1": shifted.top1[0], "gmacs_paper": result.gmacs_paper[0]}
        kind, severity = shifted.corruption, shifted.severity
        rows += [
            ShiftRow(name=result.name, corruption=kind, severity=severity, setting=setting, **values)
            for setting, values in columns.items()
        ]
    return rows


def _mean(rows: Sequence[ShiftRow]) -> ShiftRow:
    harms = [row.harm for row in rows if row.harm is not None]
    exits = [row.exit_shares for row in rows if row.exit_shares is not None]
    return replace(
        rows[0],
        top1=float(np.mean([row.top1 for row in rows])),
        gmacs_paper=float(np.mean([row.gmacs_paper for row in rows])),
        exit_shares=tuple(np.mean(exits, axis=0).tolist()) if exits else None,
        harm=float(np.mean(harms)) if len(harms) == len(rows) else None,
        right=None,
    )


def by_corruption(model: ShiftResult | Seeds, severity: int, setting: str) -> dict[str | None, ShiftRow]:
    """A setting under each corruption, mean over seeds; empty if a seed or a corruption does not have it."""
    rows = rows_of(model, severity, setting)
    if len(rows) < len(rows_of(model, severity, FULL_PATH)):
        return {}
    kinds = dict.fromkeys(row.corruption for row in rows)
    return {kind: _mean([row for row in rows if row.corruption == kind]) for kind in kinds}


def mean_at(model: ShiftResult | Seeds, severity: int, setting: str) -> ShiftRow | None:
    """A setting at a severity, mean over corruptions; None if not all have it."""
    rows = by_corruption(model, severity, setting)
    return _mean(list(rows.values())) if rows else None


def mean_top1(model: ShiftResult | Seeds, severity: int, setting: str = FULL_PATH) -> float:
    """Top-1 of the full path or of round 1 at a severity, mean over corruptions."""
    return _mean(list(by_corruption(model, severity, setting).values())).top1


def refined_gain(result: ShiftResult, severity: int, setting: str) -> float:
    """Share of the images that continue after round 1 which later rounds turn from wrong to right, net of the reverse.

    At a setting, mean over corruptions.
    """
    routed = mean_at(result, severity, setting)
    if routed is None:
        raise ValueError(f"{result.name} has no setting {setting} at severity {severity}; measure it, or name another.")
    return (routed.top1 - mean_top1(result, severity, ROUND_1)) / (1 - _exits(routed))


def routed_change(result: ShiftResult, severity: int, setting: str) -> Difference:
    """Top-1 at a setting minus top-1 of the full path, mean over corruptions, with its 95 % interval over images."""
    routed, full = (correct_of((result,), severity, name)[0] for name in (setting, FULL_PATH))
    return paired_difference(routed, full)


def beyond_bound(result: ShiftResult, severity: int, setting: str) -> int:
    """Corruptions of a severity whose harm at a setting is above the bound that it guarantees for clean images."""
    rows = rows_of(result, severity, setting)
    return sum(row.harm > row.epsilon for row in rows if row.harm is not None and row.epsilon is not None)


def correct_of(seeds: Seeds, severity: int, setting: str) -> NDArray[np.float64]:
    """Share of the corruptions under which each image is right: (K, N)."""
    table = []
    for result in seeds:
        right = [row.right for row in rows_of(result, severity, setting) if row.right is not None]
        if len(right) < len(rows_of(result, severity, FULL_PATH)):
            raise ValueError(f"{result.name} does not say which images are right at {setting}; measure again.")
        table.append(np.mean(right, axis=0))
    return np.stack(table)


def severities_of(models: Models) -> list[int]:
    """All severities, with 0 for the clean images."""
    return sorted({shifted.severity for seeds in models.values() for result in seeds for shifted in result.sets})


def settings_of(models: Models) -> list[str]:
    """The calibrated settings of any model."""
    sets = [shifted for seeds in models.values() for result in seeds for shifted in result.sets]
    return list(dict.fromkeys(at.setting for shifted in sets for at in shifted.at))


def gather_shift(results: Results, study: Study, key: str) -> tuple[dict[str, Seeds], list[str]]:
    """The models of a shift entry that were measured, by name, and what was not; refused if they do not compare."""
    measured: dict[str, Seeds] = {}
    missing: list[str] = []
    for model in study.shift[key].models:
        for seed in study.shift_seeds(key, model):
            result = results.shift.get(study.shift_name(key, model, seed))
            if result is None:
                missing.append(model if seed is None else f"seed {seed} of {model}")
                continue
            if seed is not None and (result.model, result.seed) != (model, seed):
                raise ValueError(
                    f"{result.name} is of seed {result.seed} of {result.model}, not of seed {seed} of {model}; measure "
                    "it again."
                )
            measured[model] = (*measured.get(model, ()), result)
    everyone = [result for seeds in measured.values() for result in seeds]
    check_comparable(everyone, f"the shift entry {key}")
    if len({frozenset((shifted.corruption, shifted.severity) for shifted in result.sets) for result in everyone}) > 1:
        names = ", ".join(measured)
        raise ValueError(f"the shift entry {key} compares models under different corruptions: {names}.")
    for model, seeds in measured.items():
        if len({result.weights for result in seeds}) < len(seeds):
            raise ValueError(f"the shift entry {key} has two seeds of {model} with the same weights; measure again.")
    return measured, missing


@dataclass(frozen=True, kw_only=True)
class ShiftTest:
    """One model against another at a severity, paired by seed and by image.

    The corruptions are fixed: intervals cover other seeds and other images, not other corruptions.
    """

    severity: int
    seeds: int
    images: int
    full: ShiftRow
    """Our full path, mean over corruptions and seeds, as are the other two."""
    budget: ShiftRow | None
    """Ours at the study's budget; None without one, and for a model of one round."""
    theirs: ShiftRow
    """Their last round."""
    full_difference: CrossedDifference
    budget_difference: CrossedDifference | None


def gather_shift_tests(results: Results, study: Study, key: str, ours: str, theirs: str) -> list[ShiftTest]:
    """A test for each severity of a shift entry with seeds; refused if a seed is missing."""
    shift = study.shift[key]
    for model in (ours, theirs):
        if shift.seeds is None or model not in study.runs or model not in shift.models:
            raise ValueError(
                f"the shift entry {key} has no seeds of {model}; give the entry seeds, and a run among its models."
            )
    measured, missing = gather_shift(results, study, key)
    lacking = [what for what in missing if what.endswith((f" of {ours}", f" of {theirs}"))]
    if lacking:
        raise ValueError(f"the shift entry {key} lacks {', '.join(lacking)}; measure every seed before comparing.")
    setting = None if shift.budget is None else budget_setting(shift.budget)
    severities = severities_of({ours: measured[ours]})
    return [_test(severity, measured[ours], measured[theirs], setting) for severity in severities]


def _test(severity: int, ours: Seeds, theirs: Seeds, setting: str | None) -> ShiftTest:
    full, plain = (correct_of(seeds, severity, FULL_PATH) for seeds in (ours, theirs))
    budget = setting if setting is not None and len(ours[0].gmacs_paper) > 1 else None
    return ShiftTest(
        severity=severity,
        seeds=len(ours),
        images=full.shape[1],
        full=_mean(rows_of(ours, severity, FULL_PATH)),
        budget=_mean(rows_of(ours, severity, budget)) if budget else None,
        theirs=_mean(rows_of(theirs, severity, FULL_PATH)),
        full_difference=crossed_difference(full, plain),
        budget_difference=crossed_difference(correct_of(ours, severity, budget), plain) if budget else None,
    )


def severity_tables(models: Models) -> list[str]:
    """Accuracy and cost by severity, means over corruptions; at each severity one row per model."""
    settings = settings_of(models)
    accuracy: list[Row] = []
    cost: list[Row] = []
    for severity in severities_of(models):
        for label, seeds in models.items():
            start = [str(severity or "clean"), label if len(models) > 1 else None]
            means = [mean_at(seeds, severity, setting) for setting in (ROUND_1, FULL_PATH, *settings)]
            accuracy.append([*start, *(percent(row.top1) if row else None for row in means)])
            if any(means[2:]):
                costs = [f"{gmacs(at.gmacs_paper)} ({percent(_exits(at))} %)" if at else None for at in means[2:]]
                cost.append([*start, *costs])
    heads = ["severity", "<model"]
    of_top1 = ["round 1 alone (%)", "full path (%)", *(f"{setting} (%)" for setting in settings)]
    made = [table("Top-1 by severity, mean over corruptions", [*heads, *of_top1], accuracy)]
    title = "GMACs by severity, and the share that exits after round 1, mean over corruptions"
    return [*made, table(title, [*heads, *settings], cost)] if cost else made


def _exits(row: ShiftRow) -> float:
    """Share of the images that exit after round 1, at a calibrated setting."""
    assert row.exit_shares is not None
    return row.exit_shares[0]


def corruption_tables(models: Models) -> list[str]:
    """A row for each corruption: top-1 of the full path, and of the first setting, at each severity."""
    made = [_corruption_table("Top-1 of the full path by corruption (%)", models, FULL_PATH)]
    for setting in settings_of(models)[:1]:
        title = f"Top-1 by corruption at {setting}, calibrated on clean images (%)"
        made.append(_corruption_table(title, models, setting))
    return made


def _corruption_table(title: str, models: Models, setting: str) -> str:
    severities = [severity for severity in severities_of(models) if severity]
    columns = [(label, severity) for label in models for severity in severities]
    means = [by_corruption(models[label], severity, setting) for label, severity in columns]
    kinds = dict.fromkeys(kind for mean in means for kind in mean)
    cells = [[percent(mean[kind].top1) if kind in mean else None for mean in means] for kind in kinds]
    rows = [[str(kind).replace("_", " "), *row] for kind, row in zip(kinds, cells)]
    several = len(models) > 1
    heads = [f"{label}, severity {severity}" if several else f"severity {severity}" for label, severity in columns]
    return table(title, ["<corruption", *heads], rows)


def harm_table(models: Models) -> str | None:
    """Share of images that early exit turns from right to wrong, by severity; None if it was not measured."""
    every = [row for seeds in models.values() for result in seeds for row in _rows(result)]
    bounds = {row.setting: row.epsilon for row in every if row.harm is not None}
    if not bounds:
        return None
    rows: list[Row] = []
    for severity in severities_of(models):
        for label, seeds in models.items():
            cells = [_harm(seeds, severity, setting) for setting in bounds]
            if any(cells):
                rows.append([str(severity or "clean"), label if len(models) > 1 else None, *cells])
    heads = [name if bound is None else f"{name}, bound {100 * bound:g} %" for name, bound in bounds.items()]
    title = "Harm by severity (%): mean over corruptions, and the highest of any corruption"
    return table(title, ["severity", "<model", *heads], rows)


def _harm(seeds: Seeds, severity: int, setting: str) -> str | None:
    mean = mean_at(seeds, severity, setting)
    if mean is None or mean.harm is None:
        return None
    if mean.corruption is None:
        return percent(mean.harm, 2)
    harms = {kind: row.harm or 0.0 for kind, row in by_corruption(seeds, severity, setting).items()}
    worst = max(harms, key=lambda kind: harms[kind])
    return f"{percent(mean.harm, 2)}, {percent(harms[worst], 2)} ({str(worst).replace('_', ' ')})"


def differences_table(tests: Sequence[ShiftTest], ours: str, theirs: str) -> str:
    """One model against another at each severity."""
    rows = [
        [
            str(test.severity or "clean"),
            f"{test.seeds} × {test.images:,}",
            _spent(test.full),
            _spent(test.budget) if test.budget else None,
            _spent(test.theirs),
            interval(test.full_difference, 2),
            verdict_of(test.full_difference),
            interval(test.budget_difference, 2) if test.budget_difference else None,
            verdict_of(test.budget_difference) if test.budget_difference else None,
        ]
        for test in tests
    ]
    heads = ["severity", "seeds × images", f"{ours}, full path", f"{ours}, at the budget", theirs]
    heads += ["full path, difference (points)", "<full path", "at the budget, difference (points)", "<at the budget"]
    title = f"{ours} minus {theirs}: top-1 (%) at average GMACs, mean over corruptions and seeds, and 95 % intervals"
    return table(title, heads, rows)


def _spent(mean: ShiftRow) -> str:
    return f"{percent(mean.top1, 2)} at {gmacs(mean.gmacs_paper)}"
