"""The jobs of callers: calls and streams, the threads that open images of calls, and portions that are fed together."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from progresvit.data.prefetch import Prefetcher
from progresvit.data.prepare import Prepared
from progresvit.engine.images import ImageOpener, OpenedImages
from progresvit.engine.prediction import Prediction

TOGETHER = 64
"""The most images of calls that a GPU crops together: in little more time than one image."""

Chunk = tuple[list[int], list[Prediction]]
"""Positions of images in their job, and their predictions."""


class Job:
    """The images of one caller. Only the thread of the engine changes it, except where noted."""

    threshold = math.nan
    """Threshold of the images; NaN uses the threshold of the engine."""

    def __init__(self, wait: float) -> None:
        self.wait = wait
        """Seconds that images may wait until a batch is full; 0 for not at all, infinity for as long as it takes."""
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
        return time.monotonic() + self.wait if self.wait else -math.inf


class Call(Job):
    """A call that wants all predictions at once."""

    def __init__(
        self,
        count: int,
        future: Future[list[Prediction]] | None = None,
        *,
        threshold: float | None = None,
        wait: float = 0.0,
    ) -> None:
        super().__init__(wait)
        self.results: list[Prediction | None] = [None] * count
        self.missing, self.future = count, future
        self.pending = count
        """Images for which the engine holds room; only ``Room`` changes it."""
        if threshold is not None:
            self.threshold = threshold


class Stream(Job):
    """Batches whose predictions are wanted as they come."""

    def __init__(self, source: Prefetcher[tuple[OpenedImages, Any]], deadline: float | None) -> None:
        super().__init__(math.inf if deadline is None else deadline)
        self.source = source
        self.entered = 0
        """Images taken from the source."""
        self.returned = 0
        """Images that the consumer has used up; the consumer counts them."""
        self.has_ended = False
        """The source has no more images."""
        self.is_held = False
        """The thread waits for the consumer to use up predictions; the consumer clears it and sends a message."""


@dataclass(slots=True, eq=False)
class Portion:
    """Images of a job that are fed together."""

    job: Job
    positions: NDArray[np.int64]
    """Positions of the images in the job."""
    sent: Any
    side: int
    failed: Chunk = ([], [])
    """The images that could not be opened."""
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
        return cls(job, np.delete(positions, bad) if bad else positions, sent, int(opened.pixels.shape[-1]), failed)


class _Waiting(NamedTuple):
    call: Call
    first: int
    """Position of the first image in the call."""
    images: list[Prepared]


class CallOpener:
    """Opens the images of calls in threads of a pool. If a GPU crops them, the images of several calls are one group.

    Args:
        opener: Opens the images.
        pool: Its threads open images; one of them at a time has the GPU crop a group.
        deliver: Called with a call, the position of its first image, and the opened images.
        fail: Called with a call and the error, if opening fails for another reason than a bad image.
    """

    def __init__(
        self,
        opener: ImageOpener,
        pool: ThreadPoolExecutor,
        deliver: Callable[[Call, int, OpenedImages], None],
        fail: Callable[[Call, BaseException], None],
    ) -> None:
        self.opener, self.pool, self.deliver, self.fail = opener, pool, deliver, fail
        self._waiting: deque[_Waiting] = deque()
        self._lock, self._is_finishing = threading.Lock(), False

    def submit(self, call: Call, first: int, images: Sequence[Any]) -> None:
        """Open these images of a call, in a thread of the pool."""
        self.pool.submit(self._open, call, first, images)

    def _open(self, call: Call, first: int, images: Sequence[Any]) -> None:
        """Open images without using the pool itself: its threads may all be busy with this."""
        if not call.is_wanted:
            return
        try:
            prepared = self.opener.prepare(images)
            if not self.opener.plan.pixels:  # the CPU crops
                self.deliver(call, first, self.opener.finish(prepared))
                return
        except BaseException as error:
            self.fail(call, error)
            return
        with self._lock:
            self._waiting.append(_Waiting(call, first, prepared))
            if self._is_finishing:
                return  # the thread that finishes takes it
            self._is_finishing = True
        while group := self._next_group():
            self._finish(group)

    def _next_group(self) -> list[_Waiting]:
        """The next waiting images, up to a group. If there are none, this thread stops finishing groups."""
        group: list[_Waiting] = []
        with self._lock:
            while self._waiting and sum(len(waiting.images) for waiting in group) < TOGETHER:
                waiting = self._waiting.popleft()
                if waiting.call.is_wanted:
                    group.append(waiting)
            self._is_finishing = bool(group)
        return group

    def _finish(self, group: list[_Waiting]) -> None:
        try:
            opened = self.opener.finish([image for waiting in group for image in waiting.images])
        except BaseException as error:
            if len(group) == 1:
                self.fail(group[0].call, error)
            else:
                for waiting in group:  # the others have nothing to do with it
                    self._finish([waiting])
            return
        start = taken = 0
        for call, first, images in group:
            errors = {
                place: opened.errors[start + place] for place in range(len(images)) if start + place in opened.errors
            }
            good = len(images) - len(errors)
            part = OpenedImages(opened.pixels[taken : taken + good], errors)
            start, taken = start + len(images), taken + good
            try:
                self.deliver(call, first, part)
            except BaseException as error:
                self.fail(call, error)
