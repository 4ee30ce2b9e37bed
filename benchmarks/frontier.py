"""Speed and energy of every point of a frontier on a GPU: images per second, milliseconds at batch 1, joules per image.

    python benchmarks/frontier.py runs/frontier --data 'photos/*.tar' --frontier all

RUNS is the folder of a study (repro/README.md) whose models are trained and measured. All models run in the same way:
compiled blocks in bf16, a CUDA graph for each round, images on the GPU already. Images that do not exit wait until a
batch of the next round is full. Models of the kind progresvit are measured in the engine too. Models and thresholds are
those of one seed; images are held-out ones. Run it again to continue: runs that are in the results file are kept.

Letters: B images of a batch, N images in all, C channels, R side of the images, s a round from 0.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from progresvit import Engine, api
from progresvit.data.dataset import find_images
from progresvit.data.transforms import normalise
from progresvit.engine.images import open_images
from progresvit.engine.measurement import Measurement
from progresvit.io.files import replace_file
from progresvit.io.parse import did_you_mean
from progresvit.model.interface import RoundModel
from progresvit.routing.decide import exits
from progresvit.routing.scores import top10_entropy
from progresvit.training.logger import git_revision
from progresvit.training.step import compile_blocks
from repro.formats import FORMAT, CostPoint, CostResult, Machine, RunResult, to_json
from repro.frontier import FrontierPoint, points_of
from repro.store import read_all, read_results
from repro.study import STUDY_FILE, Study, read_study

BATCHES = 8
"""Number of batches of different images."""
RUNTIME = "blocks compiled by torch.compile, bf16, a CUDA graph for each round"


class GraphedRound:
    """A round for batches of one size, recorded as a CUDA graph. Its outputs are overwritten by the next call."""

    def __init__(self, model: RoundModel, s: int, batch: int, previous: Tensor | None, image: Tensor) -> None:
        self.images = image.expand(batch, *image.shape[1:]).clone()
        self.previous = None if previous is None else previous[:1].expand(batch, *previous.shape[1:]).clone()
        self.batch = batch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles
                model.run_round(s, self.images, previous=self.previous)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            output = model.run_round(s, self.images, previous=self.previous)
            self.logits, self.tokens = output.logits, output.tokens
            self.entropy = top10_entropy(output.logits)
            self.answers = output.logits.argmax(dim=-1)

    def __call__(self, images: Tensor, previous: Tensor | None) -> None:
        self.images.copy_(images)
        if self.previous is not None:
            assert previous is not None
            self.previous.copy_(previous)
        self.graph.replay()


class CompiledPoint:
    """A point of a frontier for ``Measurement``: one round of a model, or its rounds with a threshold."""

    def __init__(self, rounds: dict[int, dict[int, GraphedRound]], point: FrontierPoint, inputs: Tensor) -> None:
        """``rounds`` are by size of the batch, then by index."""
        batch = max(rounds)
        self.rounds, self.point, self.batch, self.inputs, self.images = rounds, point, batch, inputs, len(inputs)
        self.order = list(rounds[batch]) if point.round is None else [point.round]

    def build(self) -> None:
        self.waiting: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in self.order]
        self.exits = [0] * len(self.order)

    def run(self, passes: int) -> None:
        """Images that wait for a full batch at the end wait for the next run: the time of a stream."""
        for _ in range(passes):
            for batch in self.inputs.split(self.batch):
                self._advance(0, batch, None)

    def _advance(self, place: int, images: Tensor, previous: Tensor | None) -> None:
        graphed = self.rounds[self.batch][self.order[place]]
        graphed(images, previous)
        if place == len(self.order) - 1:
            self.exits[place] += len(images)
            return
        stays = ~exits(graphed.entropy, self.point.threshold)
        rows = stays.nonzero()[:, 0]  # waits for the GPU
        self.exits[place] += len(images) - len(rows)
        waiting = self.waiting[place + 1]
        waiting.append((images[rows], graphed.tokens[rows]))
        while sum(len(images) for images, _ in waiting) >= self.batch:
            joined = torch.cat([images for images, _ in waiting])
            tokens = torch.cat([tokens for _, tokens in waiting if tokens is not None])
            waiting[:] = [(joined[self.batch :], tokens[self.batch :])]
            self._advance(place + 1, joined[: self.batch], tokens[: self.batch])

    def one(self, number: int) -> None:
        """One image, until its answer is on the host."""
        place = number % self.images
        image, previous = self.inputs[place : place + 1], None
        for index, s in enumerate(self.order):
            graphed = self.rounds[1][s]
            graphed(image, previous)
            if index == len(self.order) - 1 or bool(exits(graphed.entropy, self.point.threshold)):
                break
            previous = graphed.tokens
        int(graphed.answers)

    def shares(self) -> list[float]:
        """Exits after each round so far, as shares."""
        return [count / sum(self.exits) for count in self.exits]


class EnginePoint:
    """A point of a frontier in the engine, on bytes."""

    def __init__(self, model: Any, point: FrontierPoint, inputs: Tensor, batch: int) -> None:
        self.model, self.point, self.inputs, self.images, self.batch = model, point, inputs, len(inputs), batch

    def build(self) -> None:
        threshold = 0.0 if self.point.threshold is None else self.point.threshold
        self.engine = Engine(self.model, threshold, device="cuda", precision="bf16", batch=self.batch)

    def run(self, passes: int) -> None:
        for _ in self.engine.stream(self.inputs.split(self.batch) * passes, deadline=None):
            pass

    def one(self, number: int) -> None:
        place = number % self.images
        self.engine.classify(self.inputs[place : place + 1])


class EnergyCounter:
    """Energy of the GPU since the driver was loaded, if it tells; pip install nvidia-ml-py."""

    def __init__(self) -> None:
        self.read: Callable[[], float] | None = None
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                device = torch.cuda.get_device_properties(torch.cuda.current_device())
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid}")
                pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # raises if the GPU does not tell
                self.read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        if self.read is None:
            print("joules are not measured: this GPU does not tell them, or nvidia-ml-py is missing")

    def per_image(self, subject: Any, seconds: float) -> float | None:
        """Joules, over passes that take about so long."""
        if self.read is None:
            return None
        torch.cuda.synchronize()
        images, before, start = 0, self.read(), time.perf_counter()
        while time.perf_counter() - start < seconds:
            subject.run(4)
            torch.cuda.synchronize()
            images += 4 * subject.images
        return float((self.read() - before) / images)


def main() -> None:
    """From the command line."""
    options = _parse()
    if not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU here; benchmarks/frontier_cpu.py measures on a CPU.")
    results_folder = options.runs / "results"
    study = open_study(results_folder, options.frontier)
    out = results_folder / "cost.json"
    conditions = {
        "device": torch.cuda.get_device_name(),
        "seed": options.seed,
        "precision": "bf16",
        "batch": options.batch,
        "runtime": RUNTIME,
    }
    points, seconds = earlier_points(out, **conditions)
    runs = read_results(results_folder).runs
    energy, pixels = EnergyCounter(), dict[Any, Tensor]()
    for run in dict.fromkeys(study.frontiers[options.frontier].rows.values()):
        result = runs.get(f"{run}-{options.seed}")
        if (options.only and run not in options.only) or any(point.run == run for point in points):
            continue
        if result is None:
            print(f"{run}: seed {options.seed} is not measured yet")
            continue
        start = time.perf_counter()
        model = api.load(str(options.runs / f"{study.runs[run].of or run}-{options.seed}" / "model"))
        if (merge := study.runs[run].merge) is not None:
            api.as_progresvit(model, "merging").set_merge(merge)
        key = model.config.input_side, model.config.crop
        if key not in pixels:
            pixels[key] = load_pixels(options.data, model, count=BATCHES * options.batch)
        rows = measure_run(model, result, pixels[key], energy, batch=options.batch, seconds=options.seconds)
        print(f"{run}: {len(rows)} points in {time.perf_counter() - start:.0f} s", flush=True)
        for row in rows:
            print(" ", row, flush=True)
        if options.warm:
            continue
        points += rows
        seconds += time.perf_counter() - start
        command = f"python benchmarks/frontier.py RUNS --data DATA --frontier {options.frontier} --seed {options.seed}"
        command += f" --batch {options.batch} --seconds {options.seconds:g}"
        write_costs(out, points, result, command=command, seconds=seconds, **conditions)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of a study: models, and results in RUNS/results")
    parser.add_argument("--data", required=True, help="what the study was run on")
    parser.add_argument("--frontier", default="all", help="name of the frontier in the study")
    parser.add_argument("--seed", type=int, default=1, help="seed whose models are measured")
    parser.add_argument("--only", nargs="*", help="runs to measure; all by default")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1.0, help="approximate duration of each timing")
    parser.add_argument("--warm", action="store_true", help="fill the compiler's cache and write nothing")
    return parser.parse_args()


def load_pixels(data: str, model: RoundModel, *, count: int) -> Tensor:
    """Held-out images as bytes on the GPU, repeated to fill the batches: (N, C, R, R)."""
    dataset = find_images(data, "val")
    places = [place * len(dataset) // count % len(dataset) for place in range(count)]
    with ThreadPoolExecutor() as pool:
        opened = open_images([dataset.read(place) for place in dict.fromkeys(places)], model.config, pool)
    if opened.errors:
        raise ValueError(f"{data}: {next(iter(opened.errors.values()))}")
    rows = {place: row for row, place in enumerate(dict.fromkeys(places))}
    return torch.from_numpy(opened.pixels)[[rows[place] for place in places]].cuda()


@torch.inference_mode()
def measure_run(
    model: RoundModel, result: RunResult, pixels: Tensor, energy: EnergyCounter, *, batch: int, seconds: float
) -> list[CostPoint]:
    """All points of a run."""
    timed = measure_in_engine(model, result, pixels, energy, batch=batch, seconds=seconds)
    model.cuda().to(torch.bfloat16)  # type: ignore[attr-defined]
    compile_blocks(model)
    inputs = torch.cat([normalise(part, model.config).to(torch.bfloat16) for part in pixels.split(256)])
    rounds = {size: graph_rounds(model, size, inputs[:1]) for size in (batch, 1)}
    rows = []
    for point, in_engine in zip(points_of(result), timed):
        subject = CompiledPoint(rounds, point, inputs)
        timing = measure_point(lambda subject=subject: subject, energy, seconds)
        spent = list(result.rounds.gmacs_paper) if point.round is None else [result.rounds.gmacs_paper[point.round]]
        gmacs = sum(share * cost for share, cost in zip(subject.shares(), spent))
        rows.append(CostPoint(run=result.run, point=point.name, gmacs_paper=gmacs, **timing, **in_engine))
    return rows


def graph_rounds(model: RoundModel, batch: int, image: Tensor) -> dict[int, GraphedRound]:
    """Every round for batches of this size."""
    rounds: dict[int, GraphedRound] = {}
    for s in range(len(model.config.rounds)):
        previous = rounds[s - 1].tokens if s and model.config.routable else None
        rounds[s] = GraphedRound(model, s, batch, previous, image)
    return rounds


def measure_point(make: Callable[[], Any], energy: EnergyCounter, seconds: float) -> dict[str, float | None]:
    """Throughput, latency and energy of a subject."""
    measurement = Measurement(make, device="cuda", threads=None, seconds=seconds)
    throughput = measurement.throughput()
    joules = energy.per_image(measurement.subject, 2 * seconds)
    latency = 1000 / measurement.latency()["images_per_s"]
    return {
        "images_per_s": throughput["images_per_s"],
        "spread": throughput["spread"],
        "latency_ms": latency,
        "joules": joules,
    }


def measure_in_engine(
    model: RoundModel, result: RunResult, pixels: Tensor, energy: EnergyCounter, *, batch: int, seconds: float
) -> Sequence[dict[str, float | None]]:
    """Each point in the engine; empty for kinds of model that it does not run."""
    points = points_of(result)
    if model.config.kind != "progresvit":
        return [{} for _ in points]
    rows = []
    for point in points:
        subject = EnginePoint(model, point, pixels, batch)
        timing = measure_point(lambda subject=subject: subject, energy, seconds)
        rows.append({f"engine_{key}": value for key, value in timing.items()})
    return rows


def open_study(results: Path, frontier: str) -> Study:
    """The study of a results folder, which has this frontier."""
    if not (results / STUDY_FILE).is_file():
        raise SystemExit(f"error: {results} has no {STUDY_FILE}; give a folder as repro/README.md describes it.")
    study = read_study(results / STUDY_FILE)
    if frontier not in study.frontiers:
        raise SystemExit(f"error: the study has no frontier {frontier!r}, {did_you_mean(frontier, study.frontiers)}")
    return study


def earlier_points(
    path: Path, *, device: str, seed: int, precision: str, batch: int, runtime: str
) -> tuple[list[CostPoint], float]:
    """The measured points and their seconds; refused if they were measured under other conditions."""
    earlier = read_all(path.parent).get(path.stem)
    if earlier is None:
        return [], 0.0
    assert isinstance(earlier, CostResult)
    machine = earlier.machine
    then = (machine.device, machine.torch, earlier.seed, earlier.precision, earlier.batch, earlier.runtime)
    now = (device, torch.__version__, seed, precision, batch, runtime)
    if then != now:
        raise SystemExit(
            f"error: {path} holds costs of other conditions ({', '.join(map(str, then))}) than these "
            f"({', '.join(map(str, now))}); move it away to measure anew."
        )
    return list(earlier.points), earlier.seconds


def write_costs(
    path: Path,
    points: Sequence[CostPoint],
    result: RunResult,
    *,
    command: str,
    seconds: float,
    device: str,
    seed: int,
    precision: str,
    batch: int,
    runtime: str,
) -> None:
    """The results file of these points; ``result`` is any run of the frontier."""
    cost = CostResult(
        format=FORMAT,
        kind="cost",
        name=path.stem,
        commands=(command,),
        seed=seed,
        seconds=round(seconds, 1),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        revision=git_revision() or "unknown",
        machine=Machine(
            device=device,
            processes=1,
            jobs=1,
            python=platform.python_version(),
            torch=torch.__version__,
        ),
        data=result.data,
        precision=precision,
        batch=batch,
        runtime=runtime,
        points=tuple(points),
    )
    replace_file(path, to_json(cost))


if __name__ == "__main__":
    main()
