"""The figures of a study: runs side by side, one model's routing, models under corruption.

Legends lie under the axes and so over no data. The label of a line is longer than its entry in the legend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from progresvit.metrics.interval import share_interval
from progresvit.plots import (
    BAND,
    COLOURS,
    MARKERS,
    band_entry,
    beside,
    blank_figure,
    curve_style,
    draw_band,
    in_lines,
    legend_below,
    new_figure,
    new_panels,
    savings_title,
    scale_compute,
)
from repro.compare import ComparedRun, CrossedDifference, LineUp
from repro.formats import FULL, MatchedResult, Point, RiskCurve, RoutingResult, ShiftResult
from repro.frontier import FrontierPoint, per_round_points
from repro.outcomes import GAIN, Outcomes
from repro.routing_tables import matched_title
from repro.shift import Models, mean_at, mean_top1, settings_of, severities_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GMACS = "average GMACs per image (paper convention)"
TOP1 = "top-1 accuracy (%)"
STAR: dict[str, Any] = {"color": "0.4", "marker": "*", "linestyle": "", "markersize": 11}
MARGIN: dict[str, Any] = {"color": "black", "marker": "|", "linestyle": "", "markersize": 13, "markeredgewidth": 2}
SINGLES = ("P", "X", "D")
"""Markers of models that are points beside frontiers."""
GRID = 60
"""Points of the mean curve of several seeds."""
PARTS = tuple(np.geomspace(0.01, 1, 25)[:-1].tolist())
"""Budgets of a curve of thresholds per round: parts of the way from round 1 to the full path."""
PER_ROUND = "thresholds per round, chosen on the other half"
PER_ROUND_LINE: dict[str, Any] = {"linestyle": (0, (1, 1)), "linewidth": 1.5}
STEP, ROOM = 0.006, 0.08
"""Offset between the rounds of two seeds, and of all of them, as a share of the axis."""
WITHHELD = 0.2
"""Share of answers that the title of :func:`risk_figure` withholds."""


def comparison_figure(compared: LineUp) -> Figure:
    """Frontiers over each other, mean over seeds, with bands: the rounds of each seed as marks, stars near-lossless.

    Runs of three or more rounds also have a dotted curve: one threshold of each round, chosen on the other half.
    """
    routed = [run for run in compared.rows if run.rounds > 1 and run.near_lossless]
    saved = [run.saving for run in routed]
    title = savings_title({compared.title: min(saved), "": max(saved)}) if saved else "top-1 of each round"
    title = f"{compared.title}: {title[0].lower()}{title[1:]}"
    figure, axes = new_figure(title=title, x=GMACS, y=TOP1)
    rounds = max(run.rounds for run in compared.rows)
    scale_compute(axes, rounds)
    entries: dict[str, dict[str, Any]] = {}
    per_round: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(compared.rows):
        curve = curve_style(number)
        entries[run.label] = _mark(number) | (curve if run in routed else {})
        if run in routed:
            _draw_mean(axes, run, label=f"{run.label}: every threshold", linewidth=1.8, **curve)
            stars = [(point.gmacs_paper, 100 * point.top1) for point in run.near_lossless]
            x, y = np.mean(stars, axis=0)
            label = f"{run.label}: near-lossless"
            axes.plot([x], [y], "*", color=curve["color"], markersize=13, zorder=4, label=label)
            if draw_per_round(axes, run, colour=curve["color"]):
                per_round["thresholds per round"] = {"color": "0.4", **PER_ROUND_LINE}
    _draw_rounds(axes, compared.rows, logarithmic=axes.get_xscale() == "log")
    if routed:
        entries |= {"near-lossless": STAR} | per_round | {BAND: band_entry()}
    if per_round:
        axes.set_title(in_lines(f"{title}; dotted: {PER_ROUND}"), fontsize=11)
    legend_below(figure, entries)
    return figure


def draw_per_round(axes: Axes, run: ComparedRun, *, colour: str) -> bool:
    """The curve of thresholds per round, mean over seeds at equal budgets; False if the run has none."""
    of_seeds = [per_round_points(result, PARTS) for result in run.seeds]
    if not all(of_seeds):
        return False
    x, y = (np.mean([[value(point) for point in points] for points in of_seeds], axis=0) for value in (_spent, _top1))
    ends = [[run.gmacs(place), 100 * run.top1(place)] for place in (0, FULL)]
    x, y = ([ends[0][axis], *values, ends[1][axis]] for axis, values in enumerate((x, y)))
    axes.plot(x, y, color=colour, label=f"{run.label}: {PER_ROUND}", zorder=3, **PER_ROUND_LINE)
    return True


def _spent(point: FrontierPoint) -> float:
    return point.gmacs


def _top1(point: FrontierPoint) -> float:
    """Top-1 in percent."""
    return 100 * float(point.correct.mean())


def _draw_mean(axes: Axes, run: ComparedRun, **style: Any) -> None:
    """The frontier of a run, mean over seeds at equal GMACs, with the 95 % interval over images (Wilson)."""
    frontiers = [sorted((point.gmacs_paper, point.top1) for point in result.frontier) for result in run.seeds]
    x, top1 = np.array(frontiers[0]).T
    if len(frontiers) > 1:
        x = np.linspace(max(curve[0][0] for curve in frontiers), min(curve[-1][0] for curve in frontiers), GRID)
        top1 = np.mean([np.interp(x, *np.array(curve).T) for curve in frontiers], axis=0)
    axes.plot(x, 100 * top1, **style)
    _draw_interval_band(axes, x.tolist(), top1.tolist(), images=run.first.data.val, colour=style["color"])


def _draw_interval_band(axes: Axes, x: Sequence[float], top1: Sequence[float], *, images: int, colour: str) -> None:
    ends = [share_interval(round(share * images), images) for share in top1]
    draw_band(axes, x, [100 * end.lowest for end in ends], [100 * end.highest for end in ends], colour=colour)


def _draw_rounds(axes: Axes, rows: Sequence[ComparedRun], *, logarithmic: bool) -> None:
    """Each round of each seed alone; seeds of a run stand side by side, so that none hides another."""
    several = [(run.run, result.seed) for run in rows for result in run.seeds if len(run.seeds) > 1]
    spent = [gmacs for run in rows for gmacs in run.first.rounds.gmacs_paper]
    reach = np.log(max(spent) / min(spent)) if logarithmic else max(spent) - min(spent)
    step = reach * min(STEP, ROOM / max(1, len(several)))
    for number, run in enumerate(rows):
        mark = _mark(number) | ({"markersize": 5} if len(run.seeds) > 1 else {})
        for result in run.seeds:
            aside = beside(several.index((run.run, result.seed)), len(several), step) if len(run.seeds) > 1 else 0.0
            x = np.array(result.rounds.gmacs_paper)
            x = x * np.exp(aside) if logarithmic else x + aside
            right = 100 * np.array(result.rounds.right) / result.data.val
            axes.plot(x, right, label=f"{run.label}, seed {result.seed}: each round alone", **mark)


def accuracy_figure(compared: LineUp) -> Figure:
    """A row for each run. Left: top-1 with a dot for each seed. Right: the difference to its base."""
    rows = compared.rows
    base = compared.against.label if compared.against is not None else "the row above"
    bases = [(run, other) for level, run in enumerate(rows) if (other := compared.base_of(level)) is not None]
    clear = sum(run.less(other, FULL).clear for run, other in bases)
    title = f"{compared.title}: intervals of {clear} of {len(bases)} full-path differences exclude 0"
    figure, (left, right) = new_panels(
        title=title if bases else compared.title, xs=[TOP1, f"points over {base}"], y="", height=1.9 + 0.45 * len(rows)
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
            heights = [height + beside(place, len(each), 0.09) for place in range(len(each))]
            left.plot(each, heights, label=f"{run.label}: {name}", **dots)
            other = compared.base_of(level)
            if other is None or (other.rounds == 1 and place != FULL):
                continue
            difference = run.less(other, place)
            arms = [[100 * (difference.mean - difference.lowest)], [100 * (difference.highest - difference.mean)]]
            bar = right.errorbar([100 * difference.mean], [height], xerr=arms, capsize=5, **style | {"markersize": 4})
            bar.set_label(f"{run.label}: {name}")
    left.set_yticks(range(len(rows)), [run.label for run in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.margins(x=0.1)
    right.axvline(0, color="0.4", linewidth=1)
    legend_below(figure, entries)
    return figure


def tests_figure(outcomes: Outcomes) -> Figure:
    """A row for each test, with the intervals of both rounds. Left: top-1 and margins. Right: log-loss."""
    rows = outcomes.measured
    with_loss = any(outcome.last.log_loss is not None for outcome in rows)
    xs = ["top-1 difference (points)", *(["log-loss difference (nats)"] if with_loss else [])]
    gains = sum(outcome.verdict == GAIN for outcome in rows)
    title = f"{outcomes.title}: the full path gains in {gains} of {len(rows)} tests"
    figure, (left, *right) = new_panels(title=title, xs=xs, y="", height=1.9 + 0.5 * len(rows))
    entries: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(("round 1", "full path")):
        style = _mark(number) | {"markerfacecolor": COLOURS[number], "markersize": 5}
        for level, outcome in enumerate(rows):
            of_round = outcome.first if name == "round 1" else outcome.last
            if of_round is None:
                continue
            height, label = level + 0.14 * (2 * number - 1), f"{outcome.label}: {name}"
            entries[name] = style
            _draw_interval(left, of_round.top1, height, label, scale=100, style=style)
            if right and of_round.log_loss is not None:
                _draw_interval(right[0], of_round.log_loss, height, label, scale=1, style=style)
    for level, outcome in enumerate(rows):
        left.plot([outcome.margin], [level + 0.14], label=f"{outcome.label}: margin", **MARGIN)
    entries["margin, full path"] = MARGIN
    left.set_yticks(range(len(rows)), [outcome.label for outcome in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    for axes in (left, *right):
        axes.axvline(0, color="0.4", linewidth=1)
        axes.locator_params(axis="x", nbins=6 if axes is left else 4)
    legend_below(figure, entries)
    return figure


def _draw_interval(
    axes: Axes, difference: CrossedDifference, height: float, label: str, *, scale: float, style: dict[str, Any]
) -> None:
    arms = [[scale * (difference.mean - difference.lowest)], [scale * (difference.highest - difference.mean)]]
    axes.errorbar([scale * difference.mean], [height], xerr=arms, capsize=4, **style).set_label(label)


def routing_frontier_figure(result: RoutingResult) -> Figure:
    """One model's frontier, its rounds, and its calibrated thresholds as marks."""
    saved = [1 - setting.point.gmacs_paper / result.rounds.gmacs_paper[-1] for setting in result.settings]
    title = f"Thresholds of {result.model}: {100 * min(saved):.0f} to {100 * max(saved):.0f} % fewer GMACs"
    figure, axes = new_figure(title=title, x=GMACS, y=TOP1)
    scale_compute(axes, len(result.rounds.gmacs_paper))
    _draw_frontier(axes, result.frontier, label="frontier", linewidth=1.8, **curve_style(0))
    spent, top1 = zip(*((point.gmacs_paper, point.top1) for point in result.frontier))
    _draw_interval_band(axes, spent, top1, images=result.data.val, colour=COLOURS[0])
    right = 100 * np.array(result.rounds.right) / result.data.val
    axes.plot(result.rounds.gmacs_paper, right, label="each round alone", **_mark(0))
    entries: dict[str, dict[str, Any]] = {"every threshold": curve_style(0), "each round alone": _mark(0)}
    places: dict[tuple[float, float], list[str]] = {}
    for setting in result.settings:
        places.setdefault((setting.point.gmacs_paper, 100 * setting.point.top1), []).append(setting.name)
    for number, ((x, y), names) in enumerate(places.items(), start=1):
        style = _mark(number) | {"markerfacecolor": COLOURS[number % len(COLOURS)], "markersize": 8}
        if "near-lossless" in names:
            style |= {"marker": "*", "markersize": 14}
        axes.plot([x], [y], label=", ".join(names), zorder=4, **style)
        entries[", ".join(names)] = style
    entries[BAND] = band_entry()
    legend_below(figure, entries)
    return figure


