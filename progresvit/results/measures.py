"""What each kind of task is measured by, and whether results from before are of this very study."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import yaml

from progresvit import api, checkpoint
from progresvit.distributed import processor_name
from progresvit.evaluation import Records, read_records
from progresvit.evaluation.shift import plan as plan_shift
from progresvit.results.carry_out import Done, reader_commands
from progresvit.results.format import Machine, Measurement, RunResult
from progresvit.results.format_routing import RoutingResult
from progresvit.results.format_shift import ShiftResult
from progresvit.results.measure import data_of
from progresvit.results.measure_routing import measure_routing
from progresvit.results.measure_run import measure_run, without_folders
from progresvit.results.measure_shift import measure_shift, shift_settings
from progresvit.results.plan import Places, Task, learned_records, model_of, plan
from progresvit.results.read import read_measurement
from progresvit.results.study import Study
from progresvit.training.logger import git_revision
from progresvit.training.recipe import RunOptions, make_recipe
from progresvit.training.run_folder import changed_keys

HOW_ALONE = {"data.workers", *(f"run.{key}" for key in RunOptions.model_fields if key != "precision")}
"""Keys of a recipe that do not change what is learned."""
SEED = 0
"""Of halves, folds and routers."""


def measure(done: Done) -> Measurement:
    """The results file of a task whose commands have run."""
    records = read_records(done.places.records(done.task.name))
    _check_weights(records, done.task, done.places)
    if done.task.kind == "run":
        return measure_run(done, records)
    return _routing(done, records) if done.task.kind == "routing" else _shift(done, records)


def _check_weights(records: Records, task: Task, places: Places) -> None:
    """Records outlive a model that is trained anew; they are then of another."""
    if records.header.weights != _weights(model_of(task, places)):
        raise ValueError(f"{places.records(task.name)} is of other weights than its model; remove it to make it again.")


def _weights(model: str) -> str:
    return checkpoint.weights_hash(api.load(model))


def _routing(done: Done, records: Records) -> RoutingResult:
    wanted = done.study.routing[done.task.of]
    learned = read_records(done.places.records(learned_records(done.task.name))) if wanted.learned_from else None
    found = measure_routing(records, learned, groups=done.study.groups, seed=SEED)
    return RoutingResult(kind="routing", **_about(done, records, seed=SEED), **found)


def _shift(done: Done, records: Records) -> ShiftResult:
    sets = plan_shift(
        "generated",
        done.places.data,
        corruptions=done.study.shift[done.task.of].corruptions,
        severities=done.study.shift[done.task.of].severities,
    )
    folder = done.places.shift(done.task.name) / "records"
    found = {one.name: read_records(folder / f"{one.name}.parquet") for one in sets}
    fields = measure_shift(records, found, sets, shift_settings(records))
    return ShiftResult(kind="shift", **_about(done, records, seed=None), **fields)


def _about(done: Done, records: Records, *, seed: int | None) -> dict[str, Any]:
    """What every file but a training run's says in the same way: this machine and this code made it."""
    header = records.header
    return {
        "format": 1,
        "name": done.task.name,
        "commands": done.commands,
        "seed": seed,
        "seconds": round(done.seconds, 1),
        "date": header.date,
        "revision": git_revision() or "unknown",
        "machine": Machine(
            device=processor_name() if header.device == "cpu" else header.device,
            processes=done.gpus,
            jobs=done.jobs,
            python=platform.python_version(),
            torch=torch.__version__,
        ),
        "data": data_of(records, name=done.study.data),
        "precision": header.precision,
        "model": without_folders(done.task.model),
        "weights": header.weights,
    }


def check_earlier(study: Study, results: Path, places: Places) -> None:
    """Refuse to go on beside results of another study: a recipe that has changed, another data set, another model.

    All of the study's are looked at, whichever are to be made, for ``study.yaml`` speaks of all.
    """
    for task in plan(study):
        path = results / f"{task.name}.json"
        if not path.exists():
            continue
        before = read_measurement(path)
        if before.data.name != study.data:
            raise ValueError(
                f"{path} is of {before.data.name} and the study of {study.data}; name another folder for the results."
            )
        differing: list[str] = []
        if isinstance(before, RunResult):
            now = study.load_recipe_of(task.of).model_copy(update={"seed": task.seed})
            then = make_recipe(before.recipe, origin=f"{path}: recipe")  # with keys newer than it
            differing = changed_keys(
                *(without_folders(yaml.safe_load(one.to_yaml())) for one in (then, now)), free=HOW_ALONE
            )
        else:
            differing = _differing(before, study, task, places)
        if differing:
            raise ValueError(
                f"{path} was made otherwise than the study says (other {', '.join(differing)}); remove it to make it "
                "again, or name another folder for the results."
            )


def _differing(before: Measurement, study: Study, task: Task, places: Places) -> list[str]:
    """What a routing or shift result was made with that is not so any more."""
    assert isinstance(before, RoutingResult | ShiftResult)
    found = ["commands"] if before.commands != reader_commands(study, task) else []
    if isinstance(before, RoutingResult) and [group.name for group in before.groups] != list(study.groups):
        found.append("groups")
    model = model_of(task, places)
    if task.needs and Path(model).exists() and before.weights != _weights(model):
        found.append("weights")
    return found
