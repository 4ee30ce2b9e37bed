"""Runs side by side: the seeds of a run as one, and the difference of two runs, image by image.

Letters: N images, S rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from repro.formats import FULL, Results, RunResult, check_comparable
from repro.study import Study

LIKELY = 1.96
"""Standard errors to either side of a mean that hold 95 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of two shares, with its 95 % interval."""

    mean: float
    lowest: float
    highest: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.lowest > 0 or self.highest < 0


def paired_difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Difference:
    """Mean of the differences on the same images: (N,), (N,).

    Images that both have right or both have wrong do not widen the interval. It is a normal interval and covers the
    sampling of the images, not that of the seeds.
    """
    between = ours - theirs
    mean = float(between.mean())
    reach = LIKELY * float(between.std(ddof=1)) / len(between) ** 0.5 if len(between) > 1 else float("inf")
    return Difference(mean=mean, lowest=mean - reach, highest=mean + reach)


@dataclass(frozen=True)
class ComparedRun:
    """A run with all of its seeds. ``place`` is the index of a round; the default is the full path."""

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
        """Share of the seeds that have each image right: (N, S)."""
        return np.mean([one.rounds.correct(one.data.val) for one in self.seeds], axis=0)  # type: ignore[no-any-return]

    def gmacs(self, place: int = FULL) -> float:
        """Of an image that exits after a round, earlier rounds included."""
        return self.first.rounds.gmacs_paper[place]

    def top1_of_seeds(self, place: int = FULL) -> tuple[float, ...]:
        """Of a round, by seed."""
        return tuple(one.rounds.right[place] / one.data.val for one in self.seeds)

    def top1(self, place: int = FULL) -> float:
        """Of a round, mean over the seeds."""
        return float(np.mean(self.top1_of_seeds(place)))

    def spread(self, place: int = FULL) -> float:
        """Distance between the best and the worst seed."""
        each = self.top1_of_seeds(place)
        return max(each) - min(each)

    @property
    def saving(self) -> float:
        """Compute that the near-lossless threshold saves, mean over the seeds."""
        return self.mean(lambda one: 1 - one.near_lossless.gmacs_paper / self.gmacs())

    def mean(self, value: Callable[[RunResult], float]) -> float:
        """Over the seeds."""
        return float(np.mean([value(one) for one in self.seeds]))

    def gmacs_at(self, top1: float) -> float:
        """GMACs from which on the frontier is nowhere below an accuracy, mean over the seeds."""

        def cheapest(one: RunResult) -> float:
            low = [place for place, point in enumerate(one.frontier) if point.top1 < top1]
            reached = one.frontier[low[-1] + 1 :] if low else one.frontier
            if not reached:
                raise ValueError(f"{one.name} never reaches a top-1 of {top1:.4f}.")
            return reached[0].gmacs_paper

        return self.mean(cheapest)

    def less(self, other: ComparedRun, place: int = FULL) -> Difference:
        """How much better this run is than the other in a round."""
        return paired_difference(self.correct[:, place], other.correct[:, place])


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """A comparison as far as it was measured."""

    title: str
    rows: tuple[ComparedRun, ...]
    missing: tuple[str, ...]
    """Labels of rows that were not measured, and seeds of those that were."""
    against: ComparedRun | None
    """The base of all differences; None: the row above."""
    unmeasured_base: str | None
    """The base of all differences, if it was not measured."""

    def base_of(self, number: int) -> ComparedRun | None:
        """The base of a row's difference; None if it has none."""
        if self.unmeasured_base is not None:
            return None
        if self.against is not None:
            return None if self.rows[number].run == self.against.run else self.against
        return self.rows[number - 1] if number else None


def gather(results: Results, run: str, label: str | None = None) -> ComparedRun:
    """The seeds of a run, possibly none; refused if they differ in more than the seed."""
    seeds = sorted((one for one in results.runs.values() if one.run == run), key=lambda one: one.seed or 0)
    for other in seeds[1:]:
        ours, theirs = _apart_from_seed(seeds[0]), _apart_from_seed(other)
        for what in sorted(ours.keys() | theirs.keys()):
            if ours.get(what) != theirs.get(what):
                raise ValueError(
                    f"{seeds[0].name} and {other.name} are seeds of one run and differ in {what}: {ours.get(what)} and "
                    f"{theirs.get(what)}. Measure one of them again."
                )
    return ComparedRun(label or run, run, tuple(seeds))


def _apart_from_seed(result: RunResult) -> dict[str, object]:
    """All but the seed, and how the training was run and its images read."""
    recipe = {f"recipe.{key}": value for key, value in result.recipe.items() if key not in ("seed", "run", "data")}
    return {
        **recipe,
        "recipe.run.precision": result.recipe.get("run", {}).get("precision"),
        "resolutions": result.rounds.resolutions,
        "heads": result.rounds.heads,
        "parameters": result.parameters,
        "epochs": result.epochs,
        "precision": result.precision,
    }


def line_up(results: Results, study: Study, name: str) -> LineUp:
    """The runs of a comparison; refused if they are not of the same images."""
    comparison = study.comparisons[name]
    rows = [gather(results, run, label) for label, run in comparison.rows.items()]
    against = None
    if comparison.against is not None:
        labels = {row.run: row.label for row in rows}
        against = gather(results, comparison.against, labels.get(comparison.against))
    measured = tuple(row for row in rows if row.seeds)
    everyone = [*measured, *([against] if against else [])]
    check_comparable([one for row in everyone for one in row.seeds], f"the comparison {name}")
    return LineUp(
        title=comparison.title,
        rows=measured,
        missing=tuple(label for row in rows for label in _missing(row, study)),
        against=against if against and against.seeds else None,
        unmeasured_base=against.label if against and not against.seeds else None,
    )


def _missing(row: ComparedRun, study: Study) -> list[str]:
    if not row.seeds:
        return [row.label]
    measured = {one.seed for one in row.seeds}
    return [f"seed {seed} of {row.label}" for seed in study.runs[row.run].seeds or () if seed not in measured]
