"""A study: which models are trained and compared (a YAML file), and the commands that this takes."""

from __future__ import annotations

import glob
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from shlex import join
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, model_validator

from progresvit.data.augment.corruptions import CORRUPTIONS, SEVERITIES
from progresvit.data.dataset import TIMM_NAMES, some_of
from progresvit.io.parse import Section, did_you_mean, parse
from progresvit.io.yaml_files import find_file, read_mapping

if TYPE_CHECKING:
    from progresvit.training.recipe import Recipe

STUDY_FILE = "study.yaml"
"""Name of the study's file in a results folder."""
MAIN = "data"
"""Name of the place of the study's own dataset."""
LEFT_OUT = "none"
"""In place of a folder: the entries that need it are left out."""
PRINTED = "printed.txt"
"""What a command printed, beside what it wrote."""
HERE = Path(__file__).parent


ProbeTask = Literal["knn", "linear"]
"""Classifiers of frozen features: k nearest neighbours, or a linear layer that is trained."""


class Run(Section):
    """A model to train: a recipe with values changed."""

    recipe: str | None = None
    """None: the study's."""
    set: tuple[str, ...] = ()
    """Changes as on the command line, after the study's own."""
    seeds: tuple[int, ...] | None = Field(None, min_length=1)
    """None: the recipe's."""
    start: str | None = None
    """Another run: training starts from its model of the same seed."""
    of: str | None = None
    """Another run, whose models are evaluated with ``merge`` or by ``task`` instead of training models of its own."""
    merge: tuple[int, ...] | None = None
    """With ``of``: tokens merged in each block of each round (ToMe)."""
    task: ProbeTask | None = None
    """What predicts from the features of the model; None: its head."""
    evaluate: tuple[str, ...] = ()
    """With ``task``: more words of the command ``progresvit evaluate``, such as --epochs 20."""
    data: str | None = None
    """One of the study's ``places``; None: the study's own data."""

    @model_validator(mode="after")
    def _evaluated_or_trained(self) -> Run:
        if self.of is None and self.merge is not None:
            raise ValueError("merge says how the models of another run are evaluated; name that run with of:")
        if self.of is not None and self.merge is None and self.task is None:
            raise ValueError("a run with of: evaluates the models of that run in another way; add merge or task")
        if self.of is not None and (self.recipe or self.set or self.seeds or self.start or self.data):
            raise ValueError(
                "a run with of: has the recipe, seeds, start and data of that run; remove recipe, set, seeds, start "
                "and data"
            )
        if self.evaluate and self.task is None:
            raise ValueError("evaluate adds words to the evaluation by a task; add task, or remove evaluate")
        return self

    @property
    def evaluation(self) -> tuple[str, ...]:
        """Words that the command ``progresvit evaluate`` has for this run alone."""
        merging = () if self.merge is None else ("--merge", ",".join(map(str, self.merge)))
        return (*merging, *self.probe_words)

    @property
    def probe_words(self) -> tuple[str, ...]:
        """Words that say what predicts from the features."""
        return () if self.task is None else ("--task", self.task, *self.evaluate)


class DeclaredTest(Section):
    """A difference of two runs that is tested, declared before the runs."""

    label: str
    ours: str
    theirs: str
    margin: float = Field(gt=0)
    """Points of top-1 in the last round. An interval that includes 0 and stays below it shows that there is no such
    gain."""
    paper: float | None = None
    """The paper's gain in points, for readers."""


Equal = Literal["epochs", "compute", "images"]
"""What the trainings of compared runs have in common besides the images: epochs, compute within
``repro.equal.COMPUTE_TOLERANCE``, or nothing more."""


class Comparison(Section):
    """Runs side by side: tables and plots."""

    title: str
    rows: dict[str, str] = Field(min_length=1)
    """Label of a row, and its run."""
    against: str | None = None
    """The run that is the base of all differences; None: the row above."""
    tests: tuple[DeclaredTest, ...] = ()
    """Differences that are tested over seeds and images, instead of those to the base over images."""
    equal: Equal = "epochs"


