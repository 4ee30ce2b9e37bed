"""``progresvit abstention``: effect of rejecting uncertain answers and of not refining unrecoverable images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def abstention(
    records: options.RecordsFile,
    threshold: options.Threshold = None,
    router: options.RouterFile = None,
    unrecoverable: Annotated[
        Path | None,
        typer.Option("--unrecoverable", "--hopeless", help="Router of fit-router --target unrecoverable."),
    ] = None,
    benefit: Annotated[Path | None, typer.Option(help="Router of fit-router --target benefit.")] = None,
    out: options.Outputs = None,
    compute_out: Annotated[
        list[Path] | None,
        typer.Option(help=f"Equal-accuracy table. {options.TABLE_HELP}"),
    ] = None,
) -> None:
    """Print risk against coverage; with --unrecoverable, also the GMACs saved by not refining such images."""
    from progresvit.analysis.routing_figures import risk_coverage_figure
    from progresvit.evaluation import equal_accuracy_table, risk_coverage_curves
    from progresvit.evaluation.iso_accuracy import rules
    from progresvit.evaluation.selective import risk_coverage_table
    from progresvit.table import check_outputs

    check_outputs(out or [])
    check_outputs(compute_out or [], plots=False)
    if unrecoverable is None and (benefit is not None or compute_out):
        raise ValueError(
            "compute at equal accuracy needs --unrecoverable, a router of fit-router --target unrecoverable."
        )
    images, limit, fitted = options.open_records(records, threshold, router)
    curves = risk_coverage_curves(images, limit, fitted)
    tables = [risk_coverage_table(curves)]
    outputs = output.make_outputs(out or [], tables[0], lambda: risk_coverage_figure(curves))
    if unrecoverable is not None:
        first, second = (options.open_router(path, images.header, images.ids) for path in (unrecoverable, benefit))
        assert first is not None
        tables.append(equal_accuracy_table(images, rules(unrecoverable=first, benefit=second)))
        outputs += output.make_outputs(compute_out or [], tables[1])
    for table in tables:
        output.show_table(table)
    output.write_outputs(outputs)
