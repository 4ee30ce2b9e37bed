"""``progresvit frontier``: records in, accuracy and compute by threshold out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import show


def frontier(
    records: Annotated[list[Path], typer.Argument(help="Records of one model or several.")],
    thresholds: Annotated[str | None, typer.Option(help="Numbers with commas; by default the paper's.")] = None,
    per_round: Annotated[
        list[str] | None, typer.Option(help="Instead: one for each round but the last, such as 0.2,0.4; repeat it.")
    ] = None,
    setting: Annotated[
        list[Path] | None,
        typer.Option(help="What calibrate wrote, measured on these records: a row and a mark; repeat it."),
    ] = None,
    router: Annotated[Path | None, typer.Option(help=show.ROUTER_HELP)] = None,
    out: Annotated[list[Path] | None, typer.Option(help=show.OUT_HELP)] = None,
) -> None:
    """Top-1, top-5, average GMACs in both conventions and exit shares, and the near-lossless point."""
    from progresvit.analysis.routing_figures import frontier_figure
    from progresvit.evaluation import frontier_table, read_records
    from progresvit.evaluation.table import check_outputs
    from progresvit.routing import PAPER_THRESHOLDS, TENTHS

    if thresholds is not None and per_round:
        raise ValueError("--thresholds gives one for all rounds and --per-round one for each; use one of them.")
    check_outputs(out or [])
    models = dict(zip(show.short_names(records), map(read_records, records)))
    fitted = None
    settings: dict[str, float | tuple[float, ...]] = {}
    for one in models.values():
        fitted = show.open_router(router, one.header, one.ids)
        settings = show.open_settings(setting or [], one.header, fitted)
    wanted: list[float] | list[list[float]] = list(PAPER_THRESHOLDS if router is None else TENTHS)
    if thresholds is not None:
        wanted = show.parse_numbers(thresholds, "--thresholds")
    elif per_round:
        wanted = [show.parse_numbers(row, "--per-round") for row in per_round]
    table = frontier_table(models, wanted, fitted, settings)
    outputs = show.make_outputs(out or [], table, lambda: frontier_figure(models, router=fitted, settings=settings))
    show.show_table(table)
    show.write_outputs(outputs)