def gains_figure(matched: Sequence[MatchedResult]) -> Figure:
    """Routers against entropy at matched shares, with 95 % intervals: a panel for each, on common axes."""
    from textwrap import fill

    lines = (len(matched) + 1) // 2
    figure = blank_figure(height=1.1 + 1.9 * lines)
    panels = list(figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False).flat)
    above = sum(low > 0 for comparison in matched for low in comparison.lowest)
    tried = sum(low < high for comparison in matched for low, high in zip(comparison.lowest, comparison.highest))
    figure.suptitle(f"Learned routers are clearly above entropy at {above} of {tried} shares that differ", fontsize=11)
    for number, (axes, comparison) in enumerate(zip(panels, matched)):
        name = matched_title(comparison)
        gain = 100 * (np.array(comparison.router_top1) - np.array(comparison.entropy_top1))
        arms = [gain - 100 * np.array(comparison.lowest), 100 * np.array(comparison.highest) - gain]
        style = _mark(number) | curve_style(number) | {"markersize": 5}
        axes.errorbar(100 * np.array(comparison.shares), gain, yerr=np.abs(arms), capsize=2, **style).set_label(name)
        axes.axhline(0, color="0.4", linewidth=1)
        axes.set_title(fill(name, 40, break_on_hyphens=False), fontsize=10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(matched) :]:
        axes.set_visible(False)
    for axes in panels[::2]:
        axes.set_ylabel("over entropy (points)", fontsize=10)
    for axes in panels[len(matched) - min(2, len(matched)) : len(matched)]:
        axes.set_xlabel("images that continue (%)", fontsize=10)
        axes.tick_params(labelbottom=True)
    return figure


