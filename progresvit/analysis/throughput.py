"""Accuracy against images per second: the engine at several thresholds, on one device.

The engine runs the images of a sample in a stream, so an image costs the time of the rounds that it runs. Speed,
accuracy and exits of a point are of the same predictions; a repeated image counts once for accuracy. Decoding is not
included: the images are on the device.

Letters: N images, C channels, H side of the images, S rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from progresvit import api
from progresvit.analysis.model_checks import check_classifier
from progresvit.analysis.sample import Sample
from progresvit.engine.measurement import Measurement, describe_ratio, hardware
from progresvit.engine.speed import TimedModel, threshold_between
from progresvit.io.resumable import Progress
from progresvit.metrics.interval import Interval, share_interval
from progresvit.model.interface import RoundModel
from progresvit.plots import BELOW, COLOURS, new_figure, percent_ends
from progresvit.routing.decide import Threshold, as_thresholds
from progresvit.table import Column, Table, interval_cells, interval_columns, percent, rough_percent
from progresvit.table import threshold as show_threshold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "throughput"
CONTINUING = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of the images that continue after round 1, if no thresholds are given."""
SECONDS = {"cpu": 8.0, "cuda": 2.0}
"""Approximate duration of the timed runs of a point, by the kind of device."""
WARM_UP = 8
"""Images that run before the timing on a CPU."""
LEAST_ON_GPU = 4096
"""Images of a pass on a GPU, for which a smaller sample is repeated: some full batches."""


