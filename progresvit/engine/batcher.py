"""The batcher: images run through the rounds in full batches, and predictions are delivered as images exit.

Rounds run asynchronously. Images that continue move to the next round when space is needed, so that the host makes
predictions while the device computes. If a round has several buffers, one is filled and started while another runs,
and the device need not wait for the host. The backend does all computation. One thread uses a batcher.

Letters: S rounds, s a round from 0.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.buffers import RoundBackend, RoundBuffer, RunningRound, batch_size
from progresvit.engine.prediction import Prediction
from progresvit.routing.decide import Answers, Array

OVERTAKEN = 4
"""The most batches of other rounds that run while images of a round are due, as long as new images keep arriving."""

NEARLY_FULL = 0.75
"""A buffer that is fuller than that starts, if its images are due, while another round runs."""

ApplyThresholds = Callable[[int, Answers, NDArray[np.float64]], Answers]
MakePredictions = Callable[[int, Answers, NDArray[np.int64]], list[Prediction]]
Deliver = Callable[[NDArray[np.int64], list[Prediction]], None]


SMALLER_BATCHES = "memory ran out; the engine continues with smaller batches, see engine.batch."


class MemoryWarning(UserWarning):
    """Batches are smaller than requested, since memory ran out."""


class Observer(Protocol):
    """Receives a report of each batch, in the thread that runs it."""

    def started(self, s: int, waited: NDArray[np.float64]) -> None:
        """A batch of round s starts; ``waited`` holds the seconds that each image has waited."""
        ...

    def finished(self, s: int, seconds: float, entropy: NDArray[np.float32]) -> None:
        """The answers of a batch have arrived, ``seconds`` after its start, with the entropies of its images."""
        ...

    def shrunk(self) -> None:
        """Memory ran out, and batches are smaller from now on."""
        ...


class _Running(NamedTuple):
    """Round s, running on ``images`` images of a buffer from place ``first`` on."""

    s: int
    buffer: RoundBuffer
    round: RunningRound
    first: int
    images: int
    started: float


class _Answered(NamedTuple):
    """A round whose images have left its buffer. After the last round, the answers may still be on their way."""

    s: int
    numbers: NDArray[np.int64]
    round: RunningRound
    answers: Answers | None
    started: float


@dataclass(frozen=True)
class Totals:
    """How many images and batches each round has run."""

    images: list[int]
    batches: list[int]


class Batcher:
    """Runs numbered images. Numbers increase in the order in which images are fed.

    Args:
        rounds: The backend.
        buffers: One or more for each round.
        largest: The largest batch.
        apply_thresholds: Called with round, answers and thresholds of single images, NaN for the policy's; returns the
            answers with these thresholds.
        make_predictions: Called with round, answers and the rows that exit; returns their predictions.
        deliver: Called with the increasing numbers of images that have exited, and their predictions.
        shrunk: Called with the new ``largest`` when memory runs out.
        before_round: Called before each batch; it may cancel images.
        totals: Updated with each batch.
        observer: Receives a report of each batch.
    """

    def __init__(
        self,
        rounds: RoundBackend,
        buffers: list[list[RoundBuffer]],
        *,
        largest: int,
        apply_thresholds: ApplyThresholds,
        make_predictions: MakePredictions,
        deliver: Deliver,
        shrunk: Callable[[int], None],
        before_round: Callable[[], None],
        totals: Totals,
        observer: Observer | None = None,
    ) -> None:
        self.rounds, self.buffers, self.largest, self.totals = rounds, buffers, largest, totals
        self.side = int(buffers[0][0].pixels.shape[-1])
        """Side of the images, R."""
        self._all_buffers = list(chain.from_iterable(buffers))
        self._apply_thresholds, self._make_predictions = apply_thresholds, make_predictions
        self._deliver, self._shrunk, self._before_round = deliver, shrunk, before_round
        self.observer = observer
        self._is_synchronous = False  # the backend computes before run returns
        self._end = 0  # numbers before it have been fed
        self.reset()

    def reset(self) -> None:
        """Forget all images."""
        self._running: list[_Running] = []  # in the order in which they were started
        self._open: list[RoundBuffer | None] = [None] * len(self.buffers)  # the buffers that are being filled
        self._answered: deque[_Answered] = deque()
        self._cancelled: list[tuple[int, int]] = []
        self._overtaken = [0] * len(self.buffers)
        for buffer in self._all_buffers:
            buffer.clear()

    @property
    def capacity(self) -> int:
        """Images that a buffer holds. It stays when batches shrink."""
        return self.buffers[0][0].capacity

    @property
    def is_empty(self) -> bool:
        return not self._answered and not any(buffer.fill for buffer in self._all_buffers)

    @property
    def next_due(self) -> float:
        """When the first of the images that wait is due."""
        return min((buffer.earliest for _, buffer in self._waiting()), default=math.inf)

    def feed(self, pixels: Array, numbers: NDArray[np.int64], due: float, threshold: float = math.nan) -> None:
        """Take images in, (B, C, R, R), which run by the time ``due`` even if the batch is not full.

        ``threshold`` is the threshold of these images; NaN uses the policy's.
        """
        taken, total = 0, len(pixels)
        while taken < total:
            buffer = self._open_buffer(0)
            count = min(buffer.free, total - taken)
            places = slice(taken, taken + count)
            self.rounds.load(buffer, pixels[places] if count < total else pixels)
            buffer.add(numbers[places], due, threshold)
            taken += count
            if not buffer.free:
                self._start(0)
        self._end = int(numbers[-1]) + 1 if total else self._end

    def cancel(self, first: int, end: int) -> None:
        """Images with these numbers start no further round."""
        self._cancelled.append((first, end))

    def expedite(self, first: int, end: int) -> None:
        """Images with these numbers are due now."""
        for buffer in self._all_buffers:
            buffer.expedite(first, end)

    def advance(self, now: float) -> bool:
        """Do one thing, or nothing if all images wait for a fuller batch; then False.

        Predictions come first, since they may complete a call. While a round runs, only buffers that are nearly full
        start; else it is waited for. If none runs, images that are due start with the batch that there is; earlier
        rounds go first and fill later buffers, on a CPU also with images that are not due.
        """
        if self._answered and self._answered[0].round.finished():
            self._deliver_next()
            return True
        if self._running or self._answered:
            for s, buffer in self._waiting():
                if buffer.earliest <= now and buffer.fill > NEARLY_FULL * buffer.capacity:
                    self._start(s)  # right behind the one that runs
                    return True
        if self._answered:
            self._deliver_next()
            return True
        if self._running:
            self._settle(self._running[0])
            return True
        is_due = self.next_due <= now
        for s, buffer in self._waiting():  # none runs
            # a CPU would be busy with a later round for long: images that may wait a moment do not wait for that
            if buffer.earliest <= now or (is_due and self._is_synchronous and buffer.earliest < math.inf):
                self._start(s)
                return True
        return False

    def keep_up(self, now: float) -> None:
        """Between new images: start rounds that were overtaken too often, and deliver what is finished."""
        for s, buffer in self._waiting():
            if buffer.earliest <= now and self._overtaken[s] >= OVERTAKEN:
                self._start(s)
        while self._running and self._running[0].round.finished():
            self._settle(self._running[0])
        self._deliver_answered()

    def flush(self) -> None:
        """Run all images to the end."""
        for s in range(len(self.buffers)):
            if self._open[s] is not None:
                self._start(s)
            self._settle_all(s)
        while self._answered:
            self._deliver_next()

    def _waiting(self) -> Iterator[tuple[int, RoundBuffer]]:
        """The rounds with images that wait, and the buffers of these images."""
        return ((s, buffer) for s, buffer in enumerate(self._open) if buffer is not None and buffer.fill)

    def _deliver_answered(self) -> None:
        while self._answered and self._answered[0].round.finished():
            self._deliver_next()

    def _deliver_next(self) -> None:
        s, numbers, running_round, answers, started = self._answered.popleft()
        if answers is None:
            answers = running_round.answers()
            if self.observer is not None:
                self.observer.finished(s, time.monotonic() - started, answers.entropy)
        rows = np.flatnonzero(answers.exits)
        if len(rows):
            self._deliver(numbers[rows], self._make_predictions(s, answers, rows))

    def _open_buffer(self, s: int) -> RoundBuffer:
        """A buffer of round s with free places."""
        buffer = self._open[s]
        if buffer is None:
            self._overtaken[s] = 0
            while (buffer := next((empty for empty in self.buffers[s] if not empty.fill), None)) is None:
                self._settle(next(running for running in self._running if running.s == s))
            self._open[s] = buffer
        return buffer

    def _start(self, s: int) -> None:
        """Start the round for all images in its open buffer. If it takes several batches, the first are settled."""
        if s and self._is_synchronous:  # images that exited do not wait for those that continue
            self._deliver_answered()
        buffer = self._open[s]
        assert buffer is not None
        first, has_freed = 0, False
        while True:
            self._before_round()
            self._remove_cancelled(buffer, first)
            if first >= buffer.fill:
                break
            count = batch_size(buffer.fill - first, self.largest, self.rounds.sizes)
            started = time.monotonic()
            try:
                running = self.rounds.run(s, buffer, first, count)
            except self.rounds.out_of_memory:
                self.rounds.shrink()
                if has_freed:  # and it was not enough
                    self._halve(count)
                has_freed = True
                continue
            has_freed = False
            self._is_synchronous = running.finished()
            self._running.append(_Running(s, buffer, running, first, count, started))
            self.totals.images[s] += count
            self.totals.batches[s] += 1
            self._overtaken = [0 if other == s else batches + 1 for other, batches in enumerate(self._overtaken)]
            if self.observer is not None:
                self.observer.started(s, started - buffer.since[first : first + count])
            first += count
            if first < buffer.fill:
                self._settle_all(s)
        self._open[s] = None
        if not any(running.buffer is buffer for running in self._running):  # the rest was cancelled
            buffer.clear()

    def _settle_all(self, s: int) -> None:
        for running in [running for running in self._running if running.s == s]:
            self._settle(running)

    def _settle(self, running: _Running) -> None:
        """Move the images that continue to the next round; predictions of the others are delivered later.

        ``running`` is the first of its round that was started, so that images stay in order.
        """
        self._running.remove(running)
        s, buffer, running_round, first, count, started = running
        numbers = buffer.numbers[first : first + count].copy()
        is_all = first + count == buffer.fill
        answers = None
        if s < len(self.buffers) - 1:
            answers = self._apply_thresholds(s, running_round.answers(), buffer.thresholds[first : first + count])
            if self.observer is not None:
                self.observer.finished(s, time.monotonic() - started, answers.entropy)
        rows = np.flatnonzero(~answers.exits) if answers is not None else np.empty(0, np.int64)
        if len(rows) < count:
            self._answered.append(_Answered(s, numbers, running_round, answers, started))
        if self._cancelled:
            rows = rows[~self._are_cancelled(numbers[rows])]
        while len(rows):
            target = self._open_buffer(s + 1)
            fitting = rows[: target.free]
            self.rounds.move(buffer, first, running_round, fitting, target)
            places = first + fitting
            target.add(buffer.numbers[places], buffer.due[places], buffer.thresholds[places])
            if not target.free:
                self._start(s + 1)
            rows = rows[len(fitting) :]
        if answers is not None:
            running_round.tokens = None  # not needed any more
        if is_all:
            buffer.clear()

    def _remove_cancelled(self, buffer: RoundBuffer, first: int) -> None:
        """Remove cancelled images from place ``first`` on, from a buffer that does not run."""
        if not self._cancelled:
            return
        stays = ~self._are_cancelled(buffer.numbers)
        stays[:first] = True  # these have run
        if not stays.all():
            rows = np.flatnonzero(stays)
            self.rounds.keep(buffer, rows)
            buffer.keep(rows)
        self._cancelled = [
            (first_, end)
            for first_, end in self._cancelled
            if end > self._end  # it is being fed
            or any(np.diff(np.searchsorted(other.numbers, (first_, end)))[0] for other in self._all_buffers)
        ]

    def _are_cancelled(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        marks = np.zeros(len(numbers), bool)
        for first, end in self._cancelled:
            start, stop = np.searchsorted(numbers, (first, end))
            marks[start:stop] = True
        return marks

    def _halve(self, count: int) -> None:
        if count == 1:
            raise MemoryError("there is not enough memory for a single image; free some, or use a smaller model.")
        self.largest = max(1, count // 2)
        if self.observer is not None:
            self.observer.shrunk()
        self._shrunk(self.largest)
