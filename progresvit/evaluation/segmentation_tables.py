"""Tables from records of segmentation models: the frontier, and the IoU of each class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from progresvit.compute import CONVENTIONS
from progresvit.evaluation import table
from progresvit.evaluation.routing_tables import point_row, threshold_table
from progresvit.evaluation.segmentation_records import SegmentationRecords
from progresvit.evaluation.table import Column, Row, Table
from progresvit.metrics.miou import iou
from progresvit.routing import TENTHS, routed_sums, threshold_for_exit_share
from progresvit.routing.decide import Threshold
from progresvit.routing.segmentation import near_lossless_miou, segmentation_frontier
from progresvit.routing.settings import DEFAULT


def segmentation_frontier_table(
    models: Mapping[str, SegmentationRecords],
    thresholds: ArrayLike | None = None,
    settings: Mapping[str, Threshold] | None = None,
) -> Table:
    """mIoU, compute in both conventions and exit shares at each threshold; then the near-lossless point.

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
    return [
        point_row(
            name,
            point,
            {"miou": point.miou, "pixel_accuracy": point.pixel_accuracy},
            {convention: float(values[t]) for convention, values in spent.items()},
            full=full,
            note=note,
        )
        for t, point in enumerate(points)
    ]


def class_table(records: SegmentationRecords) -> Table:
    """IoU of each class in every round, and its share of the labelled pixels.

    A class that is neither labelled nor predicted has no IoU.
    """
    totals = records.totals
    shares = totals.labelled[-1] / totals.labelled[-1].sum()
    rows: list[Row] = []
    for label, share, values in zip(records.labels, shares.tolist(), iou(totals).T.tolist()):
        rounds = {f"iou_{s}": None if np.isnan(value) else value for s, value in enumerate(values, start=1)}
        rows.append({"class": label, "pixel_share": share, **rounds})
    columns = [
        Column("class", "class", left=True),
        Column("pixel_share", "pixels (%)", table.percent),
        *(Column(f"iou_{s}", f"round {s} IoU (%)", table.percent) for s in range(1, records.rounds + 1)),
    ]
    return Table("Intersection over union by class", columns, rows)
