"""Speed of every point of a frontier on a CPU: images per second, and milliseconds at batch 1.

    python benchmarks/frontier_cpu.py repro/results/frontier --threads 2

The argument is the results folder of a study (repro/README.md). No trained model is needed: a round takes the same time
with any weights, so models are built from the recipes in the results and have random weights, and images exit after the
rounds after which they exited when the point was measured. All models run in eager float32. Each round runs on all
images that reach it, in full batches but for the last. Run it again to continue: runs that are in the results file are
kept.

Letters: B images of a batch, N images in all, C channels, R side of the images, s a round from 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from frontier import earlier_points, open_study, write_costs

from progresvit import api
from progresvit.engine.measurement import Measurement, hardware
from progresvit.model.interface import RoundModel
from progresvit.routing.scores import top10_entropy
from progresvit.training.build import build_model
from progresvit.training.recipe import make_recipe
from repro.formats import CostPoint, RunResult
from repro.frontier import FrontierPoint, points_of
from repro.store import read_results

GOLDEN = (5**0.5 - 1) / 2
RUNTIME = "eager torch, fp32, images exit as recorded"


class ReplayedPoint:
    """A point of a frontier for ``Measurement``: one round of a model, or its rounds with recorded exits."""

    def __init__(self, model: RoundModel, point: FrontierPoint, *, images: int, batch: int) -> None:
        side = model.config.input_side
        self.inputs = torch.rand(images, 3, side, side)  # (N, C, R, R)
        self.model, self.batch, self.images = model, batch, images
        self.order = range(len(model.config.rounds)) if point.round is None else [point.round]
        self.exit_after = torch.from_numpy(sample_exits(point, images))  # (N,)

    def build(self) -> None:
        """Nothing: the model is there."""

    @torch.inference_mode()
    def run(self, passes: int) -> None:
        for _ in range(passes):
            self._route(torch.arange(self.images), self.batch)

    @torch.inference_mode()
    def one(self, number: int) -> None:
        self._route(torch.tensor([number % self.images]), 1)

    def _route(self, rows: Tensor, batch: int) -> None:
        tokens = None
        for s in self.order:
            outputs = [
                self.model.run_round(s, self.inputs[part], previous=None if tokens is None else tokens[at])
                for at, part in zip(torch.arange(len(rows)).split(batch), rows.split(batch))
            ]
            for output in outputs:
                top10_entropy(output.logits)
                output.logits.argmax(dim=-1)
            stays = self.exit_after[rows] > s
            if not stays.any():
                return
            tokens, rows = torch.cat([output.tokens for output in outputs])[stays], rows[stays]

    def gmacs(self, result: RunResult) -> float:
        """Average over the images, paper convention."""
        return float(np.array(result.rounds.gmacs_paper)[self.exit_after.numpy()].mean())


def sample_exits(point: FrontierPoint, images: int) -> NDArray[np.int64]:
    """The exit round of each of this many images, in the recorded shares and evenly mixed: (N,)."""
    recorded = np.sort(point.exit_after)
    spread = (0.5 + np.arange(images) * GOLDEN) % 1  # every part of the images has nearly the same shares
    return recorded[(spread * len(recorded)).astype(int)]


def measure_run(result: RunResult, *, images: int, batch: int, seconds: float) -> list[CostPoint]:
    """All points of a run, on a model of its recipe."""
    recipe = make_recipe(result.recipe | {"model": result.recipe["model"] | {"merge": None}}, origin=result.name)
    model = build_model(recipe, tuple(map(str, range(result.data.classes))))
    model.eval()  # type: ignore[attr-defined]
    if (merge := result.recipe["model"].get("merge")) is not None:
        api.as_progresvit(model, "merging").set_merge(merge)
    rows = []
    for point in points_of(result):
        subject = ReplayedPoint(model, point, images=images, batch=batch)
        measurement = Measurement(lambda subject=subject: subject, device="cpu", threads=None, seconds=seconds)
        throughput, latency = measurement.throughput(), measurement.latency()
        rows.append(
            CostPoint(
                run=result.run,
                point=point.name,
                gmacs_paper=subject.gmacs(result),
                images_per_s=throughput["images_per_s"],
                spread=throughput["spread"],
                latency_ms=1000 / latency["images_per_s"],
                joules=None,
            )
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results folder of a study")
    parser.add_argument("--frontier", default="all", help="name of the frontier in the study")
    parser.add_argument("--seed", type=int, default=1, help="seed whose exits are replayed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4.0, help="approximate duration of each timing")
    options = parser.parse_args(arguments)
    study, runs = open_study(options.results, options.frontier), read_results(options.results).runs
    out = options.results / "cost_cpu.json"
    torch.set_num_threads(options.threads)
    conditions = {
        "device": hardware("cpu"),
        "seed": options.seed,
        "precision": "fp32",
        "batch": options.batch,
        "runtime": RUNTIME,
    }
    points, seconds = earlier_points(out, **conditions)
    command = f"python benchmarks/frontier_cpu.py RESULTS --frontier {options.frontier} --seed {options.seed}"
    command += f" --threads {options.threads} --batch {options.batch} --images {options.images}"
    command += f" --seconds {options.seconds:g}"
    for run in dict.fromkeys(study.frontiers[options.frontier].rows.values()):
        result = runs.get(f"{run}-{options.seed}")
        if any(point.run == run for point in points):
            continue
        if result is None:
            print(f"{run}: seed {options.seed} is not measured yet")
            continue
        start = time.perf_counter()
        points += measure_run(result, images=options.images, batch=options.batch, seconds=options.seconds)
        seconds += time.perf_counter() - start
        print(f"{run}: {time.perf_counter() - start:.0f} s", flush=True)
        write_costs(out, points, result, command=command, seconds=seconds, **conditions)


if __name__ == "__main__":
    main()
