"""``progresvit report``: records in, one HTML page about classes, confusions, exits and errors out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def report(
    context: typer.Context,
    records: Annotated[Path, typer.Argument(help="Records of a classification model on labelled images.")],
    out: Annotated[Path, typer.Option(help="Folder for the page, index.html, and its figures and tables.")],
    data: Annotated[
        str | None,
        typer.Option(help="The images that were evaluated, as in progresvit evaluate: adds thumbnails of the errors."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of --data; by default the split of the records.")] = None,
    threshold: options.Threshold = None,
    router: options.RouterFile = None,
    errors: Annotated[int, typer.Option(help="Most errors on the page; the most confident are kept.", min=0)] = 200,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier report.")] = False,
) -> None:
    """Write a report: top-1 by round and class with 95 % intervals, confusions, exits by class, the worst errors."""
    from progresvit.analysis.error_gallery import find_errors
    from progresvit.analysis.records_report import FILES, make_records_report
    from progresvit.evaluation import DataSource, is_segmentation
    from progresvit.evaluation.answers import route

    if data is None:
        options.refuse_options(context, ["split"], "for the images of --data")
    if is_segmentation(records):
        raise ValueError(
            f"{records} holds records of a segmentation model, and a report is about classes of whole images; "
            f"progresvit evaluate prints the IoU of each class, and progresvit frontier {records} mIoU by threshold."
        )
    earlier = output.check_report_folder(out, FILES, overwrite=overwrite)
    images, limit, fitted = options.open_records(records, threshold, router)
    answers = route(images, limit, fitted)
    source = None if data is None else DataSource(data=data, split=split or images.header.split or "val")
    gallery = find_errors(answers, errors, source)
    page = make_records_report(gallery, data_given=source is not None)
    shares = ", ".join(f"{name} {share.as_percent()}" for name, share in answers.accuracies())
    output.echo(f"top-1 of {output.count_images(len(images))}: {shares} (95% intervals)")
    for line in gallery.missing:
        output.echo(f"no image: {line}", err=True)
    output.write_report(page, out, earlier=earlier)
