"""The tables of the runs: each comparison's accuracy and early leaving, and all runs with what they ran on."""

from __future__ import annotations

from collections.abc import Sequence

from progresvit.evaluation.table import Column, Row, Table, text
from progresvit.report.wording import gmacs, percent, schedule, with_interval
from progresvit.results.compare import FULL, ComparedRun, LineUp
from progresvit.results.format import Measurement, RunResult


def accuracy_table(compared: LineUp) -> Table:
    """Top-1 of the first round and of the full path, and what lies between a row and the one it is compared with."""
    rows: list[Row] = []
    for number, run in enumerate(compared.rows):
        base = compared.base_of(number)
        several = run.rounds > 1
        rows.append(
            {
                "row": run.label,
                "rounds": schedule(run.first.rounds),
                "gmacs": run.first.rounds.gmacs_paper[FULL],
                "round1": run.top1(0) if several else None,
                "round1_difference": run.less(base, 0) if base is not None and several and base.rounds > 1 else None,
                "top1": run.top1(FULL),
                "difference": run.less(base, FULL) if base is not None else None,
                "seeds": len(run.seeds),
                "epochs": run.first.epochs,
            }
        )
    base_name = compared.against.label if compared.against is not None else "the row above"
    columns = [
        Column("row", "", left=True),
        Column("rounds", "rounds", left=True),
        Column("gmacs", "GMACs", gmacs),
        Column("round1", "round 1, top-1 (%)", percent),
        Column("round1_difference", f"points over {base_name}", with_interval),
        Column("top1", "full path, top-1 (%)", percent),
        Column("difference", f"points over {base_name}", with_interval),
        Column("seeds", "seeds"),
        Column("epochs", "epochs"),
    ]
    return Table(f"{compared.title}: accuracy, and the compute of the full path", columns, rows)


def leaving_table(compared: LineUp) -> Table | None:
    """The near-lossless threshold of each run, and its seeds apart; None if there is nothing to tell."""
    rows = [_leaving_row(run) for run in compared.rows if run.rounds > 1 or len(run.seeds) > 1]
    columns = [
        Column("row", "", left=True),
        Column("top1", "top-1 (%)", percent),
        Column("gmacs", "GMACs", gmacs),
        Column("saving", "saved (%)", percent),
        Column("exit1", "leave after round 1 (%)", percent),
        Column("round1_of_seeds", "round 1 of each seed (%)", _list),
        Column("top1_of_seeds", "full path of each seed (%)", _list),
        Column("spread", "seeds apart, full path (points)", percent),
    ]
    return (
        Table(f"{compared.title}: leaving early by the near-lossless threshold of these very pictures", columns, rows)
        if rows
        else None
    )


def _leaving_row(run: ComparedRun) -> Row:
    several, repeated = run.rounds > 1, len(run.seeds) > 1
    each = run.top1_of_seeds(FULL)
    return {
        "row": run.label,
        "top1": run.mean(lambda one: one.near_lossless.top1) if several else None,
        "gmacs": run.mean(lambda one: one.near_lossless.gmacs_paper) if several else None,
        "saving": run.saving if several else None,
        "exit1": run.mean(lambda one: one.near_lossless.exit_shares[0]) if several else None,
        "round1_of_seeds": run.top1_of_seeds(0) if several and repeated else None,
        "top1_of_seeds": each if repeated else None,
        "spread": max(each) - min(each) if repeated else None,
    }


def _list(values: Sequence[float]) -> str:
    return ", ".join(percent(value) for value in values)


def runs_table(found: Sequence[Measurement]) -> Table:
    """Everything that was measured, and on what."""
    rows: list[Row] = [
        {
            "name": one.name,
            "seed": one.seed,
            "parameters": one.parameters if isinstance(one, RunResult) else None,
            "epochs": one.epochs if isinstance(one, RunResult) else None,
            "minutes": one.seconds / 60,
            "device": one.machine.device,
            "jobs": one.machine.jobs,
            "precision": one.precision,
            "date": one.date[:10],
        }
        for one in found
    ]
    columns = [
        Column("name", "file", lambda name: f"`{name}.json`", left=True),
        Column("seed", "seed"),
        Column("parameters", "parameters", lambda count: f"{count:,}"),
        Column("epochs", "epochs"),
        Column("minutes", "minutes", lambda minutes: f"{minutes:.1f}"),
        Column("device", "on", left=True),
        Column("jobs", "jobs at a time"),
        Column("precision", "measured in", left=True),
        Column("date", "date", text),
    ]
    return Table("Everything that was measured", columns, rows)
