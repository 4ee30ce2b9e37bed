"""Inference speed: saved MACs as saved time, beside timm's compiled DeiT-S and this model run round by round.

    python benchmarks/inference.py --device cuda --out inference      # bf16; inference.json and inference.png
    python benchmarks/inference.py --device cpu --threads 2 --out cpu # float32, and onnxruntime and OpenVINO
    python benchmarks/inference.py --device cuda --only engine,fp8    # some parts alone

The small model of the paper with random weights, 66.4 % of the images going on, random pictures on the device already.
Parts run in processes of their own. Each row is printed and kept as soon as it is there, and a second run measures only
what is missing or failed; ``--fresh`` starts over.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import progresvit
from progresvit.analysis.bench_figures import throughput_figure
from progresvit.analysis.bench_report import bench_table, bench_title, ratio_lines, ratios
from progresvit.analysis.style import render
from progresvit.cli.show import show_table
from progresvit.config import preset
from progresvit.engine.bench import run_cases
from progresvit.engine.bench_case import Case, Row, deit_name
from progresvit.engine.bench_measure import hardware
from progresvit.io.files import replace_file

MODEL = "progresvit_small_192_240"
CONTINUING = 0.664
SHARES = (0.0, 0.2, 0.4, 0.8, 1.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
MEMORY_BATCH = 128
GRAPHS = {
    "onnxruntime": ("onnxruntime", "fp32"),
    "openvino": ("openvino", "fp32"),
    "openvino-bf16": ("openvino", "bf16"),
}

Parts = dict[str, list[Case]]
"""The cases of each part, which share a process; the names are what ``--only`` takes."""
Maker = Callable[..., Case]


def cuda_parts(options: argparse.Namespace) -> Parts:
    """The most important first."""
    case = maker(options, precision="bf16")
    batch = options.batch
    parts = {
        "deit240": deit(case, options, 240, batch),
        "eager": everywhere(case, options, "eager", batch, continuing=CONTINUING),
        "engine": [
            *everywhere(case, options, "engine", batch, continuing=CONTINUING),
            *(case(subject="round", batch=batch, round=s + 1) for s in range(len(preset(options.model).rounds))),
        ],
        "fp8": [case(subject="engine", batch=batch, continuing=CONTINUING, precision="fp8")],
        "deit224": deit(case, options, 224, batch)[:1],
        "compiled": [case(subject="compiled", batch=batch, continuing=CONTINUING)],
        "shares": [case(subject="engine", batch=batch, continuing=share) for share in SHARES],
        "batches": [case(subject="engine", batch=size, continuing=CONTINUING) for size in BATCHES],
        "deit384": deit(case, options, 384, batch)[:1],
    }
    return {name: [*dict.fromkeys(cases)] for name, cases in parts.items()}


def cpu_parts(options: argparse.Namespace) -> Parts:
    """The model as it is under eager torch, the engine, and the engine on exported graphs, at one batch and at 1."""
    case = maker(options, precision="fp32")
    routed = {"batch": options.batch, "continuing": CONTINUING}
    single = {"measure": "latency", "batch": 1, "continuing": CONTINUING}
    parts = {
        "eager": [case(subject="eager", **routed), case(subject="eager", **single)],
        "graphs": [
            case(subject="engine", backend=backend, **{**how, "precision": precision})
            for backend, precision in GRAPHS.values()
            for how in (routed, single)
        ],
        "engine": [case(subject="engine", **routed), case(subject="engine", **single)],
        "deit240": deit(case, options, 240, options.batch)[:1],
        "deit224": deit(case, options, 224, options.batch)[:1],
    }
    for name, subject in (("memory-engine", "engine"), ("memory-eager", "eager")):
        parts[name] = [memory(case, subject=subject, continuing=CONTINUING)]
    return parts


def maker(options: argparse.Namespace, precision: str) -> Maker:
    """Makes cases of this run."""
    common = {"device": options.device, "threads": options.threads, "seconds": options.seconds}

    def make(**fields: Any) -> Case:
        return Case(**{"model": options.model, "precision": precision, **common, **fields})

    return make


def everywhere(case: Maker, options: argparse.Namespace, subject: str, batch: int, **fields: Any) -> list[Case]:
    """Throughput, memory at batch 128 and latency at batch 1."""
    return [
        case(subject=subject, batch=batch, **fields),
        memory(case, subject=subject, **fields),
        case(subject=subject, measure="latency", batch=1, **fields),
    ]


def deit(case: Maker, options: argparse.Namespace, side: int, batch: int) -> list[Case]:
    """timm's DeiT of the model's size."""
    return everywhere(case, options, "deit", batch, model=deit_name(preset(options.model).heads), resolution=side)


def memory(case: Maker, **fields: Any) -> Case:
    """Peak memory at the paper's batch."""
    return case(batch=MEMORY_BATCH, images=4 * MEMORY_BATCH, memory=True, **{**fields, "seconds": 0.1})


