"""The service: all requests share one engine. It refuses requests that would wait too long, audits exits, and drains.

Its methods run in the thread of the event loop; the engine computes in its own thread, and images are decoded in
processes with limits.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from fastapi import HTTPException

from progresvit.data.isolated import IsolatedDecoder
from progresvit.data.prepare import Form, Plan, Prepared
from progresvit.engine.engine import Engine
from progresvit.engine.prediction import Prediction
from progresvit.engine.scheduler import EngineFull
from progresvit.serving.metrics import ServerMetrics

if TYPE_CHECKING:
    from progresvit.serving.audit import Audit

KINDS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM", b"II*\x00", b"MM\x00*")
"""First bytes of JPEG, PNG, GIF, BMP and TIFF files."""
READ_AHEAD = 1024
"""Requests are read up to twice ``Limits.pending`` plus this number, within ``Limits.memory``."""
SLOW_IMAGES = 4
"""Slow images wait until they have this many times the pixels of the largest image. A request has one at a time."""
MOST_AUDITS = 16
"""The most images that wait for their audit; no image is sampled while the queue is full."""
AUDIT_RETRY = 0.05
"""Seconds until an audit is tried again when the engine is full."""
LEAST_PENDING = 24
"""Smallest limit of the queue, for slow models. At 80 % of the capacity, random arrivals rarely need more."""

MEMORY = 256_000_000
"""Bytes of requests that are held at a time, if requests are not larger than usual."""

T = TypeVar("T")
Hold: TypeAlias = Callable[[int], None]
"""Counts bytes of a request as held, or refuses them."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server accepts."""

    body: int = 16_000_000
    """The most bytes of a request, compressed or not."""
    images: int = 64
    """The most images of a request."""
    queue: float = 0.25
    """Seconds of work that may wait."""
    pending: int = 512
    """The most images that wait or run. Those after the first of a request have at most half of it."""
    wait: float = 0.005
    """Seconds that an image may wait for a fuller batch if the server has other images."""
    deadline: float = 10.0
    """Seconds after which a request without an answer gets 504."""
    receive: float = 10.0
    """Seconds that a client has to send its request."""
    rate: float = 10_000.0
    """Bytes per second that a client must send, after the first 2 seconds."""
    memory: int | None = None
    """The most bytes of requests that are held at a time, until nothing refers to them; by default 256 MB, and at least
    four requests of the largest size. A request may have as much as is left beside it, so small ones find room."""
    drain: float = 30.0
    """Seconds to answer the accepted requests when the server ends."""


