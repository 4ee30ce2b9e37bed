"""Inference speed: saved MACs as saved time, beside timm's compiled DeiT-S and this model run round by round.

A plain DeiT-S in this engine tells what routing saves from what the engine's kernels save.

    python benchmarks/inference.py --device cuda --out inference      # bf16; inference.json and inference.png
    python benchmarks/inference.py --device cpu --threads 2 --out cpu # float32, and onnxruntime and OpenVINO
    python benchmarks/inference.py --device cuda --only engine,fp8    # some parts alone

The small model of the paper with random weights; 66.4 % of the images continue; random images, already on the device.
Each row is measured in its own process, and printed and kept at once. A second run measures only what is missing or
failed; ``--fresh`` starts over.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import Case, Row, case_key, deit_name, run_case
from report import bench_table, bench_title, ratio_lines, ratios, throughput_figure

import progresvit
from progresvit.cli.output import show_table
from progresvit.config import preset
from progresvit.engine.measurement import hardware
from progresvit.io.files import replace_file
from progresvit.io.parse import dump_json
from progresvit.plots import render

MODEL = "progresvit_small_192_240"
CONTINUING = 0.664
SHARES = (0.0, 0.2, 0.4, 0.8, 1.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
MEMORY_BATCH = 128
GRAPHS = (("onnxruntime", "fp32"), ("openvino", "fp32"), ("openvino", "bf16"))

Parts = dict[str, list[Case]]
"""The cases of each part; ``--only`` takes the names."""
Maker = Callable[..., Case]


def cuda_parts(options: argparse.Namespace) -> Parts:
    """The most important first."""
    case = maker(options, precision="bf16")
    rounds = range(1, len(preset(options.model).rounds) + 1)
    routed = {"subject": "engine", "batch": options.batch, "continuing": CONTINUING}
    parts = {
        "deit240": deit(case, options, 240),
        "eager": everywhere(case, options, subject="eager", continuing=CONTINUING),
        "engine": [
            *everywhere(case, options, subject="engine", continuing=CONTINUING),
            *(case(subject="round", batch=options.batch, round=number) for number in rounds),
        ],
        "plain": [
            *(case(subject="plain", batch=options.batch, resolution=side) for side in (240, 224)),
            case(subject="plain", measure="latency", batch=1, resolution=240),
        ],
        "fp8": [case(**{**routed, "precision": "fp8"})],
        "deit224": deit(case, options, 224)[:1],
        "compiled": [case(**{**routed, "subject": "compiled"})],
        "shares": [case(**{**routed, "continuing": share}) for share in SHARES],
        "batches": [case(**{**routed, "batch": size}) for size in BATCHES],
        "deit384": deit(case, options, 384)[:1],
    }
    return {name: [*dict.fromkeys(cases)] for name, cases in parts.items()}


def cpu_parts(options: argparse.Namespace) -> Parts:
    """The model as it is under eager torch, the engine, and the engine on exported graphs; at a batch and at 1."""
    case = maker(options, precision="fp32")
    routed = {"batch": options.batch, "continuing": CONTINUING}
    single = {"measure": "latency", "batch": 1, "continuing": CONTINUING}
    return {
        "eager": [case(subject="eager", **how) for how in (routed, single)],
        "graphs": [
            case(subject="engine", backend=backend, **{**how, "precision": precision})
            for backend, precision in GRAPHS
            for how in (routed, single)
        ],
        "engine": [case(subject="engine", **how) for how in (routed, single)],
        "deit240": deit(case, options, 240)[:1],
        "plain": [case(subject="plain", batch=options.batch, resolution=240)],
        "deit224": deit(case, options, 224)[:1],
        "memory": [memory(case, subject=subject, continuing=CONTINUING) for subject in ("engine", "eager")],
    }


def maker(options: argparse.Namespace, precision: str) -> Maker:
    """Makes cases of this run."""
    common = {"device": options.device, "threads": options.threads, "seconds": options.seconds}

    def make(**fields: Any) -> Case:
        return Case(**{"model": options.model, "precision": precision, **common, **fields})

    return make


def everywhere(case: Maker, options: argparse.Namespace, **fields: Any) -> list[Case]:
    """Throughput, memory at batch 128 and latency at batch 1."""
    return [
        case(batch=options.batch, **fields),
        memory(case, **fields),
        case(measure="latency", batch=1, **fields),
    ]


def deit(case: Maker, options: argparse.Namespace, side: int) -> list[Case]:
    """timm's DeiT of the model's size."""
    return everywhere(case, options, subject="deit", model=deit_name(preset(options.model).heads), resolution=side)


def memory(case: Maker, **fields: Any) -> Case:
    """Peak memory at the paper's batch."""
    images = {} if fields["subject"] == "deit" else {"images": 4 * MEMORY_BATCH}
    return case(measure="memory", batch=MEMORY_BATCH, **images, **{**fields, "seconds": 0.1})


