"""``progresvit fit-router``: records in, a learned router out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import output


def fit_router(
    records: Annotated[Path, typer.Argument(help="Records of images that are not used for reporting.")],
    out: Annotated[Path, typer.Option(help="Router file to write, such as MODEL/router.safetensors.")],
    target: Annotated[
        str,
        typer.Option(help="benefit: the last round corrects this one; error: this one errs; unrecoverable: all err."),
    ] = "benefit",
    epochs: Annotated[
        int | None,
        typer.Option(help="Epochs over the records; by default 6, or more on few records (100 optimizer steps)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the batch order.")] = 0,
) -> None:
    """Fit the small network that decides from a round's logits whether to continue."""
    if out.suffix != ".safetensors":
        raise ValueError(f"{out}: a router is a .safetensors file; use --out {out}.safetensors.")
    if epochs is not None and epochs < 1:
        raise ValueError(f"--epochs must be at least 1, not {epochs}.")
    from progresvit.evaluation import read_records
    from progresvit.evaluation.routers import fit_on
    from progresvit.routing import save_router

    router = fit_on(read_records(records), target=target, epochs=epochs, seed=seed)  # type: ignore[arg-type]  # checked
    save_router(router, out)
    output.echo(f"{out} is ready: fitted on {output.count_images(router.origin.images)} to predict {target!r}")
