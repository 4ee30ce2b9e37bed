"""Learned routers on records: fitted on some, and compared on others when as many images continue to round 2.

``progresvit fit-router`` and ``compare-routers`` and the results pipeline use these functions. Letters: N images,
R rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from progresvit import table
from progresvit.evaluation.records import Records
from progresvit.metrics.arrays import Bools, Float32s
from progresvit.routing import TENTHS, Router, fit_router
from progresvit.routing.router import Target
from progresvit.table import Column, Row, Table


def fit_on(records: Records, *, target: Target = "benefit", epochs: int | None = None, seed: int = 0) -> Router:
    """A router of these images, bound to their model and their names.

    Args:
        records: Labelled records of images that are not reported on.
        target: The event whose probability is predicted.
        epochs: Passes over the records; by default ``routing.router.default_epochs``.
        seed: Seed of the weights and the order.
    """
    records.header.check_routable()
    return fit_router(
        records.statistics,
        records.correct,
        target=target,
        epochs=epochs,
        seed=seed,
        model=records.header.weights_sha256,
        ids=records.ids,
    )


def matched_outcomes(records: Records, scores: Float32s, rates: Sequence[float]) -> tuple[Bools, list[float]]:
    """Whether each image is correct at each rate, (N, R), and the average GMACs of the rates.

    The images with the highest scores continue, exactly as many as the rate asks for; ties are taken in order. The cost
    of the router itself is not counted.

    Args:
        records: Labelled records of two rounds.
        scores: Scores of round 1, (N,).
        rates: Shares of the images that continue to round 2.
    """
    if records.rounds != 2:
        raise ValueError(f"matched continuation rates are for two rounds, and these records have {records.rounds}.")
    order, correct, gmacs = np.argsort(-scores, kind="stable"), records.correct, records.gmacs("paper")
    outcomes, spent = np.zeros((len(records), len(rates)), bool), []
    for number, rate in enumerate(rates):
        count = round(rate * len(records))
        refined = np.zeros(len(records), bool)
        refined[order[:count]] = True
        outcomes[:, number] = np.where(refined, correct[:, 1], correct[:, 0])
        spent.append(gmacs[0] + count / len(records) * (gmacs[1] - gmacs[0]))
    return outcomes, spent


def matched_table(records: Records, routers: Mapping[str, Router], rates: Sequence[float] = TENTHS) -> Table:
    """Top-1 of entropy and of each router when the same share of the images continues to round 2: the paper's table."""
    rules: dict[str, Router | None] = {"entropy": None, **routers}
    outcomes = {
        name: matched_outcomes(records, records.exit_scores(router)[:, 0], rates) for name, router in rules.items()
    }
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
