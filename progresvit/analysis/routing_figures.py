"""Routing figures: frontier, risk against coverage, reliability."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from progresvit.compute import Convention
from progresvit.evaluation.per_round import CrossFittedPoint, cross_fitted_curve, has_per_round
from progresvit.evaluation.published import PublishedSeries, check_comparable, describe_images
from progresvit.evaluation.records import Records, RoutedRecords
from progresvit.evaluation.reliability import Reliability
from progresvit.evaluation.selective import RiskCoverage
from progresvit.metrics.arrays import Floats
from progresvit.metrics.interval import share_interval
from progresvit.plots import (
    BAND,
    BELOW,
    COLOURS,
    LINES,
    MARKERS,
    band_entry,
    curve_style,
    draw_band,
    in_lines,
    legend_below,
    new_figure,
    percent_ends,
    percent_range,
    savings_title,
    scale_compute,
    shorten,
)
from progresvit.routing import Router, Top1
from progresvit.routing.decide import Threshold
from progresvit.routing.settings import DEFAULT
from progresvit.routing.sums import every_threshold

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITHHELD = 0.2
"""Share of the answers that the title of :func:`risk_coverage_figure` withholds."""
CURVE = 300
"""Number of thresholds per curve."""

PUBLISHED = "published points: GMACs as in their sources"
LABEL = 24
"""Characters of the label of a published point."""
BESIDE = ((4, -7, "left"), (4, 3, "left"), (-4, 3, "right"), (-4, -7, "right"))
"""Places of the label of a published point beside it: offsets in points, and the side of the label that is there."""
APART = tuple((x, y, "left" if x > 0 else "right") for y in (-14, 10, -22, 18) for x in (10, -10, 18, -18, 30))
"""Places with a line from the label to its point."""
ENTRY = 0.14
"""Inches of height for each method in the legend."""
PER_ROUND_CURVE = 40
"""Number of budgets of a curve of thresholds per round."""
PER_ROUND = "thresholds per round, chosen on the other half of the images"
PER_ROUND_LINE: dict[str, Any] = {"linestyle": (0, (1, 1)), "linewidth": 1.8}
PER_ROUND_MARK: dict[str, Any] = {"marker": "*", "markersize": 13, "markerfacecolor": "white", "linestyle": "none"}


def frontier_figure(
    models: Mapping[str, RoutedRecords],
    *,
    router: Router | None = None,
    settings: Mapping[str, Threshold] | None = None,
    fixed: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
    published: Sequence[PublishedSeries] = (),
    convention: Convention = "paper",
) -> Figure:
    """Accuracy against compute, one curve per model; rounds are open marks, the near-lossless point is a star.

    The accuracy is top-1, or the mIoU of segmentation models. Bands are its 95 % intervals over images at each
    threshold (Wilson; of the mIoU to first order). The curve has one threshold for all rounds. Classification models of
    three or more rounds have a second, dotted one: the best threshold of each round, chosen on one half of the images
    and measured on the other, both ways; its near-lossless point is an open star.

    Args:
        models: Records by the name of the model, all of one kind.
        router: Route by its probabilities instead of entropies.
        settings: Named thresholds calibrated on other images; each is a filled mark. One that is named near-lossless
            replaces the near-lossless point of these images.
        fixed: Models without early exit, by the name of their series: GMACs and top-1 of each, by its label.
        published: Results of other methods. Operating points of one trained model are connected; other points have
            their labels. GMACs are those of the sources, whatever the convention.
        convention: Convention of the GMACs.
    """
    check_comparable(models, published)
    metric = next(iter(models.values())).metric
    name_of_accuracy = "top-1 accuracy" if isinstance(metric, Top1) else next(iter(metric.labels.values()))
    notes = [PUBLISHED, *filter(None, [describe_images(models)])] if published else []
    figure, axes = new_figure(
        title="",
        x="\n".join([f"average GMACs per image ({convention} convention)", *notes]),
        y=f"{name_of_accuracy} (%)",
    )
    savings: dict[str, float] = {}
    per_round: dict[str, CrossFittedPoint] = {}
    for number, (name, records) in enumerate(models.items()):
        savings[name] = _draw_model(axes, number, name, records, router, settings or {}, convention)
        if has_per_round(records):
            per_round[name] = _draw_per_round(axes, number, name, records, router, convention)
    title = savings_title(savings)
    if per_round:
        saved = [1 - point.gmacs / models[name].full_gmacs(convention) for name, point in per_round.items()]
        full = {name: float(models[name].metric.single_rounds()["top1"][-1]) for name in per_round}
        lost = max(full[name] - point.top1 for name, point in per_round.items())
        title += f"; with {PER_ROUND}: {percent_range(saved)}, top-1 {-100 * lost + 0.0:+.2f}"
    axes.set_title(in_lines(title), fontsize=11)
    scale_compute(axes, max(records.rounds for records in models.values()))
    entries = model_entries(models, [DEFAULT, *(settings or {})])
    if per_round:
        colour = COLOURS[0] if len(models) == 1 else "0.4"
        entries["per round"] = {"color": colour, **PER_ROUND_LINE}
        entries["near-lossless, per round"] = {"color": colour, **PER_ROUND_MARK}
    entries[BAND] = band_entry()
    for number, (name, sizes) in enumerate((fixed or {}).items(), start=len(models)):
        entries[name] = {"marker": "X", **curve_style(number)}
        spent_by_size, top1_by_size = np.array(sorted(sizes.values())).T
        axes.plot(spent_by_size, 100 * top1_by_size, label=name, **entries[name])
        last = spent_by_size[-1]
        for label, (spent, top1) in sizes.items():  # beside the curve: above on the left, the last one below
            offset, side = ((6, -12), "left") if spent == last else ((-6, 4), "right")
            at = (spent, 100 * top1)
            axes.annotate(label, at, xytext=offset, textcoords="offset points", ha=side, fontsize=9)
    if fixed:
        axes.margins(x=0.14)  # for the names
    before = len(axes.texts)
    entries |= _draw_published(axes, published, first=len(models) + len(fixed or {}))
    legend_below(figure, entries)
    if published:
        axes.margins(x=0.1)  # for the labels
        figure.set_figheight(figure.get_figheight() + ENTRY * max(0, len(entries) - 8))
        _spread_labels(figure, axes, axes.texts[before:])
    return figure


def _draw_published(axes: Axes, published: Sequence[PublishedSeries], *, first: int) -> dict[str, dict[str, Any]]:
    """Points of other methods, and labels of those that are models of their own; returns their legend.

    The first colours are those of the measured models. When the others begin again, markers tell methods apart.
    """
    methods = list(dict.fromkeys(series.method for series in published))
    colours = COLOURS[first:] or ("0.4",)
    entries: dict[str, dict[str, Any]] = {}
    for series in published:
        number = methods.index(series.method)
        look: dict[str, Any] = {"color": colours[number % len(colours)], "marker": MARKERS[number % len(MARKERS)]}
        look |= {"linestyle": LINES[number % len(LINES)], "markersize": 5, "linewidth": 1.1}
        if not series.one_model:
            look["linestyle"] = "none"
        points = sorted((point.gmacs, point.top1, point.label) for point in series.points)
        axes.plot([gmacs for gmacs, *_ in points], [top1 for _, top1, _ in points], label=series.method, **look)
        entries.setdefault(series.method, look)
        for gmacs, top1, label in [] if series.one_model else points:
            shown = {"textcoords": "offset points", "fontsize": 6.5, "color": look["color"], "zorder": 3}
            leader = {"arrowstyle": "-", "linewidth": 0.5, "color": look["color"], "shrinkA": 0, "shrinkB": 3}
            axes.annotate(shorten(label, LABEL), (gmacs, top1), xytext=BESIDE[0][:2], arrowprops=leader, **shown)
    return entries


def _spread_labels(figure: Figure, axes: Axes, labels: Sequence[Any]) -> None:
    """Move each label to a place where it covers no other label or point: beside its point, or at a leader line.

    A label beside its point is nearer to it than to all others. A label without a place is removed; tables have all.
    """
    from matplotlib.text import Text

    figure.draw_without_rendering()  # places are known after it
    lines = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    points = np.concatenate(lines)
    steps = np.linspace(0, 1, 30)[:, None, None]
    drawn = [line for line, style in zip(lines, axes.lines) if style.get_linestyle() != "None"]
    curves = np.concatenate([((1 - steps) * line[:-1] + steps * line[1:]).reshape(-1, 2) for line in drawn])
    taken: list[Any] = []
    for label in labels:
        at = axes.transData.transform(label.xy)
        for x, y, side in (*BESIDE, *APART):
            label.set(position=(x, y), horizontalalignment=side)
            box = Text.get_window_extent(label)  # without the line
            away = np.hypot(*(points - points.clip(box.min, box.max)).T)  # of the points from the label
            others = np.hypot(*(points - at).T) > 1  # a point may be in several series
            room = not box.count_contains([*points, *curves]) and axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            apart = (x, y, side) in APART
            if apart:
                room = room and not any(_crosses(at, box, other) for other in taken)
            elif others.any():
                room = room and away[others].min() > 1.5 * away[~others].min()
            if room and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                label.arrow_patch.set_visible(apart)
                break
        else:
            label.remove()


def _crosses(at: Floats, box: Any, other: Any) -> bool:
    """Whether the line from a point to the middle of its label crosses another label."""
    middle = np.array([(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2])
    return any(other.contains(*(at + share * (middle - at))) for share in np.linspace(0, 1, 20))


def _draw_model(
    axes: Axes,
    number: int,
    name: str,
    records: RoutedRecords,
    router: Router | None,
    settings: Mapping[str, Threshold],
    convention: Convention,
) -> float:
    """The curve of a model with its band, rounds and marks; returns the saving at the near-lossless setting."""
    scores, metric = records.exit_scores(router), records.metric
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    points = records.frontier(curve_thresholds(scores), router, convention)
    limits = {DEFAULT: records.near_lossless(router, convention).threshold, **settings}
    marks = {setting: records.frontier([limit], router, convention)[0] for setting, limit in limits.items()}
    gmacs = [point.gmacs for point in points]
    axes.plot(gmacs, [100 * point.accuracy for point in points], label=name, **curve_style(number))
    costs = np.asarray(records.gmacs(convention))
    by_round = costs.mean(axis=0) if costs.ndim == 2 else costs  # (N, S) or (S,) -> (S,)
    accuracies = 100 * next(iter(metric.single_rounds().values()))
    axes.plot(by_round, accuracies, marker, color=colour, markerfacecolor="white", label=f"{name}: single rounds")
    for place, (setting, point) in enumerate(marks.items()):
        mark = {"color": colour, "linestyle": "none", "label": f"{name}: {setting}", **setting_mark(place)}
        axes.plot([point.gmacs], [100 * point.accuracy], **mark)
    intervals = metric.intervals(scores, [point.threshold for point in points], fast=True)
    _, lowest, highest = percent_ends(intervals)
    draw_band(axes, gmacs, lowest, highest, colour=colour)
    return float(1 - marks[DEFAULT].gmacs / records.full_gmacs(convention))


def _draw_per_round(
    axes: Axes, number: int, name: str, records: Records, router: Router | None, convention: Convention
) -> CrossFittedPoint:
    """The curve of thresholds per round from round 1 to the full path; returns its near-lossless point."""
    gmacs, ends = records.gmacs(convention), records.correct.mean(axis=0)[[0, -1]].tolist()
    budgets = np.geomspace(gmacs[0], gmacs[-1], PER_ROUND_CURVE)[1:-1].tolist()
    inner, lossless = cross_fitted_curve(records, budgets, router, convention)
    spent = [gmacs[0], *(point.gmacs for point in inner), gmacs[-1]]
    top1 = 100 * np.array([ends[0], *(point.top1 for point in inner), ends[-1]])
    colour = COLOURS[number % len(COLOURS)]
    axes.plot(spent, top1, label=f"{name}: {PER_ROUND}", color=colour, **PER_ROUND_LINE)
    label = f"{name}: near-lossless, {PER_ROUND}"
    axes.plot([lossless.gmacs], [100 * lossless.top1], label=label, color=colour, **PER_ROUND_MARK)
    return lossless


def model_entries(models: Iterable[str], settings: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Entries of the legend of frontiers: a colour for each model, and what their marks are, once for all models."""
    names = list(models)
    entries: dict[str, dict[str, Any]] = {name: curve_style(number) for number, name in enumerate(names)}
    look = {"color": COLOURS[0] if len(names) == 1 else "0.4", "linestyle": ""}
    entries["single rounds"] = look | {"marker": MARKERS[0], "markerfacecolor": "white"}
    for place, setting in enumerate(dict.fromkeys(settings)):
        entries[setting] = look | setting_mark(place)
    return entries


