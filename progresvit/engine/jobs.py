"""What a scheduler works on: calls and streams of callers, and the portions of their images that are fed together."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit.data.prefetch import Prefetcher
from progresvit.engine.batcher import Batcher
from progresvit.engine.images import OpenedImages
from progresvit.engine.prediction import Prediction

Chunk = tuple[list[int], list[Prediction]]
"""Positions of images in their job, and their predictions."""


@dataclass(slots=True, eq=False)
class Portion:
    """Images of a job that are fed together, or ``work`` that needs the rounds for itself."""

    job: Job
    positions: NDArray[np.int64]
    """Positions of the images in the job."""
    sent: Any
    side: int
    work: Callable[[Batcher], None] | None = None
    left: int = 0
    """Images without a prediction."""
    first: int = -1
    """Number of the first image in the batcher; those of the others follow."""

    @property
    def end(self) -> int:
        return self.first + len(self.positions)


class Job:
    """Images of one caller."""

    def __init__(self) -> None:
        self.owner: int | None = None
        """The thread that waits for it; None for a future."""
        self.wakeups: SimpleQueue[None] = SimpleQueue()
        """Wakes that thread, if it does not drive."""
        self.is_open = True
        """Its images are wanted."""
        self.error: BaseException | None = None
        self.fed: list[Portion] = []
        """Portions in the batcher."""
        self.threshold = math.nan
        """Of its images; NaN for that of the policy."""

    @property
    def is_ready(self) -> bool:
        """Whether the caller need not wait."""
        return not self.is_open

    def due(self) -> float:
        """When images that arrive now shall run at the latest."""
        raise NotImplementedError


class Call(Job):
    """A call that wants all predictions at once. Its images may wait for a fuller batch for ``wait`` seconds."""

    def __init__(
        self,
        count: int,
        future: Future[list[Prediction]] | None = None,
        *,
        threshold: float | None = None,
        wait: float = 0.0,
    ) -> None:
        super().__init__()
        self.results: list[Prediction | None] = [None] * count
        self.missing, self.future, self.wait = count, future, wait
        if threshold is not None:
            self.threshold = threshold

    def due(self) -> float:
        return time.monotonic() + self.wait if self.wait else -math.inf


class Stream(Job):
    """Batches whose predictions are wanted as they come. ``returned`` counts those that the consumer has used up."""

    def __init__(self, source: Prefetcher[tuple[OpenedImages, Any]], deadline: float | None) -> None:
        super().__init__()
        self.source, self.deadline = source, deadline
        self.chunks: deque[Chunk] = deque()
        self.entered = self.returned = 0
        self.has_ended = False

    @property
    def is_ready(self) -> bool:
        return bool(self.chunks) or not self.is_open

    def due(self) -> float:
        return math.inf if self.deadline is None else time.monotonic() + self.deadline


def make_portion(job: Job, position: int, opened: OpenedImages, sent: Any) -> tuple[Portion, Chunk]:
    """The images that could be opened, and predictions for the others."""
    failed = sorted(opened.errors)
    positions = np.arange(position, position + len(opened.pixels) + len(failed))
    if failed:
        positions = np.delete(positions, failed)
    predictions = [Prediction.failed(opened.errors[place]) for place in failed]
    return Portion(job, positions, sent, opened.side), ([position + place for place in failed], predictions)


def announce(jobs: Iterable[Job]) -> None:
    """Wake the callers, and resolve the futures."""
    for job in jobs:
        future = job.future if isinstance(job, Call) else None
        if future is None:
            job.wakeups.put(None)
            continue
        assert isinstance(job, Call)
        job.future = None
        with suppress(InvalidStateError):  # it was cancelled just now
            if job.error is not None:
                future.set_exception(job.error)
            else:
                future.set_result(job.results)  # type: ignore[arg-type]  # complete
