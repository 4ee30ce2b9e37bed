"""``progresvit frontier``: records in, accuracy and compute by threshold out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def frontier(
    context: typer.Context,
    records: Annotated[list[Path], typer.Argument(help="Records of one or more models.")],
    thresholds: Annotated[
        str | None,
        typer.Option(help="Comma-separated thresholds; the paper's by default, and exit shares for segmentation."),
    ] = None,
    per_round: Annotated[
        list[str] | None, typer.Option(help="One threshold per round except the last, such as 0.2,0.4; repeatable.")
    ] = None,
    setting: Annotated[
        list[Path] | None,
        typer.Option(help="Setting file to evaluate on these records; repeatable."),
    ] = None,
    router: options.RouterFile = None,
    published: Annotated[
        Path | None,
        typer.Option(help="YAML file with published results of other methods to show beside, each with its source."),
    ] = None,
    comparison: Annotated[
        str | None, typer.Option(help="Only the published methods of this comparison, such as early-exit.")
    ] = None,
    out: options.Outputs = None,
) -> None:
    """Print accuracy, average GMACs and exit shares by threshold, and the near-lossless point.

    The accuracy is top-1 and top-5, or mIoU and pixel accuracy for records of segmentation models.
    """
    from progresvit.analysis.routing_figures import frontier_figure
    from progresvit.evaluation import SegmentationRecords, frontier_table, read_published, read_routed_records
    from progresvit.routing import TENTHS
    from progresvit.table import check_outputs

    if thresholds is not None and per_round:
        raise ValueError("--thresholds and --per-round exclude each other; use one of them.")
    if comparison is not None and published is None:
        raise ValueError("--comparison chooses among the results of --published; give both.")
    check_outputs(out or [])
    others = () if published is None else read_published(published, comparison)
    limits: list[float] | list[list[float]] | None = None
    if thresholds is not None:
        limits = options.parse_numbers(thresholds, "--thresholds")
    elif per_round:
        limits = [options.parse_numbers(row, "--per-round") for row in per_round]
    elif router is not None:
        limits = list(TENTHS)
    models = dict(zip(options.short_names(records), map(read_routed_records, records)))
    kinds = [isinstance(model_records, SegmentationRecords) for model_records in models.values()]
    if any(kinds):
        if not all(kinds):
            raise ValueError(
                f"{records[kinds.index(True)]} is of a segmentation model and {records[kinds.index(False)]} is not; "
                "give records of one kind."
            )
        options.refuse_options(context, ["router", "published"], options.NOT_FOR_SEGMENTATION_RECORDS)
    fitted = None
    settings: dict[str, float | tuple[float, ...]] = {}
    for model_records in models.values():
        fitted = options.open_router(router, model_records.header, model_records.ids)
        settings = options.open_settings(setting or [], model_records.header, fitted)
    table = frontier_table(models, limits, fitted, settings, others)
    figure = partial(frontier_figure, models, router=fitted, settings=settings, published=others)
    outputs = output.make_outputs(out or [], table, figure)
    output.show_table(replace(table, columns=[column for column in table.columns if column.key != "source"]))
    for line in dict.fromkeys(
        f"{series.method}: {series.source}" for series in others
    ):  # too long for a terminal's table
        output.echo(line)
    output.write_outputs(outputs)
