"""The engine: classifies images with a model and an exit policy.

After each round only the images that continue are kept, and they wait until the batch is full (buffers.py, batcher.py),
so an image costs only the rounds that it runs, in time as well. Any number of threads may call an engine; their images
share batches (scheduler.py). This file needs no torch; the torch backend does.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, overload

from progresvit import compute
from progresvit.data.prefetch import Prefetcher
from progresvit.engine.backends import open_source
from progresvit.engine.images import (
    ImageOpener,
    Images,
    OneImage,
    PathLike,
    as_input,
    is_channels_last,
    is_one_image,
    is_single,
)
from progresvit.engine.jobs import CallOpener, Stream
from progresvit.engine.options import EngineKeywords, EngineOptions
from progresvit.engine.prediction import Prediction, PredictionMaker
from progresvit.engine.scheduler import Counts, Scheduler, mark_thread_of_engine
from progresvit.engine.thresholds import ThresholdLike, check_setting, find_threshold
from progresvit.engine.worker import Worker
from progresvit.routing.decide import Abstention, Policy, check_own_threshold, with_thresholds
from progresvit.routing.settings import Setting, SettingWarning

if TYPE_CHECKING:
    from progresvit.engine.backends import ModelSource
    from progresvit.engine.batcher import Observer
    from progresvit.model import ProgResViT
    from progresvit.routing.custom_router import ExitScore
    from progresvit.routing.router import Router

DEADLINE = 0.005
"""Seconds that an image of a stream may wait until a batch is full."""
PENDING_BATCHES, LEAST_PENDING = 16, 1024
"""The default of ``pending``: this number of batches, and at least this number of images."""
DECODED_TOGETHER = 16
"""The most files of a future that one thread decodes before they are sent."""


class Engine:
    """Classifies images in rounds. The model is folded when the engine is made; later changes to it have no effect.

    Threads may call it at the same time. It closes at the end of a ``with``, or when it is not used any more.

    Args:
        model: A model, the folder or hub id of one, the name of a bundled model, or a folder that ``progresvit export``
            wrote. None for the bundled model ``imagenet-tiny``.
        threshold: A number, one for each round but the last, a ``Setting``, or the path or name of one (in the model
            folder, ``settings/NAME.json``). A setting for other weights is refused; one for another preprocessing or
            precision warns. By default the setting of the export, or the near-lossless setting of the model folder;
            without one every round runs, with a warning. It is compared with top-10 entropies, or with the
            probabilities of ``router``.
        budget_gmacs: Average GMACs per image, instead of a threshold; looked up in ``budgets.json`` of the folder.
        router: A learned router or the path of one, or a router of your own: a function of a round and the statistics
            of its logits (``routing.ExitScore``), or its import string, ``my_module:my_router``.
        abstain: The top-10 entropy from which answers are withheld, or an ``Abstention``. By default the limit of the
            setting. Answers for out-of-distribution images are withheld if the setting has a limit for them.
        temperatures: One for each round; they divide the logits for the reported probability only.
        options: How the engine runs, as :class:`EngineOptions`.
        keywords: The same by keyword: ``backend``, ``device``, ``precision``, ``batch``, ``kernels``, ``threads``,
            ``workers``, ``decode``, ``max_pixels``, ``top_k``, ``pending``; see :class:`EngineOptions`.
    """

    def __init__(
        self,
        model: ProgResViT | ModelSource | PathLike | None = None,
        threshold: ThresholdLike | None = None,
        *,
        budget_gmacs: float | None = None,
        router: Router | ExitScore | PathLike | None = None,
        abstain: float | Abstention | None = None,
        temperatures: Sequence[float] | None = None,
        options: EngineOptions | None = None,
        **keywords: Unpack[EngineKeywords],
    ) -> None:
        self.options = options = EngineOptions.merge(options, keywords)
        self._source = source = open_source(model, options.backend)
        self.config = config = source.config
        self.precision = source.precision or options.precision
        self.top_k = top_k = options.top_k
        if top_k > max(1, config.num_classes):
            raise ValueError(f"top_k must be at most {config.num_classes}, the classes of the model, got {top_k}.")
        if router is not None:
            from progresvit.routing.custom_router import open_router

            router = open_router(router, len(config.rounds))
        threshold = find_threshold(threshold, source, budget_gmacs=budget_gmacs, use_default=router is None)
        self.setting = threshold if isinstance(threshold, Setting) else None
        """The setting of the threshold, if it was calibrated."""
        if isinstance(threshold, Setting):
            check_setting(threshold, source, precision=self.precision, router_sha256=_router_hash(router))
            abstain = threshold.abstain if abstain is None else abstain
            threshold = threshold.threshold
        ood = None if self.setting is None else self.setting.ood
        self.policy = Policy.make(len(config.rounds), threshold, router=router, abstain=abstain, ood=ood)
        if any(own.origin.model_sha256 not in (None, source.weights_sha256) for own in self.policy.routers):
            warnings.warn("the router was fitted on another model's records.", SettingWarning, stacklevel=2)
        self.temperatures = _checked_temperatures(temperatures, source.temperatures, len(config.rounds))
        self.gmacs = compute.cumulative_gmacs(config)
        self.backend, self.rounds, batch = source.make_backend(self.policy, self.temperatures, options)
        self.make_predictions = PredictionMaker(config.labels, self.gmacs, top_k, has_ood=self.policy.ood is not None)
        """Predictions from the answers of a round."""
        self._scheduler = Scheduler(
            partial(
                Worker,
                rounds=self.rounds,
                make_predictions=self.make_predictions,
                apply_thresholds=partial(with_thresholds, self.policy),
                count=len(config.rounds),
                batch=batch,
            ),
            self.rounds.send,
            pending=options.pending or max(LEAST_PENDING, PENDING_BATCHES * batch),
        )
        device = getattr(self.rounds, "device", None)
        self.opener = ImageOpener(
            config, device=device, decode=options.decode, workers=options.workers, max_pixels=options.max_pixels
        )
        self.workers = self.opener.workers
        self._pool = ThreadPoolExecutor(self.workers, "progresvit-decode", initializer=mark_thread_of_engine)
        self._call_opener = CallOpener(self.opener, self._pool, self._scheduler.add, self._scheduler.fail)

    @property
    def batch(self) -> int:
        """The largest batch; it shrinks if memory runs out."""
        return self._scheduler.worker.batch

    @property
    def counts(self) -> Counts:
        """Images and batches that each round has run, and images that were cancelled or are pending."""
        return self._scheduler.counts()

    def __repr__(self) -> str:
        thresholds = ", ".join(f"{threshold:.4g}" for threshold in self.policy.thresholds)
        rule = "" if self.setting is None else f" ({'certified' if self.setting.is_certified else self.setting.rule})"
        rule += ", withholds answers" if self.setting is not None and self.setting.withheld else ""
        device = getattr(self.rounds, "device", "cpu")  # graphs run there
        return (
            f"<Engine {self._source.name}: {self.backend} on {device}, {self.precision}, "
            f"threshold {thresholds or 'none'}{rule}>"
        )

    def observe(self, observer: Observer) -> None:
        """Report each batch of each round to the observer, in the thread that runs it."""
        worker = self._scheduler.worker
        worker.post(worker.observe, observer)

    @overload
    def classify(self, images: OneImage) -> Prediction: ...

    @overload
    def classify(self, images: Images) -> list[Prediction]: ...

    def classify(self, images: Images) -> Prediction | list[Prediction]:
        """A prediction for each image, in order; for one path or one PIL image its prediction alone.

        Args:
            images: One path or PIL image, or a list of paths, contents of image files (bytes), file objects, PIL images
                or uint8 numpy arrays (H, W, 3), also as one array (B, H, W, 3), which get the evaluation crop; or a
                uint8 array or tensor (B, C, r, r) of square images, which are used as they are, r at least the
                resolution of the last round. An image that cannot be opened gives a prediction with the reason
                (``error``).
        """
        if is_one_image(images):
            return self.classify([images])[0]
        images = _as_sequence(images, "classify")
        if not len(images):
            return []
        if len(images) > (size := self.batch):  # the next images are opened while others are computed
            results: list[Any] = [None] * len(images)
            batches = (images[first : first + size] for first in range(0, len(images), size))
            for position, prediction in self.as_completed(batches, deadline=None):
                results[position] = prediction
            return results
        call = self._scheduler.open_call(len(images))
        try:
            opened = self.opener.open(images, self._pool)
            return self._scheduler.run(call, opened)
        finally:
            self._scheduler.worker.cancel(call)  # if it is not complete

    def submit(
        self,
        images: Images,
        *,
        block: bool = True,
        timeout: float | None = None,
        threshold: float | None = None,
        wait: float = 0.0,
    ) -> Future[list[Prediction]]:
        """Classify without waiting: a future of the predictions.

        Until it is done, ``cancel`` cancels it, and its images start no further round. Threads of the engine decode
        and compute; do not call ``classify`` in a callback of the future, which runs in the computing thread.

        Args:
            images: A list, as ``classify`` takes it.
            block: Wait while as many images are pending as the engine takes; else, :class:`EngineFull` is raised.
            timeout: Seconds to wait at most, before :class:`EngineFull` is raised.
            threshold: For these images, instead of the engine's threshold; 0 runs every round. Not with a router.
            wait: Seconds that the images may wait, in all, until batches are full.
        """
        if threshold is not None:
            check_own_threshold(self.policy, threshold)
        images = _as_sequence(images, "submit")
        future: Future[list[Prediction]] = Future()
        if not len(images):
            future.set_result([])
            return future
        if not hasattr(images, "dtype"):  # the caller may reuse arrays and close files
            images = [
                as_input(image) if hasattr(image, "dtype") or hasattr(image, "read") else image for image in images
            ]
        elif is_channels_last(images, self.config):
            images = [as_input(image) for image in images]
        is_array = hasattr(images, "dtype")
        if is_array:
            self.opener.open(images)  # refuses other arrays at once
            images = images.clone() if hasattr(images, "clone") else images.copy()  # the caller may reuse its array
        call = self._scheduler.open_call(
            len(images), future=future, block=block, timeout=timeout, threshold=threshold, wait=wait
        )
        size = self.batch if is_array else min(DECODED_TOGETHER, -(-len(images) // self.workers))
        try:
            for first in range(0, len(images), size):
                portion = images[first : first + size]
                if is_array:  # sent in this thread: a tensor may be the work of its CUDA stream
                    self._scheduler.add(call, first, self.opener.open(portion))
                else:
                    self._call_opener.submit(call, first, portion)
        except BaseException:
            self._scheduler.worker.cancel(call)
            raise
        return future

    @overload
    async def aclassify(self, images: OneImage) -> Prediction: ...

    @overload
    async def aclassify(self, images: Images) -> list[Prediction]: ...

    async def aclassify(self, images: Images) -> Prediction | list[Prediction]:
        """Classify in an event loop, as ``classify`` does. Cancelling the task cancels the images.

        It never waits for room: if too many images are pending, it raises :class:`EngineFull` at once.
        """
        if is_one_image(images):
            return (await asyncio.wrap_future(self.submit([images], block=False)))[0]
        return await asyncio.wrap_future(self.submit(images, block=False))

    def as_completed(
        self, batches: Iterable[Images], *, deadline: float | None = DEADLINE, ahead: int = 2
    ) -> Iterator[tuple[int, Prediction]]:
        """Predictions for a stream of batches as they finish, each with the number of its image in the stream, from 0.

        Images that continue wait until a batch is full, across the given batches and all callers, until one has waited
        ``deadline`` seconds and no other images are ready, or until the stream ends. Closing the iterator cancels the
        images in progress.

        Args:
            batches: Each as ``classify`` takes it. A thread iterates over them; do not use the iterator meanwhile.
            deadline: In seconds; None waits for full batches as long as it takes.
            ahead: Number of batches that are read and decoded ahead.
        """
        with self._open_stream(batches, deadline, ahead) as stream:
            while (chunk := self._scheduler.next_chunk(stream)) is not None:
                yield from zip(*chunk)
                stream.returned += len(chunk[0])

    def stream(
        self,
        batches: Iterable[Images],
        *,
        deadline: float | None = DEADLINE,
        ahead: int = 2,
        processes: bool | None = None,
    ) -> Iterator[Prediction]:
        """Predictions for a stream of batches, one by one and in order; else as ``as_completed``.

        Predictions are held back behind an image that still waits. If 32 batches are, it does not wait any longer.
        Processes may decode files if there is no deadline, or if ``processes`` says that the batches do not depend on
        earlier predictions.
        """
        held: dict[int, Prediction] = {}
        with self._open_stream(batches, deadline, ahead, processes) as stream:
            while (chunk := self._scheduler.next_chunk(stream)) is not None:
                held.update(zip(*chunk))
                while stream.returned in held:
                    yield held.pop(stream.returned)
                    stream.returned += 1

    def close(self) -> None:
        """Refuse further calls, end open streams with an error, wait for the futures, and stop the engine's threads."""
        self._scheduler.refuse_calls()
        self._pool.shutdown()
        self._scheduler.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def identity(self) -> dict[str, Any]:
        """Everything that determines its answers, in plain data."""
        return {
            "weights": self._source.weights_sha256,
            "config": {key: value for key, value in self.config.to_dict().items() if key != "kind"},  # progresvit
            "kernels": self.rounds.identity,
            "preprocessing": self._source.preprocessing_sha256,
            "thresholds": [str(threshold) for threshold in self.policy.thresholds],
            "routers": [_router_hash(router) for router in (self.policy.router, self.policy.abstention.router)],
            "abstain": [str(self.policy.abstention.entropy), str(self.policy.abstention.unrecoverable)],
            **({} if self.policy.ood is None else {"ood": self.policy.ood.model_dump()}),  # runs of 0.1.0 have none
            "temperatures": list(self.temperatures),
            "top_k": self.top_k,
            "backend": self.backend,
            "precision": self.precision,
            **({"graphs": graphs} if (graphs := self._source.graphs_sha256) else {}),
            **({"decode": "gpu" if self.opener.plan.jpeg else "gpu crop"} if self.opener.plan.pixels else {}),
            **({} if self.opener.plan.max_pixels is None else {"max_pixels": self.opener.plan.max_pixels}),
        }

    def warm_up(self) -> None:
        """Build what is otherwise built on first use: on a GPU, a CUDA graph for each batch size."""
        self._scheduler.warm_up(self.config.input_side)

    @contextmanager
    def _open_stream(
        self, batches: Iterable[Images], deadline: float | None, ahead: int, processes: bool | None = None
    ) -> Iterator[Stream]:
        # a source with a deadline may wait for answers, which processes would hold back
        processes = deadline is None if processes is None else processes
        opened = self.opener.open_all(batches, self._pool, processes=processes)
        sent = ((images, self.rounds.send(images.pixels)) for images in opened)
        # the worker is looked up each time: a forked process has another one
        with Prefetcher(sent, ahead, arrived=lambda: self._scheduler.worker.wake()) as source:
            stream = self._scheduler.open_stream(source, deadline)
            try:
                yield stream
            finally:
                self._scheduler.worker.cancel(stream)  # if it is not complete


def _router_hash(router: Router | None) -> str | None:
    if router is None:
        return None
    from progresvit.routing.router import router_hash

    return router_hash(router)


def _checked_temperatures(
    temperatures: Sequence[float] | None, default: Sequence[float] | None, rounds: int
) -> tuple[float, ...]:
    if temperatures is None:
        temperatures = (1.0,) * rounds if default is None else default
    numbers = tuple(float(number) for number in temperatures)
    if len(numbers) != rounds or not all(number > 0 and math.isfinite(number) for number in numbers):
        raise ValueError(f"temperatures must be {rounds} numbers above 0, one for each round, got {temperatures}.")
    return numbers


def _as_sequence(images: Images, name: str) -> Any:
    if is_single(images):
        shape = f" of shape {tuple(images.shape)}" if hasattr(images, "shape") else ""
        raise ValueError(f"{name} takes a list of images; put this one{shape} into brackets: {name}([image]).")
    if not isinstance(images, Iterable):
        raise ValueError(f"{name} takes a list of images, not {type(images).__name__}.")
    return images if hasattr(images, "__len__") else list(images)