class Frontier(Section):
    """Accuracy and compute of every point of several runs, and one run's differences to the others at equal GMACs."""

    title: str
    ours: str
    """The run that the others are compared with."""
    rows: dict[str, str] = Field(min_length=1)
    """Label of a row, and its run; ``ours`` is among them."""
    margin: float = Field(gt=0)
    """Points of top-1. An interval that includes 0 and lies within the margin on both sides shows equivalence."""
    families: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Label of a curve in plots, and the runs that are its points: one architecture at several resolutions."""
    equal: Equal = "compute"

    @model_validator(mode="after")
    def _in_rows(self) -> Frontier:
        rows = self.rows.values()
        for run in (self.ours, *(run for family in self.families.values() for run in family)):
            if run not in rows:
                raise ValueError(f"{run!r} is not among the rows, {did_you_mean(run, rows)}")
        return self


class Segmentation(Section):
    """The runs are segmentation models: validation images choose thresholds, test images measure them."""

    title: str
    val: str = "val"
    """Split that chooses thresholds."""
    test: str = "test"
    """Split that models are measured on; the same as ``val`` if the data have no other."""
    ours: str
    """The run that the others are compared with."""
    rows: dict[str, str] = Field(min_length=1)
    """Label of a row, and its run; ``ours`` is among them."""
    margin: float = Field(gt=0)
    """Points of mIoU. An interval that includes 0 and lies within the margin on both sides shows equivalence."""
    max_drop: float = Field(gt=0)
    """Points of mIoU that early exits may lose on the validation images."""
    block: int = Field(1, ge=1)
    """Consecutive images that count as one draw in intervals: neighbouring frames of a video look alike."""
    equal: Equal = "compute"

    @model_validator(mode="after")
    def _in_rows(self) -> Segmentation:
        if self.ours not in self.rows.values():
            raise ValueError(f"{self.ours!r} is not among the rows, {did_you_mean(self.ours, self.rows.values())}")
        return self


class Routing(Section):
    """A model whose routing is measured."""

    model: str
    """A run of the study, or what progresvit evaluate takes: a folder, a bundled model, a hub id."""
    learned_from: bool = True
    """Also fit routers on the training split, as the paper does."""
    learned_images: int | None = Field(None, ge=1)
    """Training images that routers are fitted on, drawn at random; None: all."""
    max_error: float = Field(default=0.05, gt=0, lt=1)
    """Maximum error rate among answered images, at which the others are withheld."""


class Shift(Section):
    """Models under corruption."""

    models: tuple[str, ...] = Field(min_length=1)
    corruptions: tuple[str, ...] = Field(CORRUPTIONS, min_length=1)
    severities: tuple[int, ...] = Field(SEVERITIES, min_length=1)
    seeds: tuple[int, ...] | None = Field(None, min_length=1)
    """Seeds of the models that are runs of the study, each measured separately; None: the first."""
    budget: float | None = Field(None, gt=0)
    """GMACs: also measure routing with an average of at most this at each severity."""
    cache: bool = False
    """Keep the corrupted images in RUNS/corrupted for the next model."""

    @model_validator(mode="after")
    def _known(self) -> Shift:
        for asked, choices in ((self.corruptions, CORRUPTIONS), (self.severities, SEVERITIES)):
            for name in asked:
                if name not in choices:
                    raise ValueError(f"{name!r} is unknown, {did_you_mean(name, map(str, choices))}")
        return self


class CommandPlan(Section):
    """A progresvit command whose tables and figures are kept, for each of some models or once.

    Placeholders stand for what it uses: ``{model}`` is the model of the row, ``{models[RUN]}`` and ``{records[RUN]}``
    the model and the records of a run, ``{made[ENTRY]}`` the folder of another command, ``{out}`` the folder that it
    writes to, ``{repro}`` this folder, ``{data}`` and the study's ``places`` the datasets.
    """

    title: str
    words: str
    """As on the command line, without ``progresvit``."""
    rows: dict[str, str] = Field(default_factory=dict)
    """Label of a row, and its model: a run of the study, or what progresvit evaluate takes. Empty: one command."""
    tables: tuple[str, ...] = ()
    """Markdown files of ``{out}`` that the page shows, the rows below each other."""
    figures: tuple[str, ...] = ("*.png",)
    """Patterns of images of ``{out}`` that the page shows."""
    printed: bool = False
    """The page shows what the command printed."""

    @model_validator(mode="after")
    def _placeholders(self) -> CommandPlan:
        names = [name for name, _ in placeholders(self.words)]
        if "out" not in names and not self.printed:
            raise ValueError("nothing of this command is kept; add printed: true, or words with {out}")
        if ("model" in names) != bool(self.rows):
            raise ValueError("{model} in words and rows belong together; give both or neither")
        return self


def placeholders(words: str) -> list[tuple[str, str]]:
    """The placeholders of a command and, in brackets, the run of each: ``("records", "full")``."""
    found = []
    for _, name, _, _ in Formatter().parse(words):
        if name is not None:
            before, _, inside = name.partition("[")
            found.append((before, inside.rstrip("]")))
    return found


class Study(Section):
    """Everything that one page of results is based on."""

    title: str
    data: str
    """Name of the dataset, for readers."""
    places: dict[str, str] = Field(default_factory=dict)
    """Further datasets: the variable that says where each is, and its name for readers."""
    recipe: str
    set: tuple[str, ...] = ()
    """Changes to the recipe of every run."""
    runs: dict[str, Run] = Field(default_factory=dict)
    comparisons: dict[str, Comparison] = Field(default_factory=dict)
    frontiers: dict[str, Frontier] = Field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Classes that are also reported separately, by class id."""
    routing: dict[str, Routing] = Field(default_factory=dict)
    shift: dict[str, Shift] = Field(default_factory=dict)
    segmentation: Segmentation | None = None
    """The runs in its rows are segmentation models; None: all are classification models."""
    commands: dict[str, CommandPlan] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names(self) -> Study:
        above: list[str] = []
        named = (*self.runs, *self.comparisons, *self.frontiers, *self.routing, *self.shift, *self.commands)
        for name in (*named, *self.places):
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"{name!r} names files; use letters, digits, dots, hyphens and underscores")
        trained = [name for name, run in self.runs.items() if run.of is None]
        for name, run in self.runs.items():
            for key, other in (("of", run.of), ("start", run.start)):
                if other is not None and other not in trained:
                    raise ValueError(
                        f"runs.{name}: {key}: {other!r} is not a trained run, {did_you_mean(other, trained)}"
                    )
        for name in trained:
            starts = [name]
            while (start := self.runs[starts[-1]].start) is not None:
                starts.append(start)
                if start in starts[:-1]:
                    raise ValueError(
                        f"runs.{name}: start: {' starts from '.join(starts)}; start one from other weights"
                    )
        for name, comparison in self.comparisons.items():
            tested = [run for test in comparison.tests for run in (test.ours, test.theirs)]
            for row in (*comparison.rows.values(), *filter(None, [comparison.against]), *tested):
                if row not in self.runs:
                    raise ValueError(f"comparisons.{name}: unknown run {row!r}, {did_you_mean(row, self.runs)}")
        for name, frontier in self.frontiers.items():
            for row in frontier.rows.values():
                if row not in self.runs:
                    raise ValueError(f"frontiers.{name}: unknown run {row!r}, {did_you_mean(row, self.runs)}")
        for row in self.segmented:
            if row not in self.runs:
                raise ValueError(f"segmentation: unknown run {row!r}, {did_you_mean(row, self.runs)}")
        for name, run in self.runs.items():
            if run.data is not None and run.data not in self.places:
                raise ValueError(
                    f"runs.{name}: data: unknown place {run.data!r}, {did_you_mean(run.data, self.places)}"
                )
        taken = {MAIN, "model", "models", "records", "made", "out", "repro"} & set(self.places)
        if taken:
            raise ValueError(f"places: {', '.join(sorted(taken))} means something else; choose another name")
        for name, command in self.commands.items():
            self._check_command(f"commands.{name}", command, above)
            above += self.command_names(name).values()
        return self

    def _check_command(self, where: str, command: CommandPlan, above: Sequence[str]) -> None:
        for kind, inside in placeholders(command.words):
            if kind in ("models", "records"):
                if inside not in self.runs:
                    raise ValueError(f"{where}: unknown run {inside!r}, {did_you_mean(inside, self.runs)}")
            elif kind == "made":
                if inside not in above:
                    raise ValueError(f"{where}: no command above makes {inside!r}, {did_you_mean(inside, above)}")
            elif kind not in (known := ("model", "out", "repro", MAIN, *self.places)):
                raise ValueError(f"{where}: unknown placeholder {{{kind}}}, {did_you_mean(kind, known)}")

    @property
    def segmented(self) -> Collection[str]:
        """The runs that are segmentation models."""
        return () if self.segmentation is None else self.segmentation.rows.values()

    def place_of(self, run: str) -> str:
        """Name of the place of a run's data."""
        return self.trained_run(run).data or MAIN

    def data_name(self, place: str) -> str:
        """Name of the dataset of a place, for readers."""
        return self.data if place == MAIN else self.places[place]

    def recipe_of(self, name: str, start: str | None = None) -> tuple[str, tuple[str, ...]]:
        """The recipe of a run and all changes to it, without the seed. Of two changes to a key the last counts.

        ``start`` is the model folder of a run that starts from another; without it, the name of that run stands there.
        """
        changes: dict[str, str] = {}
        run = self.trained_run(name)
        starting = () if run.start is None else (f"model.start={start or run.start}",)
        for change in (*self.set, *run.set, *starting, *self._merging(name)):
            key = change.partition("=")[0]
            changes.pop(key, None)  # and it counts at its own place
            changes[key] = change
        return run.recipe or self.recipe, tuple(changes.values())

    def trained_run(self, name: str) -> Run:
        """The run itself, or the one whose models it evaluates."""
        run = self.runs[name]
        return run if run.of is None else self.runs[run.of]

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Seeds of a run; by default the recipe's."""
        return self.trained_run(name).seeds or (self.load_recipe_of(name).seed,)

    def _merging(self, name: str) -> tuple[str, ...]:
        merge = self.runs[name].merge
        return () if merge is None else (f"model.merge={list(merge)}",)

    def load_recipe_of(self, name: str) -> Recipe:
        """The recipe of a run, validated."""
        from progresvit.training.recipe import load_recipe  # imports torch, which a page does not need

        return load_recipe(*self.recipe_of(name))

    def shift_name(self, key: str, model: str, seed: int | None = None) -> str:
        """Name of the results file of a model under corruption: the entry, the model if there are several, the seed."""
        name = key if len(self.shift[key].models) == 1 else f"{key}-{_plain(model)}"
        return name if seed is None else f"{name}-{seed}"

    def command_names(self, key: str) -> dict[str, str]:
        """Names of a command's results files by the label of each row; without rows, one of no label."""
        return {label: f"{key}-{_plain(label)}" for label in self.commands[key].rows} or {"": key}

    def shift_seeds(self, key: str, model: str) -> tuple[int | None, ...]:
        """The seeds with which a model is measured under corruption; one None: not by seed."""
        seeds = self.shift[key].seeds
        return (None,) if seeds is None or model not in self.runs else seeds

    def to_yaml(self) -> str:
        """The text of a study file."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def _plain(model: str) -> str:
    return re.sub(r"[^\w.-]+", "-", model).strip("-")  # a folder or a hub id has slashes


def read_study(source: str | Path) -> Study:
    """A study by its name in ``repro/runs`` or by a path. Its recipes are not read."""
    run_lists = {path.stem: path for path in sorted((HERE / "runs").glob("*.yaml"))}
    path = find_file(str(source), run_lists, "study")
    return parse(Study, read_mapping(path, "study", "runs: and comparisons:"), origin=str(path))


def load_study(source: str | Path, changes: Sequence[str] = (), unlabelled: str | None = None) -> Study:
    """A study with its recipes validated.

    Args:
        source: As of ``read_study``.
        changes: Made to every run's recipe, after all others.
        unlabelled: More images, for the runs whose recipe has the task dino.
    """
    study = _with_changes(read_study(source), dict.fromkeys(read_study(source).runs, tuple(changes)))
    tasks = {}
    for name in study.runs:
        try:
            tasks[name] = study.load_recipe_of(name).task
        except ValueError as error:
            raise ValueError(f"{source}: runs.{name}: {error}") from error
    if unlabelled is None:
        return study
    if "dino" not in tasks.values():
        raise ValueError(f"unlabelled: {source} has no run with the task dino; remove unlabelled={unlabelled}.")
    change = (f"task_options.unlabelled={unlabelled}",)
    return _with_changes(study, {name: change for name, task in tasks.items() if task == "dino"})


def _with_changes(study: Study, changes: Mapping[str, tuple[str, ...]]) -> Study:
    """The study with more changes to the recipes of some runs; a run with ``of`` has no recipe of its own."""
    runs = {
        name: run.model_copy(update={"set": (*run.set, *changes[name])})
        for name, run in study.runs.items()
        if run.of is None and name in changes
    }
    return study.model_copy(update={"runs": study.runs | runs})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one results file is made of."""

    name: str
    """The file's name without .json."""
    kind: Literal["run", "routing", "shift", "command"]
    key: str
    """The run, or the key in the study's ``routing``, ``shift`` or ``commands``."""
    model: str
    """As the study calls it: a run, or what progresvit evaluate takes; empty for a command of no single model."""
    seed: int | None = None
    trained: str | None = None
    """The run with its seed that trains the model; None for a model from elsewhere."""
    start: str | None = None
    """The run with its seed that trains the model that this training starts from."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Further runs whose models a command uses, and what trains each."""
    records: Mapping[str, str] = field(default_factory=dict)
    """Runs whose records a command reads, and the entry of each."""
    made: tuple[str, ...] = ()
    """Entries of other commands whose files a command reads."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The entries whose files a command reads."""
        return (*self.records.values(), *self.made)

    @property
    def uses(self) -> tuple[str, ...]:
        """The trainings whose models its commands open."""
        return tuple(dict.fromkeys((*filter(None, [self.trained]), *self.models.values())))


