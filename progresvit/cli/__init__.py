"""The ``progresvit`` command: one file per command, heavy imports inside the functions."""

from __future__ import annotations

from typing import Annotated

import typer

from progresvit import __version__
from progresvit.cli.abstention import abstention
from progresvit.cli.analyze import analyze
from progresvit.cli.bench import bench
from progresvit.cli.calibrate import calibrate
from progresvit.cli.classify import classify
from progresvit.cli.classify_ray import classify_ray
from progresvit.cli.compare_routers import compare_routers
from progresvit.cli.embed import embed
from progresvit.cli.errors import Commands
from progresvit.cli.evaluate import evaluate
from progresvit.cli.export import export
from progresvit.cli.fit_router import fit_router
from progresvit.cli.frontier import frontier
from progresvit.cli.import_official import import_official
from progresvit.cli.info import info
from progresvit.cli.ood import ood
from progresvit.cli.quickstart import quickstart
from progresvit.cli.report import report
from progresvit.cli.segment import segment
from progresvit.cli.serve import serve
from progresvit.cli.shift import shift
from progresvit.cli.train import train
from progresvit.cli.trust import trust
from progresvit.cli.worth import worth

app = typer.Typer(
    help="Progressive vision transformers: process an image in rounds, stop when confident.",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
COMMANDS = (
    quickstart, info, classify, classify_ray, segment, serve, embed, import_official, train, evaluate, frontier, report,
    calibrate, fit_router, compare_routers, abstention, ood, trust, shift, export, bench, worth,
)  # fmt: skip
for command in COMMANDS:
    app.command()(command)  # fit_router becomes fit-router
app.add_typer(analyze, name="analyze")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"progresvit {__version__}")
        raise typer.Exit


@app.callback()
def main(
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module first, such as one that registers a kind of model; repeatable.",
        ),
    ] = None,
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of the whole command."""
    if modules:
        from progresvit.io.imports import import_module

        for name in modules:
            import_module(name, what="--import")
