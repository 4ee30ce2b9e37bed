"""Runs side by side: the seeds of a run as one, and what lies between two runs, picture by picture.

Letters: N pictures, S rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from progresvit.results.format import RunResult
from progresvit.results.read import Results, check_comparable
from progresvit.results.study import Study

LIKELY = 1.96
"""Standard errors to either side of a mean that hold 95 % of a normal distribution."""

FULL = -1
"""The last round's place: the full path."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of two shares, with its 95 % interval."""

    mean: float
    lowest: float
    highest: float


def paired_difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Difference:
    """Mean of the differences on the same pictures: (N,), (N,).

    Pictures that both have right or both have wrong tell nothing and widen nothing. The interval is a normal one and
    covers the draw of the pictures, not that of the seeds.
    """
    between = ours - theirs
    mean = float(between.mean())
    reach = LIKELY * float(between.std(ddof=1)) / len(between) ** 0.5 if len(between) > 1 else float("inf")
    return Difference(mean=mean, lowest=mean - reach, highest=mean + reach)


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison: all of its seeds."""

    label: str
    run: str
    seeds: tuple[RunResult, ...]

    @property
    def first(self) -> RunResult:
        """For what the seeds have in common: rounds, parameters, epochs."""
        return self.seeds[0]

    @property
    def rounds(self) -> int:
        return len(self.first.rounds.resolutions)

    @cached_property
    def correct(self) -> NDArray[np.float64]:
        """Share of the seeds that have each picture right: (N, S)."""
        return np.mean([one.rounds.correct(one.data.val) for one in self.seeds], axis=0)  # type: ignore[no-any-return]

    def top1_of_seeds(self, place: int) -> tuple[float, ...]:
        """Of a round, by seed."""
        return tuple(one.rounds.right[place] / one.data.val for one in self.seeds)

    def top1(self, place: int) -> float:
        """Of a round, mean over the seeds."""
        return float(np.mean(self.top1_of_seeds(place)))

    @property
    def saving(self) -> float:
        """Compute that the near-lossless threshold saves, mean over the seeds."""
        full = self.first.rounds.gmacs_paper[FULL]
        return self.mean(lambda one: 1 - one.near_lossless.gmacs_paper / full)

    def mean(self, figure: Callable[[RunResult], float]) -> float:
        """Over the seeds."""
        return float(np.mean([figure(one) for one in self.seeds]))

    def less(self, other: ComparedRun, place: int) -> Difference:
        """How much better this run is in a round, the other in the same."""
        return paired_difference(self.correct[:, place], other.correct[:, place])


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """A comparison as far as it was carried out."""

    title: str
    rows: tuple[ComparedRun, ...]
    missing: tuple[str, ...]
    """Labels of rows that were not measured, and seeds of those that were."""
    against: ComparedRun | None
    """What all are compared with; None: each with the row above it."""
    unmeasured_base: str | None
    """The run that all should be compared with, if it was not measured."""

    def base_of(self, number: int) -> ComparedRun | None:
        """What a row is compared with; None if with nothing."""
        if self.unmeasured_base is not None:
            return None
        if self.against is not None:
            return None if self.rows[number].run == self.against.run else self.against
        return self.rows[number - 1] if number else None


def gather(results: Results, label: str, run: str) -> ComparedRun:
    """The seeds of a run, which may be none; refused if they differ in more than the seed."""
    found = ComparedRun(label, run, tuple(results.of_run(run)))
    _check_seeds(found)
    return found


def line_up(results: Results, study: Study, name: str) -> LineUp:
    """The runs of a comparison; refused if they are not of the same pictures."""
    comparison = study.comparisons[name]
    rows = [gather(results, label, run) for label, run in comparison.rows.items()]
    asked, against = comparison.against, None
    if asked is not None:
        labels = {row.run: row.label for row in rows}
        against = gather(results, labels.get(asked, asked), asked)
    measured = tuple(row for row in rows if row.seeds)
    everyone = [*measured, *([against] if against is not None and against.seeds else [])]
    check_comparable([one for row in everyone for one in row.seeds], f"the comparison {name}")
    return LineUp(
        title=comparison.title,
        rows=measured,
        missing=tuple(said for row in rows for said in _missing(row, study)),
        against=against if against is not None and against.seeds else None,
        unmeasured_base=against.label if against is not None and not against.seeds else None,
    )


def _missing(row: ComparedRun, study: Study) -> list[str]:
    if not row.seeds:
        return [row.label]
    measured = {one.seed for one in row.seeds}
    return [f"seed {seed} of {row.label}" for seed in study.runs[row.run].seeds or () if seed not in measured]


def _check_seeds(row: ComparedRun) -> None:
    """Seeds of a run differ in nothing but the seed."""
    for other in row.seeds[1:]:
        first = row.first
        ours, theirs = _what_counts(first), _what_counts(other)
        for what in sorted(ours.keys() | theirs.keys()):
            if ours.get(what) != theirs.get(what):
                raise ValueError(
                    f"{first.name} and {other.name} are seeds of one run and differ in {what}: {ours.get(what)} and "
                    f"{theirs.get(what)}. Measure one of them again."
                )


def _what_counts(result: RunResult) -> dict[str, object]:
    """All but the seed, and how the training was run and its pictures read."""
    recipe = {f"recipe.{key}": value for key, value in result.recipe.items() if key not in ("seed", "run", "data")}
    schedule = {"resolutions": result.rounds.resolutions, "heads": result.rounds.heads}
    return {
        **schedule,
        "parameters": result.parameters,
        "epochs": result.epochs,
        "precision": result.precision,
        **recipe,
        "recipe.run.precision": result.recipe.get("run", {}).get("precision"),
    }
