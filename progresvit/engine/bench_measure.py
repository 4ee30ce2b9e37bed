"""How the benchmark measures: warm-up, then the median of repeated stretches, or percentiles of single calls."""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from progresvit import __version__
from progresvit.distributed import processor_name
from progresvit.engine.bench_case import Case, Row, make_row
from progresvit.engine.bench_subjects import Subject, open_subject

STRETCHES = 5
"""So many stretches share the seconds, where passes are quick."""
FEWEST, MOST = 3, 50
"""Stretches."""
FEWEST_CALLS, MOST_CALLS = 20, 2000
WARM_CALLS = 10


def measure(case: Case) -> Row:
    """The row of a case, measured in this process."""
    if case.on_gpu and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; use --device cpu.")
    if case.threads is not None:
        torch.set_num_threads(case.threads)
    try:
        memory = Memory(case)
        subject = open_subject(case)
        memory.begin(subject)
        subject.build()
        found = latency(subject, case) if case.measure == "latency" else throughput(subject, case)
        found.update(subject.facts(), peak_gib=memory.peak_gib())
        if case.measure == "latency":
            found["top1"] = None  # of as many images as there was time for
        return make_row(
            case,
            **found,
            tflops=tflops(found["gmacs"], found["images_per_s"]),
            hardware=hardware(case.device),
            torch=torch.__version__,
            version=__version__,
        )
    finally:
        subject = None  # type: ignore[assignment]
        free()


def tflops(gmacs: float, images_per_s: float) -> float:
    """A multiply and an add for each MAC, 10^12 a second."""
    return 2 * gmacs * images_per_s / 1000


def throughput(subject: Subject, case: Case) -> dict[str, Any]:
    """Images a second: whole passes over the subject's pictures, with nobody waiting between batches."""
    subject.run(1)  # builds kernels, records graphs
    once = _timed(subject, 1, case)
    passes = max(1, round(case.seconds / STRETCHES / once))
    times = [once]
    if passes > 1:
        subject.run(passes)  # what is left over at its end may come in new sizes
        times = []
    while len(times) < FEWEST or (sum(times) < case.seconds and len(times) < MOST):
        times.append(_timed(subject, passes, case))
        if sum(times) > 4 * case.seconds:
            break
    images, median = passes * subject.images, statistics.median(times)
    found = {"images": images, "images_per_s": images / median, "milliseconds": 1000 * case.batch * median / images}
    return {**found, "repeats": len(times), "spread": (max(times) - min(times)) / median}


def latency(subject: Subject, case: Case) -> dict[str, Any]:
    """One image after the other, each from its bytes on the device to its answer on the host."""
    for number in range(WARM_CALLS):
        subject.one(number)
    _synchronise(case)
    times: list[float] = []
    while len(times) < FEWEST_CALLS or (sum(times) < case.seconds and len(times) < MOST_CALLS):
        start = time.perf_counter()
        subject.one(len(times))
        times.append(time.perf_counter() - start)
    p50, p95, p99 = (1000 * float(value) for value in np.percentile(times, [50, 95, 99]))
    rate = len(times) / sum(times)
    found = {"images": len(times), "images_per_s": rate, "milliseconds": 1000 / rate, "repeats": len(times)}
    return {**found, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}


class Memory:
    """Peak memory, weights included, without the pictures that wait to be benchmarked.

    On a GPU what tensors occupy from ``begin`` on. On a CPU by how much the process grew since it is here: its peak
    cannot be reset, so that tells something in fresh processes alone, and finding thresholds counts as well.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.without = 0 if case.on_gpu else _largest_resident_bytes()

    def begin(self, subject: Subject) -> None:
        self.without += subject.waiting_bytes
        free()
        if self.case.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.case.device)

    def peak_gib(self) -> float | None:
        if not self.case.on_gpu and not self.case.memory:
            return None
        peak = torch.cuda.max_memory_allocated(self.case.device) if self.case.on_gpu else _largest_resident_bytes()
        return (peak - self.without) / 2**30


def hardware(device: str) -> str:
    """The name of the GPU, or of the CPU and how many threads torch has on it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def free() -> None:
    """Nothing of the last measurement may help or hinder the next."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _timed(subject: Subject, passes: int, case: Case) -> float:
    _synchronise(case)
    start = time.perf_counter()
    subject.run(passes)
    _synchronise(case)
    return time.perf_counter() - start


def _synchronise(case: Case) -> None:
    if case.on_gpu:
        torch.cuda.synchronize(case.device)


def _largest_resident_bytes() -> int:
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else 1024 * found