def entries_of(study: Study) -> list[Entry]:
    """All entries of a study in order. The model of a run's first seed is measured further, unless an entry has seeds.

    The first seed of every run comes before the second of any, so that a study that was stopped compares equals.
    """
    seeds = {run: study.seeds_of(run) for run in study.runs}
    runs = [
        Entry(
            name=f"{run}-{seed}",
            kind="run",
            key=run,
            model=run,
            seed=seed,
            trained=f"{study.runs[run].of or run}-{seed}",
            start=_start_of(study, run, seed),
        )
        for turn in zip_longest(*([(run, seed) for seed in seeds[run]] for run in seeds))
        for run, seed in filter(None, turn)
    ]
    trained = {entry.key: entry.name for entry in reversed(runs) if entry.name == entry.trained}
    others = [
        Entry(name=key, kind="routing", key=key, model=routing.model, trained=trained.get(routing.model))
        for key, routing in study.routing.items()
    ]
    others += _shift_entries(study, {entry.name for entry in runs if entry.name == entry.trained}, trained)
    first = {entry.key: entry for entry in reversed(runs)}
    others += [entry for key in study.commands for entry in _command_entries(study, key, first)]
    for name, count in Counter(entry.name for entry in (*runs, *others)).items():
        if count > 1:
            raise ValueError(f"{count} entries of the study would write {name}.json; rename a run or an entry.")
    return [*runs, *others]


