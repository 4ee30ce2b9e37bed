"""The scheduler: callers in any number of threads share the batches of one engine thread.

A call or a stream is a job (jobs.py). Callers send the images of their jobs to the thread of the engine (worker.py) in
portions, and wait for the queue of their job, or for a future. The thread starts with the first call, and ends when the
engine is closed or not used any more.

No caller computes for others. A caller computes its own images only while the thread has nothing to do, which saves two
wake-ups (``Worker.run_alone``).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from progresvit.data.prefetch import Prefetcher
from progresvit.engine.images import OpenedImages
from progresvit.engine.jobs import Call, Chunk, Job, Portion, Stream
from progresvit.engine.prediction import Prediction
from progresvit.engine.worker import JOIN, Worker

_threads = threading.local()


def mark_thread_of_engine() -> None:
    """The current thread decodes for an engine; it must not wait for that engine."""
    _threads.of_engine = True


class EngineFull(RuntimeError):  # noqa: N818  (as queue.Full)
    """The engine accepts no further images at the moment."""


@dataclass(frozen=True)
class Counts:
    """Counts since the engine was made."""

    images: tuple[int, ...]
    """Images that each round has run."""
    batches: tuple[int, ...]
    """Batches that each round has run."""
    cancelled: int
    """Images whose caller left before they had an answer."""
    pending: int
    """Images of calls that are waiting or running now."""


class Scheduler:
    """Takes the jobs of all callers. Any thread may call it.

    Args:
        make_worker: Makes the worker, given what it calls with calls that are done.
        send: Starts copying images to the device, as a backend does.
        pending: The most images of calls that wait or run; a single call may have more.
    """

    def __init__(
        self, make_worker: Callable[[Callable[[Call], None]], Worker], send: Callable[[Any], Any], *, pending: int
    ) -> None:
        self.room = Room(pending)
        self._make_worker, self._send = make_worker, send
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._begin()

    def _begin(self) -> None:
        self.worker = self._make_worker(self.room.leave)
        weakref.finalize(self, self.worker.inbox.put, None).atexit = False  # ends the thread

    def open_call(
        self,
        count: int,
        *,
        future: Future[list[Prediction]] | None = None,
        block: bool = True,
        timeout: float | None = None,
        threshold: float | None = None,
        wait: float = 0.0,
    ) -> Call:
        """A call with ``count`` images, as soon as there is room for them."""
        self._start()
        self.room.enter(count, 0.0 if self._is_in_callback() or not block else timeout)
        call = Call(count, future, threshold=threshold, wait=wait)
        if future is not None:
            future.add_done_callback(partial(_cancel_if_cancelled, weakref.ref(self.worker), call))
        return call

    def open_stream(self, source: Prefetcher[tuple[OpenedImages, Any]], deadline: float | None) -> Stream:
        """A stream of opened images, each with what the backend's ``send`` returned for them."""
        self._start()
        self.room.check_open()
        stream = Stream(source, deadline)
        self.worker.post(self.worker.streams.append, stream)
        return stream

    def add(self, call: Call, position: int, opened: OpenedImages) -> None:
        """Send images of a call, from this position on, to the device and to the thread."""
        portion = Portion.make(call, position, opened, self._send(opened.pixels))
        self.worker.post(self.worker.add, portion)

    def run(self, call: Call, opened: OpenedImages) -> list[Prediction]:
        """Compute a call whose images are all opened, and wait for its predictions."""
        self._check_may_wait()
        portion = Portion.make(call, 0, opened, self._send(opened.pixels))
        if not self.worker.run_alone(portion):
            self.worker.post(self.worker.add, portion)
        return self.results(call)

    def results(self, call: Call) -> list[Prediction]:
        """Wait for all predictions of a call."""
        call.ready.get()
        if call.error is not None:
            raise call.error
        return call.results  # type: ignore[return-value]  # complete

    def next_chunk(self, stream: Stream) -> Chunk | None:
        """Wait for predictions of a stream; None after the last."""
        self._check_may_wait()
        if stream.is_held:
            stream.is_held = False
            self.worker.wake()
        chunk = stream.ready.get()
        if chunk is None and stream.error is not None:
            raise stream.error
        return chunk

    def fail(self, job: Job, error: BaseException) -> None:
        """The caller gets this error; the job's images are not run any more."""
        job.is_wanted = False
        self.worker.post(self.worker.end, job, error)

    def warm_up(self, side: int) -> None:
        """Run each round in each batch size for images of this side, and wait for it."""
        self._check_may_wait()
        call = self.open_call(1)
        try:
            self.worker.post(self.worker.warm_up, call, side)
            self.results(call)
        finally:
            self.worker.cancel(call)

    def counts(self) -> Counts:
        totals = self.worker.totals
        return Counts(tuple(totals.images), tuple(totals.batches), self.worker.cancelled, self.room.pending)

    def refuse_calls(self) -> None:
        """Refuse calls from now on, also those that wait for room; open streams end with an error."""
        self.room.close()
        error = RuntimeError("the engine was closed while this stream was open; make a new one.")
        self.worker.post(self.worker.end_streams, error)

    def close(self) -> None:
        """Wait for the calls, and stop the thread."""
        self.refuse_calls()
        can_wait = not self._is_in_callback()
        if can_wait:
            self.room.wait_until_empty()
        self.worker.inbox.put(None)
        if can_wait and self._thread is not None:
            self._thread.join(JOIN)

    def _start(self) -> None:
        """Start the thread if it does not run: at the first call, and in a forked process."""
        if self._thread is not None and self._thread.is_alive():
            return
        with self._starting:
            if self._thread is not None and not self._thread.is_alive() and not self.room.is_closed:
                self.room.pending = 0  # they belong to the other process
                self._begin()
                self._thread = None
            if self._thread is None:
                self._thread = threading.Thread(target=self.worker.run, daemon=True, name="progresvit-engine")
                self._thread.start()

    def _is_in_callback(self) -> bool:
        """Whether the caller is a thread that the engine needs, such as in a callback of a future."""
        is_computing = threading.current_thread() is self._thread or threading.get_ident() == self.worker.alone
        return is_computing or getattr(_threads, "of_engine", False)

    def _check_may_wait(self) -> None:
        if self._is_in_callback():
            raise RuntimeError("a callback of a future runs in the thread that computes; use submit there.")


