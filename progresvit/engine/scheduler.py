"""The scheduler: callers in any number of threads share the batches of one batcher.

Each call is a job. Jobs hand over their images in portions, and one thread at a time, the driver, feeds them to the
batcher and delivers predictions. A caller that waits drives if no other thread does, until its own job is ready, and
serves the other jobs meanwhile; then another caller takes over. For futures, on which no thread waits, a daemon thread
drives. KeyboardInterrupt can strike the main thread at any point; so that it harms no other caller, the main thread
drives only as long as all jobs are its own.

One lock guards the state of the scheduler; batcher and backend belong to the driver. Neither computation nor callbacks
of futures run under the lock. It is reentrant, since garbage collection may close the generator of a stream anywhere.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit.data.prefetch import Prefetcher, Raised
from progresvit.engine.batcher import Batcher, Decide, Make, MemoryWarning, Observer, Totals
from progresvit.engine.buffers import HELD_BATCHES, RoundBackend, RoundBuffer
from progresvit.engine.images import OpenedImages
from progresvit.engine.jobs import Call, Chunk, Job, Portion, Stream, announce, make_portion
from progresvit.engine.prediction import Prediction

JOIN = 10.0
"""Seconds to wait for the daemon thread at the end; a round may keep it for longer."""


_threads = threading.local()


def mark_thread_of_engine() -> None:
    """The current thread decodes for an engine; it must not wait for that engine."""
    _threads.of_engine = True


class EngineFull(RuntimeError):  # noqa: N818  (as queue.Full)
    """As many images wait as the engine accepts."""


@dataclass(frozen=True)
class Counts:
    """What an engine has done since it was made."""

    images: tuple[int, ...]
    """Images that each round has run."""
    batches: tuple[int, ...]
    """Batches that each round has run."""
    cancelled: int
    """Images whose caller left before they had an answer."""
    pending: int
    """Images of calls that are waiting or running now."""


class Scheduler:
    """Runs the jobs of all callers.

    Args:
        rounds: The backend.
        make: Makes predictions, as for ``Batcher``.
        decide: Applies the thresholds of single images, as for ``Batcher``.
        count: Number of rounds.
        batch: The largest batch.
        pending: The most images of calls that wait or run; a single call may have more.
    """

    def __init__(
        self,
        rounds: RoundBackend,
        make: Make,
        decide: Decide,
        *,
        count: int,
        batch: int,
        pending: int,
    ) -> None:
        self.rounds, self.batch, self.pending = rounds, batch, pending
        self._make, self._decide = make, decide
        self._observer: Observer | None = None
        self._totals = Totals([0] * count, [0] * count)
        self._driving = rounds.driving
        self._batcher: Batcher | None = None
        self._has_warned = False
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._driver: int | None = None
        self._main = threading.main_thread().ident
        self._jobs: dict[Job, None] = {}  # all that are open, in their order
        self._waiters: dict[Job, None] = {}  # those whose threads wait for a wake-up
        self._abandoned: deque[Job] = deque()  # to be cancelled by the thread that has the lock
        self._streams: deque[Stream] = deque()
        self._queue: deque[Portion] = deque()
        self._fed: list[Portion] = []  # by number, as the batcher knows their images
        self._firsts: list[int] = []
        self._next = self._pending = self._cancelled = self._futures = 0
        self._waiting_for_room: deque[object] = deque()  # callers that wait for room, in their order
        self._is_closed = self._is_called = False
        self._thread: threading.Thread | None = None
        self._wakeups: SimpleQueue[Scheduler | None] = SimpleQueue()
        weakref.finalize(self, self._wakeups.put, None)  # ends the thread

    # For callers, in any thread

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
        """A call with so many images, as soon as there is room for them."""
        with self._lock:
            self._check_open()
            if self._waiting_for_room or not self._has_room(count):
                self._wait_for_room(count, timeout if block else 0.0)
            call = Call(count, future, threshold=threshold, wait=wait)
            self._jobs[call] = None
            self._pending += count
            self._futures += future is not None
        if future is not None:
            future.add_done_callback(_Canceller(self, call))
        return call

    def open_stream(self, source: Prefetcher[tuple[OpenedImages, Any]], deadline: float | None) -> Stream:
        with self._lock:
            self._check_open()
            stream = Stream(source, deadline)
            self._jobs[stream] = None
            self._streams.append(stream)
        return stream

    def observe(self, observer: Observer) -> None:
        """Report each batch from now on."""
        with self._lock:
            self._observer = observer
            if self._batcher is not None:
                self._batcher.observer = observer

    def add(self, call: Call, position: int, opened: OpenedImages, sent: Any) -> None:
        """Images of a call, from this position on."""
        portion, failed = make_portion(call, position, opened, sent)
        with self._lock:
            if not call.is_open:
                return
            is_finished = self._give(call, failed) if failed[0] else False
            if len(portion.positions):
                self._queue.append(portion)
            if call.future is not None:
                self._wake()  # other callers drive themselves
        if is_finished:
            announce([call])

    def warm_up(self, side: int) -> None:
        """Run each round in each batch size for images of this side, while no images are in the buffers."""
        call = self.open_call(1)
        try:
            with self._lock:
                self._queue.append(Portion(call, np.zeros(1, np.int64), None, side, self._run_each_size))
            self.results(call)
        finally:
            self.cancel(call)

    def results(self, call: Call) -> list[Prediction]:
        """The predictions of a call, once they are all there."""
        self._wait_for(call)
        if call.error is not None:
            raise call.error
        return call.results  # type: ignore[return-value]  # complete

    def next_chunk(self, stream: Stream) -> Chunk | None:
        """Predictions of a stream, once there are any; None after the last."""
        self._wait_for(stream)
        with self._lock:
            if stream.chunks:
                return stream.chunks.popleft()
        if stream.error is not None:
            raise stream.error
        return None

    def arrived(self) -> None:
        """A stream has images."""
        with self._lock:
            self._wake()

    def cancel(self, job: Job) -> None:
        """The caller has left; no image of the job starts another round."""
        if not job.is_open:
            return
        if self._lock._is_owned():  # type: ignore[attr-defined]  # garbage collection closes a stream
            self._abandoned.append(job)
            return
        with self._lock:
            self._cancel(job)
            if self._driver is None:
                self._clear_unused()
                self._wake()

    def fail(self, job: Job, error: BaseException) -> None:
        """The caller gets this error; the job's images are not run any more."""
        with self._lock:
            if not job.is_open:
                return
            job.error = error
            self._remove(job)
            self._wake()
            is_awaited = self._is_awaited(job)
        if is_awaited:
            announce([job])

    def counts(self) -> Counts:
        with self._lock:
            return Counts(
                tuple(self._totals.images), tuple(self._totals.batches), self._cancelled, max(0, self._pending)
            )

    def shrunk(self, largest: int) -> None:
        """Memory ran out: batches are smaller from now on."""
        self.batch = largest
        if not self._has_warned:
            self._has_warned = True
            text = "memory ran out; the engine continues with smaller batches, see engine.batch."
            warnings.warn(text, MemoryWarning, stacklevel=2)

    def refuse_calls(self) -> None:
        """From now on; those that wait for room are refused as well, and open streams end with an error."""
        with self._lock:
            self._is_closed = True
            self._room.notify_all()
            streams = list(self._streams)
        for stream in streams:
            self.fail(stream, RuntimeError("the engine was closed while this stream was open; make a new one."))

    def close(self) -> None:
        """Wait for the futures, and stop the thread."""
        self.refuse_calls()
        with self._lock:
            if not self._is_in_callback():
                self._room.wait_for(lambda: not self._futures)
            thread = self._thread
        if thread is not None:
            self._wakeups.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout=JOIN)

    # Waiting and driving

    def _wait_for(self, job: Job) -> None:
        """Drive, or wait while another thread drives, until the job is ready."""
        me = job.owner = threading.get_ident()
        if self._is_in_callback():
            raise RuntimeError("a callback of a future runs in the thread that computes; use submit there.")
        try:
            while not job.is_ready:
                with self._lock:
                    self._waiters.pop(job, None)
                    if job.is_ready:
                        return
                    if self._driver is None and self._may_drive(me):
                        self._driver = me
                    else:
                        self._waiters[job] = None
                        self._wake()  # a main thread that must not drive needs another thread
                timeout = self._drive(me, job) if self._driver == me else math.inf
                if timeout is not None:
                    _wait(job.wakeups, timeout)
        finally:
            with self._lock:
                self._waiters.pop(job, None)
                self._stop_driving(me)
                self._wake()  # this thread may have been woken to drive

    def _drive(self, me: int, job: Job | None) -> float | None:
        """Run rounds until the job is ready; for the daemon thread (None), until no job needs it.

        Returns the seconds to wait for a wake-up if there is nothing to do; the thread does not drive meanwhile, so
        that others can. None if there is no need to wait.
        """
        group: list[Portion] = []
        try:
            with self._driving():
                while True:
                    with self._lock:
                        is_done = job.is_ready if job is not None else not self._needs_thread()
                        if is_done or not self._may_drive(me):
                            self._stop_driving(me)
                            return None
                        group, now = self._take(), time.monotonic()
                        if not group and job is not None and job.is_ready:  # its stream has ended
                            continue
                        if not group and not (self._batcher is not None and self._batcher.has_work(now)):
                            self._driver = None
                            if job is not None:
                                self._waiters[job] = None
                            return math.inf if self._batcher is None else self._batcher.next_due - now
                    self._step(group)
                    # without the lock: nobody else feeds, and portions that come meanwhile end this
                    while not self._queue and not self._streams and self._advance(now):
                        if job is not None and job.is_ready:
                            break
        except BaseException:  # KeyboardInterrupt; what a step raises reaches the callers
            with self._lock:
                drives = self._driver == me
            if drives:  # else another thread has taken over
                self._fail_fed(RuntimeError("the computation was interrupted; classify these images again."), group)
            raise

    def _drive_for_futures(self) -> float | None:
        """As ``_drive``, in the daemon thread."""
        me = threading.get_ident()
        with self._lock:
            self._is_called = False
            if self._driver is not None:
                return None
            self._driver = me
        try:
            return self._drive(me, None)
        finally:
            with self._lock:
                self._stop_driving(me)

    def _stop_driving(self, me: int) -> None:
        if self._driver == me:
            self._driver = None
            self._clear_unused()
            self._wake()

    def _wake(self) -> None:
        """Have a thread drive if there may be work and none drives."""
        if self._driver is not None or not (self._queue or self._fed or self._streams):
            return
        waiter = next((job for job in self._waiters if self._may_drive(job.owner)), None)
        if waiter is not None:
            del self._waiters[waiter]
            waiter.wakeups.put(None)
        elif self._needs_thread() and not self._is_called:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_serve, args=(self._wakeups,), daemon=True, name="progresvit-engine"
                )
                self._thread.start()
            self._is_called = True
            self._wakeups.put(self)  # keeps the scheduler until the futures are done

    def _needs_thread(self) -> bool:
        """Whether there are portions of futures, or callers that wait and may not drive."""
        if self._futures and (self._queue or self._fed):
            return True
        return bool(self._waiters) and not any(self._may_drive(job.owner) for job in self._waiters)

    def _may_drive(self, thread: int | None) -> bool:
        return thread != self._main or all(job.owner == thread for job in self._jobs)

    # For the driver

    def _take(self) -> list[Portion]:
        """What to feed next: at most a batch of calls, and a portion of one stream."""
        while self._abandoned:
            self._cancel(self._abandoned.popleft())
        group: list[Portion] = []
        count = 0
        while self._queue and count < self.batch:
            group.append(self._queue.popleft())
            count += len(group[-1].positions)
        for stream in tuple(self._streams):
            portion = self._pull(stream)
            if portion is not None:
                group.append(portion)
                self._streams.remove(stream)  # the others are next
                self._streams.append(stream)
                break
        if len(group) > 1 and self._batcher is not None:
            side = self._batcher.side
            group.sort(key=lambda portion: portion.side != side)  # changing the side is expensive
        return group

    def _pull(self, stream: Stream) -> Portion | None:
        while not stream.has_ended and stream.entered - stream.returned <= self._held():
            item = stream.source.poll()
            if item is None:
                return None
            if isinstance(item, Raised):
                self.fail(stream, item.error)
                return None
            if item is Prefetcher.END:
                stream.has_ended = True
                self._expedite(stream)
                break
            assert isinstance(item, tuple)
            opened, sent = item
            portion, failed = make_portion(stream, stream.entered, opened, sent)
            stream.entered += len(portion.positions) + len(failed[0])
            if failed[0] and self._give(stream, failed):
                stream.wakeups.put(None)
            if len(portion.positions):
                return portion
        if stream.has_ended and not stream.fed and stream.is_open:
            self._remove(stream)
            if self._is_awaited(stream):
                stream.wakeups.put(None)
        return None

    def _held(self) -> int:
        """The most images of a stream in progress before it is expedited."""
        return HELD_BATCHES * (self.batch if self._batcher is None else self._batcher.capacity)

    def _expedite(self, stream: Stream) -> None:
        for portion in stream.fed:
            assert self._batcher is not None
            self._batcher.expedite(portion.first, portion.end)

    def _step(self, group: list[Portion]) -> None:
        """Feed these portions; without any, advance the rounds. Errors are given to the callers."""
        for portion in group:
            try:
                self._feed(portion)
            except Exception as error:  # the others of the group go on
                self._fail_fed(error, [portion])
        if not group:
            self._advance(time.monotonic())
        elif self._batcher is not None and (self._queue or self._streams):
            try:
                self._batcher.run_overtaken(time.monotonic())
                self._batcher.deliver_finished()
            except Exception as error:
                self._fail_fed(error)

    def _advance(self, now: float) -> bool:
        """Advance the rounds by one thing; False if there is nothing to do."""
        try:
            return self._batcher is not None and self._batcher.advance(now)
        except Exception as error:
            self._fail_fed(error)
            return False

    def _feed(self, portion: Portion) -> None:
        job = portion.job
        if not job.is_open:
            return
        batcher = self._batcher_for(portion.side, job)
        if batcher is None:
            return
        if portion.work is not None:
            self._work(portion.work, batcher, job)
            return
        try:
            pixels, portion.sent = self.rounds.receive(portion.sent), None
        except Exception as error:  # concerns this job only
            self.fail(job, error)
            return
        with self._lock:
            if not job.is_open:
                return
            portion.first, portion.left = self._next, len(portion.positions)
            self._next = portion.end
            self._fed.append(portion)
            self._firsts.append(portion.first)
            job.fed.append(portion)
        batcher.feed(pixels, np.arange(portion.first, portion.end), job.due(), job.threshold)
        if isinstance(job, Stream) and job.entered - job.returned > self._held():
            with self._lock:
                self._expedite(job)

    def _work(self, work: Callable[[Batcher], None], batcher: Batcher, job: Job) -> None:
        batcher.flush()
        try:
            work(batcher)
        except Exception as error:
            self.fail(job, error)
            return
        with self._lock:
            if job.is_open:
                self._remove(job)
            is_awaited = self._is_awaited(job)
        if is_awaited:
            announce([job])

    def _run_each_size(self, batcher: Batcher) -> None:
        places = [(s, buffer) for s, buffers in enumerate(batcher.buffers) for buffer in buffers]
        for s, buffer in places:
            for size in sorted(self.rounds.sizes or (1,), reverse=True):
                if size > self.batch:
                    continue
                try:
                    self.rounds.run(s, buffer, 0, size).answers()
                except self.rounds.out_of_memory:
                    if size == 1:
                        raise
                    self.rounds.shrink()
                    self.shrunk(size // 2)
                    batcher.largest = self.batch

    def _batcher_for(self, side: int, job: Job) -> Batcher | None:
        """The batcher for images of this side, after all images of another side; None if the job has failed."""
        if self._batcher is not None and self._batcher.side == side:
            return self._batcher
        if self._batcher is not None:
            try:
                self._batcher.flush()
            except Exception as error:
                self._fail_fed(error)
            self._batcher = None  # its buffers are freed first
            self.rounds.shrink()  # and what was built on them
        try:
            self._batcher = Batcher(
                self.rounds,
                self._make_buffers(side),
                largest=self.batch,
                decide=self._decide,
                make=self._make,
                deliver=_weak(self._deliver),
                shrunk=_weak(self.shrunk),
                totals=self._totals,
                observer=self._observer,
            )
        except Exception as error:
            self.fail(job, error)
        return self._batcher

    def _make_buffers(self, side: int) -> list[list[RoundBuffer]]:
        while True:
            try:
                return [self.rounds.make_buffers(s, self.batch, side) for s in range(len(self._totals.images))]
            except self.rounds.out_of_memory:
                if self.batch == 1:
                    raise
                self.rounds.shrink()
                self.shrunk(self.batch // 2)

    def _deliver(self, numbers: NDArray[np.int64], predictions: list[Prediction]) -> None:
        """Give predictions to the jobs of their images, if these are still wanted."""
        finished: list[Job] = []
        ordered, at = numbers.tolist(), 0
        with self._lock:
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
                if self._give(portion.job, (positions, predictions[at:stop])):
                    finished.append(portion.job)
                at = stop
        announce(finished)

    def _give(self, job: Job, chunk: Chunk) -> bool:
        """Whether the caller waits for this."""
        if isinstance(job, Stream):
            job.chunks.append(chunk)
            if job.has_ended and not job.fed:
                self._remove(job)
            return self._is_awaited(job)
        assert isinstance(job, Call)
        for position, prediction in zip(*chunk):
            job.results[position] = prediction
        job.missing -= len(chunk[0])
        self._release(len(chunk[0]))
        if job.missing:
            return False
        self._remove(job)
        return self._is_awaited(job)

    def _is_awaited(self, job: Job) -> bool:
        """Whether a thread waits for the job and must be woken now, or a future waits."""
        if job in self._waiters:
            del self._waiters[job]
            return True
        return isinstance(job, Call) and job.future is not None

    def _fail_fed(self, error: BaseException, group: Sequence[Portion] = ()) -> None:
        """The rounds failed: images in the batcher are lost, and their callers get the error. Others go on."""
        with self._lock:
            jobs = list(dict.fromkeys(portion.job for portion in (*self._fed, *group)))
            if self._batcher is not None:
                self._batcher.reset()
        for job in jobs:
            self.fail(job, error)

    def _cancel(self, job: Job) -> None:
        if job.is_open:
            self._cancelled += job.missing if isinstance(job, Call) else sum(portion.left for portion in job.fed)
            self._remove(job)

    def _remove(self, job: Job) -> None:
        """Close a job; what is left of its images is not wanted any more."""
        job.is_open = False
        del self._jobs[job]
        if isinstance(job, Call) and job.missing:
            self._queue = deque(portion for portion in self._queue if portion.job is not job)
        for portion in job.fed:
            index = bisect_left(self._firsts, portion.first)
            del self._fed[index], self._firsts[index]
            assert self._batcher is not None
            self._batcher.cancel(portion.first, portion.end)
        job.fed.clear()
        if isinstance(job, Stream):
            self._streams.remove(job)
        elif isinstance(job, Call):
            self._futures -= job.future is not None
            self._release(job.missing)

    def _clear_unused(self) -> None:
        """Images of cancelled jobs may be left; without other jobs they are forgotten at once."""
        if not self._jobs and self._batcher is not None and not self._batcher.is_empty:
            self._batcher.reset()

    # Room

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engine is closed; make a new one.")

    def _has_room(self, count: int) -> bool:
        return self._pending + count <= self.pending or not self._pending

    def _wait_for_room(self, count: int, timeout: float | None) -> None:
        place = object()
        self._waiting_for_room.append(place)

        def may_enter() -> bool:
            return self._is_closed or (self._waiting_for_room[0] is place and self._has_room(count))

        try:
            if not self._room.wait_for(may_enter, 0.0 if self._is_in_callback() else timeout):
                raise EngineFull(
                    f"{self._pending} images wait or run, and the engine takes {self.pending}: call again later, send "
                    "fewer images at once, or give the engine a larger pending."
                )
            self._check_open()
        finally:
            self._waiting_for_room.remove(place)
            self._room.notify_all()  # the next one may fit

    def _is_in_callback(self) -> bool:
        """Whether a callback of a future calls, in a thread of which the engine itself has need."""
        return self._driver == threading.get_ident() or getattr(_threads, "of_engine", False)

    def _release(self, count: int) -> None:
        self._pending -= count
        if self._waiting_for_room or self._is_closed:
            self._room.notify_all()


class _Canceller:
    """Called when a future is done; one that was cancelled cancels its images. It does not keep the engine."""

    def __init__(self, scheduler: Scheduler, call: Call) -> None:
        self.scheduler, self.call = weakref.ref(scheduler), call

    def __call__(self, future: Future[list[Prediction]]) -> None:
        if not future.cancelled():
            return
        future.set_running_or_notify_cancel()  # for threads in concurrent.futures.wait
        scheduler = self.scheduler()
        if scheduler is not None:
            scheduler.cancel(self.call)
        self.call.future = None


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """The method without a reference to its object, so that an engine is freed as soon as it is not used any more."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = reference()
        assert bound is not None  # the object makes all calls
        bound(*args)

    return call


def _wait(wakeups: SimpleQueue[Any], timeout: float) -> Any:
    """The next message, or False after the timeout."""
    try:
        return wakeups.get() if timeout == math.inf else wakeups.get(timeout=max(0.0, timeout))
    except Empty:
        return False


def _serve(wakeups: SimpleQueue[Scheduler | None]) -> None:
    """The daemon thread: drives when it is woken, until a None. It keeps no scheduler while it waits."""
    scheduler: Scheduler | None = None
    timeout: float | None = math.inf
    while (woken := _wait(wakeups, math.inf if timeout is None else timeout)) is not None:
        scheduler = woken or scheduler
        del woken
        assert scheduler is not None
        timeout = scheduler._drive_for_futures()
        if timeout is None or timeout == math.inf:
            scheduler = None
