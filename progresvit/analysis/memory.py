"""Peak memory of a GPU against the batch size: the engine, and the model run eagerly round by round.

No image exits early, so every measurement is of the complete path from the first round to the last. It includes the
weights, the engine's buffers and the workspaces of the matrix products, but not the images, which are on the GPU
before. Each is made in a process of its own: workspaces stay in a process and would be counted once only.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from progresvit.engine.batcher import MemoryWarning
from progresvit.engine.measurement import Measurement, hardware, in_fresh_process
from progresvit.engine.speed import TimedModel
from progresvit.io.resumable import Progress
from progresvit.plots import BELOW, MARKERS, curve_style, new_figure
from progresvit.table import Column, Table, decimals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = (1, 8, 32, 128, 512)
FULL_BATCHES = 4
"""Batches of a measurement: the first ones fill the engine's buffers."""

Runner = Literal["engine", "eager"]
WAYS: tuple[Runner, ...] = get_args(Runner)
"""The engine, and the model run round by round without it."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """One measurement."""

    way: Runner
    batch: int
    peak_gib: float | None
    """None if memory ran out."""
    images: int
    """Number of images that ran."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The measurements of a model, and where they were made."""

    points: tuple[PeakMemory, ...]
    """Measurements of the engine, then of the eager model, in the order of the batches."""
    hardware: str
    precision: str


def memory(
    model: str | os.PathLike[str],
    batches: Sequence[int] = BATCHES,
    *,
    device: str = "cuda",
    precision: str = "bf16",
    progress: Progress | None = None,
) -> Memory:
    """Run a ProgResViT on random images in batches of each size, and read the peak memory of tensors.

    It starts processes, so a script calls it below ``if __name__ == "__main__":``.

    Args:
        model: Folder, bundled name or hub id of a model, or a preset, which gets random weights.
        batches: Images per batch.
        device: A GPU.
        precision: As the engine takes it; for fp8 the eager model runs in bf16.
        progress: Called after each measurement.
    """
    _check(batches, device)
    pairs = [(way, batch) for way in WAYS for batch in batches]
    points = []
    for done, (way, batch) in enumerate(pairs, start=1):
        try:
            peak = in_fresh_process(peak_gib, os.fspath(model), way, batch, device, precision)
        except MemoryError as error:
            raise ValueError(
                f"the process that measures {way} at batch {batch} ended; use smaller batches, and in a script call "
                "memory below if __name__ == '__main__'."
            ) from error
        images = 0 if peak is None else FULL_BATCHES * batch
        points.append(PeakMemory(way=way, batch=batch, peak_gib=peak, images=images))
        if progress:
            progress(done, len(pairs))
    return Memory(points=tuple(points), hardware=hardware(device), precision=precision)


def memory_table(result: Memory) -> Table:
    """A row for each way and batch size; the peak is empty if memory ran out."""
    columns = [
        Column("way", "model", left=True),
        Column("batch", "batch"),
        Column("peak_gib", "peak (GiB)", decimals),
        Column("images", "images"),
    ]
    rows = [
        {"way": point.way, "batch": point.batch, "peak_gib": point.peak_gib, "images": point.images}
        for point in result.points
    ]
    return Table(f"Peak memory, every round, on {result.hardware}, {result.precision}", columns, rows)


def memory_figure(result: Memory) -> Figure:
    """Peak memory against the batch size, both on logarithmic axes."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    conditions = f"{result.hardware}, {result.precision}"
    figure, axes = new_figure(
        title=_finding(result), conditions=conditions, x="images per batch", y="peak memory (GiB)"
    )
    for number, way in enumerate(WAYS):
        points = [point for point in result.points if point.way == way]
        measured = sorted((point.batch, point.peak_gib) for point in points if point.peak_gib is not None)
        too_large = [f"{point.batch}" for point in points if point.peak_gib is None]
        label = "engine" if way == "engine" else "eager, round by round"
        label += f" (out of memory: {', '.join(too_large)})" if too_large else ""
        axes.plot(*zip(*measured) if measured else ([], []), marker=MARKERS[number], label=label, **curve_style(number))
    batches = sorted({point.batch for point in result.points})
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0] / 1.3, batches[-1] * 1.3)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    if any(point.peak_gib is not None for point in result.points):  # a logarithmic axis needs a point
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(ncols=2, fontsize=10, **BELOW)
    return figure


def _finding(result: Memory) -> str:
    """The memory of both ways at the smallest and the largest batch that both ran."""
    peaks = {(point.way, point.batch): point.peak_gib for point in result.points if point.peak_gib is not None}
    common = sorted(batch for way, batch in peaks if way == WAYS[0] and (WAYS[1], batch) in peaks)
    if not common:
        return "Peak memory: no batch fits"
    engine, eager = (f"{peaks[way, common[0]]:.2f}–{peaks[way, common[-1]]:.2f}\u00a0GiB" for way in WAYS)
    return f"Peak memory at batch {common[0]}–{common[-1]}: engine {engine}, round by round {eager}"


def _check(batches: Sequence[int], device: str) -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            "memory measures the memory of a GPU, and there is none here; run it on a machine with a CUDA device."
        )
    if not device.startswith("cuda"):
        raise ValueError(f"memory measures the memory of a GPU, not of {device!r}; give a CUDA device.")
    if not batches or min(batches) < 1:
        raise ValueError(f"batches are sizes of one image or more, such as {BATCHES}, not {tuple(batches)}.")


def peak_gib(model: str, way: Runner, batch: int, device: str, precision: str) -> float | None:
    """One measurement in this process; None if memory ran out. Only the first one of a process is valid."""
    eager = way == "eager"

    def make() -> TimedModel:
        return TimedModel(
            model,
            eager=eager,
            device=device,
            precision="bf16" if eager and precision == "fp8" else precision,
            batch=batch,
            continuing=1.0,
            thresholds=0.0,  # no image exits early
            count=FULL_BATCHES * batch,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryWarning)  # the engine continues with smaller batches
        try:
            measurement = Measurement(make, device=device, threads=None, seconds=0)
            measurement.subject.run(1)
            torch.cuda.synchronize(device)
        except (torch.OutOfMemoryError, MemoryError):  # the second is the engine's, if no batch is small enough
            return None
    shrunk = not eager and measurement.subject.runner.batch < batch
    return None if shrunk else measurement.peak_gib()
