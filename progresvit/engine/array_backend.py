"""The backend of rounds on numpy arrays, with decisions in numpy: the graphs of an export, or rounds of your own.

Needs no torch. Letters: B images, C channels, r the side of the model's input, N tokens, d channels of a round, s a
round from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit.config import ModelConfig
from progresvit.engine.buffers import ArrayRounds, RoundBuffer, RunningRound
from progresvit.engine.export.manifest import tokens_shape
from progresvit.metrics.arrays import Float32s
from progresvit.routing.decide import Answers, Policy, decide

GRAPH_BATCH = 64
"""Largest batch by default. The activation ranges of int8 graphs depend on the batch, so evaluation uses the same."""


@dataclass
class FinishedRound:
    """A round that has run."""

    decided: Answers
    tokens: Float32s | None

    def finished(self) -> bool:
        return True

    def answers(self) -> Answers:
        return self.decided


class ArrayBackend:
    """Rounds on numpy arrays. They have run when ``run`` returns."""

    identity = "ArrayRounds"  # the name that runs of all versions have
    sizes: tuple[int, ...] | None = None
    out_of_memory: tuple[type[Exception], ...] = (MemoryError,)

    def __init__(
        self, rounds: ArrayRounds, config: ModelConfig, policy: Policy, temperatures: Sequence[float], top_k: int = 1
    ) -> None:
        self.rounds, self.config, self.policy = rounds, config, policy
        self.temperatures, self.top_k = tuple(temperatures), top_k

    def make_buffers(self, s: int, capacity: int, side: int) -> list[RoundBuffer]:
        if side != self.config.input_side:
            raise ValueError(
                f"the backend takes images of {self.config.input_side} pixels, not {side}; crop or resize them first."
            )
        pixels = np.zeros((capacity, self.config.in_channels, side, side), np.uint8)
        shape = (capacity, *tokens_shape(self.config, s - 1)) if s else None
        return [RoundBuffer(pixels, None if shape is None else np.zeros(shape, np.float32))]

    def send(self, pixels: Any) -> NDArray[np.uint8]:
        return np.asarray(pixels)

    def receive(self, sent: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return sent

    def load(self, buffer: RoundBuffer, pixels: NDArray[np.uint8]) -> None:
        buffer.pixels[buffer.fill : buffer.fill + len(pixels)] = pixels

    def run(self, s: int, buffer: RoundBuffer, first: int, count: int) -> RunningRound:
        places = slice(first, first + count)
        tokens = None if buffer.tokens is None else buffer.tokens[places]
        logits, tokens = self.rounds.run(s, buffer.pixels[places], tokens)
        return FinishedRound(decide(self.policy, s, logits, self.temperatures[s], self.top_k), tokens)

    def move(
        self, source: RoundBuffer, first: int, running: RunningRound, rows: NDArray[np.int64], target: RoundBuffer
    ) -> None:
        places = slice(target.fill, target.fill + len(rows))
        np.take(source.pixels, first + rows, axis=0, out=target.pixels[places])
        assert target.tokens is not None
        np.take(running.tokens, rows, axis=0, out=target.tokens[places])

    def keep(self, buffer: RoundBuffer, rows: NDArray[np.int64]) -> None:
        for held in (buffer.pixels, buffer.tokens):
            if held is not None:
                held[: len(rows)] = held[rows]  # indexing copies, so places may overlap

    def shrink(self) -> None:
        pass

    def driving(self) -> AbstractContextManager[None]:
        return nullcontext()