class Intake:
    """What the models of a server share: the bound of the requests and of their bytes, and the processes that decode.

    Args:
        engines: The engines of the models, with one limit of pixels.
        limits: What the server accepts.

    Attributes:
        pending: The most images of a model that wait or run: an equal share of ``limits.pending``.
        requests: Number of requests that are read or answered now.
        held: Bytes of requests that are held now.
        is_draining: Whether new requests are refused because the server ends.
    """

    def __init__(self, engines: Sequence[Engine], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.memory = self.limits.memory or max(MEMORY, 4 * self.limits.body)
        if self.memory < 4 * self.limits.body:
            raise ValueError(f"memory must be at least four times body, {4 * self.limits.body}, got {self.memory}.")
        plan = max((engine.opener.plan for engine in engines), key=lambda plan: plan.crop.byte_count)  # any crop fits
        workers = max(engine.workers for engine in engines)
        self.decoder = IsolatedDecoder(plan, workers=workers, most_bytes=self.limits.body)
        self.pending = max(1, self.limits.pending // len(engines))
        self.requests = self.held = self.slow_pixels = 0
        self.is_draining = False


class Service:
    """Answers requests with an engine.

    Args:
        engine: Must have ``metrics`` as its observer.
        name: Name of the model in addresses and responses.
        limits: What the server accepts, if there is no intake.
        audit: Samples images to run to the last round; None for no audit.
        intake: What this model shares with the others of the server; None for a server of one model.
        top_k: Number of classes in ``top`` of an answer, unless the request asks for another number; 1 for an empty
            ``top``. By default the engine's, which is the most that a request may ask for.
    """

    version = "1"

    def __init__(
        self,
        engine: Engine,
        name: str,
        metrics: ServerMetrics,
        *,
        limits: Limits | None = None,
        audit: Audit | None = None,
        intake: Intake | None = None,
        top_k: int | None = None,
    ) -> None:
        self.engine, self.name, self.metrics, self.audit = engine, name, metrics, audit
        self.intake = intake = intake or Intake([engine], limits)
        self.limits, self.decoder = intake.limits, intake.decoder
        self.top_k = engine.top_k if top_k is None else top_k
        self._pending = self._later = self._slow = 0
        self._turns: deque[asyncio.Future[None]] = deque()
        self._audits: set[asyncio.Future[None]] = set()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the server ends."""
        return self.intake.is_draining

    @property
    def queue_limit(self) -> int:
        """The most images that may wait or run: as many as are computed in ``limits.queue`` seconds."""
        seconds = max(self.metrics.seconds_per_image() or 0.0, self.decoder.seconds_per_image)
        if not seconds:
            return self.intake.pending
        return min(self.intake.pending, max(LEAST_PENDING, math.ceil(self.limits.queue / seconds)))

    @contextmanager
    def accepted(self) -> Iterator[Hold]:
        """A context in which a request is read and answered; entering it refuses the request if the server is full.

        It gives a function that counts further bytes of the request as held, or refuses them.
        """
        if self.is_draining:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down.", {"Connection": "close"})
        self._check_capacity()
        intake = self.intake
        if intake.requests >= 2 * self.limits.pending + READ_AHEAD:
            raise self._full()
        intake.requests += 1
        request = 0

        def hold(size: int) -> None:
            nonlocal request
            if request + size > intake.memory - (intake.held + size):
                raise self._full()
            intake.held, request = intake.held + size, request + size

        try:
            yield hold
        finally:
            intake.requests -= 1
            intake.held -= request

    @property
    def _waiting(self) -> int:
        """Images that hold up others. Slow ones do not."""
        return self._pending - self._slow

    def _check_capacity(self) -> None:
        """Refuse a request whose first image would wait too long."""
        if self._waiting and self._waiting + 1 > self.queue_limit:
            raise self._full()

    def _full(self) -> HTTPException:
        seconds = self.metrics.seconds_per_image() or 0.0
        return too_many_requests(max(1, math.ceil(seconds * self._pending)))

    async def classify(
        self, contents: Sequence[bytes], *, threshold: float | None = None, timeout: float | None = None
    ) -> list[Prediction]:
        """A prediction for each image file. Cancelling the task cancels the images."""
        if threshold is not None and self.engine.policy.routers:
            raise HTTPException(
                HTTPStatus.BAD_REQUEST, "this server routes by a learned router; it takes no threshold."
            )
        self._check_capacity()
        limit = min(self.limits.deadline, timeout or math.inf)
        self.metrics.queue_limit.set(self.queue_limit)
        slow = asyncio.Lock()
        work = [self._classify_one(content, threshold, slow, is_first=not n) for n, content in enumerate(contents)]
        return await gather_within(work, limit)

    @asynccontextmanager
    async def _turn(self, *, is_first: bool) -> AsyncIterator[None]:
        """The turn of an image, in which it counts as pending.

        The first image of a request has it at once. The later ones of all requests take at most half of the queue, so
        that requests of many images leave room for other clients.
        """
        queue = self._turns.append
        while not is_first and (self._later >= max(1, self.queue_limit // 2) or self._waiting >= self.queue_limit):
            turn = asyncio.get_running_loop().create_future()
            queue(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_turn()  # to the next one
                raise
            queue = self._turns.appendleft  # if there is no room after all
        self._pending, self._later = self._pending + 1, self._later + (not is_first)
        try:
            yield
        finally:
            self._pending, self._later = self._pending - 1, self._later - (not is_first)
            self._give_turn()

    def _give_turn(self) -> None:
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def drain(self) -> None:
        """Refuse new requests to the server and wait for the accepted ones, at most ``limits.drain`` seconds."""
        self.intake.is_draining = True
        end = time.monotonic() + self.limits.drain
        while self.intake.requests and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """End the processes that decode."""
        self.decoder.close()

    async def prepare(self, content: bytes, plan: Plan) -> Prepared:
        """Prepare a single image file with a plan of its own, in a process with limits."""
        async with self._turn(is_first=True):
            return await self._prepare(content, asyncio.Lock(), plan)

    async def _prepare(
        self, content: bytes, slow: asyncio.Lock, plan: Plan | None = None, *, is_first: bool = True
    ) -> Prepared:
        """Prepare an image file in a process with limits. The slow images of a request share the lock."""
        if not is_image(content):
            return Prepared(Form.ERROR, error=UNSUPPORTED)
        plan = plan or self.engine.opener.plan
        prepared = await self._until_given_up(self.decoder.submit(content, plan), content)
        if prepared.form is not Form.LATER:
            return prepared
        most = self.decoder.most_pixels
        pixels = min(math.prod(prepared.size) or most, most)
        self._slow, self._later = self._slow + 1, self._later - (not is_first)
        self._give_turn()
        try:
            async with slow:
                if self.intake.slow_pixels and self.intake.slow_pixels + pixels > SLOW_IMAGES * most:
                    raise self._full()
                job = self.decoder.submit_slow(content, plan)
                self.intake.slow_pixels += pixels

                def release() -> None:
                    self.intake.slow_pixels -= pixels

                self._when_done(job, release)
                return await self._until_given_up(job, content)
        finally:
            self._slow, self._later = self._slow - 1, self._later + (not is_first)

    async def _until_given_up(self, job: Future[Prepared], content: bytes) -> Prepared:
        """The result of a job. If its request is given up, the content is held until the job ends."""
        try:
            return await asyncio.wrap_future(job)
        finally:
            job.cancel()
            if not job.done():
                size = len(content)
                self.intake.held += size

                def release() -> None:
                    self.intake.held -= size

                self._when_done(job, release)

    def _when_done(self, job: Future[Prepared], callback: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def call(_: Future[Prepared]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(callback)

        job.add_done_callback(call)

    async def _classify_one(
        self, content: bytes, threshold: float | None, slow: asyncio.Lock, *, is_first: bool
    ) -> Prediction:
        async with self._turn(is_first=is_first):
            prepared = await self._prepare(content, slow, is_first=is_first)
            return await self._answer(prepared, threshold)

    async def _answer(self, prepared: Prepared, threshold: float | None) -> Prediction:
        if prepared.error is not None:
            return Prediction.failed(prepared.error)
        is_audited = False
        is_alarm = self.audit is not None and self.audit.alarm
        if self.audit is not None and threshold is None and len(self._audits) < MOST_AUDITS:
            is_audited = self.audit.samples()  # before the exit is known
        (prediction,) = await asyncio.wrap_future(self._submit(prepared, 0.0 if is_alarm else threshold))
        if prediction.error is not None:
            return prediction
        self.metrics.answered(prediction)
        if is_audited and self.audit is not None and self.audit.is_new(_digest(prepared)):
            self._audit(prepared, prediction, other_threshold=None if is_alarm else 0.0)
        return prediction

    def _submit(self, prepared: Prepared, threshold: float | None) -> Future[list[Prediction]]:
        """Submit one image. Each image is its own call, so its exit is answered at once; a lone image does not wait."""
        wait = self.limits.wait if self._pending > 1 else 0.0
        try:
            return self.engine.submit([prepared], block=False, threshold=threshold, wait=wait)
        except EngineFull:
            raise self._full() from None

    def _audit(self, prepared: Prepared, prediction: Prediction, *, other_threshold: float | None) -> None:
        """Compare an answer with the answer at another threshold, after the client got it.

        The other answer is the last round's. During an alarm the client gets the last round's, and the other one is
        the answer at the engine's threshold, so that the evidence continues.
        """
        assert self.audit is not None
        if other_threshold is not None and prediction.exit_round == len(self.engine.gmacs):
            self._record(is_different=False)
            return

        async def compare() -> None:
            while True:
                try:
                    (other,) = await asyncio.wrap_future(self._submit(prepared, other_threshold))
                    break
                except Exception as error:
                    if not isinstance(error, HTTPException):
                        log.exception("an audit failed")
                        return
                    # the engine is full; skipping the image would bias the audit towards images that ran all rounds
                    await asyncio.sleep(AUDIT_RETRY)
            self._record(is_different=other.index != prediction.index)

        task = asyncio.ensure_future(compare())
        self._audits.add(task)
        task.add_done_callback(self._audits.discard)

    def _record(self, *, is_different: bool) -> None:
        assert self.audit is not None
        self.audit.record(is_different)
        self.metrics.audited.inc()
        self.metrics.disagreements.inc(is_different)
        self._report_audit()

    def reset_audit(self) -> None:
        """Forget the evidence of the audit, and end an alarm."""
        if self.audit is not None:
            self.audit.reset()
            self._report_audit()

    def _report_audit(self) -> None:
        assert self.audit is not None
        self.metrics.audit_alarm.set(self.audit.alarm)
        for side, bound in zip(("lower", "upper"), self.audit.bounds()):
            self.metrics.audit_bound.labels(side).set(bound)


def _digest(prepared: Prepared) -> bytes:
    """A hash of what the engine sees of an image."""
    return hashlib.blake2b(np.ascontiguousarray(prepared.data).data, digest_size=16).digest()


async def gather_within(work: Iterable[Coroutine[Any, Any, T]], seconds: float) -> list[T]:
    """All results. The tasks are cancelled if one fails, if the time is over (504), and if this is cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.gather(*tasks)
    except TimeoutError:
        raise HTTPException(HTTPStatus.GATEWAY_TIMEOUT, f"no answer within {seconds:g} seconds.") from None
    finally:
        for task in tasks:
            task.cancel()


def too_many_requests(retry_after: int) -> HTTPException:
    """The refusal of a request that would wait too long. The client may try again after these seconds."""
    headers = {"Retry-After": str(retry_after)}
    return HTTPException(HTTPStatus.TOO_MANY_REQUESTS, "too many requests; try again later.", headers)


UNSUPPORTED = "not an image of a supported format"


def is_image(content: bytes) -> bool:
    """Whether a file begins like a supported image: JPEG, PNG, GIF, WebP, BMP or TIFF."""
    return content.startswith(KINDS) or (content[:4] == b"RIFF" and content[8:12] == b"WEBP")