@dataclass(frozen=True, kw_only=True)
class SpeedPoint:
    """A threshold and what the engine does with it."""

    threshold: tuple[float, ...]
    """One for each round but the last."""
    accuracy: Interval
    exit_shares: tuple[float, ...]
    """Share of the images that exits after each round."""
    images_per_s: float
    """Median of the timed runs."""
    spread: float
    """Difference of the slowest and the fastest run, as a share of the median."""

    @property
    def continuing(self) -> float:
        """Share of the images that run more than round 1."""
        return sum(self.exit_shares[1:])


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The points, the highest share that continues first, and where they were measured."""

    points: tuple[SpeedPoint, ...]
    images: int
    hardware: str
    """Name of the GPU, or of the CPU with the number of threads."""
    precision: str
    batch: int
    """Largest batch of the engine; less than asked for if memory ran out."""


def throughput(
    model: RoundModel,
    sample: Sample,
    thresholds: Sequence[Threshold] | None = None,
    *,
    device: str | None = None,
    precision: str | None = None,
    batch: int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Throughput:
    """Time the engine on the images at each threshold.

    Args:
        model: A ProgResViT with classes.
        sample: The images.
        thresholds: Each is one number for all rounds, or one for each round but the last. By default all, 75, 50, 25
            and 0 % of the images continue after round 1.
        device: ``cpu`` or ``cuda``; by default the device of the model.
        precision: As the engine takes it; by default bf16 on a GPU, else fp32.
        batch: Largest batch; by default the engine's, 512 on a GPU, else 64.
        seconds: Approximate duration of the timed runs of a point; by default 2 on a GPU, else 8. All images run at
            least twice.
        progress: Called after each point.
    """
    network = api.as_progresvit(model, NAME)
    check_classifier(network, NAME)
    rounds = len(network.config.rounds)
    if thresholds is not None and (rounds == 1 or not thresholds):
        which = "no image of a model of one round exits early" if rounds == 1 else "there are none"
        raise ValueError(f"{which}, so leave out the thresholds of {NAME}.")
    limits = [] if thresholds is None else [tuple(as_thresholds([limit], rounds)[0].tolist()) for limit in thresholds]
    device = device or str(next(network.parameters()).device)
    on_gpu = device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; use device='cpu'.")
    precision = precision or ("bf16" if on_gpu else "fp32")
    copies = math.ceil(LEAST_ON_GPU / len(sample)) if on_gpu else 1
    inputs = sample.pixels.to(device).repeat(copies, 1, 1, 1)  # (N, C, H, H) -> (copies * N, C, H, H)
    none_continues = [math.inf] * (rounds - 1)
    engine = TimedModel(
        network, eager=False, device=device, precision=precision, batch=batch, thresholds=none_continues, inputs=inputs
    )
    limits, points = limits or _thresholds(engine, len(sample)), []
    for done, limit in enumerate(limits, start=1):
        length = SECONDS["cuda" if on_gpu else "cpu"] if seconds is None else seconds
        points.append(_measure(engine, limit, sample, length))
        if progress:
            progress(done, len(limits))
    return Throughput(
        points=tuple(sorted(points, key=lambda point: -point.continuing)),
        images=len(sample),
        hardware=hardware(device),
        precision=precision,
        batch=engine.runner.batch,
    )


def _thresholds(engine: TimedModel, images: int) -> list[tuple[float, ...]]:
    """Thresholds by the entropies that round 1 has in this engine; a single, empty one for a model of one round."""
    rounds = len(engine.config.rounds)
    if rounds == 1:
        return [()]
    engine.build()
    engine.run(1)
    entropies = [prediction.entropy for prediction in engine.exits[:images]]
    return list(dict.fromkeys((threshold_between(entropies, share),) * (rounds - 1) for share in CONTINUING))


def _measure(engine: TimedModel, limit: tuple[float, ...], sample: Sample, seconds: float) -> SpeedPoint:
    """Speed, accuracy and exits at a threshold; every image of the sample counts once."""
    engine.thresholds, device = limit, engine.inputs.device
    measurement = Measurement(lambda: engine, device=str(device), threads=None, seconds=seconds)
    # on a CPU there are no kernels to build, and a pass over all images takes long
    warm_up = None if device.type == "cuda" else partial(engine.runner.classify, engine.inputs[:WARM_UP])
    timing = measurement.throughput(warm_up)
    predictions, labels = engine.exits[: len(sample)], sample.labels.tolist()
    numbers = [prediction.exit_round for prediction in predictions]
    correct = sum(prediction.index == label for prediction, label in zip(predictions, labels))
    return SpeedPoint(
        threshold=limit,
        accuracy=share_interval(correct, len(labels)),
        exit_shares=tuple(numbers.count(s + 1) / len(labels) for s in range(len(engine.config.rounds))),
        images_per_s=timing["images_per_s"],
        spread=timing["spread"],
    )


def throughput_table(result: Throughput) -> Table:
    """A row for each threshold."""
    columns = [
        Column("continuing", "continuing (%)", rough_percent),
        Column("threshold", "threshold (nats)", show_threshold),
        Column("images", "images"),
        *interval_columns("accuracy", "top-1 (%)", percent),
        Column("images_per_s", "images/s", lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}"),
        Column("spread", "spread (%)", rough_percent),
    ]
    rows = [
        {
            "continuing": point.continuing,
            "threshold": _shortest(point.threshold),
            "images": result.images,
            **interval_cells("accuracy", point.accuracy),
            "images_per_s": point.images_per_s,
            "spread": point.spread,
        }
        for point in result.points
    ]
    return Table(f"Accuracy and throughput on {result.hardware}; {_how(result)}", columns, rows)


def throughput_figure(result: Throughput) -> Figure:
    """Accuracy against images per second on a logarithmic axis; labels give the share that continues."""
    from matplotlib.ticker import LogLocator, NullFormatter

    conditions = f"{result.hardware}, {_how(result)}"
    figure, axes = new_figure(
        title=_finding(result), conditions=conditions, x="images per second", y="top-1 accuracy (%)"
    )
    speeds = np.array([point.images_per_s for point in result.points])
    accuracy, low, high = percent_ends([point.accuracy for point in result.points])
    axes.errorbar(
        *(speeds, accuracy),
        xerr=[point.images_per_s * point.spread / 2 for point in result.points],
        yerr=[accuracy - low, high - accuracy],
        color=COLOURS[0],
        marker="o",
        capsize=3,
        label="top-1 (95 % interval) and speed (spread)\nlabels: images that continue after round 1",
    )
    for rank, number in enumerate(sorted(range(len(speeds)), key=lambda number: speeds[number])):
        above = rank % 2 == 0  # neighbours at different ends of their bars, so that the labels do not meet
        at, offset = (speeds[number], (high if above else low)[number]), (0, 4 if above else -4)
        share = f"{100 * result.points[number].continuing:.0f} %"
        side = "bottom" if above else "top"
        axes.annotate(share, at, xytext=offset, textcoords="offset points", fontsize=9, ha="center", va=side)
    axes.set_xscale("log")
    axes.margins(x=0.08, y=0.15)  # for the labels
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    figure.legend(fontsize=10, **BELOW)
    return figure


def _finding(result: Throughput) -> str:
    """The speed at which no accuracy is lost on these images, beside the speed of every round for every image."""
    every, *others = result.points
    speed = f"{every.images_per_s:,.0f}"
    if not others:
        return f"{speed} images/s at a top-1 of {100 * every.accuracy.mean:.1f} %"
    equal = [point for point in others if point.accuracy.mean >= every.accuracy.mean]
    fastest = max(equal or others, key=lambda point: point.images_per_s)
    speeds = f"{fastest.images_per_s:,.0f} instead of {speed} images/s"
    if not equal:
        lost = 100 * (every.accuracy.mean - fastest.accuracy.mean)
        return f"{speeds} with {100 * fastest.continuing:.0f} % continuing, at {lost:.1f} points less"
    ratio = describe_ratio(vars(fastest), vars(every)) or "no clear difference"
    return f"{speeds} at equal top-1: {ratio}"


def _how(result: Throughput) -> str:
    return f"{result.precision}, batch {result.batch}, {result.images} images"


def _shortest(thresholds: tuple[float, ...]) -> Threshold | None:
    """One number if all rounds have the same; None without any."""
    if not thresholds:
        return None
    return thresholds[0] if len(set(thresholds)) == 1 else thresholds
