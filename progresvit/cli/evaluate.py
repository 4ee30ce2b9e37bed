"""``progresvit evaluate``: a model and data in, records out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def evaluate(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)],
    data: Annotated[
        str, typer.Option(help="Folder or tars with <split>/<class>/<image> or <class>/<image>; hfds/NAME; wds/FOLDER.")
    ],
    out: Annotated[Path, typer.Option(help="Records file to write, such as records.parquet.")],
    split: Annotated[str, typer.Option(help="Split; '.' uses all images of top-level class folders.")] = "val",
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Images without labels, in any folder structure.")
    ] = False,
    restrict_classes: Annotated[
        bool, typer.Option("--restrict-classes", help="Predict only among the classes of the data.")
    ] = False,
    corruption: Annotated[str | None, typer.Option(help="Corrupt every image: fog/3 is fog at severity 3.")] = None,
    merge: Annotated[
        str | None,
        typer.Option(help="Merge this many tokens in each block (ToMe), without training: 8, or 0,8 by round."),
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help="Store all logits; needed for temperature scaling.")] = False,
    precision: Annotated[str, typer.Option(help=options.PRECISION_HELP)] = "fp32",
    batch: Annotated[int, typer.Option(help=options.BATCH_HELP)] = 128,
    workers: Annotated[int, typer.Option(help=options.DECODE_HELP)] = 2,
    device: Annotated[str | None, typer.Option(help=options.DEVICE_HELP)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing records.")] = False,
) -> None:
    """Run every round on every image once and write one record per image. Run it again to resume.

    Uses several GPUs under torchrun.
    """
    from progresvit import api
    from progresvit.data.split import count_training_images
    from progresvit.data.transforms import Corruption
    from progresvit.distributed import end_processes, start_processes
    from progresvit.evaluation import DataSource, EvalOptions
    from progresvit.evaluation import evaluate as run

    source = DataSource(
        data=data,
        split=split,
        unlabelled=unlabelled,
        restrict_classes=restrict_classes,
        corruption=None if corruption is None else Corruption.parse(corruption),
    )
    eval_options = EvalOptions(
        precision=precision, batch=batch, workers=workers, keep_logits=logits, overwrite=overwrite
    )
    loaded, folder = api.load_with_folder(model)
    if merge is not None:
        api.as_progresvit(loaded, "--merge").set_merge(options.parse_integers(merge, "--merge"))
    processes = start_processes(device)
    try:
        with output.progress_bars(wanted=processes.first) as begin:
            progress = begin("evaluating") if begin else None
            records = run(loaded, source, out, name=model, processes=processes, options=eval_options, progress=progress)
    finally:
        end_processes()
    if not processes.first:
        return
    output.report_drawn_split(data, split, images=records.header.images, drawn_from=records.header.drawn_from)
    if folder is not None and (learned := count_training_images(folder, records.ids)):
        reason = ": the dataset changed, and with it the split" if split == "val" else ""
        typer.echo(
            f"note: {learned} of these {len(records)} images are training images of this model, by name{reason}; "
            "train again, or evaluate on other images.",
            err=True,
        )
    for line in records.header.unreadable:
        typer.echo(f"skipped: {line}", err=True)
    if records.broken:
        typer.echo(
            f"note: {records.broken} images have NaN or infinite logits in some round; they do not exit in that round.",
            err=True,
        )
    if records.labelled:
        shares = ", ".join(f"round {s + 1} {share:.2%}" for s, share in enumerate(records.correct.mean(axis=0)))
        typer.echo(f"top-1 of {len(records)} images: {shares}")
    following = f": progresvit frontier {out}" if records.header.routable else "; its rounds are alternatives"
    typer.echo(f"{out} is ready{following}")
