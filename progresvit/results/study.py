"""A study: which models are trained, and which are set side by side. A YAML file, as a recipe is for one run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from progresvit.data.corruptions import CORRUPTIONS, SEVERITIES
from progresvit.io.files import replace_file
from progresvit.io.yaml_files import find_file, read_mapping, shipped_files

if TYPE_CHECKING:
    from progresvit.training.recipe import Recipe


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(_Section):
    """A model to train: a recipe with values changed."""

    recipe: str | None = None
    """None: the study's."""
    set: tuple[str, ...] = ()
    """As on the command line, after the study's own."""
    seeds: tuple[int, ...] | None = Field(None, min_length=1)
    """None: the recipe's."""

    @model_validator(mode="after")
    def _different_seeds(self) -> Run:
        if self.seeds and len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"each seed is given once, not {', '.join(map(str, self.seeds))}")
        return self


class Comparison(_Section):
    """Runs side by side: a table and a figure of their frontiers."""

    title: str
    rows: dict[str, str] = Field(min_length=1)
    """What a row is called, and its run."""
    against: str | None = None
    """The run that the others' differences are told from; None: each is told from the row above it."""


class Measured(_Section):
    """A model that more is measured of."""

    model: str
    """A run of the study, or what progresvit evaluate takes: a folder, shipped, a hub id."""
    learned_from: bool = True
    """Fit routers on the training split, as the paper does, beside those that are fitted on held-back pictures."""


class Shifted(_Section):
    """Models under corruption."""

    models: tuple[str, ...] = Field(min_length=1)
    corruptions: tuple[str, ...] = Field(CORRUPTIONS, min_length=1)
    severities: tuple[int, ...] = Field(SEVERITIES, min_length=1)

    @model_validator(mode="after")
    def _known(self) -> Shifted:
        for what, asked, known in (
            ("corruption", self.corruptions, CORRUPTIONS),
            ("severity", self.severities, SEVERITIES),
        ):
            strange = [str(one) for one in asked if one not in known]
            if strange or len(set(asked)) != len(asked):
                said = f"there is no {what} {strange[0]}" if strange else f"each {what} is given once"
                raise ValueError(f"{said}; choose from {', '.join(map(str, known))}")
        return self


class Study(_Section):
    """Everything that one page of results rests on."""

    title: str
    data: str
    """What the pictures are, for people."""
    recipe: str
    set: tuple[str, ...] = ()
    """Changes to the recipe of every run."""
    runs: dict[str, Run] = {}
    comparisons: dict[str, Comparison] = {}
    groups: dict[str, tuple[str, ...]] = {}
    """Classes that are also reported apart, by folder name."""
    routing: dict[str, Measured] = {}
    shift: dict[str, Shifted] = {}

    @model_validator(mode="after")
    def _file_names(self) -> Study:
        for name in (*self.runs, *self.comparisons, *self.routing, *self.shift):
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"{name!r} names files; use letters, digits, dots, hyphens and underscores")
        return self

    @model_validator(mode="after")
    def _known_runs(self) -> Study:
        for name, comparison in self.comparisons.items():
            asked = [*comparison.rows.values(), *([comparison.against] if comparison.against else [])]
            for run in asked:
                if run not in self.runs:
                    near = difflib.get_close_matches(run, self.runs, n=1)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    raise ValueError(f"comparisons.{name} asks for the run {run}, which is not among runs{hint}")
        return self

    def file_of(self, key: str, model: str) -> str:
        """What the results file of a model under corruption is called; with one model, as the entry itself."""
        if len(self.shift[key].models) == 1:
            return key
        plain = re.sub(r"[^\w.-]+", "-", model).strip("-")  # a folder or a hub id has slashes
        return f"{key}-{plain}"

    def recipe_of(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The recipe of a run and all changes to it, without the seed."""
        run = self.runs[name]
        changes: dict[str, str] = {}
        for change in (*self.set, *run.set):
            key = change.partition("=")[0]
            changes.pop(key, None)  # the last of a key counts, and in its own place
            changes[key] = change
        return run.recipe or self.recipe, tuple(changes.values())

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """The seeds of a run."""
        return self.runs[name].seeds or (self.load_recipe_of(name).seed,)

    def load_recipe_of(self, name: str) -> Recipe:
        """The recipe of a run, validated."""
        from progresvit.training.recipe import load_recipe  # and torch with it, which a report does without

        return load_recipe(*self.recipe_of(name))


def shipped_studies() -> dict[str, Path]:
    """Names of the studies that ship, and where they are."""
    return shipped_files("studies")


STUDY_FILE = "study.yaml"
"""In a results folder: which study it is of."""


def write_study(study: Study, results: Path) -> None:
    """Beside the results, for the report to know what is compared."""
    results.mkdir(parents=True, exist_ok=True)
    values = study.model_dump(mode="json", exclude_defaults=True)
    replace_file(results / STUDY_FILE, yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120))


def load_study(source: str | Path, changes: Sequence[str] = ()) -> Study:
    """A study by the name of one that ships, or by a path; every run's recipe is validated too.

    ``changes`` are made to every run's recipe, after all others.
    """
    study = read_study(source)
    changed = {name: run.model_copy(update={"set": (*run.set, *changes)}) for name, run in study.runs.items()}
    study = study.model_copy(update={"runs": changed})
    for name in study.runs:
        try:
            study.load_recipe_of(name)
        except ValueError as error:
            raise ValueError(f"{source}: runs.{name}: {error}") from error
    return study


def read_study(source: str | Path) -> Study:
    """The same without its recipes, which who only reads results need not have."""
    path = find_file(str(source), shipped_studies(), "study")
    values = read_mapping(path, "study", "runs: and comparisons:")
    try:
        return Study.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(dict(problem)) for problem in error.errors())
        raise ValueError(f"{path}: {problems}.") from error


def _explain(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    said = (
        "is no key of a study" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, ")
    )
    return f"{place}: {said}" if place else str(said)
