"""What a round costs on a CPU: the model in torch beside exported graphs in onnxruntime and OpenVINO.

    python benchmarks/cpu_backends.py --threads 2 --batch 1 --batch 8

Weights are random, which changes no time. Medians in milliseconds a batch, after warm-up; the rounds are timed apart.
"""

from __future__ import annotations

import argparse
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
from progresvit.engine.export.int8 import quantise
from progresvit.engine.export.manifest import Manifest, write_manifest
from progresvit.engine.onnx_backend import GraphRounds

Run = Callable[[int, NDArray[np.uint8], Any], tuple[Any, Any]]


def main() -> None:
    """Time each backend and print a line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="progresvit_small_192_240")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = progresvit.create_model(options.model).eval()
    print(f"{options.model}, {options.threads} threads, ms a batch")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "fp32"
        export(model, folder)
        small = in_int8(folder, Path(scratch) / "int8")
        makers: dict[str, Callable[[], Run]] = {
            "torch fp32": lambda: eager(model),
            "onnxruntime fp32": lambda: GraphRounds(folder, threads=options.threads).run,
            "onnxruntime int8": lambda: GraphRounds(small, threads=options.threads).run,
            "openvino fp32": lambda: GraphRounds(folder, backend="openvino", threads=options.threads).run,
            "openvino int8": lambda: GraphRounds(small, backend="openvino", threads=options.threads).run,
            "openvino bf16": lambda: (
                GraphRounds(folder, backend="openvino", precision="bf16", threads=options.threads).run
            ),
        }
        for name, make in makers.items():  # one at a time: threads of an idle backend would disturb the others
            for batch in options.batch or [1, 8]:
                times = time_rounds(make(), model.config, batch, options.repeats)
                print(f"{name:17} batch {batch}", *(f"  round {s + 1} {t:7.1f}" for s, t in enumerate(times)))


def time_rounds(run: Run, config: progresvit.ModelConfig, batch: int, repeats: int) -> list[float]:
    """Milliseconds of each round."""
    shape = (batch, config.in_channels, config.input_side, config.input_side)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    times, tokens = [], None
    for s in range(len(config.rounds)):
        times.append(median(partial(run, s, pixels, tokens), repeats))
        tokens = run(s, pixels, tokens)[1]
    return times


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


def median(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))


if __name__ == "__main__":
    main()
