"""The worker: the one thread of an engine that uses batcher and backend.

It takes messages from its inbox: portions of images, streams, cancellations. It feeds the images to the batcher, runs
rounds, and gives predictions to the jobs. Errors of the rounds reach the callers. It also resolves futures, so their
callbacks run in this thread.

There is one exception. While the thread has nothing to do, a caller that waits for its images computes them itself
(:meth:`Worker.run_alone`): on an H200 a call with one image takes 0.87 to 0.92 ms then, and 0.93 to 1.15 ms if it wakes
the thread and is woken by it. A lock, the turn, says which of them uses batcher and backend.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import warnings
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit.data.prefetch import Prefetcher, Raised
from progresvit.engine.batcher import (
    SMALLER_BATCHES,
    ApplyThresholds,
    Batcher,
    MakePredictions,
    MemoryWarning,
    Observer,
    Totals,
)
from progresvit.engine.buffers import HELD_BATCHES, RoundBackend
from progresvit.engine.jobs import Call, Chunk, Job, Portion, Stream
from progresvit.engine.prediction import Prediction

JOIN = 10.0
"""Seconds to wait for the thread at the end; a round may keep it for longer."""

_running: weakref.WeakKeyDictionary[threading.Thread, weakref.ref[Worker]] = weakref.WeakKeyDictionary()
"""Threads of engines, until they are gone."""

Message = tuple[Callable[..., object], tuple[Any, ...]] | None
"""A method of the worker and its arguments. None ends the thread when nothing is left to do."""


class Worker:
    """Runs jobs in its thread, which calls :meth:`run`.

    Other threads call only :meth:`post`, :meth:`wake`, :meth:`cancel` and :meth:`run_alone`.

    Args:
        release: Called with calls that are done or whose callers have left, some of them twice.
        rounds: The backend.
        make_predictions, apply_thresholds: As for ``Batcher``.
        count: Number of rounds.
        batch: The largest batch.
    """

    def __init__(
        self,
        release: Callable[[Call], None],
        *,
        rounds: RoundBackend,
        make_predictions: MakePredictions,
        apply_thresholds: ApplyThresholds,
        count: int,
        batch: int,
    ) -> None:
        self.rounds, self.batch, self._release = rounds, batch, release
        self._make_predictions, self._apply_thresholds = make_predictions, apply_thresholds
        self.totals = Totals([0] * count, [0] * count)
        self.cancelled = 0
        """Images whose caller left before they had an answer."""
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self._turn = threading.Lock()
        """The thread that holds it uses batcher and backend."""
        self._wants_turn = False  # the thread has something to do
        self.alone: int | None = None
        """The thread of a caller that computes its images itself."""
        self._leaving: deque[Job] = deque()  # jobs whose callers have left
        self._queue: deque[Portion] = deque()
        self.streams: deque[Stream] = deque()
        self._fed: list[Portion] = []  # by number, as the batcher knows their images
        self._firsts: list[int] = []
        self._next = 0
        self._batcher: Batcher | None = None
        self._observer: Observer | None = None
        self._has_warned = self._ends = self._is_exiting = False

    def post(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call a method of the worker."""
        self.inbox.put((method, arguments))

    def wake(self) -> None:
        """Have the thread look for cancelled jobs and for images of streams."""
        self.post(self._drop_cancelled)

    def cancel(self, job: Job) -> None:
        """No image of the job starts another round. Takes no lock for a stream: garbage collection may call this."""
        if job.is_done:
            return
        job.is_wanted = False
        if isinstance(job, Call):
            self._release(job)  # now: a round may run for long
        self._leaving.append(job)
        self.wake()

    def run_alone(self, portion: Portion) -> bool:
        """Compute all images of a call in the thread of its caller; False if the engine has something else to do.

        If messages arrive meanwhile, the thread of the engine goes on with these images.
        """
        if not self._turn.acquire(blocking=False):
            return False
        job = portion.job
        try:
            self.alone = threading.get_ident()
            if self._queue or self._fed or self.streams or not self.inbox.empty():
                return False
            with self.rounds.driving():
                self.add(portion)
                while not job.is_done and not self._wants_turn and self._work(time.monotonic()):
                    pass
        except BaseException as error:  # KeyboardInterrupt; only images of this call are in the batcher
            self._fail_fed(error, [portion])
            raise
        finally:
            self.alone = None
            self._turn.release()
        if not job.is_done:
            self.wake()
        return True

    def run(self) -> None:
        """Serve the inbox until a None, and finish what is begun."""
        _running[threading.current_thread()] = weakref.ref(self)
        messages: list[Message] = []
        try:
            with self.rounds.driving():
                while not self._is_exiting:
                    with self._turn:
                        self._wants_turn = False
                        due = self._step(messages)
                    if due is None:
                        break
                    messages = []
                    if (seconds := due - time.monotonic()) > 0:
                        with suppress(Empty):
                            messages = [self.inbox.get(timeout=None if seconds == math.inf else seconds)]
                    self._wants_turn = True
        except BaseException as error:  # the backend cannot be used; no caller may wait for it
            self._fail_fed(error, self._queue)
            self.end_streams(error)
        self._batcher = None  # it refers to this object

    def end_now(self) -> None:
        """Stop after this step, whatever is left."""
        self._is_exiting = True
        self.inbox.put(None)

    def _step(self, messages: list[Message]) -> float | None:
        """Handle messages and do one thing. Returns when the next thing is due; None at the end."""
        while messages or not self.inbox.empty():
            message = messages.pop() if messages else self.inbox.get()
            if message is None:
                self._ends = True
            else:
                method, arguments = message
                method(*arguments)
        now = time.monotonic()
        if self._work(now):
            return now
        if not self._fed and self._batcher is not None and not self._batcher.is_empty:
            self._batcher.reset()  # images of cancelled jobs
        if self._ends and not self._fed and not self.streams:
            return None
        return math.inf if self._batcher is None else self._batcher.next_due

    def _work(self, now: float) -> bool:
        """Feed images or advance the rounds by one thing; False if there is nothing to do."""
        self._drop_cancelled()
        group = self._take()
        for portion in group:
            self._feed(portion)
        try:
            if not group:
                return self._batcher is not None and self._batcher.advance(now)
            if self._batcher is not None and (self._queue or self.streams):  # more are coming
                self._batcher.keep_up(time.monotonic())
        except BaseException as error:
            self._fail_fed(error)
        return True

    # Messages

    def add(self, portion: Portion) -> None:
        """Images of a call that are opened; those that could not be opened have their answer at once."""
        job = portion.job
        if job.is_wanted:
            self._give(job, portion.failed)
            if len(portion.positions):
                self._queue.append(portion)

    def end_streams(self, error: BaseException) -> None:
        """The callers of open streams get this error."""
        for stream in tuple(self.streams):
            self.end(stream, error)

    def observe(self, observer: Observer) -> None:
        """Report each batch from now on."""
        self._observer = observer
        if self._batcher is not None:
            self._batcher.observer = observer

    def warm_up(self, call: Call, side: int) -> None:
        """Run each round in each batch size for images of this side, after all images that are in the buffers."""
        try:
            batcher = self._batcher_for(side)
            batcher.flush()
            for s, buffer in [(s, buffer) for s, buffers in enumerate(batcher.buffers) for buffer in buffers]:
                for size in sorted(self.rounds.sizes or (1,), reverse=True):
                    if size > self.batch:
                        continue
                    try:
                        self.rounds.run(s, buffer, 0, size).answers()
                    except self.rounds.out_of_memory:
                        if size == 1:
                            raise
                        self.rounds.shrink()
                        self._shrunk(size // 2)
                        batcher.largest = self.batch
            self._give(call, ([0], [Prediction.failed("")]))
        except BaseException as error:  # concerns this call only
            self.end(call, error)

    # Images go to the batcher

    def _drop_cancelled(self) -> None:
        """Remove the jobs whose callers have left. The batcher also calls this before each round."""
        while self._leaving:
            job = self._leaving.popleft()
            if not job.is_done:
                self.cancelled += job.missing if isinstance(job, Call) else sum(portion.left for portion in job.fed)
                self.end(job)

    def _take(self) -> list[Portion]:
        """The portions to feed next: at most a batch of calls, and a portion of one stream."""
        group: list[Portion] = []
        count = 0
        while self._queue and count < self.batch:
            group.append(self._queue.popleft())
            count += len(group[-1].positions)
        for stream in tuple(self.streams):
            portion = self._pull(stream)
            if portion is not None:
                group.append(portion)
                self.streams.remove(stream)  # the others are next
                self.streams.append(stream)
                break
        if len(group) > 1 and self._batcher is not None:
            side = self._batcher.side
            group.sort(key=lambda portion: portion.side != side)  # changing the side is expensive
        return group

    def _pull(self, stream: Stream) -> Portion | None:
        """The next images of a stream, if there are any and its consumer is not too far behind."""
        while not stream.has_ended:
            stream.is_held = True  # before the consumer's count is read, so that no message is missed
            if stream.entered - stream.returned > self._most_held():
                return None
            stream.is_held = False
            item = stream.source.poll()
            if item is None:
                return None
            if isinstance(item, Raised):
                self.end(stream, item.error)
                return None
            if item is Prefetcher.END:
                stream.has_ended = True
                self._expedite(stream)
                break
            assert isinstance(item, tuple)
            opened, sent = item
            portion = Portion.make(stream, stream.entered, opened, sent)
            stream.entered += len(portion.positions) + len(portion.failed[0])
            self._give(stream, portion.failed)
            if len(portion.positions):
                return portion
        if not stream.fed:
            self.end(stream)
        return None

    def _most_held(self) -> int:
        """The most images of a stream in progress before it is expedited.

        It does not shrink with the batch: a stream above a smaller limit would be held without being expedited.
        """
        return HELD_BATCHES * (self.batch if self._batcher is None else self._batcher.capacity)

    def _expedite(self, stream: Stream) -> None:
        """The images of a stream that are in the batcher are due now."""
        for portion in stream.fed:
            assert self._batcher is not None
            self._batcher.expedite(portion.first, portion.end)

    def _feed(self, portion: Portion) -> None:
        """Give images to the batcher, under the next numbers."""
        job = portion.job
        if not job.is_wanted:
            return
        try:
            batcher = self._batcher_for(portion.side)
            pixels, portion.sent = self.rounds.receive(portion.sent), None
        except BaseException as error:  # concerns this job only
            self.end(job, error)
            return
        portion.first, portion.left = self._next, len(portion.positions)
        self._next = portion.end
        self._fed.append(portion)
        self._firsts.append(portion.first)
        job.fed.append(portion)
        try:
            batcher.feed(pixels, np.arange(portion.first, portion.end), job.due(), job.threshold)
            if isinstance(job, Stream) and job.entered - job.returned > self._most_held():
                self._expedite(job)
        except BaseException as error:
            self._fail_fed(error)

    def _batcher_for(self, side: int) -> Batcher:
        """The batcher for images of this side, after all images of another side."""
        if self._batcher is not None and self._batcher.side != side:
            try:
                self._batcher.flush()
            except BaseException as error:
                self._fail_fed(error)
            self._batcher = None  # its buffers are freed first
            self.rounds.shrink()  # and what was built on them
        while self._batcher is None:
            try:
                buffers = [self.rounds.make_buffers(s, self.batch, side) for s in range(len(self.totals.images))]
            except self.rounds.out_of_memory:
                if self.batch == 1:
                    raise
                self.rounds.shrink()
                self._shrunk(self.batch // 2)
                continue
            self._batcher = Batcher(
                self.rounds,
                buffers,
                largest=self.batch,
                apply_thresholds=self._apply_thresholds,
                make_predictions=self._make_predictions,
                deliver=self._deliver,
                shrunk=self._shrunk,
                before_round=self._drop_cancelled,
                totals=self.totals,
                observer=self._observer,
            )
        return self._batcher

    def _shrunk(self, largest: int) -> None:
        """Memory ran out: batches are smaller from now on."""
        self.batch = largest
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(SMALLER_BATCHES, MemoryWarning, stacklevel=2)

    # Predictions and errors go to the callers

    def _deliver(self, numbers: NDArray[np.int64], predictions: list[Prediction]) -> None:
        """Give predictions to the jobs of their images, if these are still wanted."""
        ordered, at = numbers.tolist(), 0
        while at < len(ordered):
            index = bisect_right(self._firsts, ordered[at]) - 1
            if index < 0 or ordered[at] >= self._fed[index].end:  # cancelled
                at += 1
                continue
            portion = self._fed[index]
            stop = bisect_left(ordered, portion.end, at)
            positions = portion.positions[numbers[at:stop] - portion.first].tolist()
            portion.left -= stop - at
            if not portion.left:
                portion.job.fed.remove(portion)
                del self._fed[index], self._firsts[index]
            self._give(portion.job, (positions, predictions[at:stop]))
            at = stop

    def _give(self, job: Job, chunk: Chunk) -> None:
        """Predictions for a job, which may be its last."""
        if not chunk[0]:
            return
        if isinstance(job, Stream):
            job.ready.put(chunk)
            if job.has_ended and not job.fed:
                self.end(job)
            return
        assert isinstance(job, Call)
        for position, prediction in zip(*chunk):
            job.results[position] = prediction
        job.missing -= len(chunk[0])
        if not job.missing:
            self.end(job)

    def end(self, job: Job, error: BaseException | None = None) -> None:
        """The job is done, and its caller gets the error if there is one. Images that are left are dropped."""
        if job.is_done:
            return
        job.is_done, job.is_wanted, job.error = True, False, error
        for portion in job.fed:
            index = bisect_left(self._firsts, portion.first)
            del self._fed[index], self._firsts[index]
            assert self._batcher is not None
            self._batcher.cancel(portion.first, portion.end)
        job.fed.clear()
        if isinstance(job, Stream):
            self.streams.remove(job)
        elif isinstance(job, Call):
            if job.missing:
                self._queue = deque(portion for portion in self._queue if portion.job is not job)
            self._release(job)
            future, job.future = job.future, None
            if future is not None:
                with suppress(InvalidStateError):  # it was cancelled
                    if job.error is not None:
                        future.set_exception(job.error)
                    else:
                        future.set_result(job.results)  # type: ignore[arg-type]  # complete
        job.ready.put(None)

    def _fail_fed(self, error: BaseException, group: Sequence[Portion] = ()) -> None:
        """The rounds failed: images in the batcher are lost, and their callers get the error. Others go on."""
        jobs = dict.fromkeys(portion.job for portion in (*self._fed, *group))
        if self._batcher is not None:
            self._batcher.reset()
        for job in jobs:
            self.end(job, error)


@atexit.register
def _end_threads() -> None:
    """The interpreter ends: a thread that still computes, or frees the backend, could crash the process."""
    for thread, worker in tuple(_running.items()):
        if (alive := worker()) is not None:
            alive.end_now()
        del alive  # so that the thread frees it
        thread.join(JOIN)