def setting_mark(place: int) -> dict[str, Any]:
    """The mark of the place-th setting; the first is a star."""
    return {"marker": MARKERS[place % len(MARKERS)]} if place else {"marker": "*", "markersize": 13}


def curve_thresholds(scores: ArrayLike) -> Floats:
    """Thresholds that are evenly spread over the images."""
    every = every_threshold(scores)
    spread: Floats = every[np.unique(np.linspace(0, len(every) - 1, CURVE).round().astype(int))]
    return spread


def risk_coverage_figure(curves: Mapping[str, RiskCoverage]) -> Figure:
    """Risk against coverage; the legend gives the area under each curve."""
    shown = curves.get("routed", list(curves.values())[-1])
    few, all_ = (f"{100 * np.interp(share, shown.coverage, shown.risk):.1f}" for share in (1 - WITHHELD, 1))
    figure, axes = new_figure(
        title=f"Withholding {100 * WITHHELD:.0f} % of the answers changes the errors from {all_} to {few} %",
        x="coverage: answered images (%)",
        y="risk: wrong answers (%)",
    )
    for number, (name, curve) in enumerate(curves.items()):
        label = f"{name} (area {100 * curve.area:.2f} %)"
        axes.plot(100 * curve.coverage, 100 * curve.risk, label=label, **curve_style(number))
    figure.legend(ncols=2, fontsize=10, **BELOW)
    return figure


