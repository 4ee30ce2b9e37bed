"""``progresvit shift``: a model under distribution shift."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from progresvit.cli import show

if TYPE_CHECKING:
    from progresvit.evaluation.records import Records
    from progresvit.evaluation.shift import ShiftedSet
    from progresvit.routing import Router


def shift(
    model: Annotated[str, typer.Argument(help="A model folder, shipped, or a hub id.")],
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
    from progresvit.distributed import end_processes, start_processes
    from progresvit.evaluation.run import EvalOptions, intended_header
    from progresvit.evaluation.shift import evaluate_sets, plan

    sets = plan(
        suite,  # type: ignore[arg-type]  # plan says which there are
        data,
        split=split,
        corruptions=corruptions.split(",") if corruptions else CORRUPTIONS,
        severities=show.parse_integers(severities, "--severities") if severities else SEVERITIES,
    )
    if router is not None and threshold is None:
        raise ValueError("--router says what --threshold is compared with; give both.")
    options = EvalOptions(precision=precision, batch=batch, workers=workers, overwrite=overwrite)
    loaded = progresvit.load(model)
    processes = start_processes(device)
    try:
        header = intended_header(loaded, sets[0].source, model, options, processes)
        fitted = show.open_router(router, header)
        tau = show.parse_threshold(threshold, header, fitted)
        with show.progress_bars(wanted=processes.first) as begin:
            found = evaluate_sets(loaded, sets, out, name=model, processes=processes, options=options, progress=begin)
    finally:
        end_processes()
    if processes.first:
        first = next(iter(found.values())).header
        show.tell_drawn(data, split, pictures=first.images, drawn_from=first.drawn_from)
        _report(sets, found, out, tau, fitted)


def _report(
    sets: list[ShiftedSet],
    found: dict[str, Records],
    out: Path,
    tau: float | tuple[float, ...] | None,
    router: Router | None,
) -> None:
    from progresvit.evaluation.routing_tables import frontier_table
    from progresvit.evaluation.shift import by_severity, mce_table, shift_table
    from progresvit.routing import PAPER_THRESHOLDS, TENTHS

    table = shift_table(sets, found, tau, router)
    sweep = PAPER_THRESHOLDS if router is None else TENTHS
    frontiers = frontier_table({**found, **(by_severity(sets, found) if len(sets) > 1 else {})}, sweep, router)
    outputs = show.make_outputs([out / f"shift.{suffix}" for suffix in ("csv", "json", "md")], table)
    outputs += show.make_outputs([out / f"frontiers.{suffix}" for suffix in ("csv", "json")], frontiers)
    show.show_table(table)
    mce = mce_table(sets, found, tau, router)
    if mce is not None:
        show.show_table(mce)
        outputs += show.make_outputs([out / f"mce.{suffix}" for suffix in ("json", "md")], mce)
    show.write_outputs(outputs)
