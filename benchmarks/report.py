"""The rows of the inference benchmark as a table, as ratios to what the engine is compared with, and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from measure import Row

from progresvit.plots import MARKERS, WIDTH, curve_style, legend_below, new_figure
from progresvit.table import Column, Table, decimals, rough_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

YARDSTICKS = ("eager", "compiled", "deit", "plain")
UNSTEADY = 0.2
"""A spread above this makes a ratio unreliable."""


def _count(value: float) -> str:
    """Three significant digits, or a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _threshold(value: Sequence[float | str]) -> str:
    return " / ".join(f"{float(limit):.4g}" for limit in value)


COLUMNS = (
    Column("name", "what"),
    Column("measure", "measure"),
    Column("precision", "precision"),
    Column("batch", "batch"),
    Column("images_per_s", "images/s", _count),
    Column("milliseconds", "ms per batch", _count),
    Column("spread", "spread, %", rough_percent),
    Column("threshold", "τ", _threshold),
    Column("share_continuing", "continuing, %", rough_percent),
    Column("gmacs", "GMACs", decimals),
    Column("tflops", "TFLOP/s", _count),
    Column("p50_ms", "p50, ms", _count),
    Column("p95_ms", "p95, ms", _count),
    Column("p99_ms", "p99, ms", _count),
    Column("peak_gib", "peak GiB", decimals),
    Column("note", "note"),
    Column("error", "failed"),
)


def bench_title(model: str, rows: Sequence[Row]) -> str:
    """Model, hardware and version of torch."""
    first = next((row for row in rows if row["error"] is None), None)
    where = "" if first is None else f" on {first['hardware']}, torch {first['torch']}"
    return f"{model} (random weights){where}; GMACs per image as executed"


def bench_table(title: str, rows: Sequence[Row]) -> Table:
    """The columns that people read."""
    return Table(title, COLUMNS, rows)


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Each kind of engine against each yardstick of the same batch and measure.

    If the yardstick is routed, the engine's row with the nearest share of continuing images counts, else the first.
    """
    found: list[Row] = []
    good = [row for row in rows if row["error"] is None and row["measure"] != "memory"]
    for yardstick in good:
        if yardstick["subject"] not in YARDSTICKS:
            continue
        chosen: dict[tuple[str, str], Row] = {}
        for row in good:
            if row["subject"] == "engine" and all(row[key] == yardstick[key] for key in ("batch", "measure")):
                kind = (row["name"], row["precision"])
                if kind not in chosen or _distance(row, yardstick) < _distance(chosen[kind], yardstick):
                    chosen[kind] = row
        found += [_ratio(row, yardstick) for row in chosen.values()]
    return found


def ratio_lines(rows: Sequence[Row]) -> list[str]:
    """The ratios as sentences, and the speed divided into routing's share and the kernels' share."""
    return [*_ratio_lines(rows), *_account(rows)]


def _account(rows: Sequence[Row]) -> list[str]:
    """The speed of each routed row relative to a plain ViT in the same engine, and of that ViT relative to timm's."""
    good = [row for row in rows if row["error"] is None and row["measure"] == "throughput"]
    lines = []
    for plain in (row for row in good if row["subject"] == "plain"):
        key = ("batch", "precision")
        deit = [row for row in good if row["subject"] == "deit" and all(row[name] == plain[name] for name in key)]
        deit = [row for row in deit if row["case"]["resolution"] == plain["case"]["resolution"]]
        for row in good:
            if row["subject"] != "engine" or any(row[name] != plain[name] for name in key):
                continue
            share = f"{row['share_continuing']:.1%} continuing" if row["share_continuing"] is not None else "all rounds"
            kernels = f"; kernels: {plain['images_per_s'] / deit[0]['images_per_s']:.2f}" if deit else ""
            side = plain["case"]["resolution"]
            routing = (
                f"routing: {row['images_per_s'] / plain['images_per_s']:.2f} against plain {side} in the same engine"
            )
            lines.append(f"{share}, batch {row['batch']}: {routing}{kernels}")
    return lines


def _ratio_lines(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row['engine']} is {row['ratio']:.2f} times as fast as {row['yardstick']} (batch {row['batch']}, "
        f"{'p50 latency' if row['measure'] == 'latency' else row['measure']})"
        f"{'; unsteady: the repeats differ by more than a fifth' if row['unsteady'] else ''}"
        for row in ratios(rows)
    ]


