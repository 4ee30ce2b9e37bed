"""``progresvit shift``: a model under distribution shift."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import show


def shift(
    model: Annotated[str, typer.Argument(help="A model folder or a hub id.")],
    suite: Annotated[
        str, typer.Option(help="generated, imagenet-c, imagenet-v2, imagenet-a, imagenet-r or imagenet-sketch.")
    ],
    data: Annotated[str, typer.Option(help="For generated: any data set; else the folder of the suite.")],
    out: Annotated[Path, typer.Option(help="The folder for records, tables and frontiers.")],
    split: Annotated[str, typer.Option(help="For generated: the split to corrupt.")] = "val",
    corruptions: Annotated[str | None, typer.Option(help="Some of the 15, with commas; by default all.")] = None,
    severities: Annotated[str | None, typer.Option(help="Some of 1 to 5, with commas; by default all.")] = None,
    threshold: Annotated[str | None, typer.Option(help="Also report this τ, or that of a setting's file.")] = None,
    router: Annotated[Path | None, typer.Option(help=show.ROUTER_HELP)] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    batch: Annotated[int, typer.Option(help="Pictures at a time.")] = 128,
    workers: Annotated[int, typer.Option(help="Processes that decode and corrupt pictures; 0 for none.")] = 2,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Redo records that are there already.")] = False,
) -> None:
    """Records, accuracy and a frontier for each set; mCE for ImageNet-C. Run it again to go on after a stop."""
    import progresvit
    from progresvit.data.corruptions import CORRUPTIONS, SEVERITIES
    from progresvit.evaluation import HowToRun, frontier_table
    from progresvit.evaluation.shift import (
        by_severity,
        evaluate_sets,
        imagenet_c_errors,
        mean_corruption_error,
        plan,
        shift_table,
    )
    from progresvit.processes import end_processes, start_processes
    from progresvit.routing import load_router
    from progresvit.routing.frontier import as_thresholds

    sets = plan(
        suite,  # type: ignore[arg-type]  # plan says which there are
        data,
        split=split,
        corruptions=corruptions.split(",") if corruptions else CORRUPTIONS,
        severities=[int(s) for s in show.parse_numbers(severities, "--severities")] if severities else SEVERITIES,
    )
    if router is not None and threshold is None:
        raise ValueError("--router says what --threshold is compared with; give both.")
    how = HowToRun(precision=precision, batch=batch, workers=workers, overwrite=overwrite)
    loaded = progresvit.load(model)
    fitted = None if router is None else load_router(router)
    tau = show.parse_threshold(threshold, len(loaded.config.rounds), fitted)
    if tau is not None:
        as_thresholds([tau], len(loaded.config.rounds))  # refused now and not after the pictures
    processes = start_processes(device)
    try:
        with show.progress_bars(wanted=processes.first) as tell:
            found = evaluate_sets(loaded, sets, out, name=model, processes=processes, how=how, tell=tell)
    finally:
        end_processes()
    if not processes.first:
        return
    table = shift_table(sets, found, tau, fitted)
    show.show_table(table)
    frontiers = frontier_table({**found, **(by_severity(sets, found) if len(sets) > 1 else {})})
    paths = [out / "shift.csv", out / "shift.json", out / "shift.md"]
    show.save_outputs(paths, table)
    show.save_outputs([out / "frontiers.csv", out / "frontiers.json"], frontiers)
    if suite == "imagenet-c" and len(sets) == len(CORRUPTIONS) * len(SEVERITIES):
        for label, at in (("full path", 0.0), *([("routed", tau)] if tau is not None else [])):
            typer.echo(f"mCE, {label}: {mean_corruption_error(imagenet_c_errors(sets, found, at, fitted)):.2f}")
