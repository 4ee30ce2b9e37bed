"""``progresvit abstention``: risk and coverage, and compute saved by not refining unrecoverable images."""

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
    """Risk against coverage; with --hopeless, GMACs saved at equal accuracy by not refining unrecoverable images."""
    from progresvit.analysis.routing_figures import risk_coverage_figure
    from progresvit.evaluation import equal_accuracy_table, read_records, risk_coverage_curves
    from progresvit.evaluation.iso_accuracy import rules
    from progresvit.evaluation.selective import risk_coverage_table
    from progresvit.evaluation.table import check_outputs

    check_outputs(out or [])
    check_outputs(compute_out or [], plots=False)
    if hopeless is None and (benefit is not None or compute_out):
        raise ValueError("compute at equal accuracy needs --hopeless, a router fitted with --target hopeless.")
    table = read_records(records)
    fitted, giving_up, mending = (
        show.open_router(path, table.header, table.ids) for path in (router, hopeless, benefit)
    )
    curves = risk_coverage_curves(table, show.parse_threshold(threshold, table.header, fitted), fitted)
    tables = [risk_coverage_table(curves)]
    outputs = show.make_outputs(out or [], tables[0], lambda: risk_coverage_figure(curves))
    if giving_up is not None:
        tables.append(equal_accuracy_table(table, rules(unrecoverable=giving_up, benefit=mending)))
        outputs += show.make_outputs(compute_out or [], tables[1])
    for one in tables:
        show.show_table(one)
    show.write_outputs(outputs)
