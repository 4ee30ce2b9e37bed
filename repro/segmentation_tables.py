"""Segmentation on the page: tables, and the plot of mIoU against GMACs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from progresvit.plots import MARKERS, band_entry, curve_style, draw_band, legend_below, new_figure
from progresvit.routing.certify import needed_images
from repro.figures import GMACS
from repro.segmentation import ALONE, FULL, ROUTED, Measured, SegmentationStudy
from repro.tables import folded, gmacs, interval, percent, share_interval, signed, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE = tuple(np.linspace(0, 1, 25).tolist())
"""Points of the curve of a routed model: parts of the way from round 1 to the full path."""


def points_table(study: SegmentationStudy) -> str:
    """A row for each point of each run."""
    cells = [
        [
            row.label,
            row.point,
            gmacs(row.gmacs),
            share_interval(row.miou),
            percent(row.pixel_accuracy, 2),
            f"{row.compute:.2f}",
            None if row.ours_gmacs is None else gmacs(row.ours_gmacs),
            None if row.difference is None else interval(row.difference, 2),
            row.verdict,
        ]
        for row in study.rows
    ]
    heads = ["<model", "<point", "GMACs", "mIoU (%)", "pixel accuracy (%)", "training compute (× ours)"]
    heads += ["ours at (GMACs)", "ours minus theirs (points)", "<verdict on ours"]
    return table(f"{study.plan.title}: every point, 95 % intervals over {' and '.join(study.drawn)}", heads, cells)


def routing_table(study: SegmentationStudy) -> str:
    """What early exits save at the thresholds of the validation images."""
    cells = []
    for row in study.rows:
        if row.point != ROUTED:
            continue
        assert row.drop is not None
        full = study.row(row.run, FULL)
        cells.append(
            [
                row.label,
                percent(row.exit_share),
                f"{gmacs(row.gmacs)} of {gmacs(full.gmacs)}",
                percent(row.saving),
                percent(row.miou.mean, 2),
                percent(full.miou.mean, 2),
                interval(row.drop, 2),
            ]
        )
    heads = ["<model", "exit after round 1 (%)", "GMACs", "saving (%)", "mIoU (%)", "every round, mIoU (%)"]
    title = f"{study.plan.title}: thresholds that lose at most {study.plan.max_drop:g} points on the validation images"
    return table(f"{title}, on the test images", [*heads, "change (points)"], cells)


def orders_table(study: SegmentationStudy, saving: float) -> str:
    """What a saving costs if images exit by their score, at random, or by what labels know."""
    cells = []
    for order in (study.exit_order(run, saving) for run in study.routed_runs):
        cells.append(
            [
                order.label,
                signed(order.gap, 2),
                interval(order.by_score, 2),
                signed(order.by_chance, 2),
                signed(order.by_error, 2),
                f"{order.correlation:.2f}",
                percent(order.not_worse),
            ]
        )
    heads = ["<model", "round 1 minus every round (points)", "exits by score (points)", "at random", "by pixel error"]
    heads += ["rank correlation of score and harm", "images not worse in round 1 (%)"]
    title = (
        f"{study.plan.title}: change of mIoU at {percent(saving, 0)} % fewer GMACs, by the order in which images exit"
    )
    return table(title, heads, cells)


def certificates_table(study: SegmentationStudy, epsilons: Sequence[float], delta: float) -> str:
    """Thresholds that bound the growth of the pixel error, certified on the validation images."""
    images, title = study.ours[0].result.val.images, study.plan.title
    possible = [epsilon for epsilon in epsilons if needed_images(epsilon, delta) <= images]
    if not possible:
        least = needed_images(max(epsilons), delta)
        return (
            f"{title}: {images} validation images certify no threshold; a bound of {percent(max(epsilons))} points of "
            f"pixel error at {percent(1 - delta, 0)} % takes {least} or more."
        )
    cells = [
        [
            certified.label,
            percent(certified.epsilon),
            percent(certified.exit_share),
            percent(certified.saving),
            percent(certified.loss, 2),
            f"{certified.beyond} of {study.seeds}",
        ]
        for certified in (study.certified(run, epsilon, delta) for run in study.routed_runs for epsilon in possible)
    ]
    heads = ["<model", "bound (points of pixel error)", "exit after round 1 (%)", "saving (%)"]
    heads += ["growth on the test images (points)", "seeds beyond the bound"]
    which = f"certificates at {percent(1 - delta, 0)} % confidence from {images} validation images"
    return folded(table(f"{title}: {which}", heads, cells))


def classes_table(study: SegmentationStudy) -> str:
    """IoU of each class in every round, mean over seeds; folded."""
    labels = study.ours[0].result.labels
    heads, columns = ["<class"], []
    for run, seeds in study.runs.items():
        for s in range(seeds[0].rounds):
            which = f", round {s + 1}" if seeds[0].rounds > 1 else ""
            heads.append(f"{study.labels[run]}{which}")
            columns.append(np.mean([model.class_iou(s) for model in seeds], axis=0))
    cells = [[label, *(percent(float(column[k])) for column in columns)] for k, label in enumerate(labels)]
    return folded(table(f"{study.plan.title}: IoU of each class (%), mean over seeds", heads, cells))


def frontier_figure(study: SegmentationStudy) -> Figure:
    """A curve with its band for each run with early exits; a model of one round is a mark with its interval."""
    pairs = [(row, study.row(row.run, FULL)) for row in study.rows if row.point == ROUTED]
    saved = [1 - routed.gmacs / full.gmacs for routed, full in pairs]
    title = f"{study.plan.title}: mIoU of each run"
    if saved:
        reach = f"{100 * min(saved):.0f} to {100 * max(saved):.0f} %"
        title = f"{study.plan.title}: thresholds of val save {reach} of the GMACs"
    figure, axes = new_figure(title=title, x=GMACS, y="mIoU on the test images (%)")
    entries: dict[str, dict[str, Any]] = {}
    for number, (run, seeds) in enumerate(study.runs.items()):
        style: dict[str, Any] = curve_style(number) | {"linewidth": 2.0 if run == study.plan.ours else 1.2}
        look: dict[str, Any] = {"color": style["color"], "linestyle": ""}
        mark = look | {"marker": MARKERS[number % len(MARKERS)], "markersize": 7}
        entries[study.labels[run]] = mark | (style if seeds[0].rounds > 1 else {})
        if seeds[0].rounds > 1:
            _draw_curve(axes, study, seeds, study.labels[run], style)
        for row in (row for row in study.rows if row.run == run):
            spot = [row.gmacs], [100 * row.miou.mean]
            if row.point == ALONE:
                ends = [[100 * (row.miou.mean - row.miou.lowest)], [100 * (row.miou.highest - row.miou.mean)]]
                axes.errorbar(*spot, yerr=ends, elinewidth=1.2, capsize=3, **mark).set_label(study.labels[run])
            else:
                star = look | {"marker": "*", "markersize": 13, "zorder": 4}
                axes.plot(*spot, label=f"{study.labels[run]}: {row.point}", **star if row.point == ROUTED else mark)
    if saved:
        entries["threshold of val"] = {"color": "0.4", "linestyle": "", "marker": "*", "markersize": 11}
    entries[f"95 % interval: {', '.join(study.drawn)}"] = band_entry()
    legend_below(figure, entries, columns=2)
    return figure


def _draw_curve(
    axes: Axes, study: SegmentationStudy, seeds: Sequence[Measured], label: str, style: dict[str, Any]
) -> None:
    """Mean over seeds at equal parts of the way from round 1 to the full path, with the interval of each part."""
    of_parts = [
        [model.within(model.first.gmacs + part * (model.full.gmacs - model.first.gmacs)) for model in seeds]
        for part in CURVE
    ]
    spent = [float(np.mean([point.gmacs for point in points])) for points in of_parts]
    intervals = [study.miou_interval(points) for points in of_parts]
    axes.plot(spent, [100 * miou.mean for miou in intervals], label=f"{label}: every threshold", **style)
    reach = [[100 * miou.lowest for miou in intervals], [100 * miou.highest for miou in intervals]]
    draw_band(axes, spent, *reach, colour=style["color"])
