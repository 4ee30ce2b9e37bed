"""``progresvit worth``: images in, a plain and a progressive model out, and which of them to use."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output
from progresvit.cli.train import stoppable_training


def worth(
    data: Annotated[str, typer.Argument(help="Folder or tars with <split>/<class>/<image> or <class>/<image>.")],
    out: Annotated[Path, typer.Option(help="Folder to write: both models, their records, worth.json and worth.png.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a value of the recipe own_images, for both models; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of both trainings, 42 by default.", min=0)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in the folder; start one if there is none.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the comparison in the folder.")] = False,
    device: options.Device = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
) -> None:
    """Is it worth it on your images? Train a plain ViT and a progressive model at equal compute, and compare them.

    Both start from imagenet-tiny. Accuracy, GMACs and images/s are measured on held-out images. Ctrl-C saves the run;
    --resume continues it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in train
    from progresvit.analysis.worth import FIGURE, RECIPE, RESULT, compare, worth_lines, worth_table
    from progresvit.distributed import set_threads, start_processes
    from progresvit.training.recipe import load_recipe

    recipe = load_recipe(RECIPE, [*(set_ or []), *([] if seed is None else [f"seed={seed}"])])
    processes = start_processes(device)
    set_threads(threads, workers=0, device=processes.device)
    with stoppable_training(processes):
        result = compare(
            recipe,
            data=data,
            out=out,
            processes=processes,
            resume=resume,
            overwrite=overwrite,
            say=partial(output.echo, err=True),
        )
    output.show_table(worth_table(result))
    output.echo(f"wrote {out / RESULT} and {out / FIGURE}")
    for line in worth_lines(result):
        output.echo(line)
