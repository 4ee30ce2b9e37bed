"""``progresvit report``: a results folder in, the page with its tables and figures out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Argument(help="The folder that progresvit study wrote its results to.")],
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit code 1 if page or figures are not those of the results."),
    ] = False,
) -> None:
    """Rebuild the page of a study: what stands between its markers, and the figures."""
    from progresvit.io.files import replace_file
    from progresvit.report.build import build_report

    made = build_report(results)
    if check:
        outdated = made.outdated()
        for one in outdated:
            typer.echo(f"differs: {one}")
        if outdated:
            typer.echo(f"make them anew: progresvit report {results}")
            raise typer.Exit(code=1)
        typer.echo(f"{made.page} and {len(made.pictures)} figures are those of {results}")
        return
    same = 0
    for path, content in made.files():
        if path.is_file() and path.read_bytes() == content:
            same += 1
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
        typer.echo(f"wrote {path}")
    if same:
        typer.echo(f"{same} of {1 + len(made.pictures)} files did not change")
    if made.unused:
        typer.echo(f"not on the page: {', '.join(made.unused)}")
