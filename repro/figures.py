"""The figures of a study: runs side by side, one model's routing, models under corruption.

Legends lie under the axes and so over no data. The label of a line is longer than its entry in the legend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from progresvit.analysis.style import COLOURS, MARKERS, curve_style, new_figure, new_panels
from repro.compare import CrossedDifference, LineUp
from repro.formats import FULL, MatchedResult, Point, RiskCurve, RoutingResult, ShiftResult
from repro.outcomes import Outcomes
from repro.routing_tables import matched_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GMACS = "average GMACs per image (paper convention)"
TOP1 = "top-1 accuracy (%)"
STAR: dict[str, Any] = {"color": "0.4", "marker": "*", "linestyle": "", "markersize": 11}
MARGIN: dict[str, Any] = {"color": "black", "marker": "|", "linestyle": "", "markersize": 13, "markeredgewidth": 2}
SINGLES = ("P", "X", "D")
"""Markers of models that are points beside frontiers."""
BESIDE = 1.3
"""Offset, in points of the share, between bars of the same share."""


def comparison_figure(compared: LineUp) -> Figure:
    """Frontiers over each other, one for each seed: rounds as marks, near-lossless points as stars."""
    figure, axes = new_figure(title=f"{compared.title}: accuracy and compute", x=GMACS, y=TOP1)
    entries: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(compared.rows):
        curve, several = curve_style(number), run.rounds > 1
        entries[run.label] = _mark(number) | (curve if several and run.near_lossless else {})
        for one in run.seeds:
            name = f"{run.label}, seed {one.seed}"
            if several and one.near_lossless is not None:
                _draw_frontier(axes, one.frontier, label=name, linewidth=1.8 if len(run.seeds) == 1 else 1, **curve)
                _draw_star(axes, one.near_lossless, number, f"{name}: near-lossless")
            right = 100 * np.array(one.rounds.right) / one.data.val
            axes.plot(one.rounds.gmacs_paper, right, label=f"{name}: each round alone", **_mark(number))
    if any(run.rounds > 1 and run.near_lossless for run in compared.rows):
        entries["near-lossless"] = STAR
    _legend_below(figure, entries)
    return figure


def accuracy_figure(compared: LineUp) -> Figure:
    """A row for each run. Left: top-1 with a dot for each seed. Right: the difference to its base."""
    rows = compared.rows
    base = compared.against.label if compared.against is not None else "the row above"
    figure, (left, right) = new_panels(
        title=compared.title, xs=[TOP1, f"points over {base}"], y="", height=1.9 + 0.45 * len(rows)
    )
    ends = {"round 1": 0, "full path": FULL} if any(run.rounds > 1 for run in rows) else {"full path": FULL}
    entries: dict[str, dict[str, Any]] = {}
    for number, (name, place) in enumerate(ends.items()):
        style = _mark(number) | {"markerfacecolor": COLOURS[number]}
        entries[name] = style
        for level, run in enumerate(rows):
            if run.rounds == 1 and place != FULL:
                continue
            height = level + 0.12 * (2 * number - 1) * (len(ends) > 1)
            each = [100 * share for share in run.top1_of_seeds(place)]
            dots = style | {"markeredgecolor": "white", "markersize": 9}
            left.plot(each, [height] * len(each), label=f"{run.label}: {name}", **dots)
            other = compared.base_of(level)
            if other is None or (other.rounds == 1 and place != FULL):
                continue
            found = run.less(other, place)
            arms = [[100 * (found.mean - found.lowest)], [100 * (found.highest - found.mean)]]
            bar = right.errorbar([100 * found.mean], [height], xerr=arms, capsize=5, **style | {"markersize": 4})
            bar.set_label(f"{run.label}: {name}")
    left.set_yticks(range(len(rows)), [run.label for run in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.margins(x=0.1)
    right.axvline(0, color="0.4", linewidth=1)
    _legend_below(figure, entries)
    return figure


def tests_figure(outcomes: Outcomes) -> Figure:
    """A row for each test, with the intervals of both rounds. Left: top-1 and margins. Right: log-loss."""
    rows = outcomes.measured
    with_loss = any(one.last.log_loss is not None for one in rows)
    xs = ["top-1 difference (points)", *(["log-loss difference (nats)"] if with_loss else [])]
    figure, (left, *right) = new_panels(title=f"{outcomes.title}: tests", xs=xs, y="", height=1.9 + 0.5 * len(rows))
    entries: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(("round 1", "full path")):
        style = _mark(number) | {"markerfacecolor": COLOURS[number], "markersize": 5}
        for level, one in enumerate(rows):
            of_round = one.first if name == "round 1" else one.last
            if of_round is None:
                continue
            height, label = level + 0.14 * (2 * number - 1), f"{one.label}: {name}"
            entries[name] = style
            _draw_interval(left, of_round.top1, height, label, scale=100, style=style)
            if right and of_round.log_loss is not None:
                _draw_interval(right[0], of_round.log_loss, height, label, scale=1, style=style)
    for level, one in enumerate(rows):
        left.plot([one.margin], [level + 0.14], label=f"{one.label}: margin", **MARGIN)
    entries["margin, full path"] = MARGIN
    left.set_yticks(range(len(rows)), [one.label for one in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    for axes in (left, *right):
        axes.axvline(0, color="0.4", linewidth=1)
        axes.locator_params(axis="x", nbins=6 if axes is left else 4)
    _legend_below(figure, entries)
    return figure


def _draw_interval(
    axes: Axes, found: CrossedDifference, height: float, label: str, *, scale: float, style: dict[str, Any]
) -> None:
    arms = [[scale * (found.mean - found.lowest)], [scale * (found.highest - found.mean)]]
    axes.errorbar([scale * found.mean], [height], xerr=arms, capsize=4, **style).set_label(label)


def routing_frontier_figure(result: RoutingResult) -> Figure:
    """One model's frontier, its rounds, and its calibrated thresholds as marks."""
    figure, axes = new_figure(title="Thresholds of one model", x=GMACS, y=TOP1)
    _draw_frontier(axes, result.frontier, label="frontier", linewidth=1.8, **curve_style(0))
    right = 100 * np.array(result.rounds.right) / result.data.val
    axes.plot(result.rounds.gmacs_paper, right, label="each round alone", **_mark(0))
    entries: dict[str, dict[str, Any]] = {"every threshold": curve_style(0), "each round alone": _mark(0)}
    places: dict[tuple[float, float], list[str]] = {}
    for one in result.settings:
        places.setdefault((one.point.gmacs_paper, 100 * one.point.top1), []).append(one.name)
    for number, ((x, y), names) in enumerate(places.items(), start=1):
        style = _mark(number) | {"markerfacecolor": COLOURS[number % len(COLOURS)], "markersize": 8}
        if "near-lossless" in names:
            style |= {"marker": "*", "markersize": 14}
        axes.plot([x], [y], label=", ".join(names), zorder=4, **style)
        entries[", ".join(names)] = style
    _legend_below(figure, entries)
    return figure


