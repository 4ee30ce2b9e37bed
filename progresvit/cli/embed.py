"""``progresvit embed``: images in, their features out, and for each image the most similar others."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from progresvit.cli import options, output

if TYPE_CHECKING:
    from progresvit.engine.embedding import Pool

SHOWN = 40
"""The most rows of the printed table of neighbours."""


def embed(
    images: Annotated[list[str], typer.Argument(help="Image files, folders, tars.")],
    out: Annotated[Path, typer.Option(help="Parquet file for the features; an interrupted run resumes.")],
    model: Annotated[str | None, typer.Option(help=f"{options.MODEL_HELP} imagenet-tiny by default.")] = None,
    round: Annotated[int | None, typer.Option(help="Round of the features, from 1; the last by default.")] = None,
    pool: Annotated[str, typer.Option(help="class (the class token) or mean (of the patch tokens).")] = "class",
    neighbours: Annotated[
        int | None, typer.Option(help="Also list this many most similar images for each image, by cosine similarity.")
    ] = None,
    device: options.Device = None,
    precision: options.TorchPrecision = "fp32",
    batch: options.Batch = None,
    workers: options.FewWorkers = 2,
    overwrite: options.OverwriteFile = False,
) -> None:
    """Write features of images to a Parquet file. Unreadable files are reported and skipped (exit code 1)."""
    if out.suffix != ".parquet":
        raise ValueError(f"{out}: features are written as .parquet.")
    from progresvit.data.dataset import unlabelled
    from progresvit.engine import EmbeddingEngine
    from progresvit.engine.embed_files import embed_files

    entries, bad = options.find_images(images)
    errors = len(bad)
    if entries:
        dataset = unlabelled(entries)
        engine = EmbeddingEngine(
            model, round=round, pool=cast("Pool", pool), device=device, precision=precision, batch=batch,
            workers=workers,
        )  # fmt: skip
        with output.stoppable(), output.progress_bars() as begin:
            result = embed_files(engine, dataset, out, neighbours=neighbours, overwrite=overwrite, progress=begin)
        if neighbours is not None:
            _show_neighbours(out, neighbours, images=result.images - result.errors)
        pooled = "class token" if engine.pool == "class" else "mean of the patch tokens"
        features = f"{engine.width} features each ({pooled} of round {engine.round})"
        unread = f"; {result.errors} unreadable (see column error)" if result.errors else ""
        output.echo(f"wrote {out}: {output.count_images(result.images - result.errors)}, {features}{unread}")
        errors += result.errors
    output.report_skipped(bad)
    if errors:
        raise typer.Exit(code=1)


def _show_neighbours(out: Path, neighbours: int, *, images: int) -> None:
    """Print the neighbours of the first images."""
    import pyarrow.parquet as pq

    from progresvit.table import Column, Table, decimals

    most = max(1, SHOWN // neighbours)
    batches = pq.ParquetFile(out).iter_batches(most, columns=["image", "neighbours", "similarities"])
    listed = (row for batch in batches for row in batch.to_pylist() if row["neighbours"])  # none if it is unreadable
    shown = list(islice(listed, most))
    rows = [
        {"image": row["image"], "neighbour": name, "similarity": similarity}
        for row in shown
        for name, similarity in zip(row["neighbours"], row["similarities"])
    ]
    if not rows:
        return
    heads = [Column("image", "image"), Column("neighbour", "neighbour"), Column("similarity", "similarity", decimals)]
    output.show_table(Table("the most similar images", heads, rows))
    if len(shown) < images:
        output.echo(
            f"the first {len(shown)} of {images} images; {out} has all of them (columns neighbours, similarities)"
        )