def _command_entries(study: Study, key: str, first: Mapping[str, Entry]) -> list[Entry]:
    """The entries of a command; ``first`` is the entry of each run with its first seed."""
    plan = study.commands[key]
    named = placeholders(plan.words)
    models = {run: str(first[run].trained) for kind, run in named if kind == "models"}
    records = {run: first[run].name for kind, run in named if kind == "records"}
    made = tuple(inside for kind, inside in named if kind == "made")
    return [
        Entry(
            name=name,
            kind="command",
            key=key,
            model=(model := plan.rows.get(label, "")),
            trained=first[model].trained if model in first else None,
            models=models,
            records=records,
            made=made,
        )
        for label, name in study.command_names(key).items()
    ]


def _start_of(study: Study, run: str, seed: int) -> str | None:
    start = study.runs[run].start
    if start is not None and seed not in study.seeds_of(start):
        raise ValueError(f"runs.{run}: start: {start} is not trained with seed {seed}; add it to the seeds of {start}.")
    return None if start is None else f"{start}-{seed}"


def _shift_entries(study: Study, runs: set[str], first: Mapping[str, str]) -> list[Entry]:
    """The first seed of every model comes before the second of any. ``first`` is the first training of each run."""
    entries = []
    for key, shift in study.shift.items():
        turns = zip_longest(*([(model, seed) for seed in study.shift_seeds(key, model)] for model in shift.models))
        for model, seed in (pair for turn in turns for pair in turn if pair is not None):
            trained = first.get(model) if seed is None else f"{model}-{seed}"
            if seed is not None and trained not in runs:
                raise ValueError(f"shift.{key}: seed {seed} of {model} is not trained; add it to the seeds of the run.")
            name = study.shift_name(key, model, seed)
            entries.append(Entry(name=name, kind="shift", key=key, model=model, seed=seed, trained=trained))
    return entries


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where images come from and where models and records go."""

    data: str
    runs: Path
    others: Mapping[str, str] = field(default_factory=dict)
    """Where the study's ``places`` are."""

    def find(self, name: str) -> str:
        """Where the data of a place are."""
        return self.data if name == MAIN else self.others.get(name, name.upper())

    def made(self, name: str) -> Path:
        """What a command writes."""
        return self.runs / "made" / name

    def run(self, name: str) -> Path:
        """The folder of a training."""
        return self.runs / name

    def records(self, name: str) -> Path:
        return self.runs / "records" / f"{name}.parquet"

    def shift(self, name: str) -> Path:
        return self.runs / "shift" / name

    @property
    def corrupted(self) -> Path:
        """Corrupted images that several models are measured on."""
        return self.runs / "corrupted"

    def log(self, name: str) -> Path:
        """Output of an entry's commands."""
        return self.runs / "logs" / f"{name}.log"

    def timings(self, name: str) -> Path:
        """A JSON line for each command of an entry: its seconds, processes and the jobs it shared the machine with."""
        return self.runs / "logs" / f"{name}.jsonl"

    def model(self, entry: Entry) -> str:
        """What the commands of an entry call its model."""
        return entry.model if entry.trained is None else str(self.run(entry.trained) / "model")


