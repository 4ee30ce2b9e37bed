"""What a template of a page can ask for: blocks of Markdown by name, and single results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import (
    figures,
    frontier_figures,
    frontier_tables,
    routing_tables,
    segmentation_tables,
    self_supervised,
    shift,
    tables,
)
from repro.compare import (
    ComparedRun,
    CrossedDifference,
    Difference,
    LineUp,
    RunShift,
    crossed_difference,
    find_row,
    gather,
    line_up,
    marginal_rows,
    run_shift,
)
from repro.equal import check_equal, check_seeds
from repro.formats import FILES, FULL, CostPoint, Measurement, Results, RunResult, ShiftResult
from repro.frontier import (
    FrontierRow,
    costs_of,
    frontier_rows,
    line_up_frontier,
    per_round_points,
    points_of,
)
from repro.outcomes import Outcome, gather_outcomes, verdict_of
from repro.segmentation import ExitOrder, SegmentationRow, SegmentationStudy
from repro.shift import gather_shift, gather_shift_tests
from repro.store import read_results
from repro.study import STUDY_FILE, Equal, Study, read_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_MEASURED = "Not measured."
SAVING = 0.15
"""Share of the GMACs at which orders of exits are compared."""
EPSILONS, DELTA = (0.005, 0.01, 0.02), 0.05
"""Bounds of certificates on the growth of the pixel error, and the probability that one fails."""
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    routing_tables.settings_of,
    routing_tables.rules_of,
    routing_tables.gains_of,
    routing_tables.open_gains,
    routing_tables.router_verdict,
    shift.mean_top1,
    shift.mean_at,
    shift.refined_gain,
    shift.routed_change,
    shift.beyond_bound,
    verdict_of,
)
"""What a template can call beside the methods of a page."""


@dataclass(frozen=True)
class Plot:
    """A PNG file, drawn when it is written."""

    draw: Callable[[], Figure]
    data: str
    """Hash of the results that it shows."""


class Page:
    """What a template can ask for: blocks of Markdown by name, and single results. Plots are noted in ``plots``."""

    def __init__(self, folder: Path, plots: dict[str, Plot], prefix: str = "") -> None:
        """``prefix`` begins the names of the plots."""
        self.results: Results = read_results(folder)
        if not (folder / STUDY_FILE).is_file():
            raise ValueError(f"{folder} has no {STUDY_FILE}, which says what is compared; copy the study's file there.")
        self.study: Study = read_study(folder / STUDY_FILE)
        self.plots, self.prefix = plots, prefix
        self._frontier_rows = cache(partial(frontier_rows, self.results, self.study))  # intervals take a while

    def _plot(self, name: str, alt: str, draw: Callable[[], Figure], *data: Any) -> str:
        """An image tag; ``data`` is everything that the plot shows."""
        name = f"{self.prefix}{name}"
        content = json.dumps([name, *data], sort_keys=True, default=_shown)
        plot = Plot(draw, hashlib.sha256(content.encode()).hexdigest())
        if self.plots.setdefault(f"{name}.png", plot).data != plot.data:
            raise ValueError(f"two plots of the page are called {name}; rename an entry in {STUDY_FILE}.")
        return f'<img src="figures/results/{name}.png" width="640" alt="{alt}">'

    def about(self) -> str:
        """The images, and how numbers are given."""
        sets: dict[tuple[str, int, int], set[int]] = {}
        for result in (result for result in self.results.all if result.data is not None):
            trained_on = sets.setdefault((result.data.name, result.data.val, result.data.classes), set())
            if result.data.train is not None:  # what was not trained here does not say
                trained_on.add(result.data.train)
        lines = []
        for (name, val, classes), trained_on in sets.items():
            numbers = " or ".join(f"{train:,}" for train in sorted(trained_on))
            trained = f"; models were trained on {numbers} others" if numbers else ""
            lines.append(f"- {name}: measured on {val:,} held-out images of {classes} classes{trained}.")
        return "\n".join(lines)

    def comparison(self, name: str) -> str:
        """Accuracy, differences and early exit of runs side by side. Differences are the declared tests, if any."""
        compared = line_up(self.results, self.study, name)
        if not compared.rows:
            return NOT_MEASURED
        notes = [f"Not measured: {', '.join(compared.missing)}."] if compared.missing else []
        if compared.unmeasured_base is not None:
            notes.append(f"Not measured, and so compared with nothing: {compared.unmeasured_base}.")
        accuracy = f"{compared.title}: top-1 of each run, and the differences with their 95 % intervals"
        cost = f"{compared.title}: top-1 against average GMACs of each run"
        differences: list[str | None]
        if self.study.comparisons[name].tests:
            differences = [tables.seeds_table(compared), " ".join(notes), *self._tests(name)]
        else:
            plot = self._plot(f"{name}-accuracy", accuracy, partial(figures.accuracy_figure, compared), compared)
            differences = [tables.accuracy_table(compared), " ".join(notes), plot]
        return _blocks(
            *differences,
            tables.exit_table(compared),
            self._plot(f"{name}-frontier", cost, partial(figures.comparison_figure, compared), compared),
        )

    def _tests(self, name: str) -> list[str | None]:
        """The declared tests of a comparison."""
        outcomes = gather_outcomes(self.results, self.study, name)
        missing = outcomes.missing and f"Tests that were not measured on two seeds: {', '.join(outcomes.missing)}."
        if not outcomes.measured:
            return [missing or None]
        alt = f"{outcomes.title}: differences with their 95 % intervals over seeds and images"
        tests = self.study.comparisons[name].tests
        tested = {run for test in tests for run in (test.ours, test.theirs)}
        runs = [result for result in self.results.runs.values() if result.run in tested]
        declared = [test.model_dump() for test in tests]
        draw = partial(figures.tests_figure, outcomes)
        return [
            tables.tests_table(outcomes),
            missing or None,
            self._plot(f"{name}-tests", alt, draw, outcomes.title, declared, runs),  # computed floats may round
            tables.first_round_table(outcomes),
        ]

    def frontier(self, name: str) -> str:
        """Every point of the runs of a frontier, and ours at the same GMACs."""
        lined_up = line_up_frontier(self.results, self.study, name)
        rows, title = self._frontier_rows(name), lined_up.plan.title
        if not rows:
            return NOT_MEASURED
        data = lined_up.runs[0].first.data
        by_device = {cost.machine.device: (cost, costs_of(rows, cost, data)) for cost in self.results.cost.values()}
        shown = [title, lined_up.plan.model_dump(), *(run.seeds for run in lined_up.runs)]
        draw = partial(frontier_figures.frontier_figure, lined_up, rows)
        parts = [self._plot(f"{name}-gmacs", f"{title}: top-1 against average GMACs of each run", draw, *shown)]
        for device, (cost, costs) in by_device.items():
            draw = partial(frontier_figures.speed_figure, lined_up, rows, costs, device)
            alt = f"{title}: top-1 against images per second of each run on {device}"
            parts.append(self._plot(f"{name}-{cost.name}", alt, draw, *shown, device, cost))
        parts.append(frontier_tables.frontier_table(title, rows, {key: costs for key, (_, costs) in by_device.items()}))
        if lined_up.missing:
            parts.append(f"Not measured: {', '.join(lined_up.missing)}.")
        timed = [row for row in rows if not row.per_round]
        parts += [frontier_tables.cost_table(title, timed, cost, costs) for cost, costs in by_device.values()]
        commands = {run.label: run.first.commands[0] for run in lined_up.runs}
        return _blocks(*parts, tables.commands_table("Commands beside each row, with the first seed", commands))

    def early_exit(self, name: str) -> str:
        """The near-lossless threshold of each run of a frontier, and its seeds separately."""
        plan, rows = self.study.frontiers[name], line_up_frontier(self.results, self.study, name).runs
        lined_up = LineUp(title=plan.title, rows=rows, missing=(), against=None, unmeasured_base=None)
        return _blocks(tables.exit_table(lined_up) if rows else NOT_MEASURED)

    def probes(self) -> str:
        """Top-1 of every run whose features were evaluated, by each probe."""
        probed = self_supervised.probed_runs(self.results, self.study)
        return _blocks(self_supervised.probes_table(probed) if probed else NOT_MEASURED)

    def training_curves(self, *names: str) -> str:
        """Loss and entropies of runs of the task dino; without names, of all that trained for several epochs."""
        runs = self_supervised.runs_with_curves(self.results, names or tuple(self.study.runs))
        if not runs:
            return NOT_MEASURED
        alt = "Loss, and entropy of the teacher's output, of its mean over images and of the centre, against epochs"
        shown = [[run.name, run.curves and run.curves.model_dump(), run.recipe["task_options"]] for run in runs]
        return self._plot("training", alt, partial(self_supervised.curves_figure, runs), *shown)

    def information(self, run: str) -> tuple[float, ...]:
        """Nats about the image in the teacher's output at the end of a training of the task dino, in each round."""
        return self_supervised.information(self_supervised.runs_with_curves(self.results, (run,)))

    def frontier_row(self, name: str, run: str, point: str) -> FrontierRow:
        """One row of a frontier, by its run or label and its point."""
        return find_row(self._frontier_rows(name), run, point, f"the frontier {name}")

    def point_top1(self, run: str, point: str) -> float:
        """Top-1 of a point of a run, by the names of ``repro.frontier``; mean over seeds."""

        def of_seed(result: RunResult) -> float:
            points = {point.name: point for point in (*points_of(result), *per_round_points(result))}
            if point not in points:
                raise ValueError(f"{result.name} has no point {point}; it has {', '.join(points)}.")
            return float(points[point].correct.mean())

        return gather(self.results, run).mean(of_seed)

    def cost_point(self, name: str, run: str, point: str) -> CostPoint:
        """The cost of one point of a run, in the file of this name."""
        points = self.results.cost[name].points
        for cost in points:
            if (cost.run, cost.point) == (run, point):
                return cost
        raise ValueError(f"{name}.json has no cost of {run} at {point}; measure it, or leave it out of the page.")

    def segmentation(self) -> str:
        """The runs of a study of segmentation: points, thresholds of the validation images, and what exits cost."""
        if not self.results.segmentation:
            return NOT_MEASURED
        study = self._segmentation
        title, plan = study.plan.title, self.study.segmentation
        assert plan is not None
        shown = [plan.model_dump(exclude={"val", "equal"}), *self.results.segmentation.values()]  # these are not shown
        draw = partial(segmentation_tables.frontier_figure, study)
        commands = {study.labels[run]: seeds[0].result.commands[0] for run, seeds in study.runs.items()}
        return _blocks(
            self._plot("segmentation", f"{title}: mIoU against average GMACs of each run", draw, *shown),
            segmentation_tables.points_table(study),
            f"Not measured: {', '.join(study.missing)}." if study.missing else None,
            segmentation_tables.routing_table(study),
            segmentation_tables.orders_table(study, SAVING),
            segmentation_tables.certificates_table(study, EPSILONS, DELTA),
            segmentation_tables.classes_table(study),
            tables.commands_table(f"{title}: commands beside each row, with the first seed", commands),
        )

    @cached_property
    def _segmentation(self) -> SegmentationStudy:
        return SegmentationStudy(self.results, self.study)  # intervals take a while

    def segmentation_row(self, run: str, point: str) -> SegmentationRow:
        """One point of a run."""
        return self._segmentation.row(run, point)

    def marginal_points(self) -> list[SegmentationRow]:
        """Points whose verdict a correction for the number of rows would not carry."""
        return marginal_rows(self._segmentation.rows)

    def exit_order(self, run: str) -> ExitOrder:
        """What the saving of the table costs a run."""
        return self._segmentation.exit_order(run, SAVING)

    def settings(self, name: str) -> str:
        """The thresholds of a routing measurement."""
        if (result := self.results.routing.get(name)) is None:
            return NOT_MEASURED
        alt = "Top-1 against average GMACs with thresholds"
        return _blocks(
            routing_tables.settings_table(result),
            self._plot(f"{name}-settings", alt, partial(figures.routing_frontier_figure, result), result),
            routing_tables.halves_table(result),
            routing_tables.certificates_table(result),
        )

    def routers(self, name: str) -> str:
        """Learned routers against entropy: the first table is the paper's, the others are folded."""
        result = self.results.routing.get(name)
        if result is None or not result.matched:
            return NOT_MEASURED
        first, *others = map(routing_tables.matched_table, result.matched)
        draw = partial(figures.gains_figure, result.matched)
        plot = self._plot(f"{name}-routers", "Gain of routers over entropy", draw, result)
        return _blocks(plot, first, *map(tables.folded, others))

    def abstention(self, name: str) -> str:
        """Withheld answers."""
        result = self.results.routing.get(name)
        if result is None or not result.abstention:
            return NOT_MEASURED
        draw = partial(figures.risk_figure, result.abstention)
        plot = self._plot(f"{name}-abstention", "Risk against coverage", draw, result)
        return _blocks(routing_tables.withheld_table(result), routing_tables.risk_table(result), plot)

    def equal_accuracy(self, name: str) -> str:
        """Compute of several rules at equal accuracy."""
        result = self.results.routing.get(name)
        if result is None or not result.equal_accuracy:
            return NOT_MEASURED
        return _blocks(routing_tables.equal_accuracy_means(result), routing_tables.rejection_table(result))

    def groups(self, name: str) -> str:
        """Groups of classes separately."""
        result = self.results.routing.get(name)
        if result is None or not result.groups:
            return NOT_MEASURED
        alt = "Share of each group that exits early"
        plot = self._plot(f"{name}-groups", alt, partial(figures.groups_figure, result), result)
        return _blocks(routing_tables.groups_table(result), plot)

    def severities(self, name: str) -> str:
        """Models under corruption, by severity; mean over seeds."""
        measured, missing = gather_shift(self.results, self.study, name)
        if not measured:
            return NOT_MEASURED
        parts: list[str | None] = [*shift.severity_tables(measured)]
        if missing:
            parts.append(f"Not measured: {', '.join(missing)}.")
        shown = {model: seeds[0] if len(seeds) == 1 else seeds for model, seeds in measured.items()}
        if len(measured) > 1:
            draw = partial(figures.shifted_accuracy_figure, measured)
            parts.append(self._plot(f"{name}-accuracy", "Top-1 of several models by severity", draw, shown))
        plain = {model: seeds[0] for model, seeds in measured.items() if len(seeds[0].gmacs_paper) == 1}
        for model, seeds in measured.items():
            if model not in plain and seeds[0].severities[0].frontier:
                parts.append(self._severity_plot(model, seeds[0], len(self.study.shift[name].models) > 1, plain))
        return _blocks(*parts)

    def _severity_plot(self, model: str, result: ShiftResult, several: bool, plain: dict[str, ShiftResult]) -> str:
        title = f"Frontiers under corruption: {model}" if several else "Frontiers under corruption"
        title += f", seed {result.seed}" if result.seed is not None else ""
        alt = f"Top-1 against average GMACs of {model} by severity; stars: a threshold calibrated on clean images"
        draw = partial(figures.severity_figure, result, title=title, beside=plain)
        return self._plot(f"{result.name}-severities", alt, draw, title, result, plain)

    def corruptions(self, name: str) -> str:
        """Models under each corruption; mean over seeds."""
        models, _ = gather_shift(self.results, self.study, name)
        return _blocks(*map(tables.folded, shift.corruption_tables(models))) if models else NOT_MEASURED

    def harm(self, name: str) -> str:
        """Images that early exit turns from right to wrong, under corruption."""
        return _blocks(shift.harm_table(gather_shift(self.results, self.study, name)[0]) or NOT_MEASURED)

    def shift_tests(self, name: str, ours: str, theirs: str) -> str:
        """One model against another under corruption, over seeds and images."""
        if not {ours, theirs} & gather_shift(self.results, self.study, name)[0].keys():
            return NOT_MEASURED
        tests = gather_shift_tests(self.results, self.study, name, ours, theirs)
        return _blocks(shift.differences_table(tests, ours, theirs))

    def command(self, name: str) -> str:
        """What a command of the study wrote: its tables, with a row for each model, and its figures."""
        plan = self.study.commands[name]
        rows = self.study.command_names(name)
        results = {label: self.results.command[row] for label, row in rows.items() if row in self.results.command}
        if not results:
            return NOT_MEASURED
        missing = [label for label in rows if label not in results]
        parts: list[str | None] = [tables.files_table(plan.title, results, file) for file in plan.tables]
        parts.append(f"Not measured: {', '.join(missing)}." if missing else None)
        for label, result in results.items():
            at = f"{FILES}/{result.name}"
            title = plan.title if not label else f"{plan.title}: {label}"
            parts += [f'<img src="{at}/{figure}" width="640" alt="{title}">' for figure in result.figures]
            parts.append(f"[{title}]({at}/{result.page})" if result.page is not None else None)
            parts.append(f"```\n{result.printed.rstrip()}\n```" if result.printed is not None else None)
        return _blocks(*parts)

    def measurements(self) -> str:
        """Every results file with its hardware and commands."""
        parts = [tables.runs_table(self.results.all)]
        for result in self.results.all:
            software = f"progresvit at {result.revision}, torch {result.machine.torch}, Python {result.machine.python}"
            summary = f"<details><summary>Commands of <code>{result.name}</code></summary>"
            parts.append(f"{summary}\n\n```\n" + "\n".join(result.commands) + f"\n```\n\n{software}.\n\n</details>")
        return _blocks(*parts)

    def difference(self, ours: str, theirs: str, place: int = FULL, equal: Equal | None = "epochs") -> Difference:
        """Difference of two runs in top-1 of a round or of the full path, with its interval over images."""
        ours_run, theirs_run = self._compared(ours, theirs, equal=equal)
        return ours_run.less(theirs_run, place)

    def widened(self, ours: str, theirs: str, place: int = FULL) -> Difference:
        """The difference over images, with the shifts of whole runs added to its interval."""
        seeds = [len(run.seeds) for run in self._compared(ours, theirs)]
        return self.run_shift(place).widen(self.difference(ours, theirs, place), *seeds)

    def crossed(self, ours: str, theirs: str, place: int = FULL, equal: Equal | None = "compute") -> CrossedDifference:
        """Difference of two runs in top-1 at equal training compute, with its interval over seeds and images.

        With ``equal`` None, trainings may differ in length: one of the two has random weights, say.
        """
        ours_run, theirs_run = self._compared(ours, theirs, equal=equal)
        check_seeds([*ours_run.seeds, *theirs_run.seeds], f"{ours} minus {theirs}")
        return crossed_difference(ours_run.correct_of_seeds(place), theirs_run.correct_of_seeds(place))

    def _compared(self, *names: str, equal: Equal | None = "epochs") -> list[ComparedRun]:
        """Measured runs of the same images and of equal epochs or compute, unless ``equal`` is None."""
        runs = [gather(self.results, name) for name in names]
        for run in runs:
            if not run.seeds:
                raise ValueError(f"{run.run} was not measured.")
        check_equal([result for run in runs for result in run.seeds], equal, " minus ".join(names))
        return runs

    def run_shift(self, place: int = FULL) -> RunShift:
        """How much a whole run shifts from seed to seed, by all runs with two seeds or more."""
        return run_shift((gather(self.results, name) for name in sorted(self._measured())), place)

    def marginal_rows(self, name: str) -> list[FrontierRow]:
        """Rows of a frontier whose gain or loss does not outlast a correction for the number of intervals."""
        return marginal_rows(self._frontier_rows(name))

    def _measured(self) -> set[str]:
        return {result.run for result in self.results.runs.values()}

    def tested(self, name: str) -> dict[str, Outcome]:
        """The declared tests of a comparison that were measured, by label."""
        return {outcome.label: outcome for outcome in gather_outcomes(self.results, self.study, name).measured}

    def compared(self, name: str) -> list[FrontierRow]:
        """Rows of a frontier that are compared with ours."""
        return [row for row in self._frontier_rows(name) if row.difference is not None]

    def values(self) -> dict[str, Any]:
        """Everything that a template can use, by name: the public methods of this class, ``FUNCTIONS`` and results."""
        methods = {name: getattr(self, name) for name in vars(Page) if not name.startswith("_") and name != "values"}
        runs = [result for result in self.results.runs.values() if len(result.rounds.bits) > 1]
        routed = [(result.near_lossless, result.rounds) for result in runs]
        return {
            **methods,
            **{function.__name__: function for function in FUNCTIONS},
            "study": self.study,
            "run": {name: gather(self.results, name) for name in self._measured()},
            "routing": self.results.routing,
            "shift": self.results.shift,
            "cost": self.results.cost,
            "savings": [1 - point.gmacs_paper / rounds.gmacs_paper[FULL] for point, rounds in routed if point],
        }


def _blocks(*parts: str | None) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part)


def _shown(value: Any) -> Any:
    """What a plot may show of a measurement: all but how and when it was made."""
    if isinstance(value, Measurement):
        return value.model_dump(mode="json", exclude=set(Measurement.model_fields) - {"name", "seed", "data"})
    return {field.name: getattr(value, field.name) for field in fields(value)}  # a comparison and its runs
