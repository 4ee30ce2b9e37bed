"""Throughput, latency and peak memory of the engine, and of the model run round by round without it.

Letters: B images of a batch, N images in all, C channels, R side of the images, s a round from 0.
"""

from __future__ import annotations

import gc
import math
import random
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from progresvit import api
from progresvit.config import PRESETS, ModelConfig
from progresvit.data.dataset import find_unlabelled
from progresvit.data.transforms import normalise
from progresvit.distributed import processor_name
from progresvit.engine.engine import Engine
from progresvit.engine.export.export import export
from progresvit.engine.export.manifest import Manifest, is_export
from progresvit.engine.images import open_images
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from progresvit.model.precision import PRECISIONS
from progresvit.routing import Policy, Setting

HEAD_SCALE = 30.0
"""A new head gives all images nearly the same entropy; scaled, it separates random images."""


@dataclass(slots=True)
class Exit:
    """Where an image exited; the names are those of ``Prediction``."""

    exit_round: int
    entropy: float
    index: int


class EagerRounds:
    """The model as it is: round by round, on the images of a batch that have not exited yet. Images are normalised."""

    def __init__(self, model: ProgResViT, thresholds: Sequence[float]) -> None:
        self.model, self.policy = model, Policy(thresholds=tuple(thresholds))

    def stream(self, batches: Iterable[Tensor], *, deadline: float | None = None) -> list[Exit]:
        """One batch after another; the answers are fetched from the device at the end."""
        rows = torch.cat([self._route(batch) for batch in batches], dim=1).T.tolist()  # (3, N) -> (N, 3)
        return [Exit(int(number), entropy, int(index)) for number, entropy, index in rows]

    def classify(self, images: Tensor) -> list[Exit]:
        return self.stream([images])

    @torch.inference_mode()
    def _route(self, images: Tensor) -> Tensor:
        """(B, C, R, R) -> (3, B): round from 1, entropy, class."""
        exits = torch.zeros(3, len(images), device=images.device)
        places = torch.arange(len(images), device=images.device)
        tokens = None
        for s in range(len(self.model.config.rounds)):
            output = self.model.run_round(s, images, previous=tokens)
            decision = self.policy.decide(s, output.logits)
            number = torch.full_like(decision.entropy, s + 1)
            exits[:, places] = torch.stack([number, decision.entropy, output.logits.argmax(dim=-1).float()])
            if s == len(self.policy.thresholds):
                break
            stays = ~decision.exits
            images, tokens, places = images[stays], output.tokens[stays], places[stays]  # (B, ...) -> (b, ...)
            if not len(places):
                break
        return exits


class Routed:
    """The engine on bytes, or with ``eager`` the model as it is on normalised images.

    Args:
        model: A preset (random weights), a model folder, a bundled model, a hub id, an export (not ``eager``), or a
            model itself.
        continuing: Share of the images that continue after each round, if there are no thresholds.
        thresholds: One for all rounds, one for each but the last, or a setting of the model.
        data: A folder or a tar of images; without it, random images are generated.
        count: Number of images; by default a few batches.
        engine: Further options of the engine.
    """

    def __init__(
        self,
        model: str | ProgResViT,
        *,
        eager: bool,
        device: str,
        precision: str,
        batch: int,
        continuing: float,
        thresholds: float | Sequence[float] | Setting | None = None,
        data: str | None = None,
        count: int | None = None,
        **engine: Any,
    ) -> None:
        self.eager, self.batch = eager, batch
        manifest = Manifest.read(Path(model).expanduser()) if isinstance(model, str) and is_export(model) else None
        self._source: ProgResViT | Path
        if manifest is None:
            self.model = self._source = find_model(model) if isinstance(model, str) else model
            self.config = self.model.config
        elif eager:
            raise ValueError(f"{model} is an export, which the engine runs; give the model that it was made from.")
        else:
            self._source, self.config = Path(str(model)).expanduser(), manifest.config
        if isinstance(thresholds, Setting):
            thresholds.check_use(len(self.config.rounds), None)
            thresholds.check_weights(weights_hash(self.model) if manifest is None else manifest.weights)
            thresholds = thresholds.threshold
        self.options = {"device": device, "precision": precision, "batch": batch, **engine}
        self.inputs = load_images(data, self.config, device=device, batch=batch, count=count)
        if eager:
            dtype = PRECISIONS[precision] or torch.float32
            self.model.to(device, dtype)
            self.inputs = torch.cat([normalise(part, self.config).to(dtype) for part in self.inputs.split(256)])
        self.images, self.exits = len(self.inputs), list[Any]()
        if manifest is None and engine.get("backend") in ("onnxruntime", "openvino"):
            self._scratch = tempfile.TemporaryDirectory()  # one export for all engines
            self._source = Path(self._scratch.name) / "export"
            export(self.model, self._source, format="onnx")
        if thresholds is None:
            thresholds = self._thresholds_for(continuing)
        self.thresholds = Policy.make(len(self.config.rounds), thresholds).thresholds

    def build(self, thresholds: Sequence[float] | None = None) -> None:
        limits = list(self.thresholds if thresholds is None else thresholds)
        self.runner = EagerRounds(self.model, limits) if self.eager else Engine(self._source, limits, **self.options)

    def run(self, passes: int) -> None:
        self.exits = list(self.runner.stream(self.inputs.split(self.batch) * passes, deadline=None))

    def one(self, number: int) -> None:
        place = number % self.images
        self.exits = [] if number == 0 else self.exits
        self.exits += self.runner.classify(self.inputs[place : place + 1])

    def exit_shares(self) -> list[float]:
        """Share of the images of the last run that exited after each round."""
        numbers = [exit_.exit_round for exit_ in self.exits]
        return [numbers.count(s + 1) / len(numbers) for s in range(len(self.config.rounds))]

    def _thresholds_for(self, continuing: float) -> list[float]:
        found: list[float] = []
        for s in range(len(self.config.rounds) - 1):
            self.build([*found, *[math.inf] * (len(self.config.rounds) - 1 - s)])  # all that reach round s exit there
            self.run(1)
            del self.runner  # its memory does not count
            found.append(split([exit_.entropy for exit_ in self.exits if exit_.exit_round == s + 1], continuing))
        return found