def measured(parts: Parts, done: list[Row], *, timeout: float) -> Iterator[Row]:
    """Rows that are missing, part by part."""
    known = {case_key(row["case"]) for row in done}
    for cases in parts.values():
        for case in cases:
            if case.key not in known:
                yield run_case(case, timeout=timeout)


def in_order(parts: Parts, rows: list[Row]) -> list[Row]:
    """The rows of these parts in their order; of each case the latest."""
    latest = {case_key(row["case"]): row for row in rows}
    keys = dict.fromkeys(case.key for cases in parts.values() for case in cases)
    return [latest[key] for key in keys if key in latest]


def read_rows(path: Path | None, *, fresh: bool) -> list[Row]:
    """The rows of earlier runs, without failures."""
    if path is None or fresh or not path.is_file():
        return []
    try:
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (ValueError, KeyError):
        raise SystemExit(f"error: {path} holds no rows of this benchmark; name another file, or use --fresh.") from None
    return [row for row in rows if not row["error"]]


def from_here(rows: list[Row], device: str) -> list[Row]:
    """The rows that were measured on this machine with this software."""
    if not rows:
        return []
    here = {"hardware": hardware(device), "torch": torch.__version__, "version": progresvit.__version__}
    return [row for row in rows if all(row[key] == value for key, value in here.items())]


def line(row: Row) -> str:
    """A row as one line."""
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
    parser.add_argument("--only", help="parts, separated by commas")
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate duration of a timing")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds after which a row is stopped")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--out", type=Path, help="path for rows and plot, without a suffix")
    options = parser.parse_args()
    options.batch = options.batch or (512 if options.device == "cuda" else 8)
    return options


def main() -> None:
    """Measure, print the table and the ratios, write JSON and a plot."""
    options = parse()
    if options.threads is not None:
        torch.set_num_threads(options.threads)  # part of the hardware's name
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: there is no CUDA device here; use --device cpu.")
    parts = cuda_parts(options) if options.device == "cuda" else cpu_parts(options)
    wanted = options.only.split(",") if options.only else list(parts)
    unknown = [name for name in wanted if name not in parts]
    if unknown:
        raise SystemExit(f"error: there is no part {unknown[0]!r}; choose among {', '.join(parts)}.")
    path = None if options.out is None else options.out.with_name(options.out.name + ".json")
    kept = read_rows(path, fresh=options.fresh)
    rows = in_order(parts, from_here(kept, options.device))
    others = [row for row in kept if row not in rows]  # of other models, batches or machines: kept, not shown
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    for row in measured({name: parts[name] for name in wanted}, rows, timeout=options.timeout):
        print(line(row), flush=True)
        rows.append(row)
        if path is not None:
            replace_file(path, dump_json({"rows": [*in_order(parts, rows), *others]}) + "\n")
    rows = in_order(parts, rows)
    if not rows:
        raise SystemExit("error: nothing was measured.")
    title = bench_title(options.model, rows)
    show_table(bench_table(title, rows))
    print(*ratio_lines(rows), sep="\n")
    if path is not None:
        held = {"title": title, "rows": [*rows, *others], "ratios": ratios(rows)}
        replace_file(path, dump_json(held) + "\n")
        if any(row["subject"] == "engine" and row["measure"] == "throughput" and not row["error"] for row in rows):
            replace_file(path.with_suffix(".png"), render(throughput_figure(rows, title=options.model), ".png"))


if __name__ == "__main__":
    main()
