"""``progresvit train``: a recipe and data in, a model folder out."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from progresvit.cli import output
from progresvit.cli.errors import Commands, in_options

if TYPE_CHECKING:
    from progresvit.distributed import Processes


def train(
    recipe: Annotated[str, typer.Argument(help="Name of a bundled recipe, or path of a YAML file.")],
    data: Annotated[
        str, typer.Option(help="Folder or tars with <split>/<class>/<image> or <class>/<image>; hfds/NAME; wds/FOLDER.")
    ],
    out: Annotated[Path, typer.Option(help="Run folder to write: checkpoints, logs and the trained model.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a recipe value, such as optimizer.batch=256; repeatable.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder; start one if there is none.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run in the folder first.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda if available.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; by default the cores that the data workers leave.")
    ] = None,
) -> None:
    """Train a model, on several GPUs under torchrun. Ctrl-C and SIGTERM save the run; --resume continues it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that wait sleep and do not spin
    from progresvit.distributed import set_threads, start_processes
    from progresvit.training.loop import train as run_training
    from progresvit.training.recipe import load_recipe

    loaded = load_recipe(recipe, set_ or [])
    processes = start_processes(device)
    set_threads(threads, workers=loaded.data.workers if loaded.data.mode == "loader" else 0, device=processes.device)
    with stoppable_training(processes):
        folder = run_training(loaded, data=data, out=out, processes=processes, resume=resume, overwrite=overwrite)
        if processes.first:
            _say_next(folder)


@contextmanager
def stoppable_training(processes: Processes) -> Iterator[None]:
    """A training that a signal stops ends with the command that continues it, and the usual exit code."""
    from progresvit.distributed import end_processes
    from progresvit.training.loop import Interrupted

    try:
        yield
    except Interrupted as stop:
        if processes.first:
            output.echo(in_options(str(stop)), err=True)
            output.echo(_resuming_command(processes.count), err=True)
        raise typer.Exit(code=128 + stop.signal_number) from stop
    except KeyboardInterrupt:  # a second signal
        if processes.first:
            output.echo("stopped at once; the same command and --resume continue from the last checkpoint.", err=True)
            output.echo(_resuming_command(processes.count), err=True)
        raise typer.Exit(code=128 + signal.SIGINT) from None
    finally:
        end_processes()


def _say_next(folder: Path) -> None:
    """Print the command that uses the model, if it has a default setting."""
    from progresvit.model.registry import read_config
    from progresvit.routing.settings import default_setting

    if (setting := default_setting(folder)) is not None:
        command = "segment" if read_config(folder).task == "segmentation" else "classify"
        words = ["progresvit", command, "IMAGES", "--model", str(folder)]
        if setting.precision in ("bf16", "fp16"):  # as it was validated, which fp32 is by default; engines have no tf32
            words += ["--precision", setting.precision]
        output.echo(f"use it: {shlex.join(words)}", err=True)


def _resuming_command(processes: int) -> str:
    """The command line as it was typed, with --resume; the options of torchrun are not known."""
    words = [word for word in Commands.words if word not in ("--overwrite", "--resume")]
    program = "progresvit" if processes == 1 else "torchrun … -m progresvit"
    return f"{program} {shlex.join([*words, '--resume'])}"
