"""The results file of an entry of a study, and whether results from before are of this very study."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from progresvit import api
from progresvit.distributed import processor_name
from progresvit.evaluation import Records, SegmentationRecords, read_records, read_segmentation_records
from progresvit.evaluation.shift import plan as plan_shift
from progresvit.io.weights import weights_hash
from progresvit.training.logger import git_revision, read_log, training_seconds
from progresvit.training.recipe import RunOptions, make_recipe
from progresvit.training.run_folder import ABOUT_FILE, RECIPE_FILE, changed_keys
from repro.formats import (
    FILES,
    FORMAT,
    CommandResult,
    Machine,
    Measurement,
    RoutingResult,
    RunResult,
    SegmentationResult,
    ShiftResult,
    TrainingCurves,
)
from repro.measure.records import (
    data_of,
    measure_frontier,
    measure_near_lossless,
    measure_probe,
    measure_rounds,
)
from repro.measure.routing import measure_routing
from repro.measure.segmentation import measure_segmentation
from repro.measure.shift import has_budget, measure_shift
from repro.store import TABLE, read_all
from repro.study import FOR_READERS, MAIN, PRINTED, Entry, Places, Study, entries_of, reader_commands, test_records

KEPT = {".png", ".svg", ".pdf", ".csv", ".md", ".json", ".tex", ".html", ".txt"}
"""Suffixes of the files of a command that results keep."""
SEED = 0
"""Seed of halves, folds and routers."""
CURVE_POINTS = 60
"""Logged steps of a run that its results file keeps at most."""
EARLIER_PROBE = ("--blocks", "1", "--crop", "0.9")
"""What linear probes did before they read four blocks by default; their settings name no blocks."""
NOT_LEARNED = {
    "data.workers",
    "data.in_memory_cache",
    *(f"run.{key}" for key in RunOptions.model_fields if key != "precision"),
}
"""Keys of a recipe that do not change the trained model."""


def measure_entry(study: Study, entry: Entry, places: Places, results: Path) -> Measurement:
    """The results file of an entry whose commands have run. Files of commands are copied to the folder ``results``."""
    if entry.kind == "command":
        return _command(study, entry, places, results)
    if entry.kind == "run" and entry.key in study.segmented:
        return _segmentation(study, entry, places)
    records = read_records(places.records(entry.name))
    merge = study.runs[entry.key].merge if entry.kind == "run" else None
    _check_weights(places.records(entry.name), records, _weights(places.model(entry), merge))
    common = _common(study, entry, places, records)
    if entry.kind == "run":
        return RunResult(**common | _training(study, entry, places, records, jobs=common["machine"].jobs))
    common |= {"model": without_folders(entry.model), "weights": records.header.weights_sha256}
    if entry.kind == "routing":
        learned = places.records(f"{entry.name}-train") if study.routing[entry.key].learned_from else None
        learned_records = read_records(learned) if learned else None
        max_error = study.routing[entry.key].max_error
        measured = measure_routing(records, learned_records, groups=study.groups, max_error=max_error, seed=SEED)
        return RoutingResult(kind="routing", **common | {"seed": SEED}, **measured)
    shift = study.shift[entry.key]
    sets = plan_shift("generated", places.data, corruptions=shift.corruptions, severities=shift.severities)
    folder = places.shift(entry.name) / "records"
    shifted = {planned.name: read_records(folder / f"{planned.name}.parquet") for planned in sets}
    return ShiftResult(kind="shift", **common, **measure_shift(records, shifted, sets, budget=shift.budget))


def _segmentation(study: Study, entry: Entry, places: Places) -> SegmentationResult:
    """A segmentation model on its validation and test images."""
    assert study.segmentation is not None
    assert entry.kind == "run"
    alone = study.segmentation.test == study.segmentation.val
    test = entry.name if alone else test_records(entry.name)
    paths = {"val": places.records(entry.name), "test": places.records(test)}
    records = {name: read_segmentation_records(path) for name, path in paths.items()}
    weights = _weights(places.model(entry))
    for name, path in paths.items():
        _check_weights(path, records[name], weights)
    common = _common(study, entry, places, records["test"])
    return SegmentationResult(
        **common | _run(study, entry, places, records["test"], jobs=common["machine"].jobs),
        kind="segmentation",
        **measure_segmentation(records["val"], records["test"]),
        history=_history(places.run(entry.name), "miou"),
    )


def _check_weights(path: Path, records: Records | SegmentationRecords, weights: str) -> None:
    if records.header.weights_sha256 != weights:  # the model was trained again since
        raise ValueError(f"{path} is of other weights than its model; delete it to evaluate again.")


def _history(folder: Path, metric: str) -> tuple[tuple[int, tuple[float, ...]], ...]:
    lines = [line for line in read_log(folder) if line["event"] == "evaluation" and metric in line]
    return tuple((line["epoch"] + 1, tuple(line[metric])) for line in lines)


def measure_curves(log: Sequence[Mapping[str, Any]]) -> TrainingCurves | None:
    """The first and the last logged step, and steps in between at equal distances; None if nothing was logged."""
    lines = [line for line in log if line["event"] == "train" and "teacher_entropy" in line]
    finished = [line for line in log if line["event"] == "evaluation"]  # at the end of an epoch
    if not lines or not finished:
        return None
    steps_per_epoch = finished[-1]["step"] / (finished[-1]["epoch"] + 1)
    places = np.unique(np.linspace(0, len(lines) - 1, CURVE_POINTS).round().astype(int))
    lines = [lines[index] for index in places]
    return TrainingCurves(
        epochs=tuple(round(line["step"] / steps_per_epoch, 3) for line in lines),
        losses=_column(lines, "losses"),
        teacher_entropy=_column(lines, "teacher_entropy"),
        mean_entropy=_column(lines, "mean_entropy"),
        centre_entropy=_column(lines, "centre_entropy"),
    )


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(value, 4) for value in line[key]) for line in lines)


def _weights(model: str, merge: Sequence[int] | None = None) -> str:
    loaded = api.load(model)
    if merge is not None:
        api.as_progresvit(loaded, "merging").set_merge(merge)
    return weights_hash(loaded)


def _command(study: Study, entry: Entry, places: Places, results: Path) -> CommandResult:
    """Tables and figures of a command. The files that people open are copied to the results, not records."""
    plan, made, copies = study.commands[entry.key], places.made(entry.name), results / FILES / entry.name
    files = sorted(path for path in made.iterdir() if path.suffix in KEPT)
    lacking = [name for name in plan.tables if name not in {path.name for path in files}]
    figures = sorted({path.name for pattern in plan.figures for path in made.glob(pattern)})
    if lacking or not (plan.tables or plan.printed or figures):
        raise ValueError(
            f"{entry.name} wrote no {' or '.join(lacking or plan.figures)}; {made} has "
            f"{', '.join(path.name for path in files)}. Name in commands.{entry.key} what the command writes."
        )
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, copies / path.name)
    on_gpu = torch.cuda.is_available()
    return CommandResult(
        kind="command",
        **_made(study, entry, places, "cpu" if not on_gpu else torch.cuda.get_device_name()),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        precision="the command's",
        model=without_folders(entry.model),
        weights=_weights(places.model(entry)) if entry.model else None,
        tables={name: _cells(_read(made / name, places)) for name in plan.tables},
        figures=tuple(figures),
        printed=_read(made / PRINTED, places) if plan.printed else None,
        page=next((path.name for path in files if path.suffix == ".html"), None),
    )


def _read(path: Path, places: Places) -> str:
    """A text in which RUNS stands for the folder of this machine."""
    return path.read_text(encoding="utf-8").replace(f"{places.runs}/", f"{FOR_READERS.runs}/")


def _cells(markdown: str) -> tuple[tuple[str, ...], ...]:
    """The heads and the rows of the first table of a Markdown text."""
    lines = [line.strip() for line in markdown.splitlines() if line.startswith("|")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return (rows[0], *rows[2:])


def _common(study: Study, entry: Entry, places: Places, records: Records | SegmentationRecords) -> dict[str, Any]:
    """What results files of records say: this machine and this code made them."""
    header = records.header
    place = study.place_of(entry.key) if entry.kind == "run" else MAIN
    return {
        **_made(study, entry, places, header.device),
        "date": header.date,
        "data": data_of(records, name=study.data_name(place)),
        "precision": header.precision,
    }


def _made(study: Study, entry: Entry, places: Places, device: str) -> dict[str, Any]:
    """What every kind of results file says."""
    timings = [json.loads(line) for line in places.timings(entry.name).read_text(encoding="utf-8").splitlines()]
    return {
        "format": FORMAT,
        "name": entry.name,
        "commands": reader_commands(study, entry),
        "seed": entry.seed,
        "seconds": round(sum(timing["seconds"] for timing in timings), 1),
        "revision": git_revision() or "unknown",
        "machine": Machine(
            device=processor_name() if device == "cpu" else device,
            processes=max(timing["processes"] for timing in timings),
            jobs=max(timing["jobs"] for timing in timings),
            python=platform.python_version(),
            torch=torch.__version__,
        ),
    }


def _run(
    study: Study, entry: Entry, places: Places, records: Records | SegmentationRecords, *, jobs: int
) -> dict[str, Any]:
    """What a training run of any task says of itself; another machine or version may have carried it out."""
    assert entry.trained is not None
    folder = places.run(entry.trained)
    about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    recipe = yaml.safe_load((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    if (start := study.trained_run(entry.key).start) is not None:
        recipe["model"]["start"] = start  # the run, as the study calls it: seeds differ in the folder
    machine = {key: about[key] for key in ("device", "processes", "python", "torch")}
    return {
        "run": entry.key,
        "seed": entry.seed,
        "seconds": round(training_seconds(read_log(folder), recipe["optimizer"]["batch"]), 1),
        "revision": about["git"] or "unknown",
        "machine": Machine(jobs=jobs, **machine),
        "data": data_of(
            records, name=study.data_name(study.place_of(entry.key)), train=about["pictures"], learned=about["names"]
        ),
        "recipe": without_folders(recipe),
        "epochs": recipe["schedule"]["epochs"] + recipe["schedule"]["cooldown"],
        "parameters": sum(weights.numel() for _, weights in api.load(places.model(entry)).named_parameters()),
    }


def _training(study: Study, entry: Entry, places: Places, records: Records, *, jobs: int) -> dict[str, Any]:
    """A classification model that the study trained."""
    assert entry.trained is not None
    common, rounds = _run(study, entry, places, records, jobs=jobs), measure_rounds(records)
    folder, is_dino = places.run(entry.trained), common["recipe"].get("task") == "dino"
    if (merge := study.runs[entry.key].merge) is not None:
        common["recipe"]["model"]["merge"] = list(merge)
        rounds = rounds.model_copy(update={"trained_gmacs": api.load(places.model(entry)).gmacs("paper")[-1]})
    return common | {
        "kind": "run",
        "rounds": rounds,
        "frontier": measure_frontier(records),
        "near_lossless": measure_near_lossless(records),
        "history": _history(folder, "knn" if is_dino else "top1"),
        "probe": measure_probe(records, study.runs[entry.key].evaluate),
        "curves": measure_curves(read_log(folder)) if is_dino and entry.trained == entry.name else None,
    }


def without_folders(value: Any) -> Any:
    """The value with every absolute path shortened to its last part: others have no such folder."""
    if isinstance(value, dict):
        return {key: without_folders(part) for key, part in value.items()}
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value


def check_earlier(study: Study, results: Path, places: Places) -> None:
    """Refuse a results folder with results of another study: another recipe, dataset or model."""
    measured = read_all(results)
    for entry in entries_of(study):
        before = measured.get(entry.name)
        if before is not None and (differing := _differing(before, study, entry, places)):
            path = results / f"{entry.name}.json"
            origin = str(path) if path.exists() else f"{entry.name} in {results / TABLE}"
            raise ValueError(
                f"{origin} was made differently from what the study says (other {', '.join(differing)}); delete it to "
                "measure again (repro/store.py removes it from a table), or name another results folder."
            )


def _options(words: Sequence[str]) -> set[str]:
    """The options among the words of a command, each with its value, in no order."""
    return set(re.split(" (?=--)", " ".join(words)))


def _probe_words(before: RunResult) -> tuple[str, ...]:
    """What the command had that evaluated the features of a model, with the defaults of its time."""
    if before.probe is None:
        return ()
    words = ("--task", before.probe.task, *before.probe.words)
    earlier = before.probe.task == "linear" and not {"--blocks", "blocks"} & {*words, *before.probe.settings}
    return (*words, *EARLIER_PROBE) if earlier else words


def _differing(before: Measurement, study: Study, entry: Entry, places: Places) -> list[str]:
    if isinstance(before, CommandResult):
        changed = ["commands"] if before.commands != reader_commands(study, entry) else []
        return changed + _other_weights(before.weights, entry, places)
    place = study.place_of(entry.key) if entry.kind == "run" else MAIN
    differing = ["data"] if before.data.name != study.data_name(place) else []
    if isinstance(before, RunResult | SegmentationResult):
        now = study.load_recipe_of(entry.key).model_copy(update={"seed": entry.seed})
        then = make_recipe(before.recipe, origin=f"{entry.name}.json: recipe", stored=True)
        recipes = [without_folders(yaml.safe_load(recipe.to_yaml())) for recipe in (then, now)]
        words = study.runs[entry.key].probe_words
        if isinstance(before, RunResult) and _options(_probe_words(before)) != _options(words):
            differing.append("evaluation")
        return differing + changed_keys(*recipes, free=NOT_LEARNED)
    assert isinstance(before, RoutingResult | ShiftResult)
    if before.commands != reader_commands(study, entry):
        differing.append("commands")
    if isinstance(before, RoutingResult) and [group.name for group in before.groups] != list(study.groups):
        differing.append("groups")
    if isinstance(before, ShiftResult) and not has_budget(before, study.shift[entry.key].budget):
        differing.append("budget")
    if isinstance(before, RoutingResult) and before.max_error not in (None, study.routing[entry.key].max_error):
        differing.append("max_error")
    return differing + _other_weights(before.weights, entry, places)


def _other_weights(before: str | None, entry: Entry, places: Places) -> list[str]:
    """Says so if the model of an entry was trained again."""
    model = places.model(entry)
    return ["weights"] if entry.trained and Path(model).exists() and before != _weights(model) else []