def risk_figure(curves: Sequence[RiskCurve]) -> Figure:
    """Risk against coverage, with the mean risk in the legend."""
    shown = next((curve for curve in curves if curve.name == "routed"), curves[-1])
    few, everyone = (
        100 * float(np.interp(share, shown.coverage, shown.risk)) for share in (1 - WITHHELD, max(shown.coverage))
    )
    figure, axes = new_figure(
        title=f"Withholding {100 * WITHHELD:.0f} % of the answers lowers the errors from {everyone:.1f} to {few:.1f} %",
        x="coverage: images answered (%)",
        y="risk: answers wrong (%)",
    )
    entries: dict[str, dict[str, Any]] = {}
    for number, curve in enumerate(curves):
        axes.plot(100 * np.array(curve.coverage), 100 * np.array(curve.risk), label=curve.name, **curve_style(number))
        entries[f"{curve.name} (mean {100 * curve.area:.2f} %)"] = curve_style(number)
    axes.set_ylim(bottom=0)
    legend_below(figure, entries)
    return figure


def groups_figure(result: RoutingResult) -> Figure:
    """The share of each group that exits after round 1, by setting."""
    settings = list(dict.fromkeys(at.setting for group in result.groups for at in group.at))
    first = {group.name: 100 * group.at[0].exit_shares[0] for group in result.groups}
    shares = ", ".join(f"{share:.0f} % of {name}" for name, share in first.items())
    figure, (axes,) = new_panels(
        title=f"With {settings[0]}, {shares} exit after round 1",
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
    legend_below(figure, entries)
    return figure


def severity_figure(
    result: ShiftResult,
    *,
    title: str = "Frontiers under corruption",
    beside: Mapping[str, ShiftResult] | None = None,
) -> Figure:
    """A frontier for each severity, all corruptions together, and one for the clean images.

    Stars show the first setting, calibrated on clean images: mean over corruptions. ``beside`` are models of one round,
    which have a point and no frontier: a filled mark in the severity's colour.
    """
    figure, axes = new_figure(title=title, x=GMACS, y=TOP1)
    scale_compute(axes, len(result.gmacs_paper))
    settings = settings_of({result.name: (result,)})
    stars: list[float] = []
    entries: dict[str, dict[str, Any]] = {}
    entries_of_settings: dict[str, dict[str, Any]] = {}
    for number, of_severity in enumerate(sorted(result.severities, key=lambda of_severity: of_severity.severity)):
        name = f"severity {of_severity.severity}" if of_severity.severity else "clean"
        style = curve_style(number) | {
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 6,
            "markerfacecolor": "white",
        }
        ends = [0, len(of_severity.frontier) - 1]
        _draw_frontier(axes, of_severity.frontier, label=name, markevery=ends, linewidth=1.8, **style)
        spots = [(point.gmacs_paper, point.top1) for point in of_severity.frontier]
        _draw_interval_band(axes, *zip(*spots), images=result.data.val, colour=style["color"])
        entries[name] = style
        if settings and (at := mean_at(result, of_severity.severity, settings[0])) is not None:
            spot = [at.gmacs_paper], [100 * at.top1]
            axes.plot(*spot, "*", color=style["color"], markersize=13, zorder=4, label=f"{name}: {at.setting}")
            entries_of_settings[at.setting] = STAR
            stars.append(at.gmacs_paper)
        for place, (model, other) in enumerate((beside or {}).items()):
            style = {
                "marker": SINGLES[place % len(SINGLES)],
                "linestyle": "",
                "markersize": 9,
                "markeredgecolor": "black",
            }
            spot = [other.gmacs_paper[-1]], [100 * mean_top1(other, of_severity.severity)]
            axes.plot(*spot, color=COLOURS[number % len(COLOURS)], label=f"{name}: {model}", zorder=3, **style)
            entries_of_settings[model] = style | {"color": "0.4"}
    if len(stars) > 1:
        spent = f"{stars[0]:.2f} GMACs on clean images, {stars[-1]:.2f} at severity {of_severity.severity}"
        axes.set_title(f"{title}\n{next(iter(entries_of_settings))}: {spent}", fontsize=11)
    entries |= entries_of_settings | {BAND: band_entry()}
    legend_below(figure, entries)
    return figure


def shifted_accuracy_figure(models: Models) -> Figure:
    """Top-1 of several models by severity, mean over seeds: full path and, hollow and dashed, the first setting."""
    levels = severities_of(models)
    top1 = {label: [100 * mean_top1(seeds, level) for level in levels] for label, seeds in models.items()}
    lost = ", ".join(f"{label} {values[0] - values[-1]:.1f}" for label, values in top1.items())
    title = f"Points of top-1 lost at severity {levels[-1]}: {lost}"
    figure, axes = new_figure(title=title, x="severity (0: clean images)", y=TOP1)
    entries: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for number, (label, seeds) in enumerate(models.items()):
        entries[label] = _mark(number) | {"linestyle": "-", "markerfacecolor": COLOURS[number % len(COLOURS)]}
        axes.plot(levels, top1[label], label=f"{label}: full path", **entries[label])
        for setting in settings_of({label: seeds})[:1]:
            style = _mark(number) | {"linestyle": "--", "markersize": 11, "zorder": 1}
            routed = {level: at.top1 for level in levels if (at := mean_at(seeds, level, setting)) is not None}
            axes.plot(list(routed), [100 * share for share in routed.values()], label=f"{label}: {setting}", **style)
            settings[setting] = style | {"color": "0.4", "marker": "o"}
    axes.set_xticks(levels)
    if settings:
        settings = {"full path": {"color": "0.4", "marker": "o", "linestyle": "-"}} | settings
    legend_below(figure, entries | settings)
    return figure


def _mark(number: int) -> dict[str, Any]:
    """Colour and hollow mark of the number-th run, no line."""
    colour = COLOURS[number % len(COLOURS)]
    shape = MARKERS[number % len(MARKERS)]
    return {"color": colour, "marker": shape, "linestyle": "", "markerfacecolor": "white", "markersize": 7}


def _draw_frontier(axes: Axes, points: Sequence[Point], **style: Any) -> None:
    axes.plot([point.gmacs_paper for point in points], [100 * point.top1 for point in points], **style)
