"""The jobs of callers, calls and streams, and the portions of their images that are fed together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
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


class Job:
    """The images of one caller. Only the thread of the engine changes it, except where noted."""

    threshold = math.nan
    """Threshold of the images; NaN uses the threshold of the engine."""

    def __init__(self) -> None:
        self.ready: SimpleQueue[Chunk | None] = SimpleQueue()
        """Predictions of a stream as they come. None follows when the job is done."""
        self.is_wanted = True
        """False when the job is done or its caller has left; any thread may clear it."""
        self.is_done = False
        self.error: BaseException | None = None
        self.fed: list[Portion] = []
        """Portions in the batcher."""

    def due(self) -> float:
        """When images that arrive now must run, even if the batch is not full."""
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
        self.pending = count
        """Images for which the engine holds room; only ``Room`` changes it."""
        if threshold is not None:
            self.threshold = threshold

    def due(self) -> float:
        return time.monotonic() + self.wait if self.wait else -math.inf


class Stream(Job):
    """Batches whose predictions are wanted as they come."""

    def __init__(self, source: Prefetcher[tuple[OpenedImages, Any]], deadline: float | None) -> None:
        super().__init__()
        self.source, self.deadline = source, deadline
        self.entered = 0
        """Images taken from the source."""
        self.returned = 0
        """Images that the consumer has used up; the consumer counts them."""
        self.has_ended = False
        """The source has no more images."""
        self.is_held = False
        """The thread waits for the consumer to use up predictions; the consumer clears it and sends a message."""

    def due(self) -> float:
        return math.inf if self.deadline is None else time.monotonic() + self.deadline


@dataclass(slots=True, eq=False)
class Portion:
    """Images of a job that are fed together, or ``work`` that needs the rounds for itself."""

    job: Job
    positions: NDArray[np.int64]
    """Positions of the images in the job."""
    sent: Any
    side: int
    failed: Chunk = ([], [])
    """The images that could not be opened."""
    work: Callable[[Batcher], None] | None = None
    left: int = 0
    """Images without a prediction."""
    first: int = -1
    """Number of the first image in the batcher; the others follow."""

    @property
    def end(self) -> int:
        return self.first + len(self.positions)

    @classmethod
    def make(cls, job: Job, position: int, opened: OpenedImages, sent: Any) -> Portion:
        """Opened images of a job, from this position on."""
        bad = sorted(opened.errors)
        positions = np.arange(position, position + len(opened.pixels) + len(bad))
        failed = [position + place for place in bad], [Prediction.failed(opened.errors[place]) for place in bad]
        return cls(job, np.delete(positions, bad) if bad else positions, sent, opened.side, failed)
