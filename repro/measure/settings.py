"""The settings of a model, on the images they were calibrated on and on others. Letters: N images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from progresvit.evaluation import Records
from progresvit.evaluation.calibrate import calibrate_guarantee, calibrate_near_lossless, with_abstention
from progresvit.evaluation.selective import routed_answers
from progresvit.routing import Setting
from progresvit.routing.calibrate import OutOfReachError
from progresvit.routing.decide import route_records
from progresvit.routing.settings import Loss
from repro.formats import DrawsResult, GroupAt, GroupResult, HalvesResult, SettingResult, Spread
from repro.measure.certificates import DRAWS, check_certificate
from repro.measure.records import measure_point

NEAR_LOSSLESS = "near-lossless"
DROPS = {"drop-0.5": 0.005, "drop-1": 0.01}
"""Settings with a guarantee: the maximum drop in accuracy, at 95 % confidence."""
DELTA = 0.05
CAREFUL = "careful"
MAX_ERROR = 0.05
"""Maximum error rate among answered images."""
HALVES = 20

Calibrate = Callable[[Records], Setting]


def calibrations(max_error: float = MAX_ERROR) -> dict[str, Calibrate]:
    """How each setting is found, by its name."""

    def be_careful(records: Records) -> Setting:
        return with_abstention(records, calibrate_near_lossless(records), max_error)

    certified = {name: _certify(drop, "labelled") for name, drop in DROPS.items()}
    return {NEAR_LOSSLESS: calibrate_near_lossless, **certified, CAREFUL: be_careful}


def label_free_calibrations() -> dict[str, Calibrate]:
    """The guarantees of ``DROPS`` from disagreement with the full path, by name; labels are not used."""
    return {f"{name}-unlabelled": _certify(drop, "unlabelled") for name, drop in DROPS.items()}


def _certify(drop: float, loss: Loss) -> Calibrate:
    return lambda records: calibrate_guarantee(records, epsilon=drop, delta=DELTA, loss=loss)


def calibrate_within_reach(records: Records, by_name: Mapping[str, Calibrate] | None = None) -> dict[str, Setting]:
    """The settings that these images allow; too few certify nothing, and on hard ones every answer is withheld.

    Without ``by_name`` they come from ``calibrations``.
    """
    settings = {}
    for name, calibrate in (by_name or calibrations()).items():
        try:
            settings[name] = calibrate(records)
        except OutOfReachError:
            continue
    return settings


def measure_settings(
    records: Records, by_name: Mapping[str, Calibrate], *, halves: int = HALVES, draws: int = DRAWS
) -> list[SettingResult]:
    """Each setting that these images allow."""
    settings = calibrate_within_reach(records, by_name)
    return [_measure_setting(records, name, settings[name], by_name[name], halves, draws) for name in settings]


def _measure_setting(
    records: Records, name: str, setting: Setting, calibrate: Calibrate, halves: int, draws: int
) -> SettingResult:
    everywhere = summarize(name, answer(records, setting), np.arange(len(records)))
    assert everywhere.top1_of_answered is not None
    try:
        repeated = measure_halves(records, calibrate, number=halves)
    except OutOfReachError:  # half as many images certify less
        repeated = None
    return SettingResult(
        name=name,
        point=measure_point(records, setting.threshold),
        epsilon=setting.epsilon,
        delta=setting.delta,
        loss=setting.loss,
        abstain=setting.abstain,
        answered=everywhere.answered,
        top1_of_answered=everywhere.top1_of_answered,
        halves=repeated,
        draws=_check(records, setting, draws),
    )


def _check(records: Records, setting: Setting, draws: int) -> DrawsResult | None:
    """Draws of as many images as the setting was calibrated on; None without a guarantee."""
    epsilon, delta, loss = setting.epsilon, setting.delta, setting.loss
    if epsilon is None or delta is None or loss is None:
        return None
    return check_certificate(records, epsilon=epsilon, delta=delta, loss=loss, images=len(records), draws=draws)


def measure_halves(records: Records, calibrate: Calibrate, *, number: int = HALVES) -> HalvesResult:
    """A threshold of one random half, measured on the other: what to expect of images it was not calibrated on."""
    measured = []
    for seed in range(number):
        design, report = records.split(0.5, seed)
        routed = answer(report, calibrate(design))
        last, predictions = report.correct[:, -1], report.predictions
        changed = predictions[np.arange(len(report)), routed.rounds] != predictions[:, -1]
        measured.append(
            {
                "drop": float(last.mean() - (1 - routed.wrong.mean())),
                "saving": float(1 - routed.gmacs.mean() / report.gmacs()[-1]),
                "wrong": float(routed.wrong[routed.given].sum() / max(1, routed.given.sum())),
                "harm": float((routed.wrong & last).mean()),
                "disagreement": float(changed.mean()),
            }
        )
    spreads = {key: _spread([half[key] for half in measured]) for key in measured[0]}
    return HalvesResult(number=number, **spreads)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(mean=float(np.mean(values)), lowest=min(values), highest=max(values))


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The outcome for each image at a setting; all (N,)."""

    rounds: NDArray[np.int64]
    """Round in which each image exits, from 0."""
    wrong: NDArray[np.bool_]
    given: NDArray[np.bool_]
    """Whether the answer is given, not withheld."""
    gmacs: NDArray[np.float64]
    number_of_rounds: int


