"""Tables from records: the frontier, and a comparison of routers at matched continuation rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from progresvit import table
from progresvit.compute import CONVENTIONS, Convention
from progresvit.evaluation.per_round import CrossFittedPoint, cross_fitted_curve, find_thresholds, has_per_round
from progresvit.evaluation.records import Records
from progresvit.evaluation.routers import matched_outcomes
from progresvit.metrics.interval import share_interval
from progresvit.routing import PAPER_THRESHOLDS, TENTHS, OperatingPoint, Router, frontier, near_lossless
from progresvit.routing.decide import Threshold
from progresvit.table import Column, Row, Table

PER_ROUND, OTHERS = "per round", "chosen on the other half"
"""Notes of rows that have one threshold for each round, and of those that were chosen on other images."""


def frontier_table(
    models: Mapping[str, Records],
    thresholds: ArrayLike = PAPER_THRESHOLDS,
    router: Router | None = None,
    settings: Mapping[str, float | tuple[float, ...]] | None = None,
) -> Table:
    """Accuracy, compute in both conventions and exit shares at each threshold; then the near-lossless point.

    The 95 % intervals of top-1 are over images (Wilson), at each threshold as if it had been chosen elsewhere. Without
    labels there is no accuracy and no near-lossless point. Models of three or more rounds also have rows of the best
    thresholds per round: near-lossless on these images, and chosen on one half of the images and measured on the other,
    both ways, at nine budgets and near-lossless.

    Args:
        models: Records by name of the model.
        thresholds: Each a number for all rounds, or a row of one for each round but the last.
        router: Compare thresholds with its probabilities instead of entropies.
        settings: Named thresholds, chosen elsewhere; each gets a row with its name.
    """
    rows: list[Row] = []
    for name, records in models.items():
        hits, hits5 = (records.correct, records.correct5) if records.labelled else (None, None)
        scores, gmacs = records.scores(router), records.gmacs("paper")
        points = frontier(scores, hits, gmacs, thresholds, correct5=hits5)
        rows += [_row(name, records, point, "") for point in points]
        if hits is not None:
            best = near_lossless(scores, hits, gmacs)
            rows += [
                _row(name, records, point, "near-lossless")
                for point in frontier(scores, hits, gmacs, [best.threshold], correct5=hits5)
            ]
        if has_per_round(records):
            rows += _per_round_rows(name, records, router)
        for setting, limit in (settings or {}).items():
            rows += [
                _row(name, records, point, setting) for point in frontier(scores, hits, gmacs, [limit], correct5=hits5)
            ]
    accuracy = [
        Column("top1", "top-1 (%)", table.percent),
        Column("top1_low", "95 % from", table.percent),
        Column("top1_high", "to", table.percent),
        Column("top5", "top-5 (%)", table.percent),
    ]
    return threshold_table(rows, accuracy, models=len(models))


def _per_round_rows(name: str, records: Records, router: Router | None) -> list[Row]:
    found, gmacs = find_thresholds(records, router), records.gmacs("paper")
    (here,) = frontier(
        records.scores(router), records.correct, gmacs, [found.near_lossless()], correct5=records.correct5
    )
    budgets = [gmacs[0] + share * (gmacs[-1] - gmacs[0]) for share in TENTHS[1:-1]]
    points, lossless = cross_fitted_curve(records, budgets, router)
    return [
        _row(name, records, here, f"near-lossless, {PER_ROUND}"),
        _row(name, records, lossless, f"near-lossless, {PER_ROUND}, {OTHERS}"),
        *(_row(name, records, point, f"{PER_ROUND}, {OTHERS}") for point in points),
    ]


def threshold_table(rows: list[Row], accuracy: Sequence[Column], *, models: int) -> Table:
    """The table of operating points; models may differ in their rounds.

    Args:
        rows: One of each point, as :func:`point_row` makes them.
        accuracy: Columns of the accuracy.
        models: Number of models; that of one model does not name it.
    """
    most = max(sum(key.startswith("exit_share_") for key in row) for row in rows)
    for row in rows:
        row.update({f"exit_share_{s}": row.get(f"exit_share_{s}") for s in range(1, most + 1)})
    columns = [
        *([Column("model", "model")] if models > 1 else []),
        Column("threshold", "τ", table.threshold),
        *accuracy,
        Column("gmacs_paper", "GMACs (paper)", table.decimals),
        Column("gmacs_executed", "GMACs (executed)", table.decimals),
        Column("saving", "saving (%)", table.rough_percent),
        *(Column(f"exit_share_{s}", f"exit {s} (%)", table.rough_percent) for s in range(1, most + 1)),
        Column("note", "note"),
    ]
    if models == 1:
        rows = [{key: value for key, value in row.items() if key != "model"} for row in rows]
    return Table("Accuracy and compute by threshold", columns, rows)


def _row(name: str, records: Records, point: OperatingPoint | CrossFittedPoint, note: str) -> Row:
    spent = {convention: float(np.dot(point.exit_shares, records.gmacs(convention))) for convention in CONVENTIONS}
    accuracy = dict.fromkeys(("top1", "top1_low", "top1_high", "top5"))
    if point.top1 is not None:
        top1 = share_interval(round(point.top1 * len(records)), len(records))
        ends = {"top1_low": top1.lowest, "top1_high": top1.highest}
        accuracy = {"top1": point.top1, **ends, "top5": point.top5}
    return point_row(name, point, accuracy, spent, full=records.gmacs("paper")[-1], note=note)


class _Point(Protocol):
    @property
    def threshold(self) -> Threshold | None: ...

    @property
    def exit_shares(self) -> tuple[float, ...]: ...


def point_row(
    name: str,
    point: _Point,
    accuracy: Mapping[str, float | None],
    spent: Mapping[Convention, float],
    *,
    full: float,
    note: str,
) -> Row:
    """A row of :func:`threshold_table`; ``spent`` are the GMACs by convention, ``full`` those of all rounds (paper)."""
    return {
        "model": name,
        "threshold": point.threshold,
        **accuracy,
        **{f"gmacs_{convention}": gmacs for convention, gmacs in spent.items()},
        "saving": 1 - spent["paper"] / full,
        **{f"exit_share_{s}": share for s, share in enumerate(point.exit_shares, start=1)},
        "note": note,
    }


def matched_table(records: Records, routers: Mapping[str, Router], rates: Sequence[float] = TENTHS) -> Table:
    """Top-1 of entropy and of each router when the same share of the images continues to round 2: the paper's table."""
    rules: dict[str, Router | None] = {"entropy": None, **routers}
    outcomes = {name: matched_outcomes(records, records.scores(router)[:, 0], rates) for name, router in rules.items()}
    rows: list[Row] = []
    for number, (rate, spent) in enumerate(zip(rates, outcomes["entropy"][1])):
        row: Row = {"continue": rate, "gmacs_paper": spent}
        row |= {name: float(correct[:, number].mean()) for name, (correct, _) in outcomes.items()}
        row |= {f"{name}_gain": row[name] - row["entropy"] for name in routers}
        rows.append(row)
    columns = [
        Column("continue", "continue (%)", table.rough_percent),
        Column("gmacs_paper", "GMACs (paper)", table.decimals),
        *(Column(name, f"{name} top-1 (%)", table.percent) for name in rules),
        *(Column(f"{name}_gain", f"{name} gain (points)", table.points) for name in routers),
    ]
    return Table("Routers at matched continuation rates", columns, rows)
