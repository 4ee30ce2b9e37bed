"""The batcher of segmentation: the windows of many images run through the rounds in full batches.

All windows of an image run a round, then one score decides for all of them. The windows of images that continue wait
until a batch of the next round is full, or the input ends. An image that waits keeps its pixels as bytes; its windows
are cut and normalised on the device when they run.

A round has fewer waiting windows than a batch and an image, so the memory of the device is bounded. So are the results
that are held back behind an image that still waits.

Letters: V windows of an image, K classes, g side of the patch grid, N tokens, d channels of tokens, s a round from 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from progresvit.data.segmentation.images import EvaluationImage
from progresvit.data.segmentation.windows import ImageWindows
from progresvit.engine.buffers import HELD_BATCHES
from progresvit.model import RoundOutput
from progresvit.predict.segment import RoundMap, image_labels, image_score
from progresvit.routing.decide import exits

if TYPE_CHECKING:
    from progresvit.engine.segmentation import SegmentationEngine

HELD_PIXELS = 2**28
"""The most pixels of label maps in progress behind a waiting image; beyond that, rounds run before batches are full."""


class WindowExit(NamedTuple):
    """The result of an image when it exits, on the host."""

    s: int
    """The round after which it exits, from 0."""
    windows: int
    map: RoundMap


@dataclass
class _Waiting:
    """An image that waits for a round, or some of whose windows have run it."""

    number: int
    image: EvaluationImage
    count: int
    """Number of windows, V."""
    tokens: Tensor | None = None
    """Tokens of the previous round, (V, N, d); None before the first."""
    cut: ImageWindows | None = None
    """The windows; None until the first of them runs."""
    outputs: list[RoundOutput] = field(default_factory=list)
    done: int = 0
    """Number of the windows that have run."""


class WindowBatcher:
    """Runs one stream of images, numbered from 0 in the order in which they enter.

    Args:
        engine: Runs the rounds; ``engine.batch`` is the most windows in a batch.
        thresholds: One for each round but the last.
    """

    def __init__(self, engine: SegmentationEngine, thresholds: Sequence[float]) -> None:
        self.engine, self.config, self.device, self.thresholds = engine, engine.config, engine.device, thresholds
        self._queues: list[deque[_Waiting]] = [deque() for _ in (*thresholds, None)]
        self._results: dict[int, WindowExit | str] = {}
        self._entered = self._returned = 0
        self._windows = self._pixels = 0  # of the images that were not returned yet

    def feed(self, image: EvaluationImage | str) -> None:
        """Take an image in, or the reason why it could not be opened."""
        number = self._entered
        self._entered += 1
        if isinstance(image, str):
            self._results[number] = image
            return
        count = sum(view.count for view in image.views)
        self._queues[0].append(_Waiting(number, image.to(self.device), count))
        self._windows += count
        self._pixels += image.size[0] * image.size[1]
        self._run_batches(least=self.engine.batch)
        if self._windows > HELD_BATCHES * self.engine.batch or self._pixels > HELD_PIXELS:
            self.flush()

    def flush(self) -> None:
        """Run everything that waits."""
        self._run_batches(least=1)

    def ready(self) -> Iterator[WindowExit | str]:
        """Results that are available: in order, up to the first that is missing."""
        while self._returned in self._results:
            result = self._results.pop(self._returned)
            self._returned += 1
            if isinstance(result, WindowExit):
                self._windows -= result.windows
                self._pixels -= result.map.labels.numel()
            yield result

    @torch.inference_mode()
    def _run_batches(self, least: int) -> None:
        """Run each round as long as at least ``least`` windows wait for it."""
        for s, queue in enumerate(self._queues):
            while sum(waiting.count - waiting.done for waiting in queue) >= least:
                self._decide(s, self._run_batch(s))

    def _run_batch(self, s: int) -> list[_Waiting]:
        """Run the next windows of a round; returns the images that are complete."""
        queue, parts, free = self._queues[s], [], self.engine.batch
        for waiting in queue:
            count = min(free, waiting.count - waiting.done)
            parts.append((waiting, slice(waiting.done, waiting.done + count)))
            waiting.done += count
            waiting.cut = waiting.cut or waiting.image.cut(self.config, self.device)
            free -= count
            if not free:
                break
        windows = torch.cat([waiting.cut.windows[rows] for waiting, rows in parts if waiting.cut is not None])
        tokens = [waiting.tokens[rows] for waiting, rows in parts if waiting.tokens is not None]
        output = self.engine.run_round(s, windows, torch.cat(tokens) if tokens else None)
        counts = [rows.stop - rows.start for _, rows in parts]
        for (waiting, _), logits, new in zip(parts, output.logits.split(counts), output.tokens.split(counts)):
            waiting.outputs.append(RoundOutput(logits, new))
        return [queue.popleft() for waiting, _ in parts if waiting.done == waiting.count]

    def _decide(self, s: int, complete: list[_Waiting]) -> None:
        """Images of which all windows have run the round exit, or wait for the next one."""
        if not complete:
            return
        logits = [torch.cat([output.logits for output in waiting.outputs]) for waiting in complete]  # (V, K, g, g) each
        scores = torch.stack([image_score(of_image) for of_image in logits]).cpu()
        is_last = s == len(self.thresholds)
        exiting = [True] * len(complete) if is_last else exits(scores, self.thresholds[s]).tolist()
        for waiting, of_image, score, is_exit in zip(complete, logits, scores, exiting):
            if is_exit:
                assert waiting.cut is not None
                labels = image_labels(of_image, waiting.cut).cpu()
                self._results[waiting.number] = WindowExit(s, waiting.count, RoundMap(labels, score))
            else:  # a copy, since the outputs are views of whole batches
                tokens = torch.cat([output.tokens for output in waiting.outputs])
                self._queues[s + 1].append(_Waiting(waiting.number, waiting.image, waiting.count, tokens))
