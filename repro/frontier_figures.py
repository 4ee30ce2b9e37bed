"""The plots of a frontier of several runs: top-1 against GMACs, and against images per second.

Accuracy is spaced by the logarithm of the error rate: weak and strong points are both readable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from progresvit.metrics.interval import Interval, share_interval
from progresvit.plots import COLOURS, MARKERS, band_entry, draw_band, new_figure, scale_compute
from repro.compare import ComparedRun, CrossedDifference, crossed_difference
from repro.figures import GMACS, PER_ROUND, PER_ROUND_LINE, TOP1, draw_per_round
from repro.formats import CostPoint
from repro.frontier import FrontierLineUp, FrontierRow, curve_of
from repro.outcomes import GAIN, LOSS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE = tuple(np.linspace(0, 1, 21).tolist())
"""Points of the curve of a routed model: parts of the way from round 1 to the full path."""
LOWEST_ERROR = 0.05
"""Error rate in percent; a lower one is drawn at this height."""
TICKS = (0, 20, 40, 60, 70, 80, 85, 90, 92, 94, 95, 96, 97, 98, 98.5, 99, 99.5)
FEW_TICKS = 3
"""With fewer of these in the plot, every fifth percent is a tick, or every percent."""
PALE = "0.8"
"""Fill of the marks of thresholds per round."""
INTERVALS = "95 % intervals"
Style = dict[str, Any]


def frontier_figure(lined_up: FrontierLineUp, rows: Sequence[FrontierRow]) -> Figure:
    """A curve for each run or family. Marks are the points of the table, with their 95 % intervals.

    Bands of routed models are such intervals at every threshold. Models of three or more rounds have a dotted curve and
    grey marks for one threshold of each round, chosen on the other half of the images.
    """
    ours = next((row.label for row in rows if row.run == lined_up.plan.ours), None)
    others = [row for row in rows if not row.per_round and not row.label.startswith(f"{ours}, ")]  # no variants of ours
    verdicts = [row.verdict for row in others if row.verdict is not None]
    against = f"ours gains at {verdicts.count(GAIN)} and loses at {verdicts.count(LOSS)} of {len(verdicts)} points"
    title = against if verdicts else "top-1 at every threshold"
    figure, axes = _new_figure(f"{lined_up.plan.title}: {title}", GMACS)
    scale_compute(axes, max((run.rounds for run in lined_up.runs if run.near_lossless), default=1))
    more: dict[str, Style] = {}
    for curve in _curves(lined_up, rows):
        for run in curve.routed:
            _draw_thresholds(axes, run, curve.style)
            if draw_per_round(axes, run, colour=curve.style["color"]):
                more[PER_ROUND] = {"color": "0.4", "marker": "o", "markerfacecolor": PALE, **PER_ROUND_LINE}
        marks = curve.style | ({"linestyle": ""} if curve.routed else {})
        shared = [(row.gmacs, row) for row in curve.rows if not row.per_round]
        per_round = [(row.gmacs, row) for row in curve.rows if row.per_round]
        _draw_points(axes, curve.label, shared, marks)
        if per_round:
            _draw_points(axes, f"{curve.label}: {PER_ROUND}", per_round, marks | {"markerfacecolor": PALE})
    _finish(figure, axes, rows, _curves(lined_up, rows), more)
    return figure


def speed_figure(
    lined_up: FrontierLineUp, rows: Sequence[FrontierRow], costs: Mapping[tuple[str, str], CostPoint], device: str
) -> Figure:
    """The points whose cost was measured, against images per second on a logarithmic axis."""
    from matplotlib.ticker import LogLocator

    figure, axes = _new_figure(f"{lined_up.plan.title}: top-1 and speed on {device}", "images per second")
    shown = [row for row in rows if (row.run, row.point) in costs]
    for curve in _curves(lined_up, shown):
        points = [(costs[row.run, row.point].images_per_s, row) for row in curve.rows]
        _draw_points(axes, curve.label, points, curve.style)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _finish(figure, axes, shown, _curves(lined_up, shown))
    return figure


@dataclass(frozen=True)
class Curve:
    """A run, or a family of runs."""

    label: str
    routed: list[ComparedRun]
    rows: list[FrontierRow]
    style: Style


def _curves(lined_up: FrontierLineUp, rows: Sequence[FrontierRow]) -> list[Curve]:
    """Curves in the order of the study. A curve without rows is left out; the others keep their styles."""
    families = {run: label for label, members in lined_up.plan.families.items() for run in members}
    members: dict[str, list[ComparedRun]] = {}
    for run in lined_up.runs:
        members.setdefault(families.get(run.run, run.label), []).append(run)
    curves, number = [], 0
    for label, runs in members.items():
        names = {run.run for run in runs}
        ours = lined_up.plan.ours in names
        own = [row for row in rows if row.run in names]
        style = _style(None if ours else number) | ({"linestyle": ""} if len(own) == 1 else {})
        number += not ours
        if own:
            routed = [run for run in runs if run.near_lossless and run.rounds > 1]
            curves.append(Curve(label, routed, own, style))
    return curves


def _style(number: int | None) -> Style:
    """Style of the number-th other run, or of ours. The second turn of colours has hollow marks and dashed lines."""
    if number is None:
        return {
            "color": COLOURS[0],
            "marker": MARKERS[0],
            "linestyle": "-",
            "linewidth": 2.2,
            "markersize": 7,
            "zorder": 4,
        }
    turn, place = divmod(number, len(COLOURS) - 1)
    return {
        "color": COLOURS[1 + place],
        "marker": MARKERS[1 + (place + 2 * turn) % (len(MARKERS) - 1)],
        "linestyle": "--" if turn else "-",
        "linewidth": 1,
        "markersize": 5.5,
        "markerfacecolor": "white" if turn else COLOURS[1 + place],
        "zorder": 3,
    }


def _new_figure(title: str, x: str) -> tuple[Figure, Axes]:
    figure, axes = new_figure(title=title, x=x, y=f"{TOP1}, spaced by log error")
    figure.set_size_inches(7, 6)
    axes.set_yscale("function", functions=(_height, lambda height: 100 - 10**-height))
    return figure, axes


def _height(top1: ArrayLike) -> NDArray[np.float64]:
    """Height of an accuracy in percent."""
    height: NDArray[np.float64] = -np.log10(np.maximum(100 - np.asarray(top1, np.float64), LOWEST_ERROR))
    return height


def _draw_thresholds(axes: Axes, run: ComparedRun, style: Style) -> None:
    """A routed model: mean over seeds at equal parts of the way from round 1 to the full path."""
    of_seeds = [curve_of(result, CURVE) for result in run.seeds]
    x = np.mean([[point.gmacs for point in points] for points in of_seeds], axis=0)
    y = np.mean([[100 * point.correct.mean() for point in points] for points in of_seeds], axis=0)
    right = [np.stack([point.correct for point in points]).astype(np.float64) for points in zip(*of_seeds)]
    ends = [_interval(correct) for correct in right]
    reach = [[100 * end.lowest for end in ends], [100 * end.highest for end in ends]]
    draw_band(axes, x, *reach, colour=style["color"])
    axes.plot(x, y, label=f"{run.label}: every threshold", **style | {"marker": ""})


def _interval(correct: NDArray[np.float64]) -> CrossedDifference | Interval:
    """Interval of top-1 over seeds and images; with one seed, over images: (K, N)."""
    if len(correct) > 1:
        return crossed_difference(correct, np.zeros_like(correct))
    return share_interval(int(correct.sum()), correct.size)


def _draw_points(axes: Axes, label: str, points: Sequence[tuple[float, FrontierRow]], style: Style) -> None:
    x, rows = zip(*sorted(points, key=lambda point: point[0]))
    ends = [_ends(row) for row in rows]
    top1 = [100 * row.top1 for row in rows]
    arms = [[y - lowest for y, (lowest, _) in zip(top1, ends)], [highest - y for y, (_, highest) in zip(top1, ends)]]
    axes.errorbar(x, top1, yerr=arms, elinewidth=0.8, **style).set_label(label)


def _ends(row: FrontierRow) -> tuple[float, float]:
    """Ends of the interval of top-1, in percent; with one seed, top-1 twice."""
    interval = row.top1_interval
    return (100 * row.top1, 100 * row.top1) if interval is None else (100 * interval.lowest, 100 * interval.highest)


def _finish(
    figure: Figure,
    axes: Axes,
    rows: Sequence[FrontierRow],
    curves: Sequence[Curve],
    more: Mapping[str, Style] | None = None,
) -> None:
    """Limits and ticks that suit the spacing, and a legend under the axes."""
    from matplotlib.lines import Line2D

    drawn = [end for end in axes.dataLim.intervaly if np.isfinite(end)]  # with bands
    ends = _height([*drawn, *(end for row in rows for end in _ends(row))])
    reach = float(np.ptp(ends)) or 0.1
    lowest, highest = ends.min() - 0.04 * reach, ends.max() + 0.04 * reach
    axes.set_ylim(100 - 10**-lowest, 100 - 10**-highest)
    ticks: list[float] = []
    for candidates in (TICKS, range(0, 100, 5), range(100)):
        if len(ticks) < FEW_TICKS:
            ticks = _spaced([tick for tick in candidates if lowest <= _height(tick) <= highest], 0.035 * reach)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    handles = [Line2D([], [], label=curve.label, **curve.style) for curve in curves]
    handles += [Line2D([], [], label=label, **style) for label, style in (more or {}).items()]
    if axes.collections:
        handles.append(Line2D([], [], label=INTERVALS, **band_entry()))
    columns = max(1, min(3, 92 // (max(len(curve.label) for curve in curves) + 8)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def _spaced(ticks: Sequence[float], distance: float) -> list[float]:
    """The ticks that are not too near to the one before."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or _height(tick) - _height(kept[-1]) > distance:
            kept.append(tick)
    return kept
