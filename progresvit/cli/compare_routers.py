"""``progresvit compare-routers``: entropy against learned routers at matched continuation rates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import show


def compare_routers(
    records: Annotated[Path, typer.Argument(help="Records of images that no router was fitted on.")],
    router: Annotated[list[Path], typer.Option(help="A router, once for each.")],
    out: Annotated[list[Path] | None, typer.Option(help=show.TABLE_HELP)] = None,
) -> None:
    """Top-1 when the same share of the images, 0 to 100 %, goes on to round 2."""
    from progresvit.evaluation import matched_table, read_records
    from progresvit.evaluation.table import check_outputs

    check_outputs(out or [], plots=False)
    table = read_records(records)
    opened = [show.open_router(path, table.header, table.ids) for path in router]
    targets = [one.origin.target for one in opened if one is not None]
    names = targets if len(set(targets)) == len(targets) else [f"router {name}" for name in show.short_names(router)]
    found = matched_table(table, {name: one for name, one in zip(names, opened) if one is not None})
    outputs = show.make_outputs(out or [], found)
    show.show_table(found)
    show.write_outputs(outputs)
