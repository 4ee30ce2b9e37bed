"""``progresvit trust``: calibration of the probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def trust(
    records: Annotated[Path, typer.Argument(help="Records of the model.")],
    threshold: Annotated[str | None, typer.Option(help=options.THRESHOLD_HELP)] = None,
    router: Annotated[Path | None, typer.Option(help=options.ROUTER_HELP)] = None,
    temperature: Annotated[
        bool,
        typer.Option(
            "--temperature", help="Fit one temperature per round on half of the images, report the other half."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the split into halves.")] = 0,
    out: Annotated[list[Path] | None, typer.Option(help=options.OUT_HELP)] = None,
) -> None:
    """Print the expected calibration error of each round and of the routed answers."""
    from progresvit.analysis.routing_figures import reliability_figure
    from progresvit.evaluation import read_records
    from progresvit.evaluation.reliability import measure_reliability, measure_scaled_reliability
    from progresvit.table import check_outputs

    check_outputs(out or [])
    table = read_records(records)
    fitted = options.open_router(router, table.header, table.ids)
    tau = options.parse_threshold(threshold, table.header, fitted)
    if temperature:
        reliability = measure_scaled_reliability(table, threshold=tau, router=fitted, seed=seed)
    else:
        reliability = measure_reliability(table, threshold=tau, router=fitted)
    outputs = output.make_outputs(out or [], reliability.table, lambda: reliability_figure(reliability.bins))
    output.show_table(reliability.table)
    output.write_outputs(outputs)
