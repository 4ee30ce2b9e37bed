"""``progresvit classify-ray``: all image files of a folder, by a Ray cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from progresvit.cli import options, output
from progresvit.io.parse import parse_limit


def classify_ray(
    images: Annotated[str, typer.Argument(help="Folder or address of image files, as Ray Data reads them.")],
    out: Annotated[str, typer.Option(help="Folder or address for the Parquet files.")],
    model: Annotated[str | None, typer.Option(help=f"{options.MODEL_HELP} imagenet-tiny by default.")] = None,
    threshold: options.Limit = None,
    address: Annotated[
        str | None,
        typer.Option(help="Address of a Ray cluster; by default one on this machine, which is started if needed."),
    ] = None,
    actors: Annotated[str, typer.Option(help="Actors of each round, such as 2,4; one number is for all.")] = "1",
    gpus: Annotated[float, typer.Option(help="GPUs, or a fraction of one, for each actor.", min=0)] = 0.0,
    precision: options.Precision = "fp32",
    batch: Annotated[int | None, typer.Option(help="Images per batch; 512 with GPUs, else 32.", min=1)] = None,
) -> None:
    """Classify image files with Ray Data: one pool of actors for each round, and one row for each image."""
    from progresvit.serving.ray_data import classify_folder

    counts = options.parse_integers(actors, "--actors")
    with output.setting_notes():
        rows = classify_folder(
            images,
            out,
            model,
            parse_limit(threshold),
            address=address,
            actors=counts,
            gpus=gpus,
            batch=batch,
            precision=precision,
        )
    output.echo(f"{output.count_images(rows)} in {out}")
