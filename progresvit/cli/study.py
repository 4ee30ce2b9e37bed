"""``progresvit study``: many runs and what is measured of them, into one folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def study(
    study: Annotated[str, typer.Argument(help="The name of a study that ships, or the path of a YAML file.")],
    data: Annotated[str, typer.Option(help="What training takes: a folder or tars with <split>/<class>/<picture>.")],
    runs: Annotated[Path, typer.Option(help="The folder for models, records and logs.")],
    results: Annotated[Path | None, typer.Option(help="The folder for the results; by default RUNS/results.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Some of its runs, comparisons, routing or shift entries; repeat it.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value in every run's recipe: schedule.epochs=30")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Tasks at a time on the same device.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of one training or evaluation, under torchrun.")] = 1,
    workers: Annotated[int | None, typer.Option(help="Processes that decode pictures, of one evaluation.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Only print the commands that would be run.")] = False,
) -> None:
    """Train, evaluate and measure everything that a page of results rests on. Run it again to go on after a stop."""
    from progresvit.results.carry_out import How, Stopped, carry_out, reader_commands
    from progresvit.results.measures import check_earlier, measure
    from progresvit.results.plan import Places, plan
    from progresvit.results.study import load_study, write_study

    wanted = load_study(study, set_ or [])
    tasks = plan(wanted, only or [])
    if list_:
        for task in tasks:
            typer.echo("\n".join(reader_commands(wanted, task)))
        return
    places, out = Places(data=data, runs=runs), results or runs / "results"
    how = How(jobs=jobs, gpus=gpus, device=device, workers=workers)
    check_earlier(wanted, out, places)
    write_study(wanted, out)
    try:
        failed = carry_out(wanted, tasks, places, out, measure=measure, how=how, tell=typer.echo)
    except Stopped as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(code=128 + stop.number) from stop
    for name, reason in failed.items():
        typer.echo(f"error: {name}: {reason}", err=True)
    if failed:
        raise typer.Exit(code=1)
    typer.echo(f"{out} is ready: progresvit report {out}")
