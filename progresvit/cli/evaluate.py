"""``progresvit evaluate``: a model and data in, records out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import show


def evaluate(
    model: Annotated[str, typer.Argument(help="A model folder, shipped, or a hub id.")],
    data: Annotated[
        str, typer.Option(help="A folder or tars with <split>/<class>/<picture> or <class>/<picture>; hfds/…; wds/….")
    ],
    out: Annotated[Path, typer.Option(help="The records to write, such as records.parquet.")],
    split: Annotated[str, typer.Option(help="The split; '.' for all pictures of class folders at the top.")] = "val",
    unlabelled: Annotated[bool, typer.Option("--unlabelled", help="Any pictures in any folders.")] = False,
    restrict_classes: Annotated[
        bool, typer.Option("--restrict-classes", help="Predict only classes that the data has.")
    ] = False,
    corruption: Annotated[str | None, typer.Option(help="Damage every picture: fog/3 is fog at severity 3.")] = None,
    logits: Annotated[bool, typer.Option("--logits", help="Keep all logits, as temperature scaling needs.")] = False,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    batch: Annotated[int, typer.Option(help="Pictures at a time.")] = 128,
    workers: Annotated[int, typer.Option(help="Processes that decode pictures; 0 for none.")] = 2,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace records that are there already.")] = False,
) -> None:
    """Run every round on every picture once. Under torchrun, on many GPUs. Run it again to go on after a stop."""
    from progresvit import api
    from progresvit.data.split import count_training_images
    from progresvit.data.transforms import Corruption
    from progresvit.distributed import end_processes, start_processes
    from progresvit.evaluation import DataSource, HowToRun
    from progresvit.evaluation import evaluate as run

    source = DataSource(
        data=data,
        split=split,
        unlabelled=unlabelled,
        restrict_classes=restrict_classes,
        corruption=None if corruption is None else Corruption.parse(corruption),
    )
    how = HowToRun(precision=precision, batch=batch, workers=workers, keep_logits=logits, overwrite=overwrite)
    loaded, folder = api.load_with_folder(model)
    processes = start_processes(device)
    try:
        with show.progress_bars(wanted=processes.first) as begin:
            progress = begin("evaluating") if begin else None
            records = run(loaded, source, out, name=model, processes=processes, how=how, progress=progress)
    finally:
        end_processes()
    if not processes.first:
        return
    show.tell_drawn(data, split, pictures=records.header.pictures, drawn_from=records.header.drawn_from)
    if folder is not None and (learned := count_training_images(folder, records.ids)):
        grown = ": the set changed and was drawn anew" if split == "val" else ""
        typer.echo(
            f"note: this model has learned from {learned} of these {len(records)} pictures, by their names{grown}; "
            "train again, or measure on others.",
            err=True,
        )
    for line in records.header.unreadable:
        typer.echo(f"left out: {line}", err=True)
    if records.broken:
        typer.echo(
            f"note: {records.broken} images have NaN or infinite logits in some round; none leaves in such a round.",
            err=True,
        )
    if records.labelled:
        shares = ", ".join(f"round {s + 1} {share:.2%}" for s, share in enumerate(records.correct.mean(axis=0)))
        typer.echo(f"top-1 of {len(records)} images: {shares}")
    typer.echo(f"{out} is ready: progresvit frontier {out}")