def reliability_figure(bins_by_name: Mapping[str, Reliability]) -> Figure:
    """Accuracy against predicted probability; a calibrated model lies on the diagonal. Bands: 95 % intervals."""
    errors = {name: bins.error for name, bins in bins_by_name.items()}
    ends = dict.fromkeys((min(errors, key=errors.__getitem__), max(errors, key=errors.__getitem__)))
    title = "Calibration error: " + " to ".join(f"{100 * errors[name]:.2f} % ({name})" for name in ends)
    figure, axes = new_figure(title=title, x="predicted probability (%)", y="accuracy (%)")
    axes.plot([0, 100], [0, 100], color="0.6", linewidth=1, label="calibrated")
    for number, (name, bins) in enumerate(bins_by_name.items()):
        filled = bins.images > 0
        label = f"{name} (calibration error {100 * bins.error:.2f} %)"
        marker = MARKERS[number % len(MARKERS)]
        axes.plot(
            100 * bins.probability[filled],
            100 * bins.accuracy[filled],
            marker=marker,
            label=label,
            **curve_style(number),
        )
        pairs = zip(bins.accuracy[filled], bins.images[filled].tolist())
        _, lowest, highest = percent_ends([share_interval(round(share * images), images) for share, images in pairs])
        draw_band(axes, 100 * bins.probability[filled], lowest, highest, colour=COLOURS[number % len(COLOURS)])
    axes.fill_between([], [], [], color="0.5", alpha=0.3, linewidth=0, label=BAND)
    figure.legend(fontsize=10, **BELOW)
    return figure