def answer(records: Records, setting: Setting) -> Answers:
    """The records at a setting."""
    routed = route_records(setting.policy(), records.scores(), records.statistics)
    _, wrong = routed_answers(records, routed.rounds)
    return Answers(
        rounds=routed.rounds,
        wrong=wrong,
        given=~routed.abstained,
        gmacs=np.array(records.gmacs())[routed.rounds],
        number_of_rounds=records.rounds,
    )


def summarize(setting: str, answers: Answers, rows: NDArray[np.int64]) -> GroupAt:
    """Means over some of the images at a setting."""
    wrong, given, rounds = answers.wrong[rows], answers.given[rows], answers.rounds[rows]
    return GroupAt(
        setting=setting,
        top1=float(1 - wrong.mean()),
        gmacs_paper=float(answers.gmacs[rows].mean()),
        exit_shares=tuple(float((rounds == s).mean()) for s in range(answers.number_of_rounds)),
        answered=float(given.mean()),
        top1_of_answered=float(1 - wrong[given].mean()) if given.any() else None,
    )


def measure_groups(
    records: Records, groups: Mapping[str, Sequence[str]], settings: Mapping[str, Setting]
) -> list[GroupResult]:
    """Groups of classes, given by their ids, each alone: a mean over all classes hides the hard ones."""
    answers = {name: answer(records, setting) for name, setting in settings.items()}
    return [
        GroupResult(
            name=group,
            pictures=len(rows),
            top1=tuple(records.correct[rows].mean(axis=0).tolist()),
            at=tuple(summarize(name, of_setting, rows) for name, of_setting in answers.items()),
        )
        for group, rows in _rows_of(records, groups).items()
    ]


def _rows_of(records: Records, groups: Mapping[str, Sequence[str]]) -> dict[str, NDArray[np.int64]]:
    class_ids = records.config.class_ids or ()
    rows = {}
    for name, members in groups.items():
        unknown = sorted(set(members) - set(class_ids))
        if unknown:
            raise ValueError(
                f"the group {name!r} has classes that the model does not know: {', '.join(unknown[:5])}; the class_ids "
                f"of its config.json are {', '.join(class_ids[:3]) + ' and so on' if class_ids else 'missing'}."
            )
        numbers = [number for number, class_id in enumerate(class_ids) if class_id in set(members)]
        rows[name] = np.flatnonzero(np.isin(records.need_labels(), numbers))
        if not len(rows[name]):
            raise ValueError(f"the group {name!r} has no images here; leave it out, or evaluate on its classes.")
    return rows
