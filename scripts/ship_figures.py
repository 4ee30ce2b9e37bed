"""The figures of the bundled model: records, settings and run folders in, plain data out.

Every accuracy is given for all images, and for the easy ten and the ten dogs separately, because an average over both
hides that the dogs are harder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from progresvit import compute
from progresvit.evaluation import Records
from progresvit.routing import Setting
from progresvit.training.logger import read_log, training_seconds
from progresvit.training.run_folder import ABOUT_FILE, RECIPE_FILE
from repro.measure.entries import without_folders
from repro.measure.settings import CAREFUL, HALVES, answer, calibrations, measure_halves, summarize

DOGS = (
    *("n02086240", "n02087394", "n02088364", "n02089973", "n02093754"),
    *("n02096294", "n02099601", "n02105641", "n02111889", "n02115641"),
)
"""The classes of Imagewoof: Shih-Tzu to dingo."""
EASY = (
    *("n01440764", "n02102040", "n02979186", "n03000684", "n03028079"),
    *("n03394916", "n03417042", "n03425413", "n03445777", "n03888257"),
)
"""The classes of Imagenette: tench to parachute. One of them, the English springer, is a dog too."""
GROUPS = {"easy ten": EASY, "ten dogs": DOGS}


def calibrate_all(records: Records, max_error: float) -> dict[str, Setting]:
    """The settings of the bundled model, calibrated on all images of the records."""
    return {name: calibrate(records) for name, calibrate in calibrations(max_error).items()}


def measure(
    records: Records, settings: Mapping[str, Setting], training: Sequence[Mapping[str, Any]], *, picked: bool
) -> dict[str, Any]:
    """Everything on the card; ``picked`` if the checkpoint was selected by its accuracy on these images."""
    config = records.config
    groups = _groups(records)
    rounds = [
        {
            "resolution": round_.resolution,
            "channels": round_.width,
            "gmacs": records.gmacs()[s],
            "top1": {name: float(records.correct[rows, s].mean()) for name, rows in groups.items()},
        }
        for s, round_ in enumerate(config.rounds)
    ]
    return {
        "classes": list(config.labels or config.class_ids or ()),
        "class_ids": list(config.class_ids or ()),
        "pictures": {name: len(rows) for name, rows in groups.items()},
        "picked_on_them": picked,
        "parameters": compute.parameters(config),
        "weights": records.header.weights,
        "precision": records.header.precision,
        "rounds": rounds,
        "settings": {name: _routed(records, setting, groups) for name, setting in settings.items()},
        "halves": _halves(records),
        "training": list(training),
    }


def _groups(records: Records) -> dict[str, NDArray[np.int64]]:
    """Rows of the records by group: all, and those of each group that has images."""
    ids = np.array(records.config.class_ids)[records.need_labels()]
    strange = sorted(set(ids.tolist()) - set(DOGS) - set(EASY))
    if strange:
        raise ValueError(f"{', '.join(strange)} are not among the 20 classes; evaluate on Imagenette and Imagewoof.")
    found = {name: np.flatnonzero(np.isin(ids, members)) for name, members in GROUPS.items()}
    return {"all": np.arange(len(records)), **{name: rows for name, rows in found.items() if len(rows)}}


def _routed(records: Records, setting: Setting, groups: Mapping[str, NDArray[np.int64]]) -> dict[str, Any]:
    answers = answer(records, setting)
    found = {name: summarize(answers, rows) for name, rows in groups.items()}
    values: dict[str, Any] = {"threshold": setting.threshold}
    if setting.epsilon is not None and setting.delta is not None:
        values |= {"max_drop": setting.epsilon, "confidence": round(1 - setting.delta, 12), "harmed": setting.k}
    values |= {
        "top1": {name: one.top1 for name, one in found.items()},
        "gmacs": {name: one.gmacs_paper for name, one in found.items()},
        "saving": {name: 1 - one.gmacs_paper / records.gmacs()[-1] for name, one in found.items()},
        "exit_shares": {name: list(one.exit_shares) for name, one in found.items()},
    }
    if setting.abstain is not None:
        values |= {
            "abstain": setting.abstain,
            "answered": {name: one.answered for name, one in found.items()},
            "top1_of_answered": {name: one.top1_of_answered for name, one in found.items()},
        }
    return values


def _halves(records: Records) -> dict[str, Any]:
    values = {}
    for name, calibrate in calibrations().items():
        if name == CAREFUL:  # it exits where near-lossless does
            continue
        values[name] = measure_halves(records, calibrate).model_dump(exclude={"number", "wrong"}, exclude_none=True)
    return {"number": HALVES, "settings": values}


def describe_run(run: Path) -> dict[str, Any]:
    """One stage of the training, from the folder that ``progresvit train`` left."""
    about = json.loads((run / ABOUT_FILE).read_text(encoding="utf-8"))
    recipe = yaml.safe_load((run / RECIPE_FILE).read_text(encoding="utf-8"))
    return {
        "command": plain_command(about["command"]),
        "pictures": about["pictures"],
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
    """As a reader would type it: no folders of the machine on which it ran, no resuming."""

    def plain(word: str) -> str:
        key, sign, value = word.rpartition("=")
        value = without_folders(value)
        return f"'{key}{sign}{value}'" if "*" in value else f"{key}{sign}{value}"

    words = [plain(word) for word in command[1:] if word not in ("--resume", "--overwrite")]
    return " ".join(["progresvit", *words])
