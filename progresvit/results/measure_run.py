"""A training run's folder and its records in, its results file out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from progresvit import compute
from progresvit.evaluation import Records
from progresvit.results.carry_out import Done
from progresvit.results.format import Machine, RunResult
from progresvit.results.measure import data_of, measure_frontier, measure_near_lossless, measure_rounds
from progresvit.training.logger import read_log, training_seconds
from progresvit.training.run_folder import ABOUT_FILE, RECIPE_FILE


def measure_run(done: Done, records: Records) -> RunResult:
    """What a run of a study gave."""
    task, folder = done.task, done.places.folder(done.task.name)
    about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    recipe = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    log = read_log(folder)
    return RunResult(
        format=1,
        kind="run",
        name=task.name,
        run=task.of,
        commands=done.commands,
        seed=task.seed,
        seconds=round(training_seconds(log, recipe["optimizer"]["batch"]), 1),
        date=records.header.date,
        revision=about["git"] or "unknown",
        machine=Machine(
            device=about["device"],
            processes=about["processes"],
            jobs=done.jobs,
            python=about["python"],
            torch=about["torch"],
        ),
        data=data_of(records, name=done.study.data, train=about["pictures"], learned=about["names"]),
        precision=records.header.precision,
        recipe=without_folders(recipe),
        epochs=recipe["schedule"]["epochs"] + recipe["schedule"]["cooldown"],
        parameters=compute.parameters(records.config),
        rounds=measure_rounds(records),
        frontier=measure_frontier(records),
        near_lossless=measure_near_lossless(records),
        history=tuple((line["epoch"] + 1, tuple(line["top1"])) for line in log if line["event"] == "evaluation"),
    )


def without_folders(value: Any) -> Any:
    """The same with every absolute path shortened to its last part: others have no such folder."""
    if isinstance(value, dict):
        return {key: without_folders(part) for key, part in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value
