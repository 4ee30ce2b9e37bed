"""The figures of a bundled model: records, settings and run folders in, plain data out.

Settings are calibrated on one half of the images, drawn by name, and all their figures come from the other half.
Letters: N images, S rounds.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).parents[1]))

from progresvit import compute
from progresvit.analysis.routing_figures import frontier_figure
from progresvit.config import ModelConfig
from progresvit.data.split import halves_by_name
from progresvit.engine import Prediction
from progresvit.evaluation import Records, calibrate_budget, with_ood
from progresvit.evaluation.ood import rejected_share
from progresvit.plots import render
from progresvit.routing import Setting, operating_point
from progresvit.training.logger import read_log, training_seconds
from progresvit.training.run_folder import ABOUT_FILE, RECIPE_FILE
from repro.compare import paired_difference
from repro.measure.certificates import DRAWS, check_certificate
from repro.measure.entries import without_folders
from repro.measure.settings import CAREFUL, DELTA, DROPS, answer, calibrations, summarize

CALIBRATION, TEST = "calibration half", "test half"
TRAINING_NAME = re.compile(r"n\d{8}_\d+\.\w+")
"""The name of an image of ImageNet's training set, such as ``n01440764_10026.JPEG``."""

PUBLISHED = "published"
"""Name of the plain ViT that is the start itself, without fine-tuning."""

Rows = NDArray[np.int64]


def halves(records: Records) -> tuple[Rows, Rows]:
    """Rows of the calibration images and of the test images."""
    first, second = halves_by_name(records.ids.tolist())
    return np.array(first), np.array(second)


def calibrate_all(records: Records, *, max_error: float, budgets: Sequence[str]) -> dict[str, Setting]:
    """The settings of a bundled model; a budget such as 1.0 gives ``budget-1.0``."""
    settings = {name: calibrate(records) for name, calibrate in calibrations(max_error).items()}
    settings[CAREFUL] = with_ood(records, settings[CAREFUL])
    return settings | {f"budget-{gmacs}": calibrate_budget(records, float(gmacs)) for gmacs in budgets}


