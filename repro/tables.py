"""The tables of a page, as Markdown: how numbers are written, and runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from progresvit.metrics.interval import Interval
from progresvit.table import Column, Table
from repro.compare import ComparedRun, LineUp
from repro.formats import FULL, CommandResult, Measurement, RunResult, SegmentationResult, Spread
from repro.frontier import near_lossless_per_round
from repro.outcomes import POINTS, Outcome, Outcomes, RoundOutcome, log_loss_verdict

MINUS = "\N{MINUS SIGN}"
Row = Sequence[str | None]


def percent(share: float, digits: int = 1) -> str:
    """A share as percent, without the sign."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f}".replace("-", MINUS)


def signed(difference: float, digits: int = 1, scale: float = POINTS) -> str:
    """A difference, by default of shares and in points, with its sign; zero has none."""
    value = round(scale * difference, digits)
    return f"{value:+.{digits}f}".replace("-", MINUS) if value else f"{0:.{digits}f}"


def interval(difference: Interval | Spread, digits: int = 1, scale: float = POINTS) -> str:
    """A difference, by default of shares and in points, with the ends of the 95 % interval."""
    ends = difference.mean, difference.lowest, difference.highest
    return "{} ({} to {})".format(*(signed(value, digits, scale) for value in ends))


def share_interval(share: Interval, digits: int = 2) -> str:
    """A share in percent with the ends of its 95 % interval."""
    return "{} ({} to {})".format(*(percent(end, digits) for end in (share.mean, share.lowest, share.highest)))


def gmacs(value: float) -> str:
    """Three decimals, as the paper gives them; below 0.01, three significant digits."""
    return f"{value:.3f}" if value >= 0.01 or not value else f"{value:.3g}"


def each(values: Iterable[float], between: str = ", ") -> str:
    """Several shares in percent."""
    return between.join(percent(value) for value in values)


def table(title: str, heads: Sequence[str], rows: Iterable[Row]) -> str:
    """A Markdown table. Columns whose head starts with "<" hold words and are left-aligned.

    None is an empty cell; a column of empty cells is left out.
    """
    columns = [Column(str(n), head.removeprefix("<"), left=head.startswith("<")) for n, head in enumerate(heads)]
    return Table(title, columns, [{str(n): cell for n, cell in enumerate(row)} for row in rows]).to_markdown()


def folded(markdown: str) -> str:
    """A table that opens when its title is clicked."""
    title, _, body = markdown.partition("\n\n")
    return f"<details><summary>{title}</summary>\n\n{body}\n</details>"


def accuracy_table(compared: LineUp) -> str:
    """Top-1 of round 1 and of the full path, and the difference of each row to its base."""
    rows = []
    for number, run in enumerate(compared.rows):
        base, several = compared.base_of(number), run.rounds > 1
        rows.append(
            [
                run.label,
                schedule(run),
                gmacs(run.gmacs()),
                percent(run.top1(0)) if several else None,
                interval(run.less(base, 0)) if base and several and base.rounds > 1 else None,
                percent(run.top1()),
                interval(run.less(base)) if base else None,
                str(len(run.seeds)),
                str(run.first.epochs),
            ]
        )
    over = f"points over {compared.against.label if compared.against else 'the row above'}"
    heads = ["<", "<rounds", "GMACs", "round 1, top-1 (%)", over, "full path, top-1 (%)", over, "seeds", "epochs"]
    return table(f"{compared.title}: accuracy, and the compute of the full path", heads, rows)


def seeds_table(compared: LineUp) -> str:
    """Top-1 of round 1 and of the full path: mean and standard deviation over seeds."""
    rows = [
        [
            run.label,
            schedule(run),
            gmacs(run.gmacs(0)) if run.rounds > 1 else None,
            over_seeds(run, 0) if run.rounds > 1 else None,
            gmacs(run.gmacs()),
            over_seeds(run, FULL),
            str(len(run.seeds)),
            str(run.first.epochs),
        ]
        for run in compared.rows
    ]
    heads = ["<", "<rounds", "GMACs of round 1", "round 1, top-1 (%)", "GMACs", "full path, top-1 (%)"]
    title = f"{compared.title}: accuracy, mean ± standard deviation over seeds"
    return table(title, [*heads, "seeds", "epochs"], rows)


def over_seeds(run: ComparedRun, place: int) -> str:
    """Top-1 of a round in percent: mean and, with several seeds, standard deviation."""
    deviation = run.deviation(place)
    return percent(run.top1(place), 2) + (f" ± {percent(deviation, 2)}" if deviation is not None else "")


def tests_table(outcomes: Outcomes) -> str:
    """The declared tests in the last round."""
    rows = [
        [
            outcome.label,
            *_endpoints(outcome, outcome.last),
            None if outcome.paper is None else signed(outcome.paper, 2, scale=1),
            outcome.verdict,
            *_log_loss(outcome.last),
        ]
        for outcome in outcomes.measured
    ]
    heads = ["<", *ENDPOINTS, "the paper's (points)", "<verdict", *LOG_LOSS]
    return table(f"{outcomes.title}: tests of the full path, 95 % intervals over seeds and images", heads, rows)


