"""From a study to tasks: which commands are run, in what order, and where their outcome lies."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from progresvit.data.corruptions import CORRUPTIONS, SEVERITIES
from progresvit.results.study import Study
from progresvit.training.run_folder import RECIPE_FILE

Kind = Literal["run", "routing", "shift"]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where pictures come from and where models and records go."""

    data: str
    runs: Path

    def folder(self, name: str) -> Path:
        """Of a training run."""
        return self.runs / name

    def records(self, name: str) -> Path:
        return self.runs / "records" / f"{name}.parquet"

    def shift(self, name: str) -> Path:
        return self.runs / "shift" / name

    def log(self, name: str) -> Path:
        return self.runs / "logs" / f"{name}.log"


FOR_READERS = Places(data="DATA", runs=Path("RUNS"))
"""How a command is written down: the folders are the reader's own."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One ``progresvit`` command."""

    arguments: tuple[str, ...]
    makes: Path
    """There when it is done."""
    begun: Path | None = None
    """There when it was begun and ``--resume`` is needed to go on."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one results file is made of."""

    name: str
    """The file's."""
    kind: Kind
    of: str
    """The run, or the key in the study's ``routing`` or ``shift``."""
    model: str
    """As the study calls it: a run, or what progresvit evaluate takes."""
    seed: int | None = None
    needs: str | None = None
    """The task that trains its model."""


def plan(study: Study, only: Sequence[str] = ()) -> list[Task]:
    """All tasks of a study in order, or those of some runs, comparisons, routing or shift entries."""
    runs = [
        Task(name=f"{run}-{seed}", kind="run", of=run, model=run, seed=seed)
        for run in study.runs
        for seed in study.seeds_of(run)
    ]
    trained = {task.of: task.name for task in reversed(runs)}  # of several seeds the first
    others = [_measured(key, "routing", measured.model, trained) for key, measured in study.routing.items()]
    for key, shifted in study.shift.items():
        others += [_measured(study.file_of(key, model), "shift", model, trained, of=key) for model in shifted.models]
    tasks = [*runs, *others]
    for name, count in Counter(task.name for task in tasks).items():
        if count > 1:
            raise ValueError(f"{count} tasks of the study would write {name}.json; rename a run or an entry.")
    return tasks if not only else _chosen(study, tasks, only)


def _measured(name: str, kind: Kind, model: str, trained: dict[str, str], of: str | None = None) -> Task:
    return Task(name=name, kind=kind, of=of or name, model=model, needs=trained.get(model))


def _chosen(study: Study, tasks: Sequence[Task], only: Sequence[str]) -> list[Task]:
    known = {*study.comparisons, *(task.of for task in tasks), *(task.name for task in tasks)}
    wanted: set[str] = set()
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}."
            raise ValueError(f"the study has nothing called {name!r}; {hint}")
        wanted |= {name, *(study.comparisons[name].rows.values() if name in study.comparisons else ())}
        if name in study.comparisons and (against := study.comparisons[name].against):
            wanted.add(against)
    return [task for task in tasks if task.of in wanted or task.name in wanted]


def steps(study: Study, task: Task, places: Places) -> list[Step]:
    """The commands of a task, one after another."""
    if task.kind == "run":
        return [_train(study, task, places), _evaluate(task.name, model_of(task, places), places)]
    if task.kind == "routing":
        found = [_evaluate(task.name, model_of(task, places), places)]
        if study.routing[task.of].learned_from:
            found.append(_evaluate(learned_records(task.name), model_of(task, places), places, split="train"))
        return found
    shifted, out = study.shift[task.of], places.shift(task.name)
    arguments = ["shift", model_of(task, places), "--suite", "generated", "--data", places.data, "--out", str(out)]
    if shifted.corruptions != CORRUPTIONS:
        arguments += ["--corruptions", ",".join(shifted.corruptions)]
    if shifted.severities != SEVERITIES:
        arguments += ["--severities", ",".join(map(str, shifted.severities))]
    return [
        _evaluate(task.name, model_of(task, places), places),
        Step(arguments=tuple(arguments), makes=out / "shift.json"),
    ]


def learned_records(name: str) -> str:
    """What the records of the pictures that a model learned from are called."""
    return f"{name}-train"


def model_of(task: Task, places: Places) -> str:
    """What the commands of a task call its model: a folder of the study's, or what the study says."""
    trained = task.name if task.kind == "run" else task.needs
    return task.model if trained is None else str(places.folder(trained) / "model")


def _train(study: Study, task: Task, places: Places) -> Step:
    recipe, changes = study.recipe_of(task.of)
    out = places.folder(task.name)
    sets = [word for change in (*changes, f"seed={task.seed}") for word in ("--set", change)]
    arguments = ("train", recipe, "--data", places.data, "--out", str(out), *sets)
    return Step(arguments=arguments, makes=out / "model", begun=out / RECIPE_FILE)


def _evaluate(name: str, model: str, places: Places, split: str = "val") -> Step:
    out = places.records(name)
    which = () if split == "val" else ("--split", split)
    return Step(arguments=("evaluate", model, "--data", places.data, *which, "--out", str(out)), makes=out)