def measure(
    records: Records,
    settings: Mapping[str, Setting],
    training: Sequence[Mapping[str, Any]],
    *,
    name: str,
    data: str,
    selected_on: str | None,
    groups: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """The figures on the evaluation images.

    Args:
        records: Of all evaluation images.
        settings: Calibrated on the first half.
        training: The stages of the training.
        name: The model's name.
        data: The name of the evaluation images.
        selected_on: Images on which the checkpoint was selected, ``evaluation`` or ``held-out``; None: it was not.
        groups: Ids of the classes of each group; accuracy is given for each apart.
    """
    config = _config(records)
    calibration, test = halves(records)
    apart = _rows_of(records, groups)
    everywhere = {**apart, CALIBRATION: calibration, TEST: test}
    test_records = records.take(test)
    return {
        "name": name,
        "data": data,
        "num_classes": config.num_classes,
        "classes": dict(zip(config.class_ids or (), config.labels or ())) if groups else {},
        "images": {key: len(rows) for key, rows in everywhere.items()},
        "in_imagenet_training_set": _seen_before(records),
        "selected_on": selected_on,
        "parameters": compute.parameters(config),
        "weights": records.header.weights_sha256,
        "precision": records.header.precision,
        "rounds": [
            {"resolution": round_.resolution, "channels": round_.width, "gmacs": records.gmacs()[s]}
            | {"top1": {key: share(records.correct[rows, s]) for key, rows in everywhere.items()}}
            for s, round_ in enumerate(config.rounds)
        ],
        "settings": measure_settings(test_records, settings, _rows_of(test_records, groups)),
        "certificates": check_certificates(records, images=len(calibration)),
        "training": list(training),
    }


def share(marks: NDArray[np.bool_]) -> dict[str, float]:
    """The share of marked images with its 95 % interval (Wilson): (N,)."""
    ends = binomtest(int(marks.sum()), len(marks)).proportion_ci(method="wilson")
    return {"mean": float(marks.mean()), "lowest": float(ends.low), "highest": float(ends.high)}


def measure_settings(
    records: Records, settings: Mapping[str, Setting], groups: Mapping[str, Rows]
) -> dict[str, dict[str, Any]]:
    """Each setting on the images of these records, by group."""
    return {name: _routed(records, name, setting, groups) for name, setting in settings.items()}


def _routed(records: Records, label: str, setting: Setting, groups: Mapping[str, Rows]) -> dict[str, Any]:
    answers = answer(records, setting)
    means = {name: summarize(label, answers, rows) for name, rows in groups.items()}
    full = records.correct[:, -1]
    values: dict[str, Any] = {"rule": setting.rule, "threshold": setting.threshold}
    if setting.epsilon is not None and setting.delta is not None:
        values |= {"max_drop": setting.epsilon, "confidence": round(1 - setting.delta, 12), "harmed": setting.k}
    values |= {
        "top1": {name: share(~answers.wrong[rows]) for name, rows in groups.items()},
        "difference": asdict(paired_difference((~answers.wrong).astype(float), full.astype(float))),
        "lost": share(answers.wrong & full),
        "gmacs": {name: summary.gmacs_paper for name, summary in means.items()},
        "saving": {name: 1 - summary.gmacs_paper / records.gmacs()[-1] for name, summary in means.items()},
        "exit_shares": {name: list(summary.exit_shares) for name, summary in means.items()},
    }
    if setting.abstain is not None:
        values |= {
            "abstain": setting.abstain,
            "answered": {name: summary.answered for name, summary in means.items()},
            "top1_of_answered": {name: summary.top1_of_answered for name, summary in means.items()},
        }
    if setting.ood is not None:
        rejected = {name: rejected_share(records.take(rows), setting) for name, rows in groups.items()}
        values |= {"ood": setting.ood.model_dump(), "out_of_distribution": rejected}
    return values


def check_certificates(records: Records, *, images: int, draws: int = DRAWS, seed: int = 0) -> dict[str, Any]:
    """How often the certificates of ``DROPS`` are wrong, with the records as the population."""
    settings: dict[str, Any] = {}
    for name, epsilon in DROPS.items():
        checked = check_certificate(records, epsilon=epsilon, delta=DELTA, images=images, draws=draws, seed=seed)
        settings[name] = {
            "epsilon": epsilon,
            "delta": DELTA,
            "exceeded": checked.exceeded,
            "harm": {"mean": checked.mean, "highest": checked.highest},
            "saving": checked.saving,
        }
    return {"draws": draws, "images": images, "settings": settings}


def measure_shift(records: Records, settings: Mapping[str, Setting], *, data: str) -> dict[str, Any]:
    """Rounds and settings on a second dataset, on which nothing was calibrated."""
    return {
        "data": data,
        "images": len(records),
        "rounds": [{"gmacs": gmacs, "top1": share(records.correct[:, s])} for s, gmacs in enumerate(records.gmacs())],
        "settings": measure_settings(records, settings, {"all": np.arange(len(records))}),
    }


def measure_plain(records: Records, plain: Sequence[Records]) -> list[dict[str, Any]]:
    """Plain ViTs of one round on the same images, by rising resolution."""
    calibration, test = (records.take(rows) for rows in halves(records))
    test_rows = halves(records)[1]
    measured = []
    for other in plain:
        if other.rounds != 1:
            raise ValueError(f"the records of {other.header.model} have {other.rounds} rounds; a plain ViT has one.")
        if other.ids.tolist() != records.ids.tolist():
            raise ValueError(
                f"the records of {other.header.model} are of other images than those of {records.header.model}; "
                "evaluate it on the same data."
            )
        config = _config(other)
        measured.append(
            {
                "resolution": config.rounds[0].resolution,
                "published": Path(other.header.model).name == PUBLISHED,
                "gmacs": other.gmacs()[0],
                "parameters": compute.parameters(config),
                "top1": {"all": share(other.correct[:, 0]), TEST: share(other.correct[test_rows, 0])},
                "routed": _at_budget(calibration, test, other.gmacs()[0]),
            }
        )
    return sorted(measured, key=lambda model: (model["resolution"], model["published"]))


def _at_budget(calibration: Records, test: Records, gmacs: float) -> dict[str, Any] | None:
    """The model with a threshold for these GMACs on average, calibrated on the other half; None out of reach."""
    if not calibration.gmacs()[0] <= gmacs <= calibration.gmacs()[-1]:
        return None
    threshold = calibrate_budget(calibration, gmacs).threshold
    point = operating_point(test.scores(), test.correct, test.gmacs(), threshold)
    return {"top1": point.top1, "gmacs": point.gmacs}


def describe_unknown(files: Sequence[Path], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Answers for images that show none of the classes."""
    failed = [f"{file}: {prediction.error}" for file, prediction in zip(files, predictions) if prediction.error]
    if failed:
        raise ValueError("; ".join(failed))
    return [
        {
            "image": file.name,
            "answer": prediction.label,
            "probability": prediction.probability,
            "exit_round": prediction.exit_round,
            "abstained": prediction.abstained,
            "out_of_distribution": prediction.out_of_distribution,
        }
        for file, prediction in zip(files, predictions)
    ]


def draw_frontier(records: Records, settings: Mapping[str, Setting], figures: Mapping[str, Any]) -> bytes:
    """The frontier on the test half as a .png, with the settings and the plain ViTs."""
    marked = {name: setting.threshold for name, setting in settings.items() if name != CAREFUL}
    plain = {
        f"{model['resolution']} px": (model["gmacs"], model["top1"][TEST]["mean"])
        for model in figures.get("plain", ())
        if not model["published"]
    }
    fixed = {"plain DeiT-Tiny": plain} if plain else None
    figure = frontier_figure({figures["name"]: records.take(halves(records)[1])}, settings=marked, fixed=fixed)
    return render(figure, ".png")


def _config(records: Records) -> ModelConfig:
    """Bundled models and plain ViTs are of the kind progresvit."""
    if not isinstance(records.config, ModelConfig):
        raise ValueError(f"{records.header.model} is of the kind {records.config.kind}; give records of a progresvit.")
    return records.config


def _rows_of(records: Records, groups: Mapping[str, Sequence[str]]) -> dict[str, Rows]:
    """Rows of the records by group: all rows, and the rows of each group that has images."""
    everything = {"all": np.arange(len(records))}
    if not groups:
        return everything
    ids = np.array(records.config.class_ids)[records.need_labels()]
    foreign = sorted(set(ids.tolist()) - {member for members in groups.values() for member in members})
    if foreign:
        raise ValueError(f"{', '.join(foreign)} are in none of the groups {', '.join(groups)}; evaluate without them.")
    rows_by_group = {name: np.flatnonzero(np.isin(ids, members)) for name, members in groups.items()}
    return everything | {name: rows for name, rows in rows_by_group.items() if len(rows)}


def _seen_before(records: Records) -> dict[str, Any]:
    """Images with names of ImageNet's training set, and the accuracy of the rounds on the others."""
    seen = np.array([TRAINING_NAME.fullmatch(Path(name).name) is not None for name in records.ids.tolist()])
    others = records.correct[~seen]
    return {
        "images": int(seen.sum()),
        "others": len(others),
        "top1_of_others": [share(others[:, s]) for s in range(records.rounds)] if len(others) else None,
    }


def describe_run(run: Path) -> dict[str, Any]:
    """One stage of the training, from the folder that ``progresvit train`` left."""
    about = json.loads((run / ABOUT_FILE).read_text(encoding="utf-8"))
    recipe = yaml.safe_load((run / RECIPE_FILE).read_text(encoding="utf-8"))
    return {
        "command": plain_command(about["command"]),
        "images": about["pictures"],
        "held_out": about.get("held_back"),
        "epochs": (epochs := recipe["schedule"]["epochs"] + recipe["schedule"]["cooldown"]),
        "steps": epochs * (about["pictures"] // recipe["optimizer"]["batch"]),
        "seed": recipe["seed"],
        "teacher": (recipe.get("distillation") or {}).get("teacher"),
        "device": about["device"],
        "processes": about["processes"],
        "torch": about["torch"],
        "minutes": round(training_seconds(read_log(run), recipe["optimizer"]["batch"]) / 60, 1),
        "recipe": without_folders(recipe),
    }


def plain_command(command: Sequence[str]) -> str:
    """The command as a reader would type it: without folders of the machine on which it ran, and without resuming."""

    def plain(word: str) -> str:
        key, sign, value = word.rpartition("=")
        value = without_folders(value)
        return f"'{key}{sign}{value}'" if "*" in value else f"{key}{sign}{value}"

    words = [plain(word) for word in command[1:] if word not in ("--resume", "--overwrite")]
    return " ".join(["progresvit", *words])
