"""Images from strangers, prepared in processes that the system limits in time and memory and that can be replaced.

A library that decodes an image cannot be interrupted, and a few bytes can keep it busy for minutes. Large images, and
those that take long, wait in a lane of their own, so that they do not hold up the others.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import LifoQueue

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from progresvit.data.decoding_process import (
    IS_SUPPORTED,
    Process,
    ProcessLimits,
    as_prepared,
    cause,
    shared_file,
    start_process,
)
from progresvit.data.prepare import Form, Plan, Prepared, prepare_for_gpu
from progresvit.data.worker_pool import SLOT

QUICK_PIXELS = 4_000_000
"""Images that take more pixels to decode are slow."""
QUICK_SECONDS, SLOW_SECONDS = 0.5, 5.0
"""CPU time for an image. One that exceeds the first is slow; one that exceeds the second is an error."""
LONGEST = 60.0
"""Seconds after which a process is ended in any case."""
BYTES_PER_PIXEL = 32
"""Memory to decode an image: its pixels in several modes at a time."""
SPARE_BYTES = 64 * 2**20
"""Memory of a process besides the file and its pixels."""
SLOW_SHARE, MOST_SLOW = 4, 4
"""There is one process for slow images for this number of processes; at least one, and at most this number."""
NICE = 10
"""Slow images give way to other images and to the model."""
DECAY = 0.98
"""Weight of an image in the moving average of times, relative to the next image."""
TOO_SLOW = f"takes longer than {SLOW_SECONDS:g} seconds to decode; save it in another format"


class IsolatedDecoder:
    """Prepares images in processes with limits.

    Args:
        plan: What to do; JPEGs that the device decodes need no process.
        workers: Number of processes for quick images.
        most_bytes: Size of the largest file.
    """

    def __init__(self, plan: Plan, *, workers: int, most_bytes: int) -> None:
        if not IS_SUPPORTED:
            raise ValueError("images from strangers are decoded in limited processes, which needs Linux or macOS.")
        self.plan, self._quick_plan = plan, replace(plan, quick_pixels=QUICK_PIXELS)
        self.most_pixels = plan.max_pixels or Image.MAX_IMAGE_PIXELS or QUICK_PIXELS
        self._room = max(SLOT, plan.crop.byte_count)  # of an image, as in a pool
        spare = SPARE_BYTES + 4 * most_bytes  # the file is received, copied and read
        quick = ProcessLimits(QUICK_SECONDS, spare + BYTES_PER_PIXEL * QUICK_PIXELS)
        slow = ProcessLimits(SLOW_SECONDS, spare + BYTES_PER_PIXEL * self.most_pixels, NICE)
        self._quick = _Lane(workers, quick, self._room, Prepared(Form.LATER))
        self._slow = _Lane(
            min(MOST_SLOW, -(-workers // SLOW_SHARE)), slow, self._room, Prepared(Form.ERROR, error=TOO_SLOW)
        )
        self._quick.start()

    @property
    def seconds_per_image(self) -> float:
        """Mean time of recent quick images, divided by the number of processes."""
        return self._quick.seconds / self._quick.workers

    def submit(self, content: bytes, plan: Plan | None = None) -> Future[Prepared]:
        """Prepare an image, with another plan if one is given. The form of slow images is ``Form.LATER``."""
        as_jpeg = prepare_for_gpu(content, plan or self.plan, self._room)
        if as_jpeg is not None:
            future: Future[Prepared] = Future()
            future.set_result(as_jpeg)
            return future
        quick_plan = self._quick_plan if plan is None else replace(plan, quick_pixels=QUICK_PIXELS)
        return self._quick.submit(content, quick_plan)

    def submit_slow(self, content: bytes, plan: Plan | None = None) -> Future[Prepared]:
        """Prepare a slow image."""
        return self._slow.submit(content, plan or self.plan)

    def close(self) -> None:
        """End the processes; what they work on is cancelled."""
        self._quick.close()
        self._slow.close()


@dataclass(eq=False)
class _Child:
    process: Process
    connection: Connection
    memory: NDArray[np.uint8]

    @classmethod
    def start(cls, limits: ProcessLimits, size: int) -> _Child:
        file = shared_file(size)
        try:
            memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
            return cls(*start_process(file, size, limits), memory)
        finally:
            os.close(file)

    def end(self) -> int:
        """End the process; the exit status that it has, or would have had."""
        self.connection.close()
        self.process.kill()
        return self.process.wait()


class _Lane:
    """Threads that each use a process for an image at a time.

    Args:
        workers: Number of threads and processes; a process starts when it is needed.
        limits: Of a process.
        room: Bytes of the result.
        when_slow: The result for an image that takes longer than the limits allow.
    """

    def __init__(self, workers: int, limits: ProcessLimits, room: int, when_slow: Prepared) -> None:
        self.workers, self.limits, self.room, self.when_slow = workers, limits, room, when_slow
        self.seconds = 0.0
        self._threads = ThreadPoolExecutor(workers, "progresvit-decode")
        self._idle: LifoQueue[_Child | None] = LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._children: set[_Child] = set()
        self._lock, self._is_closed = threading.Lock(), False

    def start(self) -> None:
        """Start all processes."""
        for child in [self._started(self._idle.get()) for _ in range(self.workers)]:
            self._idle.put(child)

    def submit(self, content: bytes, plan: Plan) -> Future[Prepared]:
        """Prepare an image. A future that is cancelled lets go of the content at once."""
        holder = [content]
        future = self._threads.submit(self._prepare, holder, plan)
        future.add_done_callback(lambda _: holder.clear())
        return future

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            children = list(self._children)
        for child in children:
            child.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in children:
            child.end()

    def _prepare(self, holder: list[bytes], plan: Plan) -> Prepared:
        started, child = time.monotonic(), self._idle.get()
        task = (plan, 0, self.room, self.room, [holder[0]])
        try:
            child = self._started(child)
            try:
                child.connection.send(task)
            except OSError:  # it ended while it was idle
                child = self._started(child)
                child.connection.send(task)
            prepared = self._receive(child)
            if child not in self._children:  # it has ended
                child = None
        finally:
            self._idle.put(child)
        self.seconds = DECAY * self.seconds + (1 - DECAY) * (time.monotonic() - started)
        return prepared

    def _started(self, child: _Child | None) -> _Child:
        """This process, or a new one."""
        if child is not None and child.process.poll() is None and not child.connection.closed:
            return child
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the decoder is closed; make a new one.")
            if child is not None:  # it has ended while it was idle
                self._children.discard(child)
                child.end()
            child = _Child.start(self.limits, self.room)
            self._children.add(child)
            return child

    def _receive(self, child: _Child) -> Prepared:
        """The result of the task that the process has. A process that ends over it is not used any more."""
        try:
            is_late = not child.connection.poll(LONGEST)
            if not is_late:
                (prepared,) = as_prepared(child.connection.recv(), child.memory)
                data = prepared.data
                return prepared if data is None else replace(prepared, data=data.copy())
        except (EOFError, OSError):
            is_late = False
        with self._lock:
            self._children.discard(child)
        code = child.process.poll() if is_late else child.process.wait()
        child.end()
        if is_late or code == -signal.SIGPROF:
            return self.when_slow
        if code == 1:  # an exception of our own code, not a file's fault
            raise RuntimeError("a process that decodes images has failed; its error is printed above.")
        assert code is not None
        return Prepared(Form.ERROR, error=f"the process that decoded it was ended by {cause(code)}")
