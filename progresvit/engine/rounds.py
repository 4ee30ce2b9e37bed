"""Single rounds on batches, for schedulers outside of this process that pass the tokens on themselves.

Letters: B images, C channels, R side of the images, N tokens, d channels of tokens, s a round from 0.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.buffers import RoundBuffer
from progresvit.engine.engine import Engine
from progresvit.engine.prediction import Prediction
from progresvit.routing.decide import with_thresholds


class RoundResult(NamedTuple):
    """The result of a round for a batch."""

    predictions: list[Prediction | None]
    """The prediction of each image; None if the image continues."""
    rows: NDArray[np.int64]
    """The images that continue."""
    tokens: NDArray[np.float32] | None
    """Their tokens, (B', N, d); None if no image continues."""


class RoundRunner:
    """Runs the rounds of an engine one at a time. The engine gives the same answers for batches of the same images.

    Args:
        engine: Not to be used otherwise, except for its properties.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rounds = engine, engine.rounds
        self._buffers: dict[tuple[int, int], RoundBuffer] = {}
        self._lock = threading.Lock()

    def run(
        self,
        s: int,
        pixels: NDArray[np.uint8],
        tokens: NDArray[np.float32] | None = None,
        thresholds: NDArray[np.float64] | None = None,
    ) -> RoundResult:
        """Round s of images (B, C, R, R), with the tokens (B, N, d) of the round before; any number of images.

        ``thresholds`` (B,) replace the threshold of the engine; NaN keeps it.
        """
        total, size = len(pixels), self.engine.batch
        limits = np.full(total, np.nan) if thresholds is None else thresholds
        parts = [slice(first, first + size) for first in range(0, total, size)]
        with self._lock, self.rounds.driving():
            results = [
                self._run_batch(s, pixels[part], None if tokens is None else tokens[part], limits[part])
                for part in parts
            ]
        kept = [result.tokens for result in results if result.tokens is not None]
        return RoundResult(
            [prediction for result in results for prediction in result.predictions],
            np.concatenate([part.start + result.rows for part, result in zip(parts, results)] or [np.empty(0, int)]),
            np.concatenate(kept) if kept else None,
        )

    def warm_up(self, s: int) -> None:
        """Build what round s otherwise builds on first use: on a GPU, a CUDA graph for each batch size."""
        with self._lock, self.rounds.driving():
            buffer = self._buffer(s, self.engine.config.input_side)
            for count in self.rounds.sizes or (1,):
                if count <= self.engine.batch:
                    self.rounds.run(s, buffer, 0, count).answers()

    def _run_batch(
        self, s: int, pixels: NDArray[np.uint8], tokens: NDArray[np.float32] | None, thresholds: NDArray[np.float64]
    ) -> RoundResult:
        buffer, count = self._buffer(s, pixels.shape[-1]), len(pixels)
        self.rounds.load(buffer, self.rounds.receive(self.rounds.send(pixels)))
        if buffer.tokens is not None:
            _copy(tokens, buffer.tokens[:count])
        running = self.rounds.run(s, buffer, 0, count)
        answers = running.answers()
        if s < len(self.engine.gmacs) - 1:
            answers = with_thresholds(self.engine.policy, s, answers, thresholds)
        exits, rows = np.flatnonzero(answers.exits), np.flatnonzero(~answers.exits)
        predictions: list[Prediction | None] = [None] * count
        for row, prediction in zip(exits.tolist(), self.engine.make_predictions(s, answers, exits)):
            predictions[row] = prediction
        return RoundResult(predictions, rows, _taken(running.tokens, rows) if len(rows) else None)

    def _buffer(self, s: int, side: int) -> RoundBuffer:
        if (s, side) not in self._buffers:
            self._buffers[s, side] = self.rounds.make_buffers(s, self.engine.batch, side)[0]
        return self._buffers[s, side]


def _copy(tokens: NDArray[np.float32] | None, target: Any) -> None:
    if tokens is None:
        raise ValueError("rounds after the first need the tokens of the round before.")
    if isinstance(target, np.ndarray):
        target[:] = tokens
    else:
        import torch

        target.copy_(torch.from_numpy(np.require(tokens, requirements="W")))  # shared memory is read-only


def _taken(tokens: Any, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """These rows, on the host; bf16 becomes float32, which holds the same numbers."""
    if isinstance(tokens, np.ndarray):
        return tokens[rows]
    import torch

    taken: NDArray[np.float32] = tokens[torch.from_numpy(rows).to(tokens.device)].float().cpu().numpy()
    return taken
