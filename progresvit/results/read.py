"""A results folder, read and checked: every field known, every comparison of one kind of data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from progresvit.results.format import FORMAT, Measurement, RunResult
from progresvit.results.format_routing import RoutingResult
from progresvit.results.format_shift import ShiftResult

KINDS: dict[str, type[Measurement]] = {"run": RunResult, "routing": RoutingResult, "shift": ShiftResult}


@dataclass(frozen=True, kw_only=True)
class Results:
    """All measurements of a folder, by name."""

    runs: dict[str, RunResult]
    routing: dict[str, RoutingResult]
    shift: dict[str, ShiftResult]

    def of_run(self, run: str) -> list[RunResult]:
        """The seeds of a run, in order; none where it was not carried out."""
        found = [result for result in self.runs.values() if result.run == run]
        return sorted(found, key=lambda result: result.seed or 0)


def read_results(folder: Path) -> Results:
    """Every measurement in the folder: its JSON files."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give the one that progresvit study wrote its results to.")
    found = [read_measurement(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise ValueError(f"{folder} holds no results (JSON files); make some with: progresvit study")
    return Results(
        runs={one.name: one for one in found if isinstance(one, RunResult)},
        routing={one.name: one for one in found if isinstance(one, RoutingResult)},
        shift={one.name: one for one in found if isinstance(one, ShiftResult)},
    )


def read_measurement(path: Path) -> Measurement:
    """One file; an error names the file, the field and what to do."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); measure again with progresvit study.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no measurement; move it out of the results folder.")
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{path}: kind is {kind!r} and should be one of {', '.join(KINDS)}; is it a results file?")
    if values.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{path} is of format {values['format']} and this version reads {FORMAT}; measure again.")
    try:
        result = KINDS[kind].model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(dict(problem)) for problem in error.errors()[:5])
        raise ValueError(f"{path}: {problems}. Measure again with progresvit study.") from error
    if result.name != path.stem:
        raise ValueError(f"{path} is called {result.name} inside; rename the file {result.name}.json.")
    return result


def _explain(problem: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"the field {place} is missing"
    if problem["type"] == "extra_forbidden":
        return f"the field {place} is foreign"
    said = str(problem["msg"]).removeprefix("Value error, ")
    return f"{place}: {said}" if place else said


_DATA = {
    "name": "the data sets",
    "train": "the numbers of pictures learned from",
    "val": "the numbers of pictures measured on",
    "classes": "the numbers of classes",
    "names": "the names of the pictures measured on",
    "learned": "the names of the pictures of the training runs",
}


def check_comparable(results: Sequence[Measurement], what: str) -> None:
    """Refuse to set side by side what was not made of the same pictures."""
    if not results:
        return
    first = results[0]
    for other in results[1:]:
        for field, said in _DATA.items():
            ours, theirs = getattr(first.data, field), getattr(other.data, field)
            if ours != theirs:
                told = "are not the same" if field in ("names", "learned") else f"are {ours} and {theirs}"
                raise ValueError(
                    f"{what} compares {first.name} and {other.name}, which are of different data: {said} ({field}) "
                    f"{told}. Measure them on the same pictures, or take one of them out."
                )
        if first.precision != other.precision:
            raise ValueError(
                f"{what} compares {first.name}, measured in {first.precision}, and {other.name}, in {other.precision}; "
                "measure them alike."
            )