def _distance(row: Row, yardstick: Row) -> float:
    if yardstick["share_continuing"] is None or row["share_continuing"] is None:
        return 0.0
    return abs(float(row["share_continuing"] - yardstick["share_continuing"]))


def _ratio(row: Row, yardstick: Row) -> Row:
    if row["measure"] == "latency":
        ratio = yardstick["p50_ms"] / row["p50_ms"]
    else:
        ratio = row["images_per_s"] / yardstick["images_per_s"]
    names = {what: f"{one['name']} {one['precision']}" for what, one in (("engine", row), ("yardstick", yardstick))}
    unsteady = any((case["spread"] or 0) > UNSTEADY for case in (row, yardstick))
    return {**names, "batch": row["batch"], "measure": row["measure"], "ratio": ratio, "unsteady": unsteady}


def throughput_figure(rows: Sequence[Row], *, title: str) -> Figure:
    """Speed against compute: each kind of engine is a curve over the share of continuing images; yardsticks are points.

    Only rows with the batch of the engine's first row are drawn. Its precision stands in the title, not in
    each label. A yardstick of far more compute is drawn in an inset.
    """
    good = [row for row in rows if row["error"] is None and row["measure"] == "throughput"]
    first = next(row for row in good if row["subject"] == "engine")
    batch, precision = first["batch"], first["precision"]
    x, y = "average GMACs per image (executed convention)", "images per second"
    figure, axes = new_figure(title=f"{title}: throughput by compute, batch {batch}, {precision}", x=x, y=y)
    series: dict[str, list[Row]] = {}
    for row in sorted(good, key=lambda row: row["subject"] in YARDSTICKS):
        if row["batch"] == batch and row["subject"] in ("engine", *YARDSTICKS):
            own = "" if row["precision"] == precision else f", {row['precision']}"
            series.setdefault(f"{row['name']}{own}", []).append(row)
    figure.set_size_inches(WIDTH, 5)  # for the legend
    entries = {}
    for number, (name, points) in enumerate(series.items()):
        points = sorted(points, key=lambda row: row["gmacs"])
        style = {**curve_style(number), "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        if points[0]["subject"] in YARDSTICKS:
            style.update(markerfacecolor="white", markersize=9, markeredgewidth=2, linestyle="none")
        axes.plot([row["gmacs"] for row in points], [row["images_per_s"] for row in points], label=name, **style)
        entries[name] = style
    axes.margins(0.08)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    inset_far(axes, bounds=(0.72, 0.66, 0.26, 0.3))
    legend_below(figure, entries)
    return figure


def inset_far(axes: Axes, *, bounds: tuple[float, float, float, float]) -> Axes | None:
    """Move points far to the right into an inset, so that they do not stretch the x axis.

    Far is what lies beyond a gap that is wider than all other points together. Without such a gap, None.

    Args:
        axes: Its lines are drawn.
        bounds: Left, bottom, width and height of the inset, as shares of the axes.
    """
    xs = np.unique(np.concatenate([np.asarray(line.get_xdata(), np.float64) for line in axes.lines]))
    gaps = np.diff(xs)
    beyond = [place for place, gap in enumerate(gaps) if place and gap > xs[place] - xs[0]]
    if not beyond:
        return None
    last = xs[beyond[-1]]
    inset = axes.inset_axes(bounds)
    for line in axes.lines:
        points = np.asarray(line.get_xydata(), np.float64)
        points = points[points[:, 0] > last]
        if len(points):
            names = ("color", "marker", "linestyle", "markersize", "markerfacecolor", "markeredgewidth")
            inset.plot(*points.T, **{name: getattr(line, f"get_{name}")() for name in names})
    far = np.concatenate([np.asarray(line.get_xydata(), np.float64) for line in inset.lines])
    inset.set_xticks(np.unique(far[:, 0]), [f"{x:.3g}" for x in np.unique(far[:, 0])])
    inset.set_yticks(np.unique(far[:, 1]), [f"{y:,.3g}" if y < 1000 else f"{y:,.0f}" for y in np.unique(far[:, 1])])
    inset.tick_params(labelsize=8)
    inset.margins(0.5)
    axes.set_xlim(right=last + 0.08 * (last - xs[0]))
    return inset
