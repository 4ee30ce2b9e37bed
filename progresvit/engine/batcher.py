"""Images on their way through the rounds: in at one end in any portions, out at the other in their order.

A round is started and left alone; whoever goes on is moved to the next room when somebody needs the place, so that the
host makes results while the device computes. Rooms are bounded, and so are the results held back behind an image that
still waits. Nothing here computes: that is the backend's. Letters: S rounds, s a round from 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.buffers import Array, Ran, Room, Rounds, portions
from progresvit.engine.prediction import Prediction
from progresvit.routing.decide import Answers

HELD_BATCHES = 32
"""So many batches may be on their way, held back behind a waiting image; then the rooms run as they are."""


class MemoryWarning(UserWarning):
    """Batches are smaller than was asked for, since memory ran out."""


@dataclass(frozen=True)
class _Running:
    """A round at work on images of its room: ``count`` of them from place ``first`` on."""

    ran: Ran
    first: int
    count: int


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
        self._running: list[_Running | None] = [None] * len(rooms)
        self._answered: deque[tuple[int, NDArray[np.int64], Ran]] = deque()
        self._coming = self._leaving = 0
        for room in rooms:
            room.clear()

    def feed(self, pixels: Array, known: dict[int, Prediction] | None = None) -> None:
        """Take images in, (B, C, R, R); those whose place is in ``known`` have their result and are not looked at."""
        known = known or {}
        now = time.monotonic()
        taken, looked_at = 0, len(pixels)
        numbers = np.arange(self._coming, self._coming + looked_at + len(known))
        if known:
            numbers = np.delete(numbers, list(known))
        self._results.update({self._coming + place: result for place, result in known.items()})
        self._coming += looked_at + len(known)
        while taken < looked_at:
            room = self._open_room(0)
            some = min(room.free, looked_at - taken)
            self.rounds.load(room, pixels[taken : taken + some])
            room.note(numbers[taken : taken + some], now)
            taken += some
            if not room.free:
                self._start(0)
        if self._coming - self._leaving > HELD_BATCHES * self.rooms[0].capacity:
            self.flush()

    def flush(self, before: float | None = None) -> None:
        """Run every room, or those where someone came before a time, as full as it is."""
        for s, room in enumerate(self.rooms):
            if room.fill and (before is None or float(room.arrived[0]) <= before):
                if self._running[s] is None:
                    self._start(s)
                self._settle(s)

    @property
    def side(self) -> int:
        return int(self.rooms[0].pixels.shape[-1])

    @property
    def is_running(self) -> bool:
        return any(self._running) or bool(self._answered)

    def oldest(self) -> float | None:
        """When the image came that waits longest."""
        return min((float(room.arrived[0]) for room in self.rooms if room.fill), default=None)

    def ready(self, *, wait: bool = False) -> Iterator[Prediction]:
        """Results that can go out: in order, up to the first that is missing."""
        for s, running in enumerate(self._running):
            if running is not None and (wait or running.ran.finished()):
                self._settle(s)
        while self._answered and (wait or self._answered[0][2].finished()):
            s, numbers, ran = self._answered.popleft()
            answers = ran.answers()
            rows = np.flatnonzero(answers.exits)
            self._results.update(zip(numbers[rows].tolist(), self._make(s, answers, rows)))
        while self._leaving in self._results:
            yield self._results.pop(self._leaving)
            self._leaving += 1

    def _open_room(self, s: int) -> Room:
        """A room that images may be put into."""
        if self._running[s] is not None:
            self._settle(s)
        return self.rooms[s]

    def _start(self, s: int) -> None:
        """Begin the round for all who are in its room; if that takes several portions, all but the last are settled."""
        room = self.rooms[s]
        first, has_freed = 0, False
        while first < room.fill:
            count = portions(room.fill - first, self.largest, self.rounds.sizes)[0]
            try:
                ran = self.rounds.run(s, room, first, count)
            except self.rounds.out_of_memory:
                self.rounds.shrink()
                if has_freed:  # and that was not enough
                    self._halve(count)
                has_freed = True
                continue
            has_freed = False
            self._running[s] = _Running(ran, first, count)
            first += count
            if first < room.fill:
                self._settle(s)

    def _settle(self, s: int) -> None:
        """Move on who goes on; the results of the others are made when there is time."""
        running, room = self._running[s], self.rooms[s]
        assert running is not None
        self._running[s] = None
        ran, first, count = running.ran, running.first, running.count
        numbers = room.numbers[first : first + count].copy()
        if s < len(self.rooms) - 1:
            self._move(s, first, ran, np.flatnonzero(~ran.answers().exits))
            ran.tokens = None  # nobody asks for them any more
        self._answered.append((s, numbers, ran))
        if first + count == room.fill:
            room.clear()

    def _move(self, s: int, first: int, ran: Ran, rows: NDArray[np.int64]) -> None:
        source = self.rooms[s]
        while len(rows):
            room = self._open_room(s + 1)
            some = rows[: room.free]
            self.rounds.move(source, first, ran, some, room)
            room.note(source.numbers[first + some], source.arrived[first + some])
            if not room.free:
                self._start(s + 1)
            rows = rows[len(some) :]

    def _halve(self, count: int) -> None:
        if count == 1:
            raise MemoryError("there is not enough memory for a single image; free some, or use a smaller model.")
        self.largest = max(1, count // 2)
        self._shrunk(self.largest)