class Room:
    """Counts the images of calls that wait or run; callers wait, in their order, until there is room for more."""

    def __init__(self, limit: int) -> None:
        self.limit, self.pending, self.is_closed = limit, 0, False
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[object] = deque()

    def check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the engine is closed; make a new one.")

    def enter(self, count: int, timeout: float | None) -> None:
        """Add images, as soon as there is room for them."""
        with self._changed:
            self.check_open()
            if self._waiting or not self._fits(count):
                self._wait(count, timeout)
            self.pending += count

    def leave(self, call: Call) -> None:
        """The call is done, or its caller has left."""
        with self._changed:
            self.pending -= call.pending
            call.pending = 0
            if self._waiting or self.is_closed:
                self._changed.notify_all()

    def close(self) -> None:
        """Refuse further images, also of callers that wait."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def wait_until_empty(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.pending)

    def _fits(self, count: int) -> bool:
        return self.pending + count <= self.limit or not self.pending

    def _wait(self, count: int, timeout: float | None) -> None:
        place = object()
        self._waiting.append(place)
        try:
            if not self._changed.wait_for(
                lambda: self.is_closed or (self._waiting[0] is place and self._fits(count)), timeout
            ):
                raise EngineFull(
                    f"{self.pending} images wait or run, and the engine takes {self.limit}: call again later, send "
                    "fewer images at once, or give the engine a larger pending."
                )
            self.check_open()
        finally:
            self._waiting.remove(place)
            self._changed.notify_all()  # the next one may fit


def _cancel_if_cancelled(worker: weakref.ref[Worker], call: Call, future: Future[list[Prediction]]) -> None:
    """Called when a future is done; a future that was cancelled cancels its images."""
    if not future.cancelled():
        return
    future.set_running_or_notify_cancel()  # for threads in concurrent.futures.wait
    if (alive := worker()) is not None:
        alive.cancel(call)
