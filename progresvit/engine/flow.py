"""Images on their way through the rounds: in at one end in any portions, out at the other in their order.

Rooms are bounded, and so are the results held back behind an image that still waits. Nothing here computes: that is the
backend's. Letters: S rounds, s a round from 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.prediction import Prediction
from progresvit.engine.rooms import Array, Ran, Room, Rounds, portions
from progresvit.routing.arrays import Answers

HELD_BATCHES = 32
"""So many batches of results may be held back behind a waiting image; then the rooms run as they are."""


class MemoryWarning(UserWarning):
    """Batches are smaller than was asked for, since memory ran out."""


class Flow:
    """One stream of images, numbered from 0 in the order of their coming."""

    def __init__(
        self,
        rounds: Rounds,
        rooms: list[Room],
        *,
        largest: int,
        make: Callable[[int, Answers, NDArray[np.int64]], list[Prediction]],
        shrunk: Callable[[int], None],
    ) -> None:
        """``make(s, answers, rows)`` are results; ``shrunk`` is told of a smaller ``largest`` batch."""
        self.rounds, self.rooms, self.largest = rounds, rooms, largest
        self._make, self._shrunk = make, shrunk
        self._results: dict[int, Prediction] = {}
        self._started: deque[tuple[int, NDArray[np.int64], Ran]] = deque()
        self._coming = self._leaving = 0
        for room in rooms:
            room.clear()

    def feed(self, pixels: Array, known: dict[int, Prediction] | None = None) -> None:
        """Take images in, (B, C, R, R); those whose place is in ``known`` have their result and are not looked at."""
        known = known or {}
        now = time.monotonic()
        taken = 0
        looked_at = len(pixels)
        numbers = np.arange(self._coming, self._coming + looked_at + len(known))
        if known:
            numbers = np.delete(numbers, list(known))
        self._results.update({self._coming + place: result for place, result in known.items()})
        self._coming += looked_at + len(known)
        while taken < looked_at:
            room = self.rooms[0]
            some = min(room.free, looked_at - taken)
            self.rounds.load(room, pixels[taken : taken + some])
            room.note(numbers[taken : taken + some], now)
            taken += some
            if not room.free:
                self._run(0)
        if len(self._results) > HELD_BATCHES * self.rooms[0].capacity:
            self.flush()

    def flush(self, before: float | None = None) -> None:
        """Run every room, or those where someone came before a time, as full as it is."""
        for s, room in enumerate(self.rooms):
            if room.fill and (before is None or float(room.arrived[0]) <= before):
                self._run(s)

    @property
    def side(self) -> int:
        return int(self.rooms[0].pixels.shape[-1])

    def oldest(self) -> float | None:
        """When the image came that waits longest."""
        return min((float(room.arrived[0]) for room in self.rooms if room.fill), default=None)

    def ready(self, *, wait: bool = False) -> Iterator[Prediction]:
        """Results that can go out: in order, up to the first that is missing."""
        while self._started and (wait or self._started[0][2].finished()):
            s, numbers, ran = self._started.popleft()
            self._note(s, numbers, ran.answers())
        while self._leaving in self._results:
            yield self._results.pop(self._leaving)
            self._leaving += 1

    def _run(self, s: int) -> None:
        room = self.rooms[s]
        first = 0
        while first < room.fill:
            count = portions(room.fill - first, self.largest, self.rounds.sizes)[0]
            try:
                ran = self.rounds.run(s, room, first, count)
            except self.rounds.out_of_memory:
                self._shrink(count)
                continue
            numbers = room.numbers[first : first + count].copy()
            if s == len(self.rooms) - 1:
                self._started.append((s, numbers, ran))
            else:
                answers = ran.answers()
                self._move(s, first, ran, np.flatnonzero(~answers.leaves))
                self._note(s, numbers, answers)
            first += count
        room.clear()

    def _move(self, s: int, first: int, ran: Ran, rows: NDArray[np.int64]) -> None:
        source, room = self.rooms[s], self.rooms[s + 1]
        while len(rows):
            some = rows[: room.free]
            self.rounds.move(source, first, ran, some, room)
            room.note(source.numbers[first + some], source.arrived[first + some])
            if not room.free:
                self._run(s + 1)
            rows = rows[len(some) :]

    def _note(self, s: int, numbers: NDArray[np.int64], answers: Answers) -> None:
        rows = np.flatnonzero(answers.leaves)
        self._results.update(zip(numbers[rows].tolist(), self._make(s, answers, rows)))

    def _shrink(self, count: int) -> None:
        if count == 1:
            raise MemoryError("there is not enough memory for a single image; free some, or use a smaller model.")
        self.rounds.shrink()
        self.largest = max(1, count // 2)
        self._shrunk(self.largest)
