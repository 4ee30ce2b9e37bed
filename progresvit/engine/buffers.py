"""Where images wait for their next round, and what a backend has to offer for that.

Before each round there is a room. Whoever goes on moves into the next room, and a round runs when its room is full (or
when nobody should wait any longer). So later rounds run full batches, whatever share of the images reaches them.

Letters: B images, C channels, R side of the images, N tokens, d channels of tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from progresvit.routing.decide import Answers

Array = Any
"""A numpy array or a tensor, whatever the backend computes with."""


class Ran(Protocol):
    """A round that has been started."""

    tokens: Array
    """(B, N, d); good until the same round is run again."""

    def finished(self) -> bool: ...

    def answers(self) -> Answers:
        """Waits for them."""
        ...


class Room:
    """Up to so many images before a round; the first ``fill`` places are taken."""

    def __init__(self, pixels: Array, tokens: Array | None) -> None:
        self.pixels, self.tokens = pixels, tokens
        """Bytes, (capacity, C, R, R), and of the round before, (capacity, N, d); no tokens before the first."""
        self.capacity = len(pixels)
        self.fill = 0
        self._numbers = np.zeros(self.capacity, np.int64)
        self._arrived = np.zeros(self.capacity)

    @property
    def free(self) -> int:
        return self.capacity - self.fill

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Of the images that are here; good until others come."""
        return self._numbers[: self.fill]

    @property
    def arrived(self) -> NDArray[np.float64]:
        """When each came into the flow."""
        return self._arrived[: self.fill]

    def note(self, numbers: NDArray[np.int64], arrived: NDArray[np.float64] | float) -> None:
        """Images have been copied into the next places."""
        places = slice(self.fill, self.fill + len(numbers))
        self._numbers[places], self._arrived[places] = numbers, arrived
        self.fill += len(numbers)

    def clear(self) -> None:
        self.fill = 0


class Rounds(Protocol):
    """A model's rounds on some device."""

    sizes: tuple[int, ...] | None
    """Batches come in these sizes; None if any will do."""
    out_of_memory: tuple[type[Exception], ...]

    def make_room(self, s: int, capacity: int, side: int) -> Room: ...

    def send(self, pixels: Array) -> Any:
        """Start bringing images (B, C, R, R) to the device. May be called from another thread."""
        ...

    def receive(self, sent: Any) -> Array:
        """The images, on the device."""
        ...

    def load(self, room: Room, pixels: Array) -> None:
        """Copy images into the first free places."""
        ...

    def run(self, s: int, room: Room, first: int, count: int) -> Ran:
        """Start the round for ``count`` images from place ``first`` on. Images before that place are done with."""
        ...

    def move(self, source: Room, first: int, ran: Ran, rows: NDArray[np.int64], target: Room) -> None:
        """Copy images, numbered from ``first``, and their new tokens into the first free places of the next room."""
        ...

    def shrink(self) -> None:
        """Give back what memory can be given back."""
        ...


def portions(count: int, largest: int, sizes: tuple[int, ...] | None = None) -> list[int]:
    """How to run so many images: numbers that add up to ``count``, none above ``largest``.

    With ``sizes`` a portion is padded to the next of them; a portion is cut off where padding would waste a quarter.
    """
    if sizes is None:
        return [min(largest, count - first) for first in range(0, count, largest)]
    usable = sorted(size for size in sizes if size <= largest) or [min(sizes)]
    found = []
    while count:
        padded = next((size for size in usable if size >= count), usable[-1])
        fits = max((size for size in usable if size <= count), default=padded)
        portion = min(count, padded) if count > 0.75 * padded else fits
        found.append(min(portion, count))
        count -= found[-1]
    return found


def padded_size(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds so many."""
    return min(size for size in sizes if size >= count)


def power_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, … and the largest itself."""
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if sizes[-1] == largest else (*sizes, largest)