FOR_READERS = Places(data="DATA", runs=Path("RUNS"))
"""Placeholders in commands that are written down."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One ``progresvit`` command of an entry."""

    words: tuple[str, ...]
    makes: Path
    """The file that is there when it is done."""


def commands_of(study: Study, entry: Entry, places: Places) -> list[Command]:
    """The commands of an entry, in order."""
    if entry.kind == "command":
        return [_command(study, entry, places)]
    if entry.kind == "run":
        data = places.find(study.place_of(entry.key))
        splits = study.segmentation if entry.key in study.segmented else None
        chosen = () if splits is None or splits.val == "val" else ("--split", splits.val)
        words = (*study.runs[entry.key].evaluation, *chosen)
        evaluation = _evaluate(entry, places, entry.name, *words, data=data)
        if study.runs[entry.key].of is not None:
            return [evaluation]
        start = None if entry.start is None else str(places.run(entry.start) / "model")
        recipe, changes = study.recipe_of(entry.key, start)
        out = places.run(entry.name)
        sets = [word for change in (*changes, f"seed={entry.seed}") for word in ("--set", change)]
        training = ("train", recipe, "--data", data, "--out", str(out), *sets)
        commands = [Command(words=training, makes=out / "model" / "model.safetensors"), evaluation]
        if splits is not None and splits.test != splits.val:
            commands.append(_evaluate(entry, places, test_records(entry.name), "--split", splits.test, data=data))
        return commands
    evaluation = _evaluate(entry, places, entry.name)
    if entry.kind == "routing":
        images = study.routing[entry.key].learned_images
        sample = () if images is None else ("--limit", str(images), "--seed", "0")
        learned = [_evaluate(entry, places, f"{entry.name}-train", "--split", "train", *sample)]
        return [evaluation, *(learned if study.routing[entry.key].learned_from else [])]
    shift, out = study.shift[entry.key], places.shift(entry.name)
    shifting = ["shift", places.model(entry), "--suite", "generated", "--data", places.data, "--out", str(out)]
    if shift.corruptions != CORRUPTIONS:
        shifting += ["--corruptions", ",".join(shift.corruptions)]
    if shift.severities != SEVERITIES:
        shifting += ["--severities", ",".join(map(str, shift.severities))]
    if shift.cache:
        shifting += ["--cache", str(places.corrupted)]
    return [evaluation, Command(words=tuple(shifting), makes=out / "shift.json")]