def gains_figure(matched: Sequence[MatchedResult]) -> Figure:
    """Routers against entropy at matched shares, with 95 % intervals, side by side."""
    figure, axes = new_figure(
        title="Learned routers against entropy",
        x="images that continue to the last round (%)",
        y="top-1 over entropy's (points)",
    )
    entries: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(matched):
        name = matched_title(one)
        style = _mark(number) | curve_style(number)
        gain = 100 * (np.array(one.router_top1) - np.array(one.entropy_top1))
        arms = [gain - 100 * np.array(one.lowest), 100 * np.array(one.highest) - gain]
        aside = BESIDE * (number - (len(matched) - 1) / 2)
        bars = axes.errorbar(
            100 * np.array(one.shares) + aside, gain, yerr=np.abs(arms), capsize=2, elinewidth=1, **style
        )
        bars.set_label(name)
        entries[name] = style
    axes.axhline(0, color="0.4", linewidth=1)
    _legend_below(figure, entries, columns=1)
    return figure


def risk_figure(curves: Sequence[RiskCurve]) -> Figure:
    """Risk against coverage, with the mean risk in the legend."""
    figure, axes = new_figure(
        title="Risk when uncertain answers are withheld", x="coverage: images answered (%)", y="risk: answers wrong (%)"
    )
    entries: dict[str, dict[str, Any]] = {}
    for number, curve in enumerate(curves):
        axes.plot(100 * np.array(curve.coverage), 100 * np.array(curve.risk), label=curve.name, **curve_style(number))
        entries[f"{curve.name} (mean {100 * curve.area:.2f} %)"] = curve_style(number)
    axes.set_ylim(bottom=0)
    _legend_below(figure, entries)
    return figure


