"""Ray Serve: one deployment for each round, each scaled independently.

    serve run progresvit.serving.ray_serve:application model=nettewoof-tiny
    serve run --address ray://HEAD:10001 progresvit.serving.ray_serve:application model=/models/mine replicas=2,4

The replicas of round 1 answer HTTP requests at the same addresses as ``progresvit serve``. Each round collects its own
batches. An image that exits is answered at once; one that continues goes to a replica of the next round with its pixels
and tokens, through the object store of Ray where they are large. Ray replaces replicas that end, and their images are
sent to other replicas.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from numpy.typing import NDArray
from pydantic import Field, field_validator
from starlette.types import Receive, Scope, Send

from progresvit.data.isolated import IsolatedDecoder
from progresvit.data.prepare import Form
from progresvit.engine import Engine
from progresvit.engine.backends import open_source
from progresvit.engine.images import ImageOpener
from progresvit.engine.options import EngineOptions
from progresvit.engine.prediction import Prediction
from progresvit.engine.rounds import RoundRunner
from progresvit.io.extras import not_installed
from progresvit.io.parse import Section, parse_limit
from progresvit.routing.decide import check_own_threshold
from progresvit.serving.front.app import make_app
from progresvit.serving.metrics import ServerMetrics
from progresvit.serving.ray_data import check_model, for_each_round
from progresvit.serving.service import UNSUPPORTED, Limits, gather_within, is_image, too_many_requests
from progresvit.serving.start import CPU_BATCH, MOST_PIXELS, TOKEN, with_candidates

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError
    from ray.serve.handle import DeploymentHandle
except ModuleNotFoundError as error:
    raise ValueError(not_installed(str(error.name), "ray")) from error

RETRIES = 3
"""How often an image is sent to another replica of its round if a replica ends."""
ONGOING, QUEUED = 4, 4
"""The most batches that a replica has, and that wait for it; further requests are refused."""

log = logging.getLogger(__name__)


class Options(Section):
    """The arguments after the import path of ``serve run``, or ``args`` of a Serve config file."""

    model: str = "imagenet-tiny"
    """A model folder, bundled name, hub id or export. Every node must have it."""
    threshold: float | tuple[float, ...] | str | None = None
    """A number, one for each round but the last, or a setting, as for :class:`Engine`."""
    top_k: int = Field(1, ge=1)
    """Number of classes in ``top`` of an answer, unless the request asks for another; 1 for an empty ``top``."""
    device: str | None = None
    precision: str = "fp32"
    threads: int | None = Field(None, ge=1)
    batch: int | None = Field(None, ge=1)
    """Largest batch; by default 512 on a GPU, else 8."""
    batch_wait: float = Field(0.005, ge=0)
    """Seconds that an image may wait for a fuller batch, in each round."""
    deadline: float = Field(10.0, gt=0)
    """Seconds until a request is given up."""
    max_pixels: int = Field(MOST_PIXELS, ge=1)
    """The most pixels of a file that are decoded; larger JPEGs are decoded at a smaller scale."""
    replicas: tuple[int, ...] = (1,)
    """Replicas of each round, such as ``2,4``, or one number for all rounds."""
    max_replicas: tuple[int, ...] | None = None
    """The most replicas of each round: Ray scales between ``replicas`` and this number, by the load of the round."""
    cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for a replica."""
    gpus: float = Field(0.0, ge=0)
    """GPUs, or a fraction of one, that Ray reserves for a replica."""
    token: str | None = Field(default_factory=lambda: os.environ.get(TOKEN) or None, repr=False)
    """Clients must send it; by default the variable PROGRESVIT_TOKEN where ``serve run`` is called."""

    @field_validator("threshold", mode="before")
    @classmethod
    def _parse_threshold(cls, value: Any) -> Any:
        return parse_limit(value) if isinstance(value, str) else value

    @field_validator("replicas", "max_replicas", mode="before")
    @classmethod
    def _parse_counts(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else (value,) if isinstance(value, int) else value

    @property
    def largest_batch(self) -> int:
        return self.batch or (CPU_BATCH if self.engine_device == "cpu" else 512)

    @property
    def engine_device(self) -> str:
        return self.device or ("cuda" if self.gpus else "cpu")

    def engine_options(self) -> EngineOptions:
        """The options of the engine of a replica."""
        return EngineOptions(
            device=self.engine_device, precision=self.precision, threads=self.threads, batch=self.largest_batch,
            top_k=self.top_k,
        )  # fmt: skip


def application(options: Options) -> serve.Application:
    """The deployments, for ``serve run`` and ``serve.run``."""
    rounds = check_model(options.model, options.threshold, options.precision)
    least = for_each_round(options.replicas, rounds, "replicas")
    most = None if options.max_replicas is None else for_each_round(options.max_replicas, rounds, "max_replicas")
    bound: serve.Application | None = None
    for s in reversed(range(rounds)):  # each round knows the next
        kind = FirstRoundReplica if s == 0 else RoundReplica
        scaling = _scaling(least[s], None if most is None else most[s], options.largest_batch)
        resources = {"num_cpus": options.cpus, "num_gpus": options.gpus}
        deployment = serve.deployment(kind, name=f"Round{s + 1}", ray_actor_options=resources, **scaling)
        bound = deployment.bind(s, options, bound)
    assert bound is not None
    return bound


def _scaling(least: int, most: int | None, batch: int) -> dict[str, Any]:
    """How Ray scales a round, and how many requests its replicas take."""
    queued = max(QUEUED * batch * max(least, most or 0), Limits.images)  # at least the images of one request
    limits = {"max_ongoing_requests": ONGOING * batch, "max_queued_requests": queued}
    if most is None:
        return {"num_replicas": least, **limits}
    scaling = {"min_replicas": least, "max_replicas": max(least, most), "target_ongoing_requests": batch}
    return {"autoscaling_config": scaling, **limits}


@dataclass(frozen=True)
class RoundImage:
    """An image that a replica sends to the next round."""

    pixels: NDArray[np.uint8]
    """(C, R, R)."""
    tokens: NDArray[np.float32] | None
    """Tokens of the previous round, (N, d); None for round 1."""
    threshold: float
    """Threshold of the request; NaN uses the engine's."""


class RoundReplica:
    """A replica of a round."""

    def __init__(self, s: int, options: Options, next_round: DeploymentHandle | None) -> None:
        source = open_source(options.model)
        engine = Engine(source, options.threshold, options=with_candidates(options.engine_options(), source))
        self.s, self.options, self.engine, self.next_round = s, options, engine, next_round
        self.runner = RoundRunner(engine)
        self.runner.warm_up(s)  # before Ray sends requests
        self._compute = ThreadPoolExecutor(1, "progresvit-round")
        self._batched.set_max_batch_size(options.largest_batch)
        self._batched.set_batch_wait_timeout_s(options.batch_wait)

    async def run(self, image: RoundImage) -> Prediction:
        """The prediction of this round, or of a later one if the image continues."""
        result = await self._batched(image)
        if isinstance(result, Prediction):
            return result
        for attempt in range(RETRIES + 1):
            try:
                return await self._continued(result)
            except RayActorError:  # the replica ended
                if attempt == RETRIES:
                    raise
                log.warning("a replica of round %d ended; the image is sent to another.", self.s + 2)
        raise AssertionError

    async def _continued(self, image: RoundImage) -> Prediction:
        assert self.next_round is not None
        response = self.next_round.run.remote(image)
        try:
            prediction: Prediction = await response
            return prediction
        except asyncio.CancelledError:
            response.cancel()  # nobody waits for the later round
            raise

    @serve.batch  # type: ignore[untyped-decorator]
    async def _batched(self, images: list[RoundImage]) -> list[Prediction | RoundImage]:
        return await asyncio.get_running_loop().run_in_executor(self._compute, self._run_batch, images)

    def _run_batch(self, images: Sequence[RoundImage]) -> list[Prediction | RoundImage]:
        tokens = [image.tokens for image in images if image.tokens is not None]
        result = self.runner.run(
            self.s,
            np.stack([image.pixels for image in images]),
            np.stack(tokens) if tokens else None,
            np.array([image.threshold for image in images]),
        )
        results: list[Any] = list(result.predictions)
        for row, kept in zip(result.rows.tolist(), () if result.tokens is None else result.tokens):
            results[row] = RoundImage(images[row].pixels, kept, images[row].threshold)
        return results


class FirstRoundReplica(RoundReplica):
    """A replica of round 1, which also receives the requests."""

    version = "1"
    is_draining = False  # Ray routes no requests to a replica that ends

    def __init__(self, s: int, options: Options, next_round: DeploymentHandle | None) -> None:
        super().__init__(s, options, next_round)
        self.name = Path(options.model).expanduser().resolve().name
        self.top_k, self.limits = options.top_k, Limits(deadline=options.deadline)
        self.metrics = ServerMetrics(len(self.engine.gmacs))  # Ray has an address of its own for them
        self._opener, self._pending = ImageOpener(self.engine.config, max_pixels=options.max_pixels), 0
        workers = max(1, math.ceil(options.cpus))
        self._decoder = IsolatedDecoder(self._opener.plan, workers=workers, most_bytes=self.limits.body)
        self._images = serve.metrics.Counter("progresvit_images", "Answered images.", tag_keys=("exit_round",))
        self._app = make_app(self, token=options.token, has_metrics=False)

    async def __call__(self, _: Request) -> Response:
        """An HTTP request."""
        return _Application(self._app)

    def accepted(self) -> AbstractContextManager[None]:
        return nullcontext()  # Ray limits the requests, and classify() the images

    async def classify(
        self, contents: Sequence[bytes], *, threshold: float | None = None, timeout: float | None = None
    ) -> list[Prediction]:
        """A prediction for each image file, like :meth:`Service.classify`."""
        if threshold is not None:
            try:
                check_own_threshold(self.engine.policy, threshold)
            except ValueError as error:
                raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        if self._pending and self._pending + len(contents) > ONGOING * self.options.largest_batch:
            raise too_many_requests(1)
        own = math.nan if threshold is None else threshold
        self._pending += len(contents)
        seconds = min(self.limits.deadline, timeout or math.inf)
        try:
            return await gather_within([self._classify_one(content, own) for content in contents], seconds)
        except BackPressureError:  # a later round is full
            raise too_many_requests(1) from None
        finally:
            self._pending -= len(contents)

    async def _classify_one(self, content: bytes, threshold: float) -> Prediction:
        if not is_image(content):
            return Prediction.failed(UNSUPPORTED)
        prepared = await asyncio.wrap_future(self._decoder.submit(content))
        if prepared.form is Form.LATER:
            prepared = await asyncio.wrap_future(self._decoder.submit_slow(content))
        opened = self._opener.finish([prepared])
        if opened.errors:
            return Prediction.failed(opened.errors[0])
        prediction = await self.run(RoundImage(np.asarray(opened.pixels[0]), None, threshold))
        self._images.inc(tags={"exit_round": str(prediction.exit_round)})
        return prediction


class _Application(Response):
    """The response of an application, which reads the request itself."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__()
        self.app: Callable[[Scope, Receive, Send], Any] = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)