def _command(study: Study, entry: Entry, places: Places) -> Command:
    """The command of a plan with its placeholders filled; done when ``PRINTED`` is there."""
    out = places.made(entry.name)
    values: dict[str, Any] = {name: places.find(name) for name in (MAIN, *study.places)}
    values |= {
        "out": out,
        "repro": "repro" if places is FOR_READERS else HERE,
        "model": places.model(entry),
        "models": {run: places.run(trained) / "model" for run, trained in entry.models.items()},
        "records": {run: places.records(name) for run, name in entry.records.items()},
        "made": {name: places.made(name) for name in entry.made},
    }
    words = tuple(word.format_map(values) for word in shlex.split(study.commands[entry.key].words))
    return Command(words=words, makes=out / PRINTED)


def places_of(study: Study, entry: Entry, entries: Mapping[str, Entry]) -> set[str]:
    """The places whose data an entry needs, with those of the trainings and records that it uses.

    ``entries`` are all of the study by name.
    """
    if entry.kind == "command":
        found = {kind for kind, _ in placeholders(study.commands[entry.key].words)} & {MAIN, *study.places}
    else:
        found = {study.place_of(entry.key) if entry.kind == "run" else MAIN}
    for name in {*entry.uses, *entry.reads, *filter(None, [entry.start])} - {entry.name}:
        found |= places_of(study, entries[name], entries)
    return found


