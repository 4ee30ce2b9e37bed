"""``progresvit import-official``: convert a checkpoint of the authors; their files themselves have not been seen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def import_official(
    file: Annotated[Path, typer.Argument(help="Checkpoint of the authors, such as progresvit_192_240.pth.tar.")],
    out: Annotated[Path, typer.Option("--out", help="Model folder to write.")],
    resolutions: Annotated[
        str | None,
        typer.Option(
            help="Resolution of each round, such as 192,240; inferred from file name or position grid by default."
        ),
    ] = None,
) -> None:
    """Convert a PyTorch checkpoint of the authors to a model folder. Only weights are read, never code.

    Tested on files made to the authors' published key names: their files themselves have not been seen.
    """
    sides = None if resolutions is None else options.parse_integers(resolutions, "--resolutions", "192,240")
    from progresvit import interop
    from progresvit.model.saving import save

    model = interop.import_official(file, resolutions=sides)
    folder = save(model, out)
    rounds = " → ".join(f"{round_.resolution} px × {round_.heads} heads" for round_ in model.config.rounds)
    output.echo(f"{rounds}, {model.config.num_classes} classes")
    output.echo(f'{folder} is ready: progresvit info {folder}, or progresvit.load("{folder}") in Python')
