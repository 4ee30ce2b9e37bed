"""``progresvit shift``: a model under distribution shift."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from progresvit.cli import options, output
from progresvit.io.parse import dump_json

if TYPE_CHECKING:
    from progresvit.evaluation.records import Records
    from progresvit.evaluation.shift import ShiftedSet, ShiftSummary
    from progresvit.routing import Router


def shift(
    model: Annotated[str, typer.Argument(help=options.EXPORT_HELP)],
    suite: Annotated[
        str, typer.Option(help="generated, imagenet-c, imagenet-v2, imagenet-a, imagenet-r or imagenet-sketch.")
    ],
    data: Annotated[str, typer.Option(help="Any dataset for generated, otherwise the folder of the suite.")],
    out: Annotated[Path, typer.Option(help="Output folder for records, tables and frontiers.")],
    split: Annotated[str, typer.Option(help="Split to corrupt, for generated.")] = "val",
    corruptions: Annotated[
        str | None,
        typer.Option(help="Comma-separated: some of the 15 (all by default), or your own, my_module:my_corruption."),
    ] = None,
    severities: Annotated[str | None, typer.Option(help="Comma-separated subset of 1 to 5; all by default.")] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the corrupted images for the next model, for generated."),
    ] = None,
    threshold: Annotated[
        str | None, typer.Option(help="Also report this threshold, or the threshold of a setting, by file or name.")
    ] = None,
    router: options.RouterFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Figure of top-1 and GMACs by suite and model: .png, .svg or .pdf.")
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="Output folder of another model or suite to show in --plot; repeatable."),
    ] = None,
    precision: options.EvaluationPrecision = "fp32",
    batch: Annotated[
        int | None, typer.Option(help="Images per batch. 128 by default on a GPU, 32 on a CPU, 64 for an export.")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that decode and corrupt images; 0 uses the main process.")
    ] = 2,
    device: options.Device = None,
    overwrite: options.OverwriteRecords = False,
) -> None:
    """Evaluate under distribution shift: records, accuracy and a frontier for each set; mCE for ImageNet-C.

    Run it again to resume.
    """
    from progresvit.data.augment.corruptions import CORRUPTIONS, SEVERITIES
    from progresvit.evaluation.shift import check_beside, evaluate_sets, plan, read_summary, shift_subject
    from progresvit.evaluation.source import EvalOptions, intended_header
    from progresvit.table import PLOTS

    sets = plan(
        suite,  # type: ignore[arg-type]  # plan reports unknown suites
        data,
        split=split,
        corruptions=corruptions.split(",") if corruptions else CORRUPTIONS,
        severities=options.parse_integers(severities, "--severities") if severities else SEVERITIES,
    )
    if router is not None and threshold is None:
        raise ValueError("--router needs --threshold; give both.")
    if cache is not None and suite != "generated":
        raise ValueError(f"--cache keeps generated corruptions, and {suite} is read from its files; leave it out.")
    if beside and plot is None:
        raise ValueError("--beside adds results to the figure of --plot; give both.")
    if plot is not None and plot.suffix not in PLOTS:
        raise ValueError(f"{plot}: the suffix names the format; use {', '.join(PLOTS)}.")
    others = [read_summary(folder) for folder in beside or []]
    opened = options.open_model(model, precision=precision, device=device)
    size = opened.batch if batch is None else batch
    eval_options = EvalOptions(precision=precision, batch=size, workers=workers, overwrite=overwrite, cache=cache)
    with output.running(opened.device) as (processes, begin):
        header = intended_header(opened.model, sets[0].source, model, eval_options, processes)
        check_beside([*others, shift_subject(sets, header)] if plot is not None else [])
        fitted = options.open_router(router, header)
        tau = options.parse_threshold(threshold, header, fitted)
        records = evaluate_sets(
            opened.model, sets, out, name=model, processes=processes, options=eval_options, progress=begin
        )
    if processes.first:
        first = next(iter(records.values())).header
        output.report_drawn_split(data, split, images=first.images, drawn_from=first.drawn_from)
        _report(sets, records, out, tau, fitted, plot, others)


def _report(
    sets: list[ShiftedSet],
    records: dict[str, Records],
    out: Path,
    tau: float | tuple[float, ...] | None,
    router: Router | None,
    plot: Path | None,
    others: list[ShiftSummary],
) -> None:
    from progresvit.evaluation.shift import SUMMARY, by_severity, mce_table, shift_table, summarize
    from progresvit.evaluation.tables import frontier_table
    from progresvit.routing import PAPER_THRESHOLDS, TENTHS

    table = shift_table(sets, records, tau, router)
    outputs = output.make_outputs([out / f"shift.{suffix}" for suffix in ("csv", "json", "md")], table)
    if next(iter(records.values())).header.routable:
        sweep = PAPER_THRESHOLDS if router is None else TENTHS
        frontiers = frontier_table({**records, **(by_severity(sets, records) if len(sets) > 1 else {})}, sweep, router)
        outputs += output.make_outputs([out / f"frontiers.{suffix}" for suffix in ("csv", "json")], frontiers)
    output.show_table(table)
    mce = mce_table(sets, records, tau, router)
    if mce is not None:
        output.show_table(mce)
        outputs += output.make_outputs([out / f"mce.{suffix}" for suffix in ("json", "md")], mce)
    summary = summarize(sets, records, tau, router)
    outputs.append((out / SUMMARY, dump_json(summary.model_dump()) + "\n"))
    output.write_outputs(outputs)
    if plot is not None:
        from progresvit.analysis.shift_figure import shift_figure
        from progresvit.plots import render

        output.write_outputs([(plot, render(shift_figure([summary, *others]), plot.suffix))])
