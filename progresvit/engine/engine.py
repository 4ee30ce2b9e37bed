"""The engine: a model and a policy, pictures in, predictions out.

After each round only the images that go on are kept, and they wait until a full batch is together (rooms.py, flow.py),
so an image costs no more than the rounds it runs, in time as well. This file needs no torch; backends bring their own.
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
from progresvit.engine.backends import BACKENDS, Backend, How, Source, open_source
from progresvit.engine.batcher import Flow, MemoryWarning
from progresvit.engine.buffers import Room
from progresvit.engine.images import Opened, PathLike, Pictures, open_pictures
from progresvit.engine.prediction import Candidate, Prediction
from progresvit.engine.prefetch import Ahead
from progresvit.routing.decide import Abstention, Answers, Policy
from progresvit.routing.settings import Setting, SettingWarning, budget_setting, find_setting

if TYPE_CHECKING:
    import torch

    from progresvit.model import ProgResViT
    from progresvit.routing.router import Router

Threshold = float | Sequence[float] | Setting | PathLike

DEADLINE = 1.0
"""Seconds that a picture of a stream may wait for others."""
POLL = 0.001
"""Seconds between two looks at a round that is running, while no new pictures come."""


class Engine:
    """Classifies pictures in rounds. The model is folded when the engine is made; later changes of it do not count.

    ``model`` is a model, the folder or hub id of one, or a folder that ``progresvit export`` wrote; without it, the
    model that ships. ``threshold`` is a number, one for each round but the last, or what ``progresvit calibrate``
    wrote: a ``Setting``, its path, or its name in the model's folder (``settings/NAME.json``); a setting made for other
    weights, preprocessing or precision warns. An export may bring its own, and a model's folder the near-lossless one.
    Instead of it ``budget_gmacs`` is the average to spend, looked up in the folder's ``budgets.json``. The threshold is
    compared with top-10 entropies, or with the probabilities of ``router``. ``abstain`` is an entropy from which on
    answers are withheld, or an ``Abstention``; a setting may bring one. ``temperatures`` divide the logits of each
    round for the reported probability alone; routing does not see them. ``Prediction.top`` names ``top_k`` classes.

    ``batch`` images at most are computed at a time (by default 512 on a GPU, else 64). ``backend`` is torch,
    onnxruntime or openvino; ``precision`` fp32, bf16, fp16 (GPU) or fp8 (newer GPUs, big products alone).
    ``kernels`` is fused (on a GPU, the default there: our kernels in CUDA graphs) or plain (torch's own).
    """

    def __init__(
        self,
        model: ProgResViT | PathLike | None = None,
        threshold: Threshold | None = None,
        *,
        budget_gmacs: float | None = None,
        router: Router | PathLike | None = None,
        abstain: float | Abstention | None = None,
        temperatures: Sequence[float] | None = None,
        top_k: int = 1,
        backend: Backend | None = None,
        device: str | torch.device | None = None,
        precision: str = "fp32",
        batch: int | None = None,
        kernels: str | None = None,
        threads: int | None = None,
        workers: int = 2,
    ) -> None:
        if batch is not None and batch < 1:
            raise ValueError(f"a batch holds one image at least, not {batch}.")
        for name, number in (("threads", threads), ("workers", workers)):
            if number is not None and number < 1:
                raise ValueError(f"{name} are 1 or more, not {number}.")
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; choose {', '.join(BACKENDS)}.")
        self._source = source = open_source(model, backend)
        self.config = config = source.config
        self.precision, self.workers = source.precision_of(precision), workers
        if not 1 <= top_k <= max(1, config.num_classes):
            raise ValueError(f"top_k is between 1 and the model's {config.num_classes} classes, not {top_k}.")
        self.top_k = top_k
        router = _open_router(router)
        threshold = _find_threshold(threshold, budget_gmacs, router, source)
        self.setting = threshold if isinstance(threshold, Setting) else None
        """Where the threshold comes from, if it was calibrated."""
        if isinstance(threshold, Setting):
            self._check(threshold, router, source)
            abstain = threshold.abstain if abstain is None else abstain
            threshold = threshold.threshold
        self.policy = Policy.make(len(config.rounds), threshold, router=router, abstain=abstain)
        self._check_routers(source)
        self.temperatures = _checked_temperatures(temperatures, source.temperatures, len(config.rounds))
        self.gmacs = compute.cumulative_gmacs(config)
        how = How(device=device, precision=precision, batch=batch, kernels=kernels, threads=threads, top_k=top_k)
        self.backend, self.rounds, self.batch = source.make_rounds(self.policy, self.temperatures, how)
        self._rooms: list[Room] = []
        self._busy = self._told_of_memory = False

    def classify(self, images: Pictures) -> list[Prediction]:
        """A prediction for each picture, in order.

        Pictures are paths, contents of picture files (bytes) or PIL images, which are cropped as in evaluation, or a
        uint8 array or tensor (B, C, r, r) of square images, which are taken as they are; r is the resolution of the
        last round or more. A picture that cannot be opened has a prediction that says why (``error``).
        """
        if isinstance(images, str | os.PathLike | bytes) or hasattr(images, "getbbox"):
            raise ValueError("classify takes a list of pictures; put this one into brackets: classify([picture]).")
        images = images if hasattr(images, "__len__") else list(images)
        predictions: list[Prediction] = []
        with self._alone(), ThreadPoolExecutor(self.workers) as pool:
            flow = None
            size = self.batch  # which may shrink on the way
            for first in range(0, len(images), size):
                opened = open_pictures(images[first : first + size], self.config, pool)
                flow = flow or self._flow(opened.side)
                flow.feed(self.rounds.receive(self.rounds.send(opened.pixels)), _failures(opened))
                predictions += flow.ready()
            if flow is not None:
                flow.flush()
                predictions += flow.ready(wait=True)
        return predictions

    def stream(
        self, batches: Iterable[Pictures], *, deadline: float | None = DEADLINE, ahead: int = 2
    ) -> Iterator[Prediction]:
        """Predictions for batches of pictures as they come, one by one and in their order.

        Pictures that go on wait until a full batch is together, across the given batches, or until one has waited
        ``deadline`` seconds, or the batches end; None waits for full batches as long as it takes. Batches, each as
        ``classify`` takes them, are read by a thread, up to ``ahead`` ahead; leave their iterator to it.
        """
        with self._alone(), ThreadPoolExecutor(self.workers) as pool:
            flow: Flow | None = None
            with Ahead(batches, lambda pictures: self._prepare(pictures, pool), ahead) as coming:
                while (item := coming.get(_patience(flow, deadline))) is not Ahead.END:
                    if isinstance(item, tuple):
                        opened, sent = item
                        if flow is None or opened.side != flow.side:
                            if flow is not None:
                                flow.flush()
                                yield from flow.ready(wait=True)
                            flow = self._flow(opened.side)
                        flow.feed(self.rounds.receive(sent), _failures(opened))
                    assert flow is not None
                    if deadline is not None:
                        flow.flush(before=time.monotonic() - deadline)
                    yield from flow.ready()
            if flow is not None:
                flow.flush()
                yield from flow.ready(wait=True)

    def identity(self) -> dict[str, Any]:
        """What decides its answers, in plain data."""
        return {
            "weights": self._source.weights,
            "config": self.config.to_dict(),
            "kernels": type(self.rounds).__name__,
            "preprocessing": self._source.preprocessing,
            "thresholds": [str(threshold) for threshold in self.policy.thresholds],
            "routers": [_router_hash(one) for one in (self.policy.router, self.policy.abstention.router)],
            "abstain": [str(self.policy.abstention.entropy), str(self.policy.abstention.unrecoverable)],
            "temperatures": list(self.temperatures),
            "top_k": self.top_k,
            "backend": self.backend,
            "precision": self.precision,
        }

    def warm_up(self) -> None:
        """Build everything that is otherwise built when it is first needed: on a GPU, a graph for each batch size."""
        side = self.config.input_side
        with self._alone():
            flow = self._flow(side)
            for s, room in enumerate(flow.rooms):
                for size in sorted(self.rounds.sizes or (1,), reverse=True):
                    if size > self.batch:
                        continue
                    try:
                        self.rounds.run(s, room, 0, size).answers()
                    except self.rounds.out_of_memory:
                        if size == 1:
                            raise
                        self.rounds.shrink()
                        self._shrunk(size // 2)

    def _prepare(self, pictures: Pictures, pool: ThreadPoolExecutor) -> tuple[Opened, Any]:
        opened = open_pictures(pictures, self.config, pool)
        return opened, self.rounds.send(opened.pixels)

    def _flow(self, side: int) -> Flow:
        """A fresh start for images of this side."""
        if not self._rooms or self._rooms[0].pixels.shape[-1] != side:
            self._rooms = []
            while not self._rooms:
                try:
                    self._rooms = [self.rounds.make_room(s, self.batch, side) for s in range(len(self.gmacs))]
                except self.rounds.out_of_memory:
                    if self.batch == 1:
                        raise
                    self.rounds.shrink()
                    self._shrunk(self.batch // 2)
        return Flow(self.rounds, self._rooms, largest=self.batch, make=self._predictions, shrunk=self._shrunk)

    def _shrunk(self, largest: int) -> None:
        self.batch = largest
        if not self._told_of_memory:
            self._told_of_memory = True
            text = "memory ran out; the engine goes on with smaller batches, and remembers it: engine.batch tells."
            warnings.warn(text, MemoryWarning, stacklevel=2)

    def _predictions(self, s: int, answers: Answers, rows: NDArray[np.int64]) -> list[Prediction]:
        facts = (answers.classes, answers.probabilities, answers.entropy, answers.abstains)
        return [
            Prediction(
                index=classes[0],
                label=self._label(classes[0]),
                probability=probabilities[0],
                exit_round=s + 1,
                entropy=entropy,
                gmacs=self.gmacs[s],
                abstained=abstained,
                top=self._candidates(classes, probabilities) if self.top_k > 1 and classes[0] >= 0 else (),
            )
            for classes, probabilities, entropy, abstained in zip(*(fact[rows].tolist() for fact in facts))
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

    def _check(self, setting: Setting, router: Router | None, source: Source) -> None:
        setting.check_use(len(self.config.rounds), _router_hash(router))
        caveat = setting.caveat(weights=source.weights, preprocessing=source.preprocessing, precision=self.precision)
        if caveat is not None:
            warnings.warn(caveat, SettingWarning, stacklevel=3)

    def _check_routers(self, source: Source) -> None:
        for one in (self.policy.router, self.policy.abstention.router):
            if one is not None and one.origin.model not in (None, source.weights):
                warnings.warn("the router was fitted on another model's records.", SettingWarning, stacklevel=3)


def _find_threshold(
    threshold: Threshold | None, budget_gmacs: float | None, router: Router | None, source: Source
) -> float | Sequence[float] | Setting:
    """What was asked for, by number, name, file or budget, or what the model brings along."""
    if budget_gmacs is not None:
        if threshold is not None:
            raise ValueError("a threshold says what is spent, and so does budget_gmacs; give one of them.")
        return budget_setting(source.folder, budget_gmacs)
    if isinstance(threshold, str | os.PathLike):
        return find_setting(threshold, source.folder)
    if threshold is None and router is None:
        threshold = source.threshold  # one for entropies
    if threshold is None:
        raise ValueError(
            "an engine needs a threshold: a number such as 0.5, or a setting that progresvit calibrate wrote; as "
            "settings/near-lossless.json in the model's folder it is used without asking."
        )
    return threshold


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
    given: Sequence[float] | None, brought: Sequence[float] | None, rounds: int
) -> tuple[float, ...]:
    numbers = given if given is not None else brought
    found = (1.0,) * rounds if numbers is None else tuple(float(number) for number in numbers)
    if len(found) != rounds or not all(number > 0 and math.isfinite(number) for number in found):
        raise ValueError(f"temperatures are {rounds} numbers above 0, one for each round, not {given}.")
    return found


def _failures(opened: Opened) -> dict[int, Prediction]:
    return {place: Prediction.failed(error) for place, error in opened.errors.items()}


def _patience(flow: Flow | None, deadline: float | None) -> float | None:
    """Seconds until it is time to look: a round may be done, or somebody has waited too long."""
    if flow is None:
        return None
    if flow.is_running:
        return POLL
    oldest = flow.oldest()
    return None if oldest is None or deadline is None else max(0.0, oldest + deadline - time.monotonic())
