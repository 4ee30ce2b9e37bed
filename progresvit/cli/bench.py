"""``progresvit bench``: speed and memory of a model in the engine, beside the model itself and a plain ViT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from progresvit.cli import options, output
from progresvit.io.parse import parse_limit

if TYPE_CHECKING:
    from progresvit.routing import Setting
    from progresvit.table import Table

CONTINUING = 0.664
"""The paper's operating point."""
ENGINE, PLAIN = "engine", "plain ViT in the engine"
"""Rows of the table."""


def bench(
    model: Annotated[str, typer.Argument(help=f"Preset. {options.EXPORT_HELP}", metavar="PRESET|MODEL")],
    device: options.Device = None,
    batch: Annotated[int | None, typer.Option(help="Images per batch; 512 on a GPU, else 8.", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
    precision: Annotated[str | None, typer.Option(help="bf16 (default on a GPU), fp32, fp16 or fp8.")] = None,
    backend: Annotated[str | None, typer.Option(help=f"Backend of the engine: {options.BACKEND_HELP}")] = None,
    threshold: Annotated[str | None, typer.Option(help=options.LIMIT_HELP)] = None,
    continuing: Annotated[
        float | None,
        typer.Option(
            help=f"Share of images that continue, instead of a threshold; {CONTINUING} by default.", min=0, max=1
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder or tar of images; random images by default.")] = None,
    seconds: Annotated[float, typer.Option(help="Approximate duration of each timing.", min=0)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[
        list[Path] | None, typer.Option(help="Output file; repeatable. Table: .csv, .json, .md, .tex.")
    ] = None,
) -> None:
    """Measure throughput, latency and peak memory of the engine, of the model run round by round, and of a plain ViT.

    The plain ViT has the width and resolution of the last round, and new weights. The images are on the device already.
    Each row is measured in its own process, after a warm-up. For an export, only the engine is measured. A baseline is
    run round by round; each of its rounds is a row if they are alternatives.
    """
    from progresvit.cli.info import find_config
    from progresvit.engine.export.manifest import is_export
    from progresvit.engine.measurement import in_fresh_process
    from progresvit.engine.onnx_backend import check_installed
    from progresvit.io.parse import dump_json
    from progresvit.model.registry import DEFAULT_KIND
    from progresvit.table import check_outputs

    check_outputs(out or [], plots=False)
    exported = is_export(model)
    config = find_config(model)  # an unknown model is an error before a process starts
    check_installed(backend, converts=not exported)
    if threshold is not None and continuing is not None:
        raise ValueError("--threshold decides which images continue, and so does --continuing; use one of them.")
    device = "cpu" if exported and device is None else _device(device, backend)
    on_gpu = device.startswith("cuda")
    precision = precision or ("bf16" if on_gpu else "fp32")
    shared = {
        "model": model,
        "device": device,
        "batch": batch or (512 if on_gpu else 8),
        "thresholds": _thresholds(threshold, model),
        "continuing": CONTINUING if continuing is None else continuing,
        "data": data,
    }
    timing = {"device": device, "threads": threads, "seconds": seconds}
    of_engine = {"eager": False, "precision": precision, "backend": backend, "threads": threads}
    of_model = {"eager": True, "precision": "bf16" if precision == "fp8" else precision}
    subjects: dict[str, dict[str, Any]] = {}
    is_baseline = config.kind != DEFAULT_KIND
    if is_baseline and not config.routable:
        subjects = {f"round {s + 1}": {**of_model, "alone": s} for s in range(len(config.rounds))}
    elif is_baseline:
        subjects = {"model, round by round": of_model, "all rounds": {**of_model, "thresholds": 0.0}}
    else:
        subjects[ENGINE] = of_engine
        if len(config.rounds) > 1:
            subjects["engine, all rounds"] = {**of_engine, "thresholds": 0.0}
    if not exported and not is_baseline:
        subjects |= {"model, round by round": of_model, PLAIN: {**of_engine, "thresholds": ()}}
    try:  # on a CPU, memory is measured for a process
        rows = [in_fresh_process(measure, name, {**shared, **own}, timing) for name, own in subjects.items()]
    except MemoryError as error:
        raise ValueError(f"{error}; use a smaller --batch.") from error
    if as_json:
        typer.echo(dump_json({"model": model, "rows": rows}))
        output.write_outputs(output.make_outputs(out or [], _table(model, rows)))
        return
    engine = rows[0]
    lines = [] if is_baseline else [_beside(engine, other) for other in rows[1:]]
    output.publish(_table(model, rows), out, lines=lines)


def measure(name: str, subject: dict[str, Any], timing: dict[str, Any]) -> dict[str, Any]:
    """The row of this name, measured in this process: options of ``TimedModel`` and of ``Measurement``."""
    import torch

    from progresvit import compute
    from progresvit.engine.measurement import Measurement, hardware
    from progresvit.engine.speed import TimedModel, find_model, plain_config
    from progresvit.model import ProgResViT

    if name == PLAIN:
        subject = {**subject, "model": ProgResViT(plain_config(find_model(subject["model"]).config)).eval()}
    measurement = Measurement(lambda: TimedModel(**subject), **timing)
    routed = measurement.subject
    throughput, shares, peak = measurement.throughput(), routed.exit_shares(), measurement.peak_gib()
    eager = subject["eager"]
    if eager:  # a baseline counts its own
        gmacs = sum(share * spent for share, spent in zip(shares, routed.model.gmacs("paper")))
    else:
        gmacs = compute.average_gmacs(routed.config, shares)
    return {
        "name": f"engine, {routed.runner.backend}" if name == ENGINE else name,
        "hardware": hardware(subject["device"]),
        "torch": torch.__version__,
        "precision": subject["precision"] if eager else routed.runner.precision,  # int8 graphs have their own
        "batch": subject["batch"] if eager else routed.runner.batch,  # less if memory ran out
        **throughput,
        **{key: value for key, value in measurement.latency().items() if key.endswith("_ms")},
        "peak_gib": peak,
        "thresholds": () if routed.alone is not None else routed.thresholds,
        "exit_shares": shares,
        "gmacs": gmacs,
    }


def _thresholds(text: str | None, model: str) -> float | Sequence[float] | Setting | None:
    limit = parse_limit(text)
    if not isinstance(limit, str):
        return limit
    from progresvit.config import PRESETS
    from progresvit.io.model_folder import find_folder
    from progresvit.routing.settings import find_setting

    return find_setting(limit, None if model in PRESETS else find_folder(model))


def _table(model: str, rows: Sequence[dict[str, Any]]) -> Table:
    from progresvit.table import Column, Table, decimals, rough_percent, threshold

    def count(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    columns = [
        Column("name", "what"),
        Column("precision", "precision"),
        Column("batch", "batch"),
        Column("images_per_s", "images/s", count),
        Column("spread", "spread, %", rough_percent),
        Column("p50_ms", "p50, ms", count),
        Column("p95_ms", "p95, ms", count),
        Column("peak_gib", "peak GiB", decimals),
        Column("thresholds", "τ", threshold),
        Column("continuing", "continuing, %", rough_percent),
        Column("gmacs", "GMACs", decimals),
    ]
    engine = rows[0]
    title = f"{model} on {engine['hardware']}, torch {engine['torch']}; latency at batch 1"
    shown = [{**row, "continuing": 1 - row["exit_shares"][0] if row["thresholds"] else None} for row in rows]
    return Table(title, columns, shown)


def _beside(engine: dict[str, Any], other: dict[str, Any]) -> str:
    """Speed of the engine beside another row."""
    from progresvit.engine.measurement import describe_ratio

    ratio = describe_ratio(engine, other) or "no clear difference in speed"
    return (
        f"{engine['name']}, beside {other['name']}: {ratio} at batch {engine['batch']}; at batch 1 (p50) "
        f"{engine['p50_ms']:.3g} instead of {other['p50_ms']:.3g} ms"
    )


def _device(device: str | None, backend: str | None) -> str:
    from progresvit.distributed import choose_device

    if device is None and backend not in (None, "torch"):
        return "cpu"
    return str(choose_device(device, ("cpu", "cuda")))
