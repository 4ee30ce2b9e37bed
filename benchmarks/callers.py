"""Many callers of one engine: throughput, right answers, memory, latency and cancellation.

    python benchmarks/callers.py --device cuda --seconds 60

64 threads classify random images, which lie on the device, in calls of 64; the rate is compared with the rate of one
stream of the same images. Answers are compared with the answers of a single caller; images for which rounding could
change the answer are left out. In the end, callers cancel half of their calls at random times, and images of cancelled
calls that start their second round afterwards are counted. Letters: N images in all, C channels, R side of the images.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from typing import Any

import torch
from torch import Tensor

from progresvit import Engine
from progresvit.engine.batcher import Batcher
from progresvit.engine.prediction import Prediction
from progresvit.engine.speed import find_model
from progresvit.model import ProgResViT

UNCLEAR = 0.2
"""This share of the images, those with entropies next to the threshold, is left out."""
CLASS_MARGIN = 0.02
"""So are images whose two most probable classes are this close."""
Answer = tuple[int, int]
"""Class and round."""


def answer(prediction: Prediction) -> Answer:
    """What must not depend on other callers."""
    return prediction.index, prediction.exit_round


def clear_images(
    model: ProgResViT, count: int, continuing: float, seed: int, options: dict[str, Any]
) -> tuple[Tensor, float]:
    """Random images, (N, C, R, R) on the device, and the threshold with which about this share continues."""
    generator = torch.Generator().manual_seed(seed)
    first = Engine(model, math.inf, top_k=2, **options)  # all images exit after the first round
    last = Engine(model, 0.0, top_k=2, **options)
    channels, side = first.config.in_channels, first.config.input_side
    coarse = torch.randint(0, 256, (count, channels, 8, 8), generator=generator).float()
    images = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")  # (N, C, 8, 8) -> (N, C, R, R)
    images = (images + 20 * torch.randn(images.shape, generator=generator)).clamp(0, 255).to(torch.uint8)
    images = images.to(options["device"])
    early, late = first.classify(images), last.classify(images)
    entropy = torch.tensor([prediction.entropy for prediction in early], dtype=torch.double)
    quantiles = [(1 - UNCLEAR) * (1 - continuing), (1 - UNCLEAR) * (1 - continuing) + UNCLEAR]
    low, high = entropy.quantile(torch.tensor(quantiles, dtype=torch.double)).tolist()
    margins = [
        min(prediction.top[0].probability - prediction.top[1].probability for prediction in pair)
        for pair in zip(early, late)
    ]
    is_clear = (entropy.lt(low) | entropy.gt(high)) & torch.tensor(margins).gt(CLASS_MARGIN)
    if is_clear.sum() < count // 4:
        raise SystemExit("most images are near a decision; use other images or another model.")
    return images[is_clear.to(images.device)], (low + high) / 2


def stream_rate(engine: Engine, images: Tensor, seconds: float) -> float:
    """Images a second of one stream."""
    batches = images.split(engine.batch)
    begun, done = time.perf_counter(), 0

    def endless() -> Any:
        while time.perf_counter() - begun < seconds:
            yield from batches

    for _ in engine.stream(endless(), deadline=None):
        done += 1
    return done / (time.perf_counter() - begun)


class Load:
    """Threads that repeat ``call(generator)``, which returns the numbers of its images and of wrong answers."""

    def __init__(self, threads: int, call: Callable[[random.Random], tuple[int, int]]) -> None:
        self.call, self.stop, self.start = call, threading.Event(), threading.Barrier(threads + 1)
        self.images, self.wrong, self.errors = [0] * threads, [0] * threads, list[BaseException]()
        self.threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(threads)]

    def _work(self, number: int) -> None:
        generator = random.Random(number)
        self.start.wait()
        try:
            while not self.stop.is_set():
                images, wrong = self.call(generator)
                self.images[number] += images
                self.wrong[number] += wrong
        except BaseException as error:
            self.errors.append(error)

    def run(self, seconds: float, probe: Callable[[], Any] = lambda: None) -> tuple[float, Any, Any]:
        """Images a second, and what the probe found after a quarter of the time and at the end."""
        for thread in self.threads:
            thread.start()
        self.start.wait()
        begun = time.perf_counter()
        time.sleep(seconds / 4)
        early = probe()
        time.sleep(seconds * 3 / 4)
        done, took = sum(self.images), time.perf_counter() - begun
        late = probe()
        self.stop.set()
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return done / took, early, late


def memory(device: str) -> dict[str, int]:
    """Bytes in use, of the process and on the GPU."""
    gc.collect()
    with open("/proc/self/statm") as file:
        found = {"host": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    if device.startswith("cuda"):
        found |= {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    return found


def latencies(engine: Engine, images: Tensor, count: int) -> list[float]:
    """Milliseconds of calls with one image on an idle engine."""
    found = []
    for number in range(count):
        one = images[number % len(images)][None]
        if one.is_cuda:
            torch.cuda.synchronize(one.device)
        begun = time.perf_counter()
        engine.classify(one)
        found.append(1000 * (time.perf_counter() - begun))
    return found


class Watch:
    """Notes when images were cancelled, and counts those that start a later round after that."""

    def __init__(self, engine: Engine) -> None:
        self.late, self.cancelled = 0, dict[int, float]()
        self._engine, self._run, self._cancel = engine, engine.rounds.run, Batcher.cancel

    def __enter__(self) -> Watch:
        def cancel(batcher: Batcher, first: int, end: int) -> None:
            self._cancel(batcher, first, end)
            self.cancelled.update(dict.fromkeys(range(first, end), time.monotonic()))

        def run(s: int, buffer: Any, first: int, count: int) -> Any:
            now = time.monotonic()
            if s:
                numbers = buffer.numbers[first : first + count].tolist()
                self.late += sum(self.cancelled.get(number, now) < now for number in numbers)
            return self._run(s, buffer, first, count)

        Batcher.cancel, self._engine.rounds.run = cancel, run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Batcher.cancel, self._engine.rounds.run = self._cancel, self._run  # type: ignore[method-assign]


def cancel_some(
    engine: Engine, images: Tensor, known: list[Answer], per_call: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Half of the callers leave at a random time, up to twice the usual time of a call."""
    usual = options.threads * per_call / options.rate
    calls, left = [0], [0]

    def call(generator: random.Random) -> tuple[int, int]:
        first = generator.randrange(len(images) - per_call)
        future: Future[list[Prediction]] = engine.submit(images[first : first + per_call])
        calls[0] += 1
        if generator.random() < 0.5:
            wait_for_all([future], generator.random() * 2 * usual)
            if future.cancel():
                left[0] += 1
                return 0, 0
        found = [answer(prediction) for prediction in future.result()]
        return per_call, sum(map(lambda one, other: one != other, found, known[first : first + per_call]))

    before = engine.counts
    with Watch(engine) as watch:
        load = Load(options.threads, call)
        load.run(options.seconds / 4)
    after = engine.counts
    return {
        "calls": calls[0],
        "cancelled_calls": left[0],
        "cancelled_images": after.cancelled - before.cancelled,
        "cancelled_images_that_started_round_2": watch.late,
        "images_by_round": [late - early for late, early in zip(after.images, before.images)],
        "wrong": sum(load.wrong),
    }


