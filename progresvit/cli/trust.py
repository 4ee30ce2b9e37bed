"""``progresvit trust``: whether the probabilities can be believed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import show


def trust(
    records: Annotated[Path, typer.Argument(help="Records of the model.")],
    threshold: Annotated[str | None, typer.Option(help=show.THRESHOLD_HELP)] = None,
    router: Annotated[Path | None, typer.Option(help=show.ROUTER_HELP)] = None,
    temperature: Annotated[
        bool,
        typer.Option("--temperature", help="Fit a temperature per round on half of the images, report the rest."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the halves.")] = 0,
    out: Annotated[list[Path] | None, typer.Option(help=show.OUT_HELP)] = None,
) -> None:
    """Expected calibration error of each round and routed."""
    from progresvit.analysis.routing_figures import reliability_figure
    from progresvit.evaluation import read_records
    from progresvit.evaluation.reliability import measure_reliability, measure_scaled_reliability
    from progresvit.evaluation.table import check_outputs

    check_outputs(out or [])
    table = read_records(records)
    fitted = show.open_router(router, table.header, table.ids)
    tau = show.parse_threshold(threshold, table.header, fitted)
    if temperature:
        found = measure_scaled_reliability(table, threshold=tau, router=fitted, seed=seed)
    else:
        found = measure_reliability(table, threshold=tau, router=fitted)
    outputs = show.make_outputs(out or [], found.table, lambda: reliability_figure(found.bins))
    show.show_table(found.table)
    show.write_outputs(outputs)
