"""``progresvit compare-routers``: entropy against learned routers at matched continuation rates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def compare_routers(
    records: Annotated[Path, typer.Argument(help="Records of images that no router was fitted on.")],
    router: Annotated[list[Path], typer.Option(help="Router file; repeatable.")],
    out: options.Tables = None,
) -> None:
    """Compare entropy with learned routers: top-1 when the same share of images, 0 to 100 %, continues to round 2."""
    from progresvit.evaluation import matched_table, read_records
    from progresvit.table import check_outputs

    check_outputs(out or [], plots=False)
    table = read_records(records)
    opened = [options.open_router(path, table.header, table.ids) for path in router]
    targets = [fitted.origin.target for fitted in opened if fitted is not None]
    names = targets if len(set(targets)) == len(targets) else [f"router {name}" for name in options.short_names(router)]
    routers = {name: fitted for name, fitted in zip(names, opened) if fitted is not None}
    output.publish(matched_table(table, routers), out)