def main() -> None:
    """Measure everything and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nettewoof-tiny", help="a model, or a preset with random weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", help="bf16 on a GPU, else fp32")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seconds", type=float, default=60, help="of the calls; the other parts are shorter")
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--per-call", type=int, default=64, help="images")
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--continuing", type=float, default=0.4, help="share of the images")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    precision = options.precision or ("bf16" if options.device.startswith("cuda") else "fp32")
    made = {"device": options.device, "precision": precision, "batch": options.batch}
    model = find_model(options.model)
    images, threshold = clear_images(model, options.images, options.continuing, options.seed, made)
    with Engine(model, threshold, **made) as engine:
        engine.warm_up()
        known = [answer(prediction) for prediction in engine.classify(images)]

        def call(generator: random.Random) -> tuple[int, int]:
            first = generator.randrange(len(images) - options.per_call)
            found = [answer(prediction) for prediction in engine.classify(images[first : first + options.per_call])]
            return len(found), sum(map(lambda one, other: one != other, found, known[first:]))

        latency = latencies(engine, images, 20 if options.device == "cpu" else 1000)
        stream_rate(engine, images, options.seconds / 20)
        one = stream_rate(engine, images, options.seconds / 4)
        before = engine.counts
        load = Load(options.threads, call)
        options.rate, early, late = load.run(options.seconds, lambda: memory(options.device))
        after = engine.counts
        again = stream_rate(engine, images, options.seconds / 4)
        sizes = [
            (late_images - early_images) / max(1, late_batches - early_batches)
            for early_images, late_images, early_batches, late_batches in zip(
                before.images, after.images, before.batches, after.batches
            )
        ]
        report = {
            "images": len(images),
            "continuing": sum(round_ > 1 for _, round_ in known) / len(known),
            "stream_images_per_second": [one, again],
            "calls_images_per_second": options.rate,
            "calls_percent_of_stream": 100 * options.rate / statistics.mean([one, again]),
            "average_batch_by_round": sizes,
            "wrong": sum(load.wrong),
            "growth_bytes": {name: late[name] - early[name] for name in early},
            "latency_ms": {"p50": statistics.median(latency), "p95": statistics.quantiles(latency, n=20)[-1]},
            "cancelling": cancel_some(engine, images, known, options.per_call, options),
            "pending_at_the_end": engine.counts.pending,
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