def first_round_table(outcomes: Outcomes) -> str | None:
    """The differences of the tests in round 1; None if there are none."""
    rows = [
        [outcome.label, *_endpoints(outcome, outcome.first), *_log_loss(outcome.first)]
        for outcome in outcomes.measured
        if outcome.first
    ]
    title = f"{outcomes.title}: the same differences in round 1"
    return table(title, ["<", *ENDPOINTS, *LOG_LOSS], rows) if rows else None


ENDPOINTS = ("seeds × images", "top-1 (points)", "detectable at 80 % power (points)", "errors removed (%)")
LOG_LOSS = ("log-loss", "<log-loss is")


def _endpoints(outcome: Outcome, of_round: RoundOutcome) -> Row:
    top1, errors = of_round.top1, of_round.errors
    removed = interval(top1, scale=100 / errors) if errors else None
    measured = f"{len(outcome.seeds)} × {outcome.images:,}"
    return [measured, interval(top1, 2), percent(top1.detectable, 2), removed]


def _log_loss(of_round: RoundOutcome) -> Row:
    difference = of_round.log_loss
    return [None, None] if difference is None else [interval(difference, 4, scale=1), log_loss_verdict(difference)]


def schedule(run: ComparedRun) -> str:
    """Resolutions and heads of the rounds."""
    between = "→" if run.near_lossless else " / "  # rounds that are alternatives do not follow each other
    rounds = run.first.rounds
    resolutions = between.join(map(str, rounds.resolutions))
    return resolutions if rounds.heads is None else f"{resolutions}, {between.join(map(str, rounds.heads))} heads"


PER_ROUND = "per round, from the other half"
"""Columns of thresholds that were chosen on the half of the images that they are not measured on."""


def exit_table(compared: LineUp) -> str | None:
    """The near-lossless threshold of each run, and its seeds separately; None if there is nothing to show."""
    rows = [_exit_row(run) for run in compared.rows if run.rounds > 1 or len(run.seeds) > 1]
    heads = ["<", "top-1 (%)", "GMACs", "saved (%)", "exit after round 1 (%)", "round 1 of each seed (%)"]
    heads += ["full path of each seed (%)", "range over seeds, full path (points)"]
    heads += [f"{PER_ROUND}: {what}" for what in ("top-1 (%)", "GMACs", "saved (%)")]
    title = f"{compared.title}: early exit at the near-lossless threshold, calibrated on these images"
    return table(title, heads, rows) if rows else None


def _exit_row(run: ComparedRun) -> Row:
    several, repeated = run.rounds > 1, len(run.seeds) > 1
    points = run.near_lossless if several else ()
    return [
        run.label,
        percent(float(np.mean([point.top1 for point in points]))) if points else None,
        gmacs(float(np.mean([point.gmacs_paper for point in points]))) if points else None,
        percent(run.saving) if points else None,
        percent(float(np.mean([point.exit_shares[0] for point in points]))) if points else None,
        each(run.top1_of_seeds(0)) if several and repeated else None,
        each(run.top1_of_seeds()) if repeated else None,
        percent(run.spread()) if repeated else None,
        *_per_round_cells(run),
    ]


def _per_round_cells(run: ComparedRun) -> Row:
    """Top-1, GMACs and saving of near-lossless thresholds of each round, means over the seeds."""
    points = [point for result in run.seeds if (point := near_lossless_per_round(result)) is not None]
    if len(points) < len(run.seeds):  # two rounds, or a file without entropies
        return [None, None, None]
    spent = float(np.mean([point.gmacs for point in points]))
    top1 = float(np.mean([point.correct.mean() for point in points]))
    return [percent(top1), gmacs(spent), percent(1 - spent / run.gmacs())]


def commands_table(title: str, commands: Mapping[str, str]) -> str:
    """The training command of each run, by its label; folded."""
    rows = [[label, f"`{command}`"] for label, command in commands.items()]
    return folded(table(title, ["<model", "<command"], rows))


def files_table(title: str, results: Mapping[str, CommandResult], file: str) -> str:
    """The table of this file of several models below each other, with the label of each."""
    heads: list[str] = []
    rows: list[list[str | None]] = []
    for label, result in results.items():
        (first, *others) = result.tables[file]
        heads = [*heads, *(head for head in first if head not in heads)]  # rounds differ in number
        rows += [[label, *(dict(zip(first, row)).get(head) for head in heads)] for row in others]
    full = [[*row, *[None] * (len(heads) + 1 - len(row))] for row in rows]
    if len(results) == 1 and "" in results:
        return table(title, [f"<{head}" for head in heads], [row[1:] for row in full])
    return table(title, ["<model", *(f"<{head}" for head in heads)], full)


def runs_table(measurements: Sequence[Measurement]) -> str:
    """Everything that was measured, and on what."""
    rows = [
        [
            f"`{measurement.name}`",
            None if measurement.seed is None else str(measurement.seed),
            f"{measurement.parameters:,}" if isinstance(measurement, RunResult | SegmentationResult) else None,
            str(measurement.epochs) if isinstance(measurement, RunResult | SegmentationResult) else None,
            f"{measurement.seconds / 60:.1f}",
            measurement.machine.device,
            str(measurement.machine.jobs),
            measurement.precision,
            measurement.date[:10],
        ]
        for measurement in measurements
    ]
    heads = ["<name", "seed", "parameters", "epochs", "minutes", "<on", "jobs at a time", "<precision", "date"]
    return table("All measurements", heads, rows)
