"""The figure of the inference benchmark: speed against accuracy, or against compute where accuracy is not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from progresvit.analysis.bench_report import YARDSTICKS
from progresvit.analysis.style import COLOURS, MARKERS, look, new_figure
from progresvit.engine.bench_case import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def throughput_figure(rows: Sequence[Row], *, title: str = "Speed of inference") -> Figure:
    """The engine's curves over the share of images going on, one batch size; yardsticks of that batch as points.

    Where the engine's accuracy is known, a yardstick without one is a level line.
    """
    good = [
        row for row in rows if row["error"] is None and row["measure"] == "throughput" and not row["case"]["memory"]
    ]
    engines = [row for row in good if row["subject"] == "engine"]
    if not engines:
        raise ValueError("there is no throughput of the engine to draw; measure it, or leave the plot out.")
    batch = engines[0]["batch"]
    known = all(row["top1"] is not None for row in engines if row["batch"] == batch)
    x = "top-1 accuracy (%)" if known else "average GMACs per image (executed convention)"
    figure, axes = new_figure(title=f"{title}, batch {batch}", x=x, y="images per second")
    good = [row for row in good if row["batch"] == batch]
    curves: dict[str, list[Row]] = {}
    for row in good:
        if row["subject"] == "engine":
            curves.setdefault(f"{row['name']}, {row['precision']}", []).append(row)
    for number, (name, points) in enumerate(curves.items()):
        points = sorted(points, key=lambda row: row["gmacs"])
        axes.plot(
            [_x(row, known) for row in points],
            [row["images_per_s"] for row in points],
            marker=MARKERS[number % len(MARKERS)],
            markersize=5,
            label=name,
            **look(number),
        )
    yardsticks = [row for row in good if row["subject"] in YARDSTICKS]
    for number, row in enumerate(yardsticks, start=len(curves)):
        _draw_yardstick(axes, row, known, number)
    axes.margins(0.08)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylim(bottom=0)
    if not known:
        axes.set_xlim(left=0)
    axes.legend(fontsize=9)
    return figure


def _x(row: Row, known: bool) -> float:
    return float(100 * row["top1"] if known else row["gmacs"])


def _draw_yardstick(axes: Axes, row: Row, known: bool, number: int) -> None:
    label, style = f"{row['name']}, {row['precision']}", look(number)
    if known and row["top1"] is None:
        axes.axhline(row["images_per_s"], label=f"{label} (accuracy not measured)", **style)
        return
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    axes.plot(
        _x(row, known),
        row["images_per_s"],
        marker,
        color=colour,
        markerfacecolor="white",
        markersize=9,
        markeredgewidth=2,
        label=label,
    )
