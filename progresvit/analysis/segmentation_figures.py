"""Figures of segmentation: mIoU against compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from progresvit.analysis.routing_figures import curve_thresholds, draw_frontier, model_entries
from progresvit.compute import Convention
from progresvit.evaluation.segmentation_records import SegmentationRecords
from progresvit.metrics.interval import Interval, mean_interval
from progresvit.metrics.miou import ClassCounts, influence_values, mean_iou
from progresvit.plots import (
    BAND,
    COLOURS,
    band_entry,
    draw_band,
    in_lines,
    legend_below,
    new_figure,
    savings_title,
    scale_compute,
)
from progresvit.routing.decide import Threshold, exit_rounds
from progresvit.routing.segmentation import near_lossless_miou, segmentation_frontier
from progresvit.routing.settings import DEFAULT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def segmentation_frontier_figure(
    models: Mapping[str, SegmentationRecords],
    *,
    settings: Mapping[str, Threshold] | None = None,
    convention: Convention = "paper",
) -> Figure:
    """mIoU against compute, one curve per model; rounds are open marks, the near-lossless point is a star.

    Bands are 95 % intervals of the mIoU over images, to first order, at each threshold.

    Args:
        models: Records by the name of the model.
        settings: Named thresholds calibrated on other images; each is a filled mark. One that is named near-lossless
            replaces the near-lossless point of these images.
        convention: Convention of the GMACs.
    """
    figure, axes = new_figure(title="", x=f"average GMACs per image ({convention} convention)", y="mIoU (%)")
    savings: dict[str, float] = {}
    for number, (name, records) in enumerate(models.items()):
        records.header.check_routable()
        scores, counts, gmacs = records.scores, records.counts, records.gmacs(convention)
        points = segmentation_frontier(scores, counts, gmacs, curve_thresholds(scores))
        limits = {DEFAULT: near_lossless_miou(scores, counts, gmacs).threshold, **(settings or {})}
        marks = {setting: segmentation_frontier(scores, counts, gmacs, [limit])[0] for setting, limit in limits.items()}
        draw_frontier(
            axes,
            number,
            name,
            curve=[(point.gmacs, point.miou) for point in points],
            rounds=list(zip(gmacs.mean(axis=0).tolist(), mean_iou(records.totals).tolist())),
            marks={setting: (point.gmacs, point.miou) for setting, point in marks.items()},
        )
        ends = [miou_interval(records, point.threshold) for point in points]
        reach = [[100 * one.lowest for one in ends], [100 * one.highest for one in ends]]
        draw_band(axes, [point.gmacs for point in points], *reach, colour=COLOURS[number % len(COLOURS)])
        savings[name] = 1 - marks[DEFAULT].gmacs / float(gmacs.mean(axis=0)[-1])
    axes.set_title(in_lines(savings_title(savings)), fontsize=11)
    scale_compute(axes, max(records.scores.shape[1] for records in models.values()))
    legend_below(figure, model_entries(models, [DEFAULT, *(settings or {})]) | {BAND: band_entry()})
    return figure


def miou_interval(records: SegmentationRecords, threshold: Threshold) -> Interval:
    """mIoU of the routed predictions, with its 95 % interval over images.

    By the influence of each image: at hundreds of thresholds the bootstrap of the tables would take minutes.
    """
    exits = exit_rounds(records.scores, threshold)  # (N,)
    rows = np.arange(len(exits))
    found = mean_interval(influence_values(ClassCounts(*(part[rows, exits] for part in records.counts))))
    return Interval(mean=found.mean, lowest=max(0.0, found.lowest), highest=min(1.0, found.highest))
