"""The rounds of an export, with numpy: no torch.

Letters: B images, C channels, R side of the images, N tokens, d channels of tokens, s a round from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.buffers import Ran, Room
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.routing.decide import Answers, Policy, decide


@dataclass
class ArrayRan:
    """A round that has been run."""

    found: Answers
    tokens: NDArray[np.float32] | None

    def finished(self) -> bool:
        return True

    def answers(self) -> Answers:
        return self.found


class ArrayRounds:
    """Graphs, and decisions on the host."""

    sizes: tuple[int, ...] | None = None
    out_of_memory: tuple[type[Exception], ...] = (MemoryError,)

    def __init__(self, graphs: GraphRounds, policy: Policy, temperatures: Sequence[float], top_k: int = 1) -> None:
        self.graphs, self.policy, self.temperatures, self.top_k = graphs, policy, tuple(temperatures), top_k
        self.config = graphs.manifest.config

    def make_room(self, s: int, capacity: int, side: int) -> Room:
        if side != self.config.input_side:
            raise ValueError(
                f"the graphs take images of {self.config.input_side} pixels, not {side}; crop or resize them first."
            )
        pixels = np.zeros((capacity, self.config.in_channels, side, side), np.uint8)
        if s == 0:
            return Room(pixels, None)
        before = self.config.rounds[s - 1]
        shape = (capacity, self.config.grid(before) ** 2 + 1, before.width)
        return Room(pixels, np.zeros(shape, np.float32))

    def send(self, pixels: Any) -> NDArray[np.uint8]:
        return np.asarray(pixels)

    def receive(self, sent: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return sent

    def load(self, room: Room, pixels: NDArray[np.uint8]) -> None:
        room.pixels[room.fill : room.fill + len(pixels)] = pixels

    def run(self, s: int, room: Room, first: int, count: int) -> Ran:
        places = slice(first, first + count)
        tokens = None if room.tokens is None else room.tokens[places]
        logits, tokens = self.graphs.run(s, room.pixels[places], tokens)
        return ArrayRan(decide(self.policy, s, logits, self.temperatures[s], self.top_k), tokens)

    def move(self, source: Room, first: int, ran: Ran, rows: NDArray[np.int64], target: Room) -> None:
        places = slice(target.fill, target.fill + len(rows))
        np.take(source.pixels, first + rows, axis=0, out=target.pixels[places])
        assert target.tokens is not None
        np.take(ran.tokens, rows, axis=0, out=target.tokens[places])

    def shrink(self) -> None:
        pass
