"""``progresvit fit-router``: records in, a learned router out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fit_router(
    records: Annotated[Path, typer.Argument(help="Records of images that are not reported on later.")],
    out: Annotated[Path, typer.Option(help="The router to write, such as MODEL/router.safetensors.")],
    target: Annotated[
        str, typer.Option(help="benefit: the last round mends an error; error: this round errs; hopeless: all err.")
    ] = "benefit",
    epochs: Annotated[int, typer.Option(help="Passes over the records.")] = 6,
    seed: Annotated[int, typer.Option(help="Of the start and the order.")] = 0,
) -> None:
    """Train the small network that says, from a round's logits, whether to go on."""
    if out.suffix != ".safetensors":
        raise ValueError(f"{out}: a router is a .safetensors file.")
    if epochs < 1:
        raise ValueError(f"a router needs one epoch at least, not {epochs}.")
    from progresvit.evaluation import read_records
    from progresvit.routing import fit_router as fit
    from progresvit.routing import save_router

    table = read_records(records)
    router = fit(
        table.statistics,
        table.correct,
        target=target,  # type: ignore[arg-type]  # fit says which there are
        epochs=epochs,
        seed=seed,
        model=table.header.weights,
        ids=table.ids,
    )
    save_router(router, out)
    typer.echo(f"{out} is ready: fitted on {router.origin.images} images to predict {target!r}")
