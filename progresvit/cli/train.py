"""``progresvit train``: a recipe and data in, a model folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[str, typer.Argument(help="The name of a recipe that ships, or the path of a YAML file.")],
    data: Annotated[str, typer.Option(help="A folder or tars with <split>/<class>/<picture> or <class>/<picture>.")],
    out: Annotated[Path, typer.Option(help="The folder of the run: checkpoints, logs, and the model in the end.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value of the recipe: --set optimizer.batch=256")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run in the folder first.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
) -> None:
    """Train a model. Under torchrun, on many GPUs; Ctrl-C and SIGTERM save before they stop, --resume goes on."""
    from progresvit.distributed import end_processes, start_processes
    from progresvit.training.loop import Interrupted
    from progresvit.training.loop import train as run
    from progresvit.training.recipe import load_recipe

    wanted = load_recipe(recipe, set_ or [])
    processes = start_processes(device)
    try:
        run(wanted, data=data, out=out, processes=processes, resume=resume, overwrite=overwrite)
    except Interrupted as stop:
        if processes.first:
            typer.echo(str(stop), err=True)
        raise typer.Exit(code=128 + stop.signal_number) from stop
    finally:
        end_processes()
