"""Buffers in which images wait for their next round, and the interface of a backend that runs the rounds.

Each round has a buffer, or several. Images that continue move to a buffer of the next round, and a round runs when its
buffer is full or an image in it is due. So later rounds run full batches, whatever share of the images reaches them.

Letters: B images, C channels, R side of the images, N tokens, d channels of tokens, K classes, s a round from
0.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from progresvit.routing.decide import Answers, Array

HELD_BATCHES = 32
"""The most batches of a stream in progress, or finished and held back; beyond that, its images do not wait."""


class RunningRound(Protocol):
    """A round that has been started on a batch."""

    tokens: Array
    """(B, N, d); valid until the round runs again on the same buffer."""

    def finished(self) -> bool:
        """Whether the answers are available without waiting."""
        ...

    def answers(self) -> Answers:
        """The answers; waits for them."""
        ...


class RoundBuffer:
    """The images that wait for a round; the first ``fill`` places are occupied, in the order of their numbers."""

    def __init__(self, pixels: Array, tokens: Array | None) -> None:
        self.pixels, self.tokens = pixels, tokens
        """Bytes, (capacity, C, R, R), and tokens of the previous round, (capacity, N, d); None before the first."""
        self.capacity = len(pixels)
        self.fill = 0
        self.earliest = math.inf
        """When the first of the images is due."""
        self._numbers = np.zeros(self.capacity, np.int64)
        self.due = np.zeros(self.capacity)
        """By place: when the image runs at the latest, even if the batch is not full."""
        self.since = np.zeros(self.capacity)
        """By place: when the image was added."""
        self.thresholds = np.zeros(self.capacity)
        """By place: the threshold of the image; NaN uses the policy's."""

    @property
    def free(self) -> int:
        return self.capacity - self.fill

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of the waiting images; valid until others are added."""
        return self._numbers[: self.fill]

    def add(
        self,
        numbers: NDArray[np.int64],
        due: NDArray[np.float64] | float,
        thresholds: NDArray[np.float64] | float = math.nan,
    ) -> None:
        """Register images that were copied into the next free places."""
        places = slice(self.fill, self.fill + len(numbers))
        self._numbers[places], self.due[places] = numbers, due
        self.since[places], self.thresholds[places] = time.monotonic(), thresholds
        self.earliest = min(self.earliest, due if isinstance(due, float) else float(due.min(initial=math.inf)))
        self.fill += len(numbers)

    def expedite(self, first: int, end: int) -> None:
        """Images with these numbers are due now."""
        start, stop = np.searchsorted(self.numbers, (first, end))
        if stop > start:
            self.due[start:stop] = self.earliest = -math.inf

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Register that only these images are left, and that they were moved to the first places."""
        for values in (self._numbers, self.due, self.since, self.thresholds):
            values[: len(rows)] = values[rows]
        self.fill = len(rows)
        self.earliest = float(self.due[: self.fill].min(initial=math.inf))

    def clear(self) -> None:
        self.fill, self.earliest = 0, math.inf


class ArrayRounds(Protocol):
    """The rounds of a model on numpy arrays: the graphs of an export, or a backend of your own."""

    def run(
        self, s: int, pixels: NDArray[np.uint8], tokens: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Run round s: bytes (B, C, R, R), and after the first round tokens (B, N, d) -> logits (B, K) and tokens.

        ``tokens`` come from the previous round; the returned ones go to the next round and are ignored after the last.
        """
        ...


class RoundBackend(Protocol):
    """The rounds of a model on a device, with buffers, exit decisions and answers."""

    identity: str
    """Identifies the implementation in the files of a resumable run."""
    sizes: tuple[int, ...] | None
    """The batch sizes that it runs; None for any."""
    out_of_memory: tuple[type[Exception], ...]

    def make_buffers(self, s: int, capacity: int, side: int) -> list[RoundBuffer]:
        """One buffer for a round; several if it can run on one while others are filled or read."""
        ...

    def send(self, pixels: Array) -> Any:
        """Start copying images (B, C, R, R) to the device. Any thread may call this, at any time."""
        ...

    def receive(self, sent: Any) -> Array:
        """The images, on the device."""
        ...

    def load(self, buffer: RoundBuffer, pixels: Array) -> None:
        """Copy images into the first free places."""
        ...

    def run(self, s: int, buffer: RoundBuffer, first: int, count: int) -> RunningRound:
        """Start the round for ``count`` images from place ``first`` on. Images before it are not needed again."""
        ...

    def move(
        self, source: RoundBuffer, first: int, running: RunningRound, rows: NDArray[np.int64], target: RoundBuffer
    ) -> None:
        """Copy images, counted from ``first``, and their new tokens into the first free places of the next buffer."""
        ...

    def keep(self, buffer: RoundBuffer, rows: NDArray[np.int64]) -> None:
        """Move these images, in increasing order, to the first places of their buffer."""
        ...

    def shrink(self) -> None:
        """Free memory that is not needed now."""
        ...

    def driving(self) -> AbstractContextManager[Any]:
        """Entered by a thread for as long as it makes all calls but ``send``; threads follow each other."""
        ...


def batch_size(count: int, largest: int, sizes: tuple[int, ...] | None = None) -> int:
    """How many of ``count`` images run in the next batch, at most ``largest``.

    With ``sizes`` a batch is padded to the next of them, and is smaller where padding would waste a quarter.
    """
    if sizes is None:
        return min(largest, count)
    usable = sorted(size for size in sizes if size <= largest) or [min(sizes)]
    padded = next((size for size in usable if size >= count), usable[-1])
    fits = max((size for size in usable if size <= count), default=padded)
    return min(count, padded if count > 0.75 * padded else fits)


def padded_size(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that is at least ``count``."""
    return min(size for size in sizes if size >= count)


def power_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, … and the largest itself."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if sizes[-1] == largest else (*sizes, largest)
