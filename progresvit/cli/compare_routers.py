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
    routers = {}
    for path in router:
        fitted = show.open_router(path, table)
        assert fitted is not None
        name = fitted.origin.target if fitted.origin.target not in routers else path.stem
        routers[name] = fitted
    found = matched_table(table, routers)
    show.show_table(found)
    show.save_outputs(out or [], found)
