"""What a round costs on a CPU: the model in torch beside exported graphs in onnxruntime and OpenVINO.

    python benchmarks/cpu_backends.py --threads 2 --batch 1 --batch 8

Weights are random, which changes no time. Medians after warm-up in milliseconds a batch, in brackets those of the CPU
time, which other programs disturb less; the rounds are timed apart. ``--passes`` takes all backends in turn several
times. "openvino int8 dynamic" runs the int8 graphs that are made for onnxruntime; OpenVINO's own need nncf.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import progresvit
from progresvit.data.transforms import normalise
from progresvit.engine.export.export import export
from progresvit.engine.export.int8 import quantise, quantise_for_openvino, round_feeds
from progresvit.engine.export.manifest import Manifest, graph_files, write_manifest
from progresvit.engine.onnx_backend import GraphRounds

Run = Callable[[int, NDArray[np.uint8], Any], tuple[Any, Any]]
Times = list[tuple[float, float]]
"""Seconds of wall and of CPU time, of each run."""


def main() -> None:
    """Time each backend and print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="progresvit_small_192_240")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--passes", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = progresvit.create_model(options.model).eval()
    print(f"{options.model}, {options.threads} threads, ms a batch (CPU time)")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "fp32"
        export(model, folder)
        small = in_int8(folder, Path(scratch) / "int8")
        graphs = partial(GraphRounds, threads=options.threads)
        makers: dict[str, Callable[[], Run]] = {
            "torch fp32": lambda: eager(model),
            "onnxruntime fp32": lambda: graphs(folder).run,
            "onnxruntime int8": lambda: graphs(small).run,
            "openvino fp32": lambda: graphs(folder, backend="openvino").run,
            "openvino bf16": lambda: graphs(folder, backend="openvino", precision="bf16").run,
            "openvino int8 dynamic": lambda: graphs(small, backend="openvino").run,
        }
        if importlib.util.find_spec("nncf") is not None:
            own = in_openvinos_int8(folder, Path(scratch) / "own")
            makers["openvino int8"] = lambda: graphs(own).run
        times: dict[tuple[str, int], list[Times]] = {}
        for _ in range(options.passes):
            for name, make in makers.items():  # one at a time: threads of an idle backend would disturb the others
                for batch in options.batch or [1, 8]:
                    found = time_rounds(make(), model.config, batch, options.repeats)
                    known = times.setdefault((name, batch), [[] for _ in found])
                    for of_round, more in zip(known, found):
                        of_round += more
        for (name, batch), rounds in times.items():
            medians = [1000 * np.median(of_round, axis=0) for of_round in rounds]
            shown = (f"  round {s + 1} {wall:7.1f} ({cpu:.1f})" for s, (wall, cpu) in enumerate(medians))
            print(f"{name:21} batch {batch}", *shown)


def time_rounds(run: Run, config: progresvit.ModelConfig, batch: int, repeats: int) -> list[Times]:
    """The times of each round."""
    pixels, times, tokens = random_pixels(config, batch), [], None
    for s in range(len(config.rounds)):
        times.append(time_runs(partial(run, s, pixels, tokens), repeats))
        tokens = run(s, pixels, tokens)[1]
    return times


def random_pixels(config: progresvit.ModelConfig, batch: int) -> NDArray[np.uint8]:
    """(B, C, r, r)"""
    shape = (batch, config.in_channels, config.input_side, config.input_side)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def eager(model: progresvit.ProgResViT) -> Run:
    """A round as the model runs it, from bytes on."""

    @torch.inference_mode()
    def run(s: int, pixels: NDArray[np.uint8], tokens: Any) -> tuple[Any, Any]:
        output = model.run_round(s, normalise(torch.from_numpy(pixels), model.config), tokens)
        return output.logits, output.tokens

    return run


def in_int8(folder: Path, target: Path) -> Path:
    """The same export quantised, its cost not measured: time does not depend on the weights."""
    target.mkdir()
    manifest = Manifest.read(folder)
    for files in manifest.files:
        for name in files:
            quantise(folder / name, target / name)
    write_manifest(manifest.model_copy(update={"precision": "int8"}), target)
    return target


def in_openvinos_int8(folder: Path, target: Path) -> Path:
    """The same export quantised by OpenVINO; time does not depend on the ranges either."""
    target.mkdir()
    manifest = Manifest.read(folder)
    feeds = round_feeds(GraphRounds(folder, backend="openvino"), [random_pixels(manifest.config, 4)])
    files = tuple(dict.fromkeys(graph_files("openvino", s), "") for s in range(len(feeds)))
    for s, of_round in enumerate(feeds):
        quantise_for_openvino(folder / graph_files("onnx", s)[0], target / graph_files("openvino", s)[0], of_round)
    write_manifest(manifest.model_copy(update={"kind": "openvino", "precision": "int8", "files": files}), target)
    return target


def time_runs(run: Callable[[], object], repeats: int) -> Times:
    """After three runs that are not timed."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return times


if __name__ == "__main__":
    main()
