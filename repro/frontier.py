"""Frontier of all methods: every point of several runs, and how one run, at the same GMACs, differs from each of them.

A model whose rounds follow each other is routed by one entropy threshold for all rounds; where the threshold lies
follows from the entropies and a budget, without labels. A model of three or more rounds also has points with the best
threshold of each round. These need labels: they are chosen on every second image, in the order of names, and measured
on the others, both ways. Letters: K seeds, N images, S rounds, T thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from progresvit.routing.calibrate import threshold_for_budget
from progresvit.routing.decide import exit_rounds
from progresvit.routing.per_round import LEAST_ROUNDS, Choice, PerRoundFrontier, cross_fitted_exits, within_or_cheapest
from progresvit.routing.scores import HIGHEST
from repro.compare import ComparedRun, CrossedDifference, PointRow, crossed_difference, gather
from repro.equal import check_equal, check_seeds, training_pmacs
from repro.formats import CostPoint, CostResult, Data, Results, RunResult
from repro.outcomes import verdict_of
from repro.study import Frontier, Study

ALONE = "the model"
"""The only point of a model of one round."""
PER_ROUND = "per round"
"""Ends the names of points with one threshold of each round."""
FRACTIONS = (0.25, 0.5, 0.75)
"""Interior points of a routed model: fractions between the GMACs of round 1 and of the full path."""
ALL_EXIT = float(math.ceil(HIGHEST))
"""A threshold above every entropy, also one that was rounded up: images exit after round 1."""
ROUNDING = 1e-9
"""Relative error that an average of GMACs may have."""
COST_TOLERANCE = 0.05
"""Relative difference allowed between the GMACs of a measured cost and of its point."""


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """A way to run a model on all images."""

    name: str
    """Routed: "round 1", "25 %", "50 %", "75 %", "every round"; with one threshold of each round, "25 %, per round" and
    so on. Alternatives: "round 1" and so on. One round: ALONE."""
    round: int | None
    """The only round that runs, from 0; None if images are routed."""
    threshold: float | None
    """Threshold of all rounds: an image exits if its entropy is below. None if images are not routed, and with one for
    each round, which depends on the half that an image belongs to."""
    gmacs: float
    """Average over the images, paper convention."""
    exit_after: NDArray[np.int64]
    """Round, from 0, whose answer each image gets: (N,)."""
    correct: NDArray[np.bool_]
    """(N,)"""


@dataclass(frozen=True, kw_only=True)
class FrontierRow(PointRow):
    """A point of a run of classification."""

    top1: float
    """Mean over seeds."""
    top1_interval: CrossedDifference | None
    """Over seeds and images; None for one seed."""

    @property
    def per_round(self) -> bool:
        """Whether each round has its own threshold; such points have no measured cost."""
        return self.point.endswith(PER_ROUND)

    @property
    def name(self) -> str:
        """The name of the point in text."""
        return self.label if self.point == ALONE else f"{self.label} at {self.point}"


@dataclass(frozen=True, kw_only=True)
class FrontierLineUp:
    """The runs of a frontier as far as they were measured."""

    plan: Frontier
    runs: tuple[ComparedRun, ...]
    missing: tuple[str, ...]
    """Labels of runs that were not measured, and seeds that no run has."""

    @property
    def ours(self) -> ComparedRun | None:
        """None if it was not measured."""
        return next((run for run in self.runs if run.run == self.plan.ours), None)


def points_of(result: RunResult) -> list[FrontierPoint]:
    """The points of a run by rising cost."""
    rounds, correct = result.rounds, result.rounds.correct(result.data.val)
    if not _routed(result):
        alone = len(rounds.bits) == 1
        return [
            FrontierPoint(
                name=ALONE if alone else f"round {s + 1}",
                round=s,
                threshold=None,
                gmacs=rounds.gmacs_paper[s],
                exit_after=np.full(len(correct), s),
                correct=correct[:, s],
            )
            for s in range(len(rounds.bits))
        ]
    scores = _scores(result)
    thresholds = {"round 1": ALL_EXIT}
    for part in FRACTIONS:
        thresholds[f"{100 * part:g} %"] = threshold_for_budget(scores, rounds.gmacs_paper, _between(result, part))
    thresholds["every round"] = 0.0
    return [_at(result, scores, threshold, name) for name, threshold in thresholds.items()]


def per_round_points(result: RunResult, fractions: Sequence[float] = FRACTIONS) -> list[FrontierPoint]:
    """A routed model of three or more rounds with one threshold of each round; empty for others, and without entropies.

    Thresholds are the most accurate within a budget on every second image, and are used on the others, both ways.
    """
    exits = _cross_fitted(result, [_between(result, fraction) for fraction in fractions])
    if exits is None:
        return []
    return [_exiting(result, rounds, f"{100 * part:g} %, {PER_ROUND}") for part, rounds in zip(fractions, exits[:-1])]


def near_lossless_per_round(result: RunResult) -> FrontierPoint | None:
    """The near-lossless thresholds of each round, chosen on every second image; None without thresholds per round."""
    exits = _cross_fitted(result, [])
    return None if exits is None else _exiting(result, exits[-1], f"near-lossless, {PER_ROUND}")


def _cross_fitted(result: RunResult, budgets: Sequence[float]) -> NDArray[np.int64] | None:
    """Exits at budgets and, in the last row, near-lossless: (budgets + 1, N)."""
    entropies = result.rounds.entropies(result.data.val)
    if not _routed(result) or len(result.rounds.bits) < LEAST_ROUNDS or entropies is None:
        return None
    choices: list[Choice] = [partial(within_or_cheapest, budget=budget) for budget in budgets]
    choices.append(PerRoundFrontier.near_lossless)
    correct, second = result.rounds.correct(result.data.val), np.arange(result.data.val) % 2 == 1
    return cross_fitted_exits(_scores(result), correct, result.rounds.gmacs_paper, second, choices)


def at_budget(result: RunResult, gmacs: float) -> FrontierPoint:
    """The point of highest cost that is at most this; of a routed model, among all thresholds."""
    points = points_of(result)
    affordable = [point for point in points if point.gmacs <= gmacs * (1 + ROUNDING)]
    if not affordable:
        raise ValueError(f"{result.name} takes {points[0].gmacs:.4g} GMACs or more, not {gmacs:.4g}; give it as much.")
    if not _routed(result) or affordable[-1] is points[-1]:
        return affordable[-1]
    scores = _scores(result)
    return _at(result, scores, threshold_for_budget(scores, result.rounds.gmacs_paper, gmacs), f"{gmacs:.3f} GMACs")


def curve_of(result: RunResult, fractions: Sequence[float]) -> list[FrontierPoint]:
    """A routed model at fractions between the GMACs of round 1 and of the full path."""
    cheapest = points_of(result)[0].gmacs  # more than round 1's if an entropy is not finite
    return [at_budget(result, max(cheapest, _between(result, fraction))) for fraction in fractions]


def _routed(result: RunResult) -> bool:
    return result.near_lossless is not None and len(result.rounds.bits) > 1


def _between(result: RunResult, fraction: float) -> float:
    first, last = result.rounds.gmacs_paper[0], result.rounds.gmacs_paper[-1]
    return first + fraction * (last - first)


def _scores(result: RunResult) -> NDArray[np.float64]:
    """Entropies, and zeros for the last round, where no threshold applies: (N, S)."""
    entropies = result.rounds.entropies(result.data.val)
    if entropies is None:
        raise ValueError(
            f"{result.name} has no entropies, so it cannot be routed; delete its file and measure it again."
        )
    return np.pad(entropies, ((0, 0), (0, 1)))


def _at(result: RunResult, scores: NDArray[np.float64], threshold: float, name: str) -> FrontierPoint:
    return _exiting(result, exit_rounds(scores, threshold), name, threshold)


def _exiting(
    result: RunResult, exit_after: NDArray[np.int64], name: str, threshold: float | None = None
) -> FrontierPoint:
    return FrontierPoint(
        name=name,
        round=None,
        threshold=threshold,
        gmacs=float(np.asarray(result.rounds.gmacs_paper)[exit_after].mean()),
        exit_after=exit_after,
        correct=result.rounds.correct(result.data.val)[np.arange(len(exit_after)), exit_after],
    )


def line_up_frontier(results: Results, study: Study, name: str) -> FrontierLineUp:
    """The runs of a frontier; refused if they differ in images, training compute (or epochs) or seeds."""
    plan, what = study.frontiers[name], f"the frontier {name}"
    runs = [gather(results, run, label) for label, run in plan.rows.items()]
    measured = tuple(run for run in runs if run.seeds)
    ours_first = sorted(measured, key=lambda run: run.run != plan.ours)
    everyone = [result for run in ours_first for result in run.seeds]
    check_equal(everyone, plan.equal, what)
    check_seeds(everyone, what)
    asked = {seed for run in plan.rows.values() for seed in study.trained_run(run).seeds or ()}
    absent = sorted(asked - {result.seed for result in everyone}) if everyone else []
    missing = [run.label for run in runs if not run.seeds] + [f"seed {seed}" for seed in absent]
    return FrontierLineUp(plan=plan, runs=measured, missing=tuple(missing))


def frontier_rows(results: Results, study: Study, name: str) -> list[FrontierRow]:
    """Every point of every measured run of a frontier."""
    lined_up = line_up_frontier(results, study, name)
    return [row for run in lined_up.runs for row in _rows_of(run, lined_up.ours, study.frontiers[name].margin)]


def _rows_of(run: ComparedRun, ours: ComparedRun | None, margin: float) -> list[FrontierRow]:
    rows = []
    every = [[*points_of(result), *per_round_points(result)] for result in run.seeds]
    for of_seeds in zip(*every, strict=True):  # one point, seed by seed
        correct = _stacked(of_seeds)
        matched = None if ours is None or ours.run == run.run else _matched(ours, of_seeds)
        several = len(of_seeds) > 1
        difference = crossed_difference(_stacked(matched), correct) if matched and several else None
        rows.append(
            FrontierRow(
                label=run.label,
                run=run.run,
                point=of_seeds[0].name,
                gmacs=_mean_gmacs(of_seeds),
                top1=float(correct.mean()),
                top1_interval=crossed_difference(correct, np.zeros_like(correct)) if several else None,
                compute=None if ours is None else training_pmacs(run.first) / training_pmacs(ours.first),
                ours_gmacs=None if matched is None else _mean_gmacs(matched),
                difference=difference,
                verdict=None if difference is None else verdict_of(difference, margin),
            )
        )
    return rows


def _matched(ours: ComparedRun, theirs: Sequence[FrontierPoint]) -> list[FrontierPoint] | None:
    """Ours at the GMACs of each seed's point; None if round 1 takes more. Beyond the full path, the full path."""
    pairs = list(zip(ours.seeds, theirs, strict=True))
    if any(point.gmacs * (1 + ROUNDING) < points_of(result)[0].gmacs for result, point in pairs):
        return None
    return [at_budget(result, point.gmacs) for result, point in pairs]


def _stacked(points: Sequence[FrontierPoint]) -> NDArray[np.float64]:
    """(K, N)"""
    return np.stack([point.correct for point in points]).astype(np.float64)


def _mean_gmacs(points: Sequence[FrontierPoint]) -> float:
    return float(np.mean([point.gmacs for point in points]))


def costs_of(rows: Sequence[FrontierRow], cost: CostResult, data: Data) -> dict[tuple[str, str], CostPoint]:
    """Costs of the rows that were measured, by run and point; refused if they are of other images or GMACs."""
    if cost.data != data:
        raise ValueError(f"{cost.name}.json was measured on other images than the runs; measure the cost again.")
    measured = {(point.run, point.point): point for point in cost.points}
    costs = {(row.run, row.point): measured[row.run, row.point] for row in rows if (row.run, row.point) in measured}
    for row in rows:
        point = costs.get((row.run, row.point))
        if point is not None and abs(point.gmacs_paper / row.gmacs - 1) > COST_TOLERANCE:
            raise ValueError(
                f"the cost of {row.run} at {row.point} was measured at {point.gmacs_paper:.4g} GMACs, and the results "
                f"have {row.gmacs:.4g}: it is of another model. Measure the cost again, or delete {cost.name}.json."
            )
    return costs
