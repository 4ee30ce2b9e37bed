"""``progresvit import-official``: a checkpoint of the authors, another project or timm becomes a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def import_official(
    file: Annotated[
        Path,
        typer.Argument(
            help="Checkpoint of ProgResViT, ThinkingViT or HydraViT, such as progresvit_192_240.pth.tar; weights of a "
            "plain ViT, in a file named as timm names it; or a folder in timm's format."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Model folder to write.")],
    resolutions: Annotated[
        str | None,
        typer.Option(
            help="Resolution of each round of a ProgResViT, such as 192,240; inferred from file name or position grid "
            "by default."
        ),
    ] = None,
) -> None:
    """Convert a checkpoint of the authors, of another project or of timm to a model folder.

    Only weights are read, never code. Tested on files made to the published key names: the projects' own files have not
    been seen.
    """
    sides = None if resolutions is None else options.parse_integers(resolutions, "--resolutions", "192,240")
    from progresvit import interop
    from progresvit.model.saving import save

    model = interop.import_official(file, resolutions=sides)
    folder = save(model, out)
    described = [f"{round_.resolution} px × {getattr(round_, 'heads', '?')} heads" for round_ in model.config.rounds]
    rounds = (" → " if model.config.routable else ", ").join(described)
    output.echo(f"{rounds}, {model.config.num_classes} classes")
    entry = getattr(model, "timm_entry", None)
    mean = ", ".join(f"{value:g}" for value in model.config.mean)
    output.echo(f"{f'timm entry {entry}: ' if entry else ''}crop {model.config.crop:g}, mean {mean}")
    output.echo(f'{folder} is ready: progresvit info {folder}, or progresvit.load("{folder}") in Python')
