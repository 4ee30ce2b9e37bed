"""What commands do with segmentation models and their records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from progresvit.cli import options, output
from progresvit.compute import Convention

if TYPE_CHECKING:
    from progresvit.data.windows import WindowOptions
    from progresvit.evaluation import SegmentationRecords
    from progresvit.evaluation.records import Header
    from progresvit.routing import Setting

NOT_FOR_SEGMENTATION = "for classification models, and this one segments images"
NOT_FOR_CLASSIFICATION = "for segmentation models, and this one classifies images"
NOT_FOR_RECORDS = "for records of classification models, and these are of a segmentation model"


def parse_windows(stride: float | None, scales: str | None, flip: bool) -> WindowOptions:
    """How images are divided into windows; by default next to each other, at one scale."""
    from progresvit.data.windows import WindowOptions

    given: dict[str, Any] = {"flip": flip}
    if stride is not None:
        given["stride"] = stride
    if scales is not None:
        given["scales"] = tuple(options.parse_numbers(scales, "--scales"))
    return WindowOptions(**given)


def report_drawn_split(header: Header) -> None:
    """Print a note if the split was drawn: from images without split folders, or from the training list of the Pets."""
    if header.drawn_from is None:
        return
    share = "the training share" if header.split == "train" else "a fifth"
    typer.echo(
        f"note: {header.data} has no split {header.split} of its own; using {header.images} of {header.drawn_from} "
        f"images, {share}, selected by file name, the same split as in training",
        err=True,
    )


def report_accuracy(records: SegmentationRecords) -> None:
    """Print mIoU and pixel accuracy of each round, and the IoU of each class, with 95 % intervals."""
    from progresvit.evaluation import class_table
    from progresvit.metrics.interval import Interval
    from progresvit.metrics.miou import bootstrap_ends, mean_iou, pixel_accuracy

    for name, metric in (("mIoU", mean_iou), ("pixel accuracy", pixel_accuracy)):
        ends = zip(metric(records.totals).tolist(), *(end.tolist() for end in bootstrap_ends(records.counts, metric)))
        intervals = [Interval(mean=mean, lowest=lowest, highest=highest) for mean, lowest, highest in ends]
        shares = ", ".join(f"round {s} {interval.as_percent()}" for s, interval in enumerate(intervals, start=1))
        typer.echo(f"{name} of {len(records)} images: {shares} (95% intervals)")
    output.show_table(class_table(records))


def are_segmentation(paths: Sequence[Path]) -> bool:
    """Whether records are of segmentation models; a mixture is an error."""
    from progresvit.evaluation import is_segmentation

    kinds = [is_segmentation(path) for path in paths]
    if any(kinds) and not all(kinds):
        raise ValueError(
            f"{paths[kinds.index(True)]} is of a segmentation model and {paths[kinds.index(False)]} is not; give "
            "records of one kind."
        )
    return all(kinds)


def frontier(
    records: Sequence[Path],
    thresholds: list[float] | list[list[float]] | None,
    setting: Sequence[Path],
    out: Sequence[Path],
) -> None:
    """Print and write the frontier of segmentation models."""
    from progresvit.analysis.segmentation_figures import segmentation_frontier_figure
    from progresvit.evaluation import read_segmentation_records, segmentation_frontier_table

    models = dict(zip(options.short_names(records), map(read_segmentation_records, records)))
    settings: dict[str, float | tuple[float, ...]] = {}
    for model_records in models.values():
        settings = options.open_settings(setting, model_records.header)
    table = segmentation_frontier_table(models, thresholds, settings)
    outputs = output.make_outputs(out, table, lambda: segmentation_frontier_figure(models, settings=settings))
    output.show_table(table)
    output.write_outputs(outputs)


def calibrate(
    records: Path,
    *,
    budget_gmacs: float | None,
    exit_share: float | None,
    max_drop: float | None,
    delta: float,
    convention: Convention,
    seed: int,
) -> Setting:
    """The setting by the rule whose value is given; near-lossless if none is."""
    from progresvit import evaluation

    table = evaluation.read_segmentation_records(records)
    if budget_gmacs is not None:
        return evaluation.calibrate_segmentation_budget(table, budget_gmacs, convention=convention)
    if exit_share is not None:
        return evaluation.calibrate_segmentation_exit_share(table, exit_share, convention=convention)
    if max_drop is not None:
        return evaluation.calibrate_segmentation_guarantee(
            table, epsilon=max_drop, delta=delta, convention=convention, seed=seed
        )
    return evaluation.calibrate_segmentation_near_lossless(table, convention=convention)
