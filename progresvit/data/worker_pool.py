"""Many images prepared in processes, in order, with shared memory between them and this process.

Threads of one process decode at most about three images at a time, because they share the interpreter lock. A pool's
processes (decoding_process.py) read tasks from a socket and write the images into the shared memory. A file that kills
a process (a decoder's crash, the system's out-of-memory killer) fails alone, because its chunk is tried again image by
image.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait

import numpy as np

from progresvit.data.decoding_process import Process, Reply, as_prepared, cause, shared_file, start_process
from progresvit.data.prepare import Form, Plan, Prepared, Request

CHUNK = 8
"""Images in a task."""
SLOT = 1024 * 1024
"""Bytes of shared memory for an image; the worker crops a larger one."""
QUEUED = 2
"""Tasks that a worker holds at a time, so that it never waits for the next one."""


@dataclass
class _Task:
    requests: list[Request]
    segment: int
    ends_group: bool
    results: list[Prepared] | None = None
    retried: list[Prepared] = field(default_factory=list)
    """Results of single images, after a worker died on the task."""
    alone: bool = False


@dataclass
class _Worker:
    process: Process
    connection: Connection
    tasks: deque[_Task] = field(default_factory=deque)


class WorkerPool:
    """Prepares images in processes, in order. For one stream of images at a time; use it in a ``with`` block.

    Args:
        plan: The work that the processes do for each image.
        workers: Number of processes; a process starts when it is needed.
        group: Number of images in a group that is handed over.
    """

    def __init__(self, plan: Plan, workers: int, *, group: int = 64) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}.")
        self.plan, self.workers = plan, workers
        self._group = max(1, group // CHUNK)
        self._length = CHUNK * max(SLOT if plan.pixels or plan.jpeg else 0, plan.crop.byte_count)  # any crop fits
        segments = QUEUED * workers + 2 * self._group
        self._file = shared_file(segments * self._length)
        self.memory = np.frombuffer(mmap.mmap(self._file, segments * self._length), np.uint8)
        """The memory that all processes share; the data of the prepared images lie here."""
        self._free = list(range(segments))
        self._running: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for worker in self._running:
            worker.connection.close()
        for worker in self._running:
            worker.process.kill()  # its results are not read any more
            worker.process.wait()
        self._running.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def prepared(self, batches: Iterable[Sequence[Request]]) -> Iterator[list[Prepared]]:
        """The images in order, in groups. A group never has images of two batches.

        The data of a group are valid until the next group is requested.
        """
        source = _cut(batches, self._group)
        waiting: deque[_Task] = deque()
        while True:
            self._dispatch(source, waiting)
            if not waiting:
                return
            while not _first_group_is_done(waiting):
                self._collect()
                self._dispatch(source, waiting)
            group = [waiting.popleft()]
            while not group[-1].ends_group:
                group.append(waiting.popleft())
            yield [image for task in group for image in task.results or ()]
            self._free += [task.segment for task in group]

    def _dispatch(self, source: Iterator[tuple[list[Request], bool]], waiting: deque[_Task]) -> None:
        """Give tasks to workers while there is room."""
        while self._free and (worker := self._available()) is not None:
            requests, ends_group = next(source, ([], True))
            if not requests:
                return
            task = _Task(requests, self._free.pop(), ends_group)
            waiting.append(task)
            self._send(worker, task)

    def _available(self) -> _Worker | None:
        """An idle worker, else a new one, else the one with the fewest tasks; None if all queues are full."""
        best = min(self._running, key=lambda worker: len(worker.tasks), default=None)
        if best is not None and not best.tasks:
            return best
        if len(self._running) < self.workers:
            return self._start()
        return best if best is not None and len(best.tasks) < QUEUED else None

    def _start(self) -> _Worker:
        worker = _Worker(*start_process(self._file, len(self.memory)))
        self._running.append(worker)
        return worker

    def _send(self, worker: _Worker, task: _Task) -> None:
        requests = task.requests
        if task.alone:
            done = len(task.retried)
            requests = requests[done : done + 1]
        worker.tasks.append(task)
        try:
            worker.connection.send(
                (self.plan, task.segment * self._length, self._length, self._length // CHUNK, requests)
            )
        except ConnectionError:  # it has died, which is noticed when its reply is read
            return

    def _collect(self) -> None:
        """Wait for replies and store their results."""
        connections = {worker.connection: worker for worker in self._running if worker.tasks}
        for connection in wait(list(connections)):
            assert isinstance(connection, Connection)
            worker = connections[connection]
            try:
                reply: Reply = connection.recv()
            except (EOFError, ConnectionError):
                self._replace_dead(worker)
                continue
            self._take(worker, worker.tasks.popleft(), reply)

    def _take(self, worker: _Worker, task: _Task, reply: Reply) -> None:
        first = task.segment * self._length
        results = as_prepared(reply, self.memory[first:])
        if not task.alone:
            task.results = results
            return
        kept = results[0]
        if kept.data is not None:  # the next image of the chunk uses the same segment
            kept = replace(kept, data=kept.data.copy())
        self._add_alone(worker, task, kept)

    def _add_alone(self, worker: _Worker, task: _Task, result: Prepared) -> None:
        task.retried.append(result)
        if len(task.retried) < len(task.requests):
            self._send(worker, task)
        else:
            task.results = task.retried

    def _replace_dead(self, worker: _Worker) -> None:
        """Replace a worker that died: another one does its first task image by image, and its other tasks as before."""
        worker.connection.close()
        code = worker.process.wait()
        self._running.remove(worker)
        if not worker.tasks:
            return
        if code == 1:  # an exception of our own code, not a file's fault
            raise RuntimeError("a process that decodes images has failed; its error is printed above.")
        replacement = self._start()
        failed, *others = worker.tasks
        if failed.alone:
            reason = f"the process that decoded it was ended by {cause(code)}"
            self._add_alone(replacement, failed, Prepared(Form.ERROR, error=reason))
        else:
            failed.alone = True
            self._send(replacement, failed)
        for task in others:
            self._send(replacement, task)


def _cut(batches: Iterable[Sequence[Request]], chunks: int) -> Iterator[tuple[list[Request], bool]]:
    """Chunks of the batches, and whether a group ends with each: after ``chunks`` chunks, and at the end of a batch."""
    for batch in batches:
        for number, first in enumerate(range(0, len(batch), CHUNK), 1):
            yield list(batch[first : first + CHUNK]), number % chunks == 0 or first + CHUNK >= len(batch)


def _first_group_is_done(waiting: Iterable[_Task]) -> bool:
    """Whether all tasks of the first group have results."""
    for task in waiting:
        if task.results is None:
            return False
        if task.ends_group:
            return True
    return False
