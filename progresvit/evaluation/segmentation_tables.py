"""Tables from records of segmentation models: the frontier, and the IoU of each class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from progresvit import table
from progresvit.compute import CONVENTIONS
from progresvit.evaluation.routing_tables import point_row, threshold_table
from progresvit.evaluation.segmentation_records import SegmentationRecords
from progresvit.metrics.miou import ClassCounts, bootstrap_ends, iou, mean_iou
from progresvit.routing import TENTHS, routed_sums, threshold_for_exit_share
from progresvit.routing.decide import Threshold, exit_rounds
from progresvit.routing.segmentation import near_lossless_miou, segmentation_frontier
from progresvit.routing.settings import DEFAULT
from progresvit.table import Column, Row, Table


def segmentation_frontier_table(
    models: Mapping[str, SegmentationRecords],
    thresholds: ArrayLike | None = None,
    settings: Mapping[str, Threshold] | None = None,
) -> Table:
    """mIoU, compute in both conventions and exit shares at each threshold; then the near-lossless point.

    The near-lossless point and settings have 95 % intervals of mIoU over images.

    Args:
        models: Records by name of the model.
        thresholds: Each a number for all rounds, or a row of one for each round but the last. By default those at which
            0, 10, ..., 100 % of the images exit early.
        settings: Named thresholds, chosen elsewhere; each gets a row with its name.
    """
    rows: list[Row] = []
    for name, records in models.items():
        records.header.check_routable()
        rows += _rows(name, records, exit_thresholds(records) if thresholds is None else thresholds)
        best = near_lossless_miou(records.scores, records.counts, records.gmacs())
        for note, limit in [(DEFAULT, best.threshold), *(settings or {}).items()]:
            rows += _rows(name, records, [limit], note)
    accuracy = [
        Column("miou", "mIoU (%)", table.percent),
        Column("miou_low", "95 % from", table.percent),
        Column("miou_high", "to", table.percent),
        Column("pixel_accuracy", "pixel accuracy (%)", table.percent),
    ]
    return threshold_table(rows, accuracy, models=len(models))


def exit_thresholds(records: SegmentationRecords) -> list[float]:
    """The thresholds at which 0, 10, ..., 100 % of the images exit early, as far as images can."""
    if records.rounds == 1:
        return [0.0]
    highest = np.isfinite(records.scores[:, :-1]).any(axis=1).mean()
    shares = [share for share in TENTHS if share <= highest]
    return list(dict.fromkeys(threshold_for_exit_share(records.scores, share) for share in shares))


def _rows(name: str, records: SegmentationRecords, thresholds: ArrayLike, note: str = "") -> list[Row]:
    gmacs = {convention: records.gmacs(convention) for convention in CONVENTIONS}
    points = segmentation_frontier(records.scores, records.counts, gmacs["paper"], thresholds)
    spent = {
        convention: routed_sums(records.scores, values, thresholds) / len(records)
        for convention, values in gmacs.items()
    }
    full = float(gmacs["paper"][:, -1].mean())
    ends = _miou_ends(records, points[0].threshold) if note else dict.fromkeys(("miou_low", "miou_high"))
    return [
        point_row(
            name,
            point,
            {"miou": point.miou, **ends, "pixel_accuracy": point.pixel_accuracy},
            {convention: float(values[t]) for convention, values in spent.items()},
            full=full,
            note=note,
        )
        for t, point in enumerate(points)
    ]


def _miou_ends(records: SegmentationRecords, threshold: Threshold) -> dict[str, float | None]:
    """The interval of the mIoU at a threshold."""
    images, exits = np.arange(len(records)), exit_rounds(records.scores, threshold)
    routed = ClassCounts(*(part[images, exits] for part in records.counts))  # (N, K) each
    lowest, highest = bootstrap_ends(routed, mean_iou)
    return {"miou_low": float(lowest), "miou_high": float(highest)}


def class_table(records: SegmentationRecords) -> Table:
    """IoU of each class in every round with 95 % intervals over images, and its share of the labelled pixels.

    A class that is neither labelled nor predicted has no IoU. One that is in a single image has the interval 0 to 1.
    """
    totals, counts = records.totals, records.counts
    shares = totals.labelled[-1] / totals.labelled[-1].sum()
    lowest, highest = bootstrap_ends(counts, iou)  # (S, K) each
    single = ((counts.labelled + counts.predicted) > 0).sum(axis=0) == 1
    parts = {"": iou(totals), "_low": np.where(single, 0, lowest), "_high": np.where(single, 1, highest)}
    rows: list[Row] = []
    for number, (label, share) in enumerate(zip(records.labels, shares.tolist())):
        row: Row = {"class": label, "pixel_share": share}
        for s in range(records.rounds):
            cells = {f"iou_{s + 1}{end}": float(values[s, number]) for end, values in parts.items()}
            row |= {key: None if np.isnan(value) else value for key, value in cells.items()}
        rows.append(row)
    columns = [Column("class", "class", left=True), Column("pixel_share", "pixels (%)", table.percent)]
    for s in range(1, records.rounds + 1):
        columns.append(Column(f"iou_{s}", f"round {s} IoU (%)", table.percent))
        columns += [Column(f"iou_{s}_low", "95 % from", table.percent), Column(f"iou_{s}_high", "to", table.percent)]
    return Table("Intersection over union by class", columns, rows)
