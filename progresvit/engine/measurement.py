"""The measuring core: throughput, latency and peak memory of a subject, and a fresh process to measure it in.

A subject has ``inputs`` (a tensor on the device) and ``images`` (their number), and the methods ``build()``,
``run(passes)`` and ``one(number)``, such as ``speed.TimedModel``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from progresvit.distributed import processor_name
from progresvit.io.parse import count_of


class Measurement:
    """Builds and times a subject in this process.

    ``run`` may return before a GPU has finished; ``one`` waits for the answer. Peak memory includes the weights but not
    the images. On a GPU it is the memory of tensors. On a CPU it is the growth of the process: only the first
    measurement of a process is valid, and the search for thresholds is included.
    """

    def __init__(self, make: Callable[[], Any], *, device: str, threads: int | None, seconds: float) -> None:
        self.device, self.seconds, self.on_gpu = device, seconds, device.startswith("cuda")
        if self.on_gpu and (torch.device(device).index or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no device {device} here; use device='cpu'.")
        if threads is not None:
            torch.set_num_threads(threads)
        self._before = 0 if self.on_gpu else _peak_resident_bytes()
        self.subject = make()
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self.subject.build()

    def throughput(self, warm_up: Callable[[], object] | None = None) -> dict[str, Any]:
        """Images per second: the median of several runs, each a whole number of passes over the images.

        There are at least three runs, unless two take more than four times the seconds.

        Args:
            warm_up: Called ahead of the timing; by default one pass, which builds kernels and records graphs.
        """
        if warm_up is None:
            self.subject.run(1)
        else:
            warm_up()
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
        rate = {"images": len(times), "images_per_s": len(times) / sum(times), "repeats": len(times)}
        return {**rate, "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}

    def peak_gib(self) -> float:
        """Peak memory until now."""
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


def describe_ratio(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str | None:
    """How many times as fast, by two results of ``throughput``; None if their spreads do not tell which is faster."""
    (low, high), (their_low, their_high) = (
        [timing["images_per_s"] * (1 + sign * timing["spread"] / 2) for sign in (-1, 1)] for timing in (ours, theirs)
    )
    if low <= their_high and their_low <= high:
        return None
    ratio = ours["images_per_s"] / theirs["images_per_s"]
    return f"{ratio:.2f} × the speed ({low / their_high:.2f} to {high / their_low:.2f})"


def rates_in_turns(measurements: Sequence[Measurement], *, turns: int, seconds: float) -> NDArray[np.float64]:
    """Images per second of subjects that take turns, so that a slow moment of the machine meets all of them.

    A subject runs for about ``seconds`` in a turn, in whole passes over its images. Returns a row for each turn and a
    column for each subject.
    """
    passes = []
    for measurement in measurements:
        measurement.subject.run(1)  # builds kernels and records graphs
        passes.append(max(1, round(seconds / measurement._time(1))))
    pairs = list(zip(measurements, passes))
    return np.array([[count * own.subject.images / own._time(count) for own, count in pairs] for _ in range(turns)])


def in_fresh_process(function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Any:
    """What a function returns in a process of its own, so that measurements share neither kernels nor memory.

    Running out of memory is a MemoryError, whether the system ends the process or the GPU refuses. A process that
    takes longer than ``timeout`` seconds is ended with a TimeoutError. Libraries print to standard error there.
    """
    others = set(multiprocessing.active_children())
    patience = 20.0  # after torch.compile a process may not end by itself
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.dup2, (2, 1)) as pool:
        try:
            return pool.submit(function, *arguments).result(timeout)
        except TimeoutError:
            patience = 0.0
            raise
        except BrokenProcessPool as error:
            raise MemoryError("the process ended, probably out of memory") from error
        except torch.OutOfMemoryError as error:
            raise MemoryError("the GPU ran out of memory") from error
        finally:
            pool.shutdown(wait=False)
            for process in set(multiprocessing.active_children()) - others:
                process.join(patience)
                process.kill()


def hardware(device: str) -> str:
    """The name of the GPU, or of the CPU with the number of torch's threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {count_of(torch.get_num_threads(), 'thread')}"


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status")
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    if peak is not None:
        return 1024 * int(peak[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS; on Linux a child inherits its parent's
