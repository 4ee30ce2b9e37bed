"""``progresvit bench``: how fast a model answers, beside what it is to be compared with."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from progresvit.cli import options, output

if TYPE_CHECKING:
    from progresvit.config import ModelConfig
    from progresvit.engine.bench_case import Case, Row

CURVE = "0,0.25,0.5,0.75,1"
MEMORY_BATCH = 128
"""The paper's."""


def bench(
    model: Annotated[
        str, typer.Argument(help="A preset, a model folder, shipped, or a hub id.", metavar="PRESET|MODEL")
    ],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 (on a GPU by default), fp32, fp16 or fp8.")] = None,
    backend: Annotated[str | None, typer.Option(help="The engine's: torch, onnxruntime or openvino.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads on a CPU.")] = None,
    batch: Annotated[int | None, typer.Option(help="Images at a time; 512 on a GPU, else 8.")] = None,
    batches: Annotated[str | None, typer.Option(help="Other batch sizes as well: 1,8,64,512")] = None,
    continuing: Annotated[float | None, typer.Option(help="Share of images going on; by default 0.664.")] = None,
    thresholds: Annotated[str | None, typer.Option(help="Instead: τ with commas, the first for all rows.")] = None,
    shares: Annotated[str | None, typer.Option(help=f"Shares for the curve; by default {CURVE}.")] = None,
    data: Annotated[str | None, typer.Option(help="Pictures as evaluate takes them; else random ones.")] = None,
    split: Annotated[str, typer.Option(help="Their split; '.' if the class folders lie at the top.")] = "val",
    images: Annotated[int | None, typer.Option(help="How many pictures are used.")] = None,
    against: Annotated[bool, typer.Option("--against", help="Beside timm's DeiT as well.")] = False,
    latency: Annotated[bool, typer.Option("--latency", help="Also p50, p95, p99 of single images.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help=f"Also peak memory at batch {MEMORY_BATCH}.")] = False,
    seconds: Annotated[float, typer.Option(help="Timing of a row takes about so long.")] = 2.0,
    quick: Annotated[bool, typer.Option("--quick", help="No curve and no single rounds, and short timing.")] = False,
    out: Annotated[list[Path] | None, typer.Option(help=options.OUT_HELP)] = None,
) -> None:
    """Images a second with images leaving early, the same round by round in eager mode, and timm's DeiT.

    Pictures are on the device already; every row is the median after a warm-up, yardsticks in processes of their own.
    """
    from progresvit.analysis.bench_figures import throughput_figure
    from progresvit.analysis.bench_report import bench_table, bench_title, full_table, ratio_lines
    from progresvit.cli.info import find_config
    from progresvit.config import PRESETS
    from progresvit.engine.bench_case import Case
    from progresvit.evaluation.table import PLOTS, check_outputs

    check_outputs(out or [])
    if any(path.suffix in PLOTS for path in out or []):
        from progresvit.analysis.style import new_figure

        new_figure(title="", x="", y="")  # says what is missing before anything is measured
    if thresholds is not None and (continuing is not None or shares is not None):
        raise ValueError("--thresholds says who goes on, and so do --continuing and --shares; use one of them.")
    config = find_config(model)
    device = device or _best_device()
    on_gpu = device.startswith("cuda")
    limits = None if thresholds is None else options.parse_numbers(thresholds, "--thresholds")
    main = Case(
        subject="engine",
        model=model,
        device=device,
        precision=precision or ("bf16" if on_gpu else "fp32"),
        backend=backend,
        threads=threads,
        batch=batch if batch is not None else (512 if on_gpu else 8),
        continuing=None if limits else (0.664 if continuing is None else continuing),
        threshold=(limits[0],) if limits else None,
        images=images,
        seconds=min(seconds, 1.0) if quick else seconds,
    )
    wanted = Wanted(
        batches=options.parse_integers(batches, "--batches") if batches else [],
        thresholds=limits[1:] if limits else [],
        shares=[] if (quick and shares is None) or limits else options.parse_numbers(shares or CURVE, "--shares"),
        rounds=not quick,
        against=against,
        latency=latency,
        memory=memory,
    )
    groups = plan(main, config, wanted)  # refuses what cannot be before anything is decoded or measured
    with tempfile.TemporaryDirectory() as folder:
        if data is not None:
            held = _hold_pictures(data, split, images, config, Path(folder) / "pictures.npz")
            groups = [[_on(case, held) for case in group] for group in groups]
        rows = _measure(groups, None if data is None else f"{data} ({split})")
    if all(row["error"] is not None for row in rows):
        raise ValueError(f"nothing could be measured: {str(rows[0]['error']).rstrip('.')}.")
    title = bench_title(model, rows, random=model in PRESETS)
    table, everything = bench_table(title, rows), full_table(title, rows)
    outputs = [
        one
        for path in out or []
        for one in output.make_outputs(
            [path], everything if path.suffix == ".json" else table, lambda: throughput_figure(rows, title=model)
        )
    ]
    output.show_table(table)
    for line in ratio_lines(rows):
        typer.echo(line)
    output.write_outputs(outputs)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is measured besides the engine itself and the model in eager mode."""

    batches: list[int]
    thresholds: list[float]
    shares: list[float]
    rounds: bool
    against: bool
    latency: bool
    memory: bool


def plan(main: Case, config: ModelConfig, wanted: Wanted) -> list[list[Case]]:
    """The cases, in groups that may share a process."""
    gpu = main.on_gpu
    plain: dict[str, Any] = {"backend": None, "precision": "bf16" if main.precision == "fp8" else main.precision}
    eager = replace(main, subject="eager", **plain)
    yardsticks = [eager]
    if wanted.against:
        yardsticks += [_deit(eager, config, side) for side in sorted({224, 240, 384, config.resolution})]
    ours = [main]
    if wanted.rounds:
        alone: dict[str, Any] = {"subject": "round", "continuing": None, "threshold": None}
        ours += [replace(main, round=s + 1, **alone) for s in range(len(config.rounds))]
    ours += [replace(main, threshold=None, continuing=share) for share in wanted.shares]
    ours += [replace(main, threshold=(limit,), continuing=None) for limit in wanted.thresholds]
    ours += [replace(main, batch=size) for size in wanted.batches if size != main.batch]
    found = [list(dict.fromkeys(ours)), *([one] for one in yardsticks)]
    if wanted.latency:
        for group, first in zip(found, [main, *yardsticks]):
            group.append(replace(first, measure="latency", batch=1))
    if wanted.memory:
        for group, first in zip(list(found), [main, *yardsticks]):
            case = replace(first, batch=MEMORY_BATCH, images=4 * MEMORY_BATCH, memory=True, seconds=0.1)
            group.append(case) if gpu else found.append([case])
    return found


def _deit(eager: Case, config: ModelConfig, side: int) -> Case:
    from progresvit.engine.bench_case import deit_name

    unrouted: dict[str, Any] = {"continuing": None, "threshold": None}
    return replace(eager, subject="deit", model=deit_name(config.heads), resolution=side, **unrouted)


def _measure(groups: list[list[Case]], pictures: str | None) -> list[Row]:
    """Every row, with a bar; what failed is told at once."""
    from progresvit.engine.bench import run_cases

    rows: list[Row] = []
    total = sum(map(len, groups))
    with output.progress_bars(wanted=True) as begin:
        assert begin is not None
        tell = begin("measuring")
        tell(0, total)
        for group in groups:
            for row in run_cases(group):
                rows.append(row)
                tell(len(rows), total)
                if row["case"]["pictures"] is not None:
                    row["case"]["pictures"] = pictures  # the file is ours and goes away
                if row["error"] is not None:
                    typer.echo(f"failed: {row['name']}, batch {row['batch']}: {row['error']}", err=True)
    return rows


def _on(case: Case, pictures: Path) -> Case:
    return case if case.subject == "deit" else replace(case, pictures=str(pictures), images=None)


def _hold_pictures(data: str, split: str, images: int | None, config: ModelConfig, path: Path) -> Path:
    """Decode and crop once, for all processes: some of the pictures, the same each time, with the model's classes."""
    import numpy as np
    import torch

    from progresvit.data.resident import resident_for_evaluation
    from progresvit.evaluation import DataSource
    from progresvit.evaluation.classes import class_numbers

    found = DataSource(data=data, split=split).find()
    numbers = np.array(class_numbers(found.class_ids, config))
    chosen = np.random.default_rng(0).permutation(len(found))[: images or 1024]
    held = resident_for_evaluation(found.subset(chosen.tolist()), config=config, device=torch.device("cpu"))
    np.savez(path, pixels=held.images.numpy(), labels=numbers[held.targets.numpy()])
    return path


def _best_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