def groups_figure(result: RoutingResult) -> Figure:
    """The share of each group that exits after round 1, by setting."""
    settings = list(dict.fromkeys(at.setting for group in result.groups for at in group.at))
    figure, (axes,) = new_panels(
        title="Early exit by group of classes",
        xs=["images that exit after round 1 (%)"],
        y="",
        height=1.9 + 0.45 * len(settings),
    )
    entries: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(result.groups):
        style = _mark(number) | {"markerfacecolor": COLOURS[number % len(COLOURS)], "markersize": 9}
        share = {at.setting: 100 * at.exit_shares[0] for at in group.at}
        levels = [level for level, setting in enumerate(settings) if setting in share]
        axes.plot([share[settings[level]] for level in levels], levels, label=group.name, **style)
        entries[f"{group.name} ({group.pictures:,} images)"] = style
    axes.set_yticks(range(len(settings)), settings)
    axes.set_ylim(len(settings) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    _legend_below(figure, entries)
    return figure


def severity_figure(
    result: ShiftResult,
    *,
    title: str = "Frontiers under corruption",
    beside: Mapping[str, ShiftResult] | None = None,
) -> Figure:
    """A frontier for each severity, all corruptions together, and that of the clean images.

    Stars show the first setting, calibrated on clean images: mean over corruptions. ``beside`` are models of one round,
    which have a point and no frontier: a filled mark in the severity's colour.
    """
    figure, axes = new_figure(title=title, x=GMACS, y=TOP1)
    entries: dict[str, dict[str, Any]] = {}
    entries_of_settings: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(sorted(result.severities, key=lambda one: one.severity)):
        name = f"severity {one.severity}" if one.severity else "clean"
        style = curve_style(number) | {
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 6,
            "markerfacecolor": "white",
        }
        ends = [0, len(one.frontier) - 1]
        _draw_frontier(axes, one.frontier, label=name, markevery=ends, linewidth=1.8, **style)
        entries[name] = style
        found = [at for shifted in result.sets if shifted.severity == one.severity for at in shifted.at]
        found = [at for at in found if at.setting == found[0].setting]
        if found:
            x, y = (float(np.mean(values)) for values in zip(*((at.gmacs_paper, 100 * at.top1) for at in found)))
            axes.plot([x], [y], "*", color=style["color"], markersize=13, zorder=4, label=f"{name}: {found[0].setting}")
            entries_of_settings[found[0].setting] = STAR
        for place, (model, other) in enumerate((beside or {}).items()):
            top1 = [100 * shifted.top1[-1] for shifted in other.sets if shifted.severity == one.severity]
            style = {
                "marker": SINGLES[place % len(SINGLES)],
                "linestyle": "",
                "markersize": 9,
                "markeredgecolor": "black",
            }
            spot = [other.gmacs_paper[-1]], [float(np.mean(top1))]
            axes.plot(*spot, color=COLOURS[number % len(COLOURS)], label=f"{name}: {model}", zorder=3, **style)
            entries_of_settings[model] = style | {"color": "0.4"}
    entries |= entries_of_settings
    _legend_below(figure, entries)
    return figure


def shifted_accuracy_figure(models: Mapping[str, ShiftResult]) -> Figure:
    """Top-1 of several models by severity: full path and, hollow and dashed, the first setting."""
    figure, axes = new_figure(title="Accuracy under corruption", x="severity (0: clean images)", y=TOP1)
    entries: dict[str, dict[str, Any]] = {}
    for number, (label, result) in enumerate(models.items()):
        levels = sorted({one.severity for one in result.sets})
        sets = {level: [one for one in result.sets if one.severity == level] for level in levels}
        style = _mark(number) | {"linestyle": "-", "markerfacecolor": COLOURS[number % len(COLOURS)]}
        top1 = [100 * float(np.mean([one.top1[-1] for one in sets[level]])) for level in levels]
        axes.plot(levels, top1, label=f"{label}: full path", **style)
        entries[f"{label}: full path"] = style
        setting = next((at.setting for one in result.sets for at in one.at), None)
        if setting is not None and len(result.gmacs_paper) > 1:
            style = _mark(number) | {"linestyle": "--", "markersize": 11, "zorder": 1}
            found = {
                level: [100 * at.top1 for one in sets[level] for at in one.at if at.setting == setting]
                for level in levels
            }
            known = [level for level in levels if found[level]]
            axes.plot(known, [float(np.mean(found[level])) for level in known], label=f"{label}: {setting}", **style)
            entries[f"{label}: {setting}"] = style
    axes.set_xticks(sorted({one.severity for result in models.values() for one in result.sets}))
    _legend_below(figure, entries)
    return figure


def _mark(number: int) -> dict[str, Any]:
    """Colour and hollow mark of the number-th run, no line."""
    colour = COLOURS[number % len(COLOURS)]
    shape = MARKERS[number % len(MARKERS)]
    return {"color": colour, "marker": shape, "linestyle": "", "markerfacecolor": "white", "markersize": 7}


def _draw_frontier(axes: Axes, points: Sequence[Point], **style: Any) -> None:
    axes.plot([point.gmacs_paper for point in points], [100 * point.top1 for point in points], **style)


def _draw_star(axes: Axes, point: Point, number: int, label: str) -> None:
    colour = COLOURS[number % len(COLOURS)]
    axes.plot([point.gmacs_paper], [100 * point.top1], "*", color=colour, markersize=13, zorder=4, label=label)


def _legend_below(figure: Figure, entries: Mapping[str, Mapping[str, Any]], columns: int | None = None) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in entries.items()]
    fitting = max(1, min(len(entries), 4, 84 // (max(map(len, entries)) + 8)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns or fitting, fontsize=10, frameon=False)
