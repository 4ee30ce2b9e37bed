"""The engine: classifies images with a model and an exit policy.

After each round only the images that continue are kept, and they wait until the batch is full (buffers.py, batcher.py),
so an image costs only the rounds that it runs, in time as well. This file needs no torch; the torch backend does.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from progresvit import compute
from progresvit.engine.backends import BACKENDS, BackendName, BackendOptions, ModelSource, open_source
from progresvit.engine.batcher import Batcher, MemoryWarning
from progresvit.engine.buffers import RoundBuffer
from progresvit.engine.images import Images, OpenedImages, PathLike, open_images
from progresvit.engine.prediction import Candidate, Prediction
from progresvit.engine.prefetch import Prefetcher
from progresvit.engine.thresholds import ThresholdLike, check_setting, find_threshold
from progresvit.io.parse import did_you_mean
from progresvit.routing.decide import Abstention, Answers, Policy
from progresvit.routing.settings import Setting, SettingWarning, budget_setting

if TYPE_CHECKING:
    import torch

    from progresvit.model import ProgResViT
    from progresvit.routing.router import Router

DEADLINE = 1.0
"""Seconds that an image of a stream may wait until a batch is full."""
POLL = 0.001
"""Seconds between two checks of a running round, while no new images come."""


class Engine:
    """Classifies images in rounds. The model is folded when the engine is made; later changes to it have no effect.

    Args:
        model: A model, the folder or hub id of one, the name of a bundled model, or a folder that ``progresvit export``
            wrote. None for the bundled model ``imagenet-tiny``.
        threshold: A number, one for each round but the last, a ``Setting``, or the path or name of one (in the model
            folder, ``settings/NAME.json``). A setting for other weights is refused; one for another preprocessing or
            precision warns. By default the setting of the export, or the near-lossless setting of the model folder. It
            is compared with top-10 entropies, or with the probabilities of ``router``.
        budget_gmacs: Average GMACs per image, instead of a threshold; looked up in ``budgets.json`` of the folder.
        router: A learned router, or the path of one.
        abstain: The top-10 entropy from which answers are withheld, or an ``Abstention``. By default that of the
            setting. Answers for out-of-distribution images are withheld if the setting has a limit for them.
        temperatures: One for each round; they divide the logits for the reported probability only.
        top_k: Number of classes in ``Prediction.top``.
        backend: torch, onnxruntime or openvino.
        device: For torch, such as ``cuda``; by default that of the model.
        precision: fp32, bf16, fp16 (GPU) or fp8 (recent GPUs, large matrix products only).
        batch: Largest batch; by default 512 on a GPU, else 64.
        kernels: fused (our kernels in CUDA graphs, the default on a GPU) or plain (those of torch, and always those of
            a model that merges tokens).
        threads: Threads of the backend on a CPU; by default its own choice.
        workers: Threads that decode images.
    """

    def __init__(
        self,
        model: ProgResViT | PathLike | None = None,
        threshold: ThresholdLike | None = None,
        *,
        budget_gmacs: float | None = None,
        router: Router | PathLike | None = None,
        abstain: float | Abstention | None = None,
        temperatures: Sequence[float] | None = None,
        top_k: int = 1,
        backend: BackendName | None = None,
        device: str | torch.device | None = None,
        precision: str = "fp32",
        batch: int | None = None,
        kernels: str | None = None,
        threads: int | None = None,
        workers: int = 2,
    ) -> None:
        if batch is not None and batch < 1:
            raise ValueError(f"a batch has at least one image, not {batch}.")
        for name, number in (("threads", threads), ("workers", workers)):
            if number is not None and number < 1:
                raise ValueError(f"{name} are 1 or more, not {number}.")
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; {did_you_mean(backend, BACKENDS)}")
        self._source = source = open_source(model, backend)
        self.config = config = source.config
        self.precision, self.workers = source.precision_of(precision), workers
        if not 1 <= top_k <= max(1, config.num_classes):
            raise ValueError(f"top_k is between 1 and the model's {config.num_classes} classes, not {top_k}.")
        self.top_k = top_k
        router = _open_router(router)
        threshold = _find_threshold(threshold, budget_gmacs, router, source)
        self.setting = threshold if isinstance(threshold, Setting) else None
        """The setting of the threshold, if it was calibrated."""
        if isinstance(threshold, Setting):
            check_setting(threshold, source, precision=self.precision, router=_router_hash(router))
            abstain = threshold.abstain if abstain is None else abstain
            threshold = threshold.threshold
        ood = None if self.setting is None else self.setting.ood
        self.policy = Policy.make(len(config.rounds), threshold, router=router, abstain=abstain, ood=ood)
        self._check_routers(source)
        self.temperatures = _checked_temperatures(temperatures, source.temperatures, len(config.rounds))
        self.gmacs = compute.cumulative_gmacs(config)
        options = BackendOptions(
            device=device, precision=precision, batch=batch, kernels=kernels, threads=threads, top_k=top_k
        )
        self.backend, self.rounds, self.batch = source.make_backend(self.policy, self.temperatures, options)
        self._buffers: list[RoundBuffer] = []
        self._busy = self._has_warned = False

    def classify(self, images: Images) -> list[Prediction]:
        """A prediction for each image, in order.

        Args:
            images: Paths, contents of image files (bytes) or PIL images, which get the evaluation crop; or a uint8
                array or tensor (B, C, r, r) of square images, which are used as they are, r at least the resolution of
                the last round. An image that cannot be opened gives a prediction with the reason (``error``).
        """
        if isinstance(images, str | os.PathLike | bytes) or hasattr(images, "getbbox"):
            raise ValueError("classify takes a list of images; put this one into brackets: classify([image]).")
        images = images if hasattr(images, "__len__") else list(images)
        predictions: list[Prediction] = []
        with self._alone(), ThreadPoolExecutor(self.workers) as pool:
            batcher = None
            size = self.batch  # self.batch may shrink meanwhile
            for first in range(0, len(images), size):
                opened = open_images(images[first : first + size], self.config, pool)
                batcher = batcher or self._make_batcher(opened.side)
                batcher.feed(self.rounds.receive(self.rounds.send(opened.pixels)), _failures(opened))
                predictions += batcher.ready()
            if batcher is not None:
                batcher.flush()
                predictions += batcher.ready(wait=True)
        return predictions

    def stream(
        self, batches: Iterable[Images], *, deadline: float | None = DEADLINE, ahead: int = 2
    ) -> Iterator[Prediction]:
        """Predictions for a stream of batches, one by one and in order.

        Images that continue wait until a batch is full, across the given batches, until one has waited ``deadline``
        seconds, or until the stream ends.

        Args:
            batches: Each as ``classify`` takes it. A thread iterates over them; do not use the iterator meanwhile.
            deadline: In seconds; None waits for full batches as long as it takes.
            ahead: Number of batches that are read and decoded ahead.
        """
        with self._alone(), ThreadPoolExecutor(self.workers) as pool:
            batcher: Batcher | None = None
            with Prefetcher(batches, lambda images: self._prepare(images, pool), ahead) as coming:
                while (item := coming.get(_timeout(batcher, deadline))) is not Prefetcher.END:
                    if isinstance(item, tuple):
                        opened, sent = item
                        if batcher is None or opened.side != batcher.side:
                            if batcher is not None:
                                batcher.flush()
                                yield from batcher.ready(wait=True)
                            batcher = self._make_batcher(opened.side)
                        batcher.feed(self.rounds.receive(sent), _failures(opened))
                    assert batcher is not None
                    if deadline is not None:
                        batcher.flush(before=time.monotonic() - deadline)
                    yield from batcher.ready()
            if batcher is not None:
                batcher.flush()
                yield from batcher.ready(wait=True)

    def identity(self) -> dict[str, Any]:
        """Everything that determines its answers, in plain data."""
        return {
            "weights": self._source.weights,
            "config": {key: value for key, value in self.config.to_dict().items() if key != "kind"},  # progresvit
            "kernels": self.rounds.identity,
            "preprocessing": self._source.preprocessing,
            "thresholds": [str(threshold) for threshold in self.policy.thresholds],
            "routers": [_router_hash(router) for router in (self.policy.router, self.policy.abstention.router)],
            "abstain": [str(self.policy.abstention.entropy), str(self.policy.abstention.unrecoverable)],
            **({} if self.policy.ood is None else {"ood": self.policy.ood.model_dump()}),  # runs of 0.1.0 have none
            "temperatures": list(self.temperatures),
            "top_k": self.top_k,
            "backend": self.backend,
            "precision": self.precision,
        }

    def warm_up(self) -> None:
        """Build what is otherwise built on first use: on a GPU, a CUDA graph for each batch size."""
        side = self.config.input_side
        with self._alone():
            batcher = self._make_batcher(side)
            for s, buffer in enumerate(batcher.buffers):
                for size in sorted(self.rounds.sizes or (1,), reverse=True):
                    if size > self.batch:
                        continue
                    try:
                        self.rounds.run(s, buffer, 0, size).answers()
                    except self.rounds.out_of_memory:
                        if size == 1:
                            raise
                        self.rounds.shrink()
                        self._shrunk(size // 2)

    def _prepare(self, images: Images, pool: ThreadPoolExecutor) -> tuple[OpenedImages, Any]:
        opened = open_images(images, self.config, pool)
        return opened, self.rounds.send(opened.pixels)

    def _make_batcher(self, side: int) -> Batcher:
        """A new batcher for images of this side; it reuses the buffers."""
        if not self._buffers or self._buffers[0].pixels.shape[-1] != side:
            self._buffers = []
            while not self._buffers:
                try:
                    self._buffers = [self.rounds.make_buffer(s, self.batch, side) for s in range(len(self.gmacs))]
                except self.rounds.out_of_memory:
                    if self.batch == 1:
                        raise
                    self.rounds.shrink()
                    self._shrunk(self.batch // 2)
        return Batcher(self.rounds, self._buffers, largest=self.batch, make=self._predictions, shrunk=self._shrunk)

    def _shrunk(self, largest: int) -> None:
        self.batch = largest
        if not self._has_warned:
            self._has_warned = True
            text = "memory ran out; the engine continues with smaller batches, see engine.batch."
            warnings.warn(text, MemoryWarning, stacklevel=2)

    def _predictions(self, s: int, answers: Answers, rows: NDArray[np.int64]) -> list[Prediction]:
        facts = (
            *(answers.classes, answers.probabilities, answers.entropy, answers.abstains),
            *(answers.out_of_distribution, answers.ood_score),
        )
        return [
            Prediction(
                index=classes[0],
                label=self._label(classes[0]),
                probability=probabilities[0],
                exit_round=s + 1,
                entropy=entropy,
                gmacs=self.gmacs[s],
                abstained=abstained,
                out_of_distribution=unknown,
                ood_score=None if self.policy.ood is None else score,
                top=self._candidates(classes, probabilities) if self.top_k > 1 and classes[0] >= 0 else (),
            )
            for classes, probabilities, entropy, abstained, unknown, score in zip(
                *(fact[rows].tolist() for fact in facts)
            )
        ]

    def _candidates(self, classes: list[int], probabilities: list[float]) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(index=index, label=self._label(index), probability=probability)
            for index, probability in zip(classes, probabilities)
        )

    def _label(self, index: int) -> str | None:
        return self.config.labels[index] if self.config.labels and index >= 0 else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._busy:
            raise RuntimeError("the engine is busy with a stream; finish or close that first, or make a second engine.")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _check_routers(self, source: ModelSource) -> None:
        for router in self.policy.routers:
            if router.origin.model not in (None, source.weights):
                warnings.warn("the router was fitted on another model's records.", SettingWarning, stacklevel=3)


def _find_threshold(
    threshold: ThresholdLike | None, budget_gmacs: float | None, router: Router | None, source: ModelSource
) -> float | Sequence[float] | Setting:
    """The threshold by number, name, file or budget, or the default of the model."""
    if budget_gmacs is None:
        return find_threshold(threshold, source, use_default=router is None)  # the default is for entropies
    if threshold is not None:
        raise ValueError("threshold and budget_gmacs both determine the compute; give one of them.")
    return budget_setting(source.folder, budget_gmacs)


def _open_router(router: Router | PathLike | None) -> Router | None:
    if not isinstance(router, str | os.PathLike):
        return router
    from progresvit.routing.router import load_router

    return load_router(os.fspath(router))


def _router_hash(router: Router | None) -> str | None:
    if router is None:
        return None
    from progresvit.routing.router import router_hash

    return router_hash(router)


def _checked_temperatures(
    given: Sequence[float] | None, default: Sequence[float] | None, rounds: int
) -> tuple[float, ...]:
    chosen = given if given is not None else default
    temperatures = (1.0,) * rounds if chosen is None else tuple(float(number) for number in chosen)
    if len(temperatures) != rounds or not all(number > 0 and math.isfinite(number) for number in temperatures):
        raise ValueError(f"temperatures are {rounds} numbers above 0, one for each round, not {given}.")
    return temperatures


def _failures(opened: OpenedImages) -> dict[int, Prediction]:
    return {position: Prediction.failed(error) for position, error in opened.errors.items()}


def _timeout(batcher: Batcher | None, deadline: float | None) -> float | None:
    """Seconds until the next check: a round may have finished, or an image may have reached its deadline."""
    if batcher is None:
        return None
    if batcher.is_running:
        return POLL
    oldest = batcher.oldest()
    return None if oldest is None or deadline is None else max(0.0, oldest + deadline - time.monotonic())
