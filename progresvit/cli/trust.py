"""``progresvit trust``: calibration of the probabilities."""

from __future__ import annotations

from typing import Annotated

import typer

from progresvit.cli import options, output


def trust(
    records: options.RecordsFile,
    threshold: options.Threshold = None,
    router: options.RouterFile = None,
    temperature: Annotated[
        bool,
        typer.Option(
            "--temperature", help="Fit one temperature per round on half of the images, report the other half."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the split into halves.")] = 0,
    out: options.Outputs = None,
) -> None:
    """Print the expected calibration error of each round and of the routed answers."""
    from progresvit.analysis.routing_figures import reliability_figure
    from progresvit.evaluation.reliability import measure_reliability, measure_scaled_reliability
    from progresvit.table import check_outputs

    check_outputs(out or [])
    images, limit, fitted = options.open_records(records, threshold, router)
    if temperature:
        reliability = measure_scaled_reliability(images, threshold=limit, router=fitted, seed=seed)
    else:
        reliability = measure_reliability(images, threshold=limit, router=fitted)
    output.publish(reliability.table, out, lambda: reliability_figure(reliability.bins))
