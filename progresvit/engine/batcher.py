"""The batcher: images run through the rounds in full batches, and their predictions are returned in order.

Rounds run asynchronously. Images that continue move to the next round's buffer when space is needed, so that the host
makes predictions while the device computes. Buffers are bounded, and so are the predictions that are held back behind
an image that still waits. The backend does all computation. Letters: S rounds, s a round from 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.buffers import Array, RoundBackend, RoundBuffer, RunningRound, batch_sizes
from progresvit.engine.prediction import Prediction
from progresvit.routing.decide import Answers

HELD_BATCHES = 32
"""The most batches in progress behind a waiting image; beyond that, buffers run before they are full."""


class MemoryWarning(UserWarning):
    """Batches are smaller than requested, since memory ran out."""


@dataclass(frozen=True)
class _Running:
    """A running round, on ``count`` images of its buffer from place ``first`` on."""

    round: RunningRound
    first: int
    count: int


class Batcher:
    """Runs one stream of images, numbered from 0 in the order in which they enter.

    Args:
        rounds: The backend.
        buffers: One for each round.
        largest: The largest batch.
        make: ``make(s, answers, rows)`` makes the predictions of the rows that exit after round s.
        shrunk: Called with the new ``largest`` when memory runs out.
    """

    def __init__(
        self,
        rounds: RoundBackend,
        buffers: list[RoundBuffer],
        *,
        largest: int,
        make: Callable[[int, Answers, NDArray[np.int64]], list[Prediction]],
        shrunk: Callable[[int], None],
    ) -> None:
        self.rounds, self.buffers, self.largest = rounds, buffers, largest
        self._make, self._shrunk = make, shrunk
        self._results: dict[int, Prediction] = {}
        self._running: list[_Running | None] = [None] * len(buffers)
        self._answered: deque[tuple[int, NDArray[np.int64], RunningRound]] = deque()
        self._entered = self._returned = 0
        for buffer in buffers:
            buffer.clear()

    def feed(self, pixels: Array, known: dict[int, Prediction] | None = None) -> None:
        """Take images in, (B, C, R, R). ``known`` gives predictions for images that have no pixels, by position."""
        known = known or {}
        now = time.monotonic()
        taken, total = 0, len(pixels)
        numbers = np.arange(self._entered, self._entered + total + len(known))
        if known:
            numbers = np.delete(numbers, list(known))
        self._results.update({self._entered + position: result for position, result in known.items()})
        self._entered += total + len(known)
        while taken < total:
            buffer = self._open_buffer(0)
            count = min(buffer.free, total - taken)
            self.rounds.load(buffer, pixels[taken : taken + count])
            buffer.add(numbers[taken : taken + count], now)
            taken += count
            if not buffer.free:
                self._start(0)
        if self._entered - self._returned > HELD_BATCHES * self.buffers[0].capacity:
            self.flush()

    def flush(self, before: float | None = None) -> None:
        """Run every buffer that is not empty; with ``before``, only those with an image that arrived by that time."""
        for s, buffer in enumerate(self.buffers):
            if buffer.fill and (before is None or float(buffer.arrived[0]) <= before):
                if self._running[s] is None:
                    self._start(s)
                self._settle(s)

    @property
    def side(self) -> int:
        return int(self.buffers[0].pixels.shape[-1])

    @property
    def is_running(self) -> bool:
        return any(self._running) or bool(self._answered)

    def oldest(self) -> float | None:
        """When the image that waits longest arrived."""
        return min((float(buffer.arrived[0]) for buffer in self.buffers if buffer.fill), default=None)

    def ready(self, *, wait: bool = False) -> Iterator[Prediction]:
        """Predictions that are available: in order, up to the first that is missing."""
        for s, running in enumerate(self._running):
            if running is not None and (wait or running.round.finished()):
                self._settle(s)
        while self._answered and (wait or self._answered[0][2].finished()):
            s, numbers, running_round = self._answered.popleft()
            answers = running_round.answers()
            rows = np.flatnonzero(answers.exits)
            self._results.update(zip(numbers[rows].tolist(), self._make(s, answers, rows)))
        while self._returned in self._results:
            yield self._results.pop(self._returned)
            self._returned += 1

    def _open_buffer(self, s: int) -> RoundBuffer:
        """The buffer of round s, free to be written to."""
        if self._running[s] is not None:
            self._settle(s)
        return self.buffers[s]

    def _start(self, s: int) -> None:
        """Start the round for all images in its buffer. If it takes several batches, all but the last are settled."""
        buffer = self.buffers[s]
        first, has_freed = 0, False
        while first < buffer.fill:
            count = batch_sizes(buffer.fill - first, self.largest, self.rounds.sizes)[0]
            try:
                running = self.rounds.run(s, buffer, first, count)
            except self.rounds.out_of_memory:
                self.rounds.shrink()
                if has_freed:  # and it was not enough
                    self._halve(count)
                has_freed = True
                continue
            has_freed = False
            self._running[s] = _Running(running, first, count)
            first += count
            if first < buffer.fill:
                self._settle(s)

    def _settle(self, s: int) -> None:
        """Move the images that continue to the next buffer; predictions of the others are made in ``ready``."""
        running, buffer = self._running[s], self.buffers[s]
        assert running is not None
        self._running[s] = None
        running_round, first, count = running.round, running.first, running.count
        numbers = buffer.numbers[first : first + count].copy()
        if s < len(self.buffers) - 1:
            self._move(s, first, running_round, np.flatnonzero(~running_round.answers().exits))
            running_round.tokens = None  # not needed any more
        self._answered.append((s, numbers, running_round))
        if first + count == buffer.fill:
            buffer.clear()

    def _move(self, s: int, first: int, running: RunningRound, rows: NDArray[np.int64]) -> None:
        source = self.buffers[s]
        while len(rows):
            target = self._open_buffer(s + 1)
            some = rows[: target.free]
            self.rounds.move(source, first, running, some, target)
            target.add(source.numbers[first + some], source.arrived[first + some])
            if not target.free:
                self._start(s + 1)
            rows = rows[len(some) :]

    def _halve(self, count: int) -> None:
        if count == 1:
            raise MemoryError("there is not enough memory for a single image; free some, or use a smaller model.")
        self.largest = max(1, count // 2)
        self._shrunk(self.largest)
