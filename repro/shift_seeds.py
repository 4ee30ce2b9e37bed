"""Models under corruption over several seeds: their mean, and the difference of two models at each severity.

Letters: K seeds, N images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from repro.compare import CrossedDifference, Difference, crossed_difference
from repro.formats import (
    FULL,
    Results,
    ShiftedAt,
    ShiftedSet,
    ShiftResult,
    budget_setting,
    check_comparable,
    flags_of,
)
from repro.outcomes import GAIN, LOSS, UNKNOWN
from repro.study import Study

Seeds = tuple[ShiftResult, ...]
"""The results of a model, one for each of its seeds."""


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
    if len({frozenset((one.corruption, one.severity) for one in result.sets) for result in everyone}) > 1:
        names = ", ".join(measured)
        raise ValueError(f"the shift entry {key} compares models under different corruptions: {names}.")
    for model, seeds in measured.items():
        if len({result.weights for result in seeds}) < len(seeds):
            raise ValueError(f"the shift entry {key} has two seeds of {model} with the same weights; measure again.")
    return measured, missing


def sets_of(result: ShiftResult, severity: int) -> list[ShiftedSet]:
    """All corruptions of a severity; severity 0 is the clean images."""
    return [one for one in result.sets if one.severity == severity]


def mean_setting(sets: Sequence[ShiftedSet], setting: str) -> ShiftedAt | None:
    """A setting, mean over sets; None if not all have it."""
    found = [at for one in sets for at in one.at if at.setting == setting]
    if len(found) < len(sets) or not found:
        return None
    harms = [at.harm for at in found if at.harm is not None]
    return ShiftedAt(
        setting=setting,
        top1=float(np.mean([at.top1 for at in found])),
        gmacs_paper=float(np.mean([at.gmacs_paper for at in found])),
        exit_shares=tuple(np.mean([at.exit_shares for at in found], axis=0).tolist()),
        harm=float(np.mean(harms)) if len(harms) == len(found) else None,
        epsilon=found[0].epsilon,
    )


def mean_over_seeds(seeds: Seeds) -> ShiftResult:
    """The first result with its sets averaged over the seeds; the frontiers stay those of the first."""
    if len(seeds) == 1:
        return seeds[0]
    sets = [_mean_set([_find(result, one) for result in seeds]) for one in seeds[0].sets]
    return seeds[0].model_copy(update={"sets": tuple(sets)})


def _find(result: ShiftResult, wanted: ShiftedSet) -> ShiftedSet:
    return next(one for one in result.sets if (one.corruption, one.severity) == (wanted.corruption, wanted.severity))


def _mean_set(sets: Sequence[ShiftedSet]) -> ShiftedSet:
    settings = dict.fromkeys(at.setting for one in sets for at in one.at)
    means = [mean_setting(sets, setting) for setting in settings]
    top1 = tuple(np.mean([one.top1 for one in sets], axis=0).tolist())
    return sets[0].model_copy(update={"top1": top1, "at": tuple(filter(None, means)), "bits": None})


@dataclass(frozen=True)
class ShiftMean:
    """Mean over corruptions and seeds."""

    top1: float
    gmacs_paper: float


@dataclass(frozen=True, kw_only=True)
class ShiftTest:
    """One model against another at a severity, paired by seed and by image.

    The corruptions are fixed: intervals cover other seeds and other images, not other corruptions.
    """

    severity: int
    seeds: int
    images: int
    full: ShiftMean
    """Our full path."""
    budget: ShiftMean | None
    """Ours at the study's budget; None without one, and for a model of one round."""
    theirs: ShiftMean
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
    severities = sorted({one.severity for one in measured[ours][0].sets})
    return [_test(severity, measured[ours], measured[theirs], setting) for severity in severities]


def _test(severity: int, ours: Seeds, theirs: Seeds, setting: str | None) -> ShiftTest:
    full, plain = (_correct(seeds, severity, None) for seeds in (ours, theirs))
    budget = budget_difference = None
    if setting is not None and len(ours[0].gmacs_paper) > 1:
        routed = _correct(ours, severity, setting)
        spent = [mean_setting(sets_of(result, severity), setting) for result in ours]
        budget = ShiftMean(float(routed.mean()), float(np.mean([at.gmacs_paper for at in spent if at is not None])))
        budget_difference = crossed_difference(routed, plain)
    return ShiftTest(
        severity=severity,
        seeds=len(ours),
        images=full.shape[1],
        full=ShiftMean(float(full.mean()), ours[0].gmacs_paper[FULL]),
        budget=budget,
        theirs=ShiftMean(float(plain.mean()), theirs[0].gmacs_paper[FULL]),
        full_difference=crossed_difference(full, plain),
        budget_difference=budget_difference,
    )


def _correct(seeds: Seeds, severity: int, setting: str | None) -> NDArray[np.float64]:
    """Share of the corruptions under which each image is right, of the last round or at a setting: (K, N)."""
    return np.stack(
        [np.mean([_right(result, one, setting) for one in sets_of(result, severity)], axis=0) for result in seeds]
    )


def _right(result: ShiftResult, one: ShiftedSet, setting: str | None) -> NDArray[np.bool_]:
    """(N,)"""
    places = {None: 0} | {at.setting: place for place, at in enumerate(one.at, start=1)}
    if one.bits is None or setting not in places:
        raise ValueError(
            f"{result.name} does not say which images are right at {setting or 'the full path'}; measure again."
        )
    return flags_of(one.bits[places[setting]], one.pictures)


def verdict(difference: Difference) -> str:
    """``gain`` or ``loss`` if the interval excludes 0."""
    if not difference.clear:
        return UNKNOWN
    return GAIN if difference.lowest > 0 else LOSS