def measured(parts: Parts, done: list[Row], *, timeout: float) -> Iterator[Row]:
    """Rows that are not there yet, part by part."""
    for cases in parts.values():
        left = [case for case in cases if not any(case.same_as(row["case"]) and not row["error"] for row in done)]
        yield from run_cases(left, timeout=timeout)


def in_order(parts: Parts, rows: list[Row]) -> list[Row]:
    """The rows of these parts, in their order; the latest of each case, and of no other run's."""
    latest = {json.dumps({**row["case"], "seconds": None}): row for row in rows}
    keys = [json.dumps({**case.to_dict(), "seconds": None}) for cases in parts.values() for case in cases]
    return [latest[key] for key in dict.fromkeys(keys) if key in latest]


def read_rows(path: Path | None, *, fresh: bool) -> list[Row]:
    """What earlier runs kept."""
    if path is None or fresh or not path.is_file():
        return []
    try:
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError):
        raise SystemExit(f"error: {path} holds no rows of this benchmark; name another file, or use --fresh.") from None
    return rows


def from_here(rows: list[Row], device: str) -> list[Row]:
    """Those that were measured on this very machine with this software."""
    if not rows:
        return []
    here = {"hardware": hardware(device), "torch": torch.__version__, "version": progresvit.__version__}
    return [row for row in rows if all(row[key] == value for key, value in here.items())]


def line(row: Row) -> str:
    """A row in a line, for whoever waits."""
    if row["error"]:
        return f"{row['name']}, batch {row['batch']}: failed: {row['error']}"
    what = f"p50 {row['p50_ms']:.3g} ms" if row["p50_ms"] else f"{row['images_per_s']:,.1f} images/s"
    peak = "" if row["peak_gib"] is None else f", {row['peak_gib']:.2f} GiB"
    return f"{row['name']}, {row['precision']}, batch {row['batch']}: {what}, {row['tflops']:.3g} TFLOP/s{peak}"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default=MODEL, help="another preset")
    parser.add_argument("--batch", type=int, help="of the main rows; by default 512, on a CPU 8")
    parser.add_argument("--threads", type=int, help="on a CPU")
    parser.add_argument("--only", help="parts, with commas")
    parser.add_argument("--seconds", type=float, default=3.0, help="what timing a row may take, roughly")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a row is given up")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    parser.add_argument("--out", type=Path, help="where to keep rows and plot, without a suffix")
    options = parser.parse_args()
    options.batch = options.batch or (512 if options.device == "cuda" else 8)
    return options


def main() -> None:
    """Measure, print the table and the ratios, write JSON and a plot."""
    options = parse()
    if options.threads is not None:
        torch.set_num_threads(options.threads)  # the machine is known by its threads too
    parts = cuda_parts(options) if options.device == "cuda" else cpu_parts(options)
    wanted = options.only.split(",") if options.only else list(parts)
    unknown = [name for name in wanted if name not in parts]
    if unknown:
        raise SystemExit(f"error: there is no part {unknown[0]!r}; choose among {', '.join(parts)}.")
    path = None if options.out is None else options.out.with_name(options.out.name + ".json")
    kept = read_rows(path, fresh=options.fresh)
    rows = in_order(parts, from_here(kept, options.device))
    others = [row for row in kept if row not in rows]  # of other models, batches, machines: kept, and not looked at
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    for row in measured({name: parts[name] for name in wanted}, rows, timeout=options.timeout):
        print(line(row), flush=True)
        rows.append(row)
        if path is not None:
            replace_file(path, json.dumps({"rows": [*in_order(parts, rows), *others]}, indent=2) + "\n")
    rows = in_order(parts, rows)
    if not rows:
        raise SystemExit("error: nothing was measured.")
    title = bench_title(options.model, rows, random=True)
    show_table(bench_table(title, rows))
    print(*ratio_lines(rows), sep="\n")
    if path is not None:
        held = {"title": title, "rows": [*rows, *others], "ratios": ratios(rows)}
        replace_file(path, json.dumps(held, indent=2) + "\n")
        if any(row["subject"] == "engine" and row["measure"] == "throughput" and not row["error"] for row in rows):
            replace_file(path.with_suffix(".png"), render(throughput_figure(rows, title=options.model), ".png"))


if __name__ == "__main__":
    main()