def with_data(study: Study, entries: Sequence[Entry], places: Places, measured: Collection[str] = ()) -> list[Entry]:
    """The entries without those whose data are left out; an error names the entries whose place is not given.

    Entries that were ``measured`` need no data.
    """
    by_name = {entry.name: entry for entry in entries}
    kept, lacking = [], dict[str, list[str]]()
    for entry in entries:
        needed = set() if entry.name in measured else places_of(study, entry, by_name)
        if any(places.find(place) == LEFT_OUT for place in needed):
            continue
        kept.append(entry)
        for place in needed - {MAIN, *places.others}:
            lacking.setdefault(place, []).append(entry.name)
    if lacking:
        lines = (
            f"{some_of(names)} need {study.places[place]}; say where it is with {place}=FOLDER, or leave them out with "
            f"{place}={LEFT_OUT}."
            for place, names in sorted(lacking.items())
        )
        raise ValueError(" ".join(lines))
    return kept


def check_data(study: Study, entries: Iterable[Entry], places: Places, folder: Path) -> None:
    """Refuse entries whose images are not where they should be; relative paths are below ``folder``."""
    missing: dict[str, list[str]] = {}
    for entry in entries:
        for command in commands_of(study, entry, places):
            for option, data in pairwise(command.words):
                is_path = option == "--data" and not data.startswith(TIMM_NAMES)
                if is_path and not glob.glob(str(folder / Path(data).expanduser())):
                    missing.setdefault(data, []).append(entry.name)
    if missing:
        lines = (
            f"there are no images at {data}, which {some_of(list(dict.fromkeys(names)))} need."
            for data, names in missing.items()
        )
        raise ValueError(" ".join(lines))


def options_of(words: Sequence[str]) -> set[str]:
    """The options that a progresvit command has."""
    from typer.main import get_command

    from progresvit.cli import app

    command: Any = get_command(app)
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands.get(word, command)
    return {option for parameter in command.params for option in parameter.opts}


def test_records(name: str) -> str:
    """Name of the records of the test split of a segmentation model."""
    return f"{name}-test"


def _evaluate(entry: Entry, places: Places, records: str, *which: str, data: str | None = None) -> Command:
    out = places.records(records)
    words = ("evaluate", places.model(entry), "--data", data or places.data, *which, "--out", str(out))
    return Command(words=words, makes=out)


def reader_commands(study: Study, entry: Entry) -> tuple[str, ...]:
    """The commands as results files and pages show them, without the folders of this machine."""
    return tuple(
        join(("progresvit", *map(_without_folders, command.words)))
        for command in commands_of(study, entry, FOR_READERS)
    )


def _without_folders(word: str) -> str:
    """A change KEY=/A/B/C as KEY=C; other words as they are."""
    key, equals, value = word.partition("=/")
    return f"{key}={Path(value).name}" if equals else word
