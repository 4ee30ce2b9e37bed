"""``progresvit abstention``: what withholding unsure answers and giving up hopeless images brings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import show


def abstention(
    records: Annotated[Path, typer.Argument(help="Records of the model.")],
    threshold: Annotated[str | None, typer.Option(help=show.THRESHOLD_HELP)] = None,
    router: Annotated[Path | None, typer.Option(help=show.ROUTER_HELP)] = None,
    hopeless: Annotated[Path | None, typer.Option(help="A router fitted with --target hopeless.")] = None,
    benefit: Annotated[Path | None, typer.Option(help="A router fitted with --target benefit.")] = None,
    out: Annotated[list[Path] | None, typer.Option(help=show.OUT_HELP)] = None,
    compute_out: Annotated[
        list[Path] | None, typer.Option(help="The same for the table of compute at equal accuracy: .csv, .json, .md.")
    ] = None,
) -> None:
    """Risk against coverage; with --hopeless, the GMACs saved at equal accuracy by not refining hopeless images."""
    from progresvit.analysis.routing_figures import risk_coverage_figure
    from progresvit.evaluation import equal_accuracy_table, read_records, risk_coverage_curves
    from progresvit.evaluation.abstention import risk_coverage_table
    from progresvit.evaluation.hopeless import rules
    from progresvit.evaluation.table import check_outputs

    check_outputs(out or [])
    check_outputs(compute_out or [], plots=False)
    if hopeless is None and (benefit is not None or compute_out):
        raise ValueError("compute at equal accuracy needs --hopeless, a router fitted with --target hopeless.")
    table = read_records(records)
    fitted = show.open_router(router, table)
    curves = risk_coverage_curves(table, show.parse_threshold(threshold, table.rounds, fitted), fitted)
    found = risk_coverage_table(curves)
    show.show_table(found)
    show.save_outputs(out or [], found, lambda: risk_coverage_figure(curves))
    giving_up = show.open_router(hopeless, table)
    if giving_up is not None:
        compared = rules(hopeless=giving_up, benefit=show.open_router(benefit, table))
        costs = equal_accuracy_table(table, compared)
        show.show_table(costs)
        show.save_outputs(compute_out or [], costs)
