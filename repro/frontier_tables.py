"""The tables of a frontier of several runs, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from repro.formats import CostPoint, CostResult
from repro.frontier import FrontierRow
from repro.tables import Row, folded, gmacs, interval, percent, share_interval, table

COSTS = (
    "images/s",
    "ms at batch 1",
    "mJ per image",
    "engine: images/s",
    "engine: ms at batch 1",
    "engine: mJ per image",
)
Costs = Mapping[tuple[str, str], CostPoint]
"""Costs by run and point."""


def frontier_table(title: str, rows: Sequence[FrontierRow], costs: Mapping[str, Costs]) -> str:
    """A row for each point of each run, with the images per second on each device."""
    cells = [
        [
            row.label,
            row.point,
            gmacs(row.gmacs),
            *(_costs(of_device.get((row.run, row.point)))[0] for of_device in costs.values()),
            percent(row.top1, 2) if row.top1_interval is None else share_interval(row.top1_interval),
            None if row.compute is None else f"{row.compute:.2f}",
            None if row.ours_gmacs is None else gmacs(row.ours_gmacs),
            None if row.difference is None else interval(row.difference, 2),
            row.verdict,
        ]
        for row in rows
    ]
    heads = ["<model", "<point", "GMACs", *(f"images/s, {device}" for device in costs)]
    heads += ["top-1 (%)", "training compute (× ours)"]
    heads += ["ours at (GMACs)", "ours minus theirs (points)", "<verdict on ours"]
    measured = any(row.difference is not None for row in rows)
    return table(f"{title}: every point{', 95 % intervals over seeds and images' if measured else ''}", heads, cells)


def cost_table(title: str, rows: Sequence[FrontierRow], cost: CostResult, costs: Costs) -> str:
    """Speed, latency and energy of each point on one device; folded. Columns without values are left out."""
    cells = [[row.label, row.point, gmacs(row.gmacs), *_costs(costs.get((row.run, row.point)))] for row in rows]
    name = f"{title}: cost on {cost.machine.device}, batch {cost.batch}, {cost.runtime}"
    command = f"`{cost.commands[0]}`"
    return folded(table(name, ["<model", "<point", "GMACs", *COSTS], cells) + f"\n\n{command}")


def _costs(cost: CostPoint | None) -> Row:
    if cost is None:
        return [None] * len(COSTS)
    return [
        *_cost(cost.images_per_s, cost.latency_ms, cost.joules),
        *_cost(cost.engine_images_per_s, cost.engine_latency_ms, cost.engine_joules),
    ]


def _cost(images_per_s: float | None, latency_ms: float | None, joules: float | None) -> Row:
    return [
        None if images_per_s is None else f"{images_per_s:,.0f}",
        None if latency_ms is None else f"{latency_ms:.2f}",
        None if joules is None else f"{1000 * joules:.1f}",
    ]