def split(entropies: Sequence[float], continuing: float) -> float:
    """A threshold that this share of the entropies reaches."""
    ordered = sorted(entropies)
    exiting = len(ordered) - round(continuing * len(ordered))
    if exiting == len(ordered):
        return math.inf
    return (ordered[exiting - 1] + ordered[exiting]) / 2 if exiting else 0.0


def find_model(name: str) -> ProgResViT:
    """A model from a folder or the hub, or a preset with random weights, the same each time."""
    if name not in PRESETS:
        return api.as_progresvit(api.load(name), "the engine")
    torch.manual_seed(0)
    model = api.create_model(name).eval()
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(HEAD_SCALE)
    return model


def load_images(data: str | None, config: ModelConfig, *, device: str, batch: int, count: int | None = None) -> Tensor:
    """Bytes (N, C, R, R) on the device, in whole batches: random, or of a folder or tar, repeated to fill the last."""
    on_gpu = device.startswith("cuda")
    count = count or (min(max(8 * batch, 256), 8192) if on_gpu else 32 if data is None else 128)
    count = batch * math.ceil(count / batch)
    if data is None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (count, config.in_channels, config.input_side, config.input_side)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    found = find_unlabelled(data)
    chosen = random.Random(0).sample(range(len(found)), min(count, len(found)))
    opened = open_images([found.read(place) for place in chosen], config)
    if not len(opened.pixels):
        raise ValueError(f"{data}: none of {len(chosen)} images can be read; the first: {opened.errors[0]}.")
    places = torch.arange(batch * math.ceil(len(opened.pixels) / batch)) % len(opened.pixels)
    return torch.from_numpy(opened.pixels)[places].to(device)


class Measurement:
    """Builds and times a subject in this process: ``Routed``, or what has the same attributes and methods.

    ``run`` may return before a GPU has finished; ``one`` waits for the answer. Peak memory includes the weights but not
    the images. On a GPU it is the memory of tensors. On a CPU it is the growth of the process: only the first
    measurement of a process is valid, and the search for thresholds is included.
    """

    def __init__(self, make: Callable[[], Any], *, device: str, threads: int | None, seconds: float) -> None:
        self.device, self.seconds, self.on_gpu = device, seconds, device.startswith("cuda")
        if self.on_gpu and (torch.device(device).index or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no device {device} here; use --device cpu.")
        if threads is not None:
            torch.set_num_threads(threads)
        self._before = 0 if self.on_gpu else _peak_resident_bytes()
        self.subject = make()
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self.subject.build()

    def throughput(self) -> dict[str, Any]:
        """Images per second: the median of at least three runs after a warm-up, each a whole number of passes."""
        self.subject.run(1)  # builds kernels, records graphs
        once = self._time(1)
        passes = max(1, round(self.seconds / 5 / once))
        times = [once]
        if passes > 1:
            self.subject.run(passes)  # the remainder at the end may have new batch sizes
            times = []
        while len(times) < 3 or (sum(times) < self.seconds and len(times) < 50):
            times.append(self._time(passes))
            if sum(times) > 4 * self.seconds:
                break
        images, median = passes * self.subject.images, statistics.median(times)
        spread = (max(times) - min(times)) / median
        return {"images": images, "images_per_s": images / median, "repeats": len(times), "spread": spread}

    def latency(self) -> dict[str, Any]:
        """Percentiles of single images, from the input on the device to the answer on the host."""
        for number in range(10):
            self.subject.one(number)
        self._synchronize()
        times: list[float] = []
        while len(times) < 20 or (sum(times) < self.seconds and len(times) < 2000):
            start = time.perf_counter()
            self.subject.one(len(times))
            times.append(time.perf_counter() - start)
        p50, p95, p99 = (1000 * float(value) for value in np.percentile(times, [50, 95, 99]))
        found = {"images": len(times), "images_per_s": len(times) / sum(times), "repeats": len(times)}
        return {**found, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}

    def peak_gib(self) -> float:
        """Until now."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else _peak_resident_bytes()
        images: int = self.subject.inputs.nbytes
        return (peak - self._before - images) / 2**30

    def _time(self, passes: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        self.subject.run(passes)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def hardware(device: str) -> str:
    """The name of the GPU, or of the CPU with the number of torch's threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    if peak is not None:
        return 1024 * int(peak[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS; on Linux a child inherits its parent's
