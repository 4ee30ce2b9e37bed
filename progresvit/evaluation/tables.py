"""Tables from records: the frontier, and the IoU of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from progresvit import table
from progresvit.compute import CONVENTIONS, Convention
from progresvit.evaluation.per_round import CrossFittedPoint, cross_fitted_curve, find_thresholds, has_per_round
from progresvit.evaluation.published import PublishedSeries, check_comparable, describe_images
from progresvit.evaluation.records import Records, RoutedRecords
from progresvit.evaluation.segmentation_records import SegmentationRecords
from progresvit.metrics.interval import Interval, share_interval
from progresvit.metrics.miou import bootstrap_ends, iou
from progresvit.routing import TENTHS, OperatingPoint, Router, SegmentationPoint
from progresvit.routing.decide import Threshold
from progresvit.routing.frontier import routed_gmacs
from progresvit.routing.settings import DEFAULT
from progresvit.table import Column, Row, Table

PER_ROUND, OTHERS = "per round", "chosen on the other half"
"""Notes of rows that have one threshold for each round, and of those that were chosen on other images."""
PUBLISHED = "published"
"""Note of rows that were not measured here."""


def frontier_table(
    models: Mapping[str, RoutedRecords],
    thresholds: ArrayLike | None = None,
    router: Router | None = None,
    settings: Mapping[str, Threshold] | None = None,
    published: Sequence[PublishedSeries] = (),
) -> Table:
    """Accuracy, compute in both conventions and exit shares at each threshold; then the near-lossless point.

    A model of one round has a single row.

    The accuracy is top-1 and top-5, or mIoU and pixel accuracy of segmentation models. The 95 % intervals are over
    images, at each threshold as if it had been chosen elsewhere: of top-1 (Wilson) in every row, of the mIoU
    (bootstrap) in the rows of the near-lossless point and of settings. Without labels there is no accuracy and no
    near-lossless point. Classification models of three or more rounds also have rows of the best thresholds per round:
    near-lossless on these images, and chosen on one half of the images and measured on the other, both ways, at nine
    budgets and near-lossless.

    Args:
        models: Records by name of the model, all of one kind.
        thresholds: Each a number for all rounds, or a row of one for each round but the last. By default the paper's;
            for segmentation models the thresholds at which 0, 10, ..., 100 % of the images exit early.
        router: Compare thresholds with its probabilities instead of entropies.
        settings: Named thresholds, chosen elsewhere; each gets a row with its name.
        published: Results of other methods. Their rows are last and have a source; their GMACs are in a column of
            their own, since each source has its own convention.
    """
    check_comparable(models, published)
    (main, label), (other, other_label) = next(iter(models.values())).metric.labels.items()
    rows: list[Row] = []
    for name, records in models.items():
        limits = records.default_thresholds() if thresholds is None else thresholds
        rows += _rows(name, records, limits, router)
        if rows[-1][main] is not None and records.rounds > 1:  # the images have labels
            rows += _rows(name, records, [records.near_lossless(router).threshold], router, DEFAULT)
        if has_per_round(records):
            rows += _per_round_rows(name, records, router)
        for setting, limit in (settings or {}).items():
            rows += _rows(name, records, [limit], router, setting)
    most = max(sum(key.startswith("exit_share_") for key in row) for row in rows)
    for row in rows:  # models may differ in their rounds
        row.update({f"exit_share_{s}": row.get(f"exit_share_{s}") for s in range(1, most + 1)})
    several = len(models) > 1 or bool(published)
    columns = [
        *([Column("model", "model")] if several else []),
        Column("threshold", "τ", table.threshold),
        Column(main, f"{label} (%)", table.percent),
        Column(f"{main}_low", "95 % from", table.percent),
        Column(f"{main}_high", "to", table.percent),
        Column(other, f"{other_label} (%)", table.percent),
        Column("gmacs_paper", "GMACs (paper)", table.decimals),
        Column("gmacs_executed", "GMACs (executed)", table.decimals),
        *([Column("gmacs_published", "GMACs (as published)", table.decimals)] if published else []),
        Column("saving", "saving (%)", table.rough_percent),
        *(Column(f"exit_share_{s}", f"exit {s} (%)", table.rough_percent) for s in range(1, most + 1)),
        Column("note", "note"),
        *([Column("source", "source", left=True)] if published else []),
    ]
    rows += _published_rows(published, main)
    if published:
        rows = [{column.key: row.get(column.key) for column in columns} for row in rows]
    if not several:
        rows = [{key: value for key, value in row.items() if key != "model"} for row in rows]
    images = f" ({described})" if published and (described := describe_images(models)) else ""
    return Table(f"Accuracy and compute by threshold{images}", columns, rows)


def _published_rows(published: Sequence[PublishedSeries], main: str) -> list[Row]:
    return [
        {
            "model": series.method,
            main: point.top1 / 100,
            "gmacs_published": point.gmacs,
            "note": f"{PUBLISHED}, {point.label}",
            "source": series.source,
        }
        for series in published
        for point in series.points
    ]


def _per_round_rows(name: str, records: Records, router: Router | None) -> list[Row]:
    best, gmacs = find_thresholds(records, router).near_lossless(), records.gmacs("paper")
    budgets = [gmacs[0] + share * (gmacs[-1] - gmacs[0]) for share in TENTHS[1:-1]]
    points, lossless = cross_fitted_curve(records, budgets, router)
    rows = _rows(name, records, [best], router, f"near-lossless, {PER_ROUND}")
    for point in (lossless, *points):
        top1 = share_interval(round(point.top1 * len(records)), len(records))
        spent = {convention: float(np.dot(point.exit_shares, records.gmacs(convention))) for convention in CONVENTIONS}
        note = f"{PER_ROUND}, {OTHERS}" if point is not lossless else f"near-lossless, {PER_ROUND}, {OTHERS}"
        rows.append(_row(name, records, point, top1, spent, note))
    return rows


def _rows(name: str, records: RoutedRecords, thresholds: ArrayLike, router: Router | None, note: str = "") -> list[Row]:
    """The rows of these thresholds."""
    points = records.frontier(thresholds, router)
    metric, scores = records.metric, records.exit_scores(router)
    intervals: Sequence[Interval | None] = [None] * len(points)
    if points[0].accuracy is not None and (note or metric.has_fast_interval):
        intervals = metric.intervals(scores, thresholds)
    shares = np.array([point.exit_shares for point in points])
    spent = {
        convention: routed_gmacs(scores, records.gmacs(convention), thresholds, shares).tolist()
        for convention in CONVENTIONS
    }
    return [
        _row(name, records, point, interval, {convention: gmacs[t] for convention, gmacs in spent.items()}, note)
        for t, (point, interval) in enumerate(zip(points, intervals))
    ]


def _row(
    name: str,
    records: RoutedRecords,
    point: OperatingPoint | SegmentationPoint | CrossFittedPoint,
    interval: Interval | None,
    spent: Mapping[Convention, float],
    note: str,
) -> Row:
    """A row of :func:`frontier_table`; ``spent`` holds the GMACs by convention."""
    main, other = records.metric.labels
    return {
        "model": name,
        "threshold": point.threshold,
        main: getattr(point, main),
        f"{main}_low": None if interval is None else interval.lowest,
        f"{main}_high": None if interval is None else interval.highest,
        other: getattr(point, other),
        **{f"gmacs_{convention}": gmacs for convention, gmacs in spent.items()},
        "saving": 1 - spent["paper"] / records.full_gmacs(),
        **{f"exit_share_{s}": share for s, share in enumerate(point.exit_shares, start=1)},
        "note": note,
    }


def iou_table(records: SegmentationRecords) -> Table:
    """IoU of each class in every round with 95 % intervals over images, and its share of the labelled pixels.

    A class that is neither labelled nor predicted has no IoU. A class of a single image has the interval 0 to 1.
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


class_table = iou_table


def segmentation_frontier_table(
    models: Mapping[str, SegmentationRecords],
    thresholds: ArrayLike | None = None,
    settings: Mapping[str, Threshold] | None = None,
) -> Table:
    """:func:`frontier_table` of segmentation models."""
    return frontier_table(models, thresholds, settings=settings)
