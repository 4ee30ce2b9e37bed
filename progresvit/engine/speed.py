"""What ``measurement.py`` measures: the engine, and the model run round by round without it.

Letters: B images of a batch, N images in all, C channels, R side of the images, s a round from 0.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from progresvit import api
from progresvit.config import PRESETS, ModelConfig
from progresvit.data.dataset import find_unlabelled
from progresvit.data.transforms import normalise
from progresvit.engine.engine import Engine
from progresvit.engine.export.export import export
from progresvit.engine.export.manifest import Manifest, is_export
from progresvit.engine.images import open_images
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from progresvit.model.interface import RoundModel
from progresvit.model.precision import PRECISIONS
from progresvit.routing import Policy, Setting

HEAD_SCALE = 30.0
"""A new head gives all images nearly the same entropy; scaled, it separates random images."""


@dataclass(slots=True)
class TimedExit:
    """Where an image exited, with the names of ``Prediction``."""

    exit_round: int
    entropy: float
    index: int


class EagerRounds:
    """The model as it is: round by round, on the images of a batch that have not exited yet. Images are normalised.

    Of rounds that are alternatives, ``alone`` is the only one that runs, from 0.
    """

    def __init__(self, model: RoundModel, thresholds: Sequence[float], alone: int | None = None) -> None:
        self.model, self.policy = model, Policy(thresholds=tuple(thresholds))
        rounds = range(len(model.config.rounds))
        self.order = rounds if alone is None else rounds[alone : alone + 1]

    def stream(self, batches: Iterable[Tensor], *, deadline: float | None = None) -> list[TimedExit]:
        """One batch after another; the answers are fetched from the device at the end."""
        rows = torch.cat([self._route(batch) for batch in batches], dim=1).T.tolist()  # (3, N) -> (N, 3)
        return [TimedExit(int(number), entropy, int(index)) for number, entropy, index in rows]

    def classify(self, images: Tensor) -> list[TimedExit]:
        return self.stream([images])

    @torch.inference_mode()
    def _route(self, images: Tensor) -> Tensor:
        """(B, C, R, R) -> (3, B): round from 1, entropy, class."""
        exits = torch.zeros(3, len(images), device=images.device)
        places = torch.arange(len(images), device=images.device)
        tokens = None
        for s in self.order:
            output = self.model.run_round(s, images, previous=tokens)
            decision = self.policy.decide(s, output.logits)
            number = torch.full_like(decision.entropy, s + 1)
            exits[:, places] = torch.stack([number, decision.entropy, output.logits.argmax(dim=-1).float()])
            if s == self.order[-1]:
                break
            stays = ~decision.exits
            images, tokens, places = images[stays], output.tokens[stays], places[stays]  # (B, ...) -> (b, ...)
            if not len(places):
                break
        return exits


class TimedModel:
    """The engine on bytes, or with ``eager`` the model as it is on normalised images.

    Args:
        model: A preset (random weights), a model folder, a bundled model, a hub id, an export (not ``eager``), or a
            model itself.
        continuing: Share of the images that continue after each round, if there are no thresholds: one number, or one
            for each round but the last, as a share of the images that reach it.
        batch: Images per batch; None is the engine's own size.
        thresholds: One for all rounds, one for each but the last, or a setting of the model.
        inputs: The images, bytes (N, C, R, R) on the device.
        data: A folder or a tar of images, if there are no ``inputs``; without it, random images are generated.
        count: Number of images of ``data``; by default a few batches.
        alone: With ``eager``, the only round that runs, from 0: rounds of some baselines are alternatives.
        engine: Further options of the engine.
    """

    def __init__(
        self,
        model: str | ProgResViT,
        *,
        eager: bool,
        device: str,
        precision: str,
        batch: int | None,
        continuing: float | Sequence[float] = 1.0,
        thresholds: float | Sequence[float] | Setting | None = None,
        inputs: Tensor | None = None,
        data: str | None = None,
        count: int | None = None,
        alone: int | None = None,
        **engine: Any,
    ) -> None:
        self.eager, self.batch, self.alone = eager, batch, alone
        manifest = Manifest.read(Path(model).expanduser()) if isinstance(model, str) and is_export(model) else None
        self._source: Any
        self.model: Any
        if manifest is None:
            find = api.load if eager and isinstance(model, str) and model not in PRESETS else find_model
            self.model = self._source = find(model) if isinstance(model, str) else model
            self.config = self.model.config
        elif eager:
            raise ValueError(f"{model} is an export, which the engine runs; give the model that it was made from.")
        else:
            self._source, self.config = Path(str(model)).expanduser(), manifest.config
        if isinstance(thresholds, Setting):
            thresholds.check_use(len(self.config.rounds), None)
            thresholds.check_weights(weights_hash(self.model) if manifest is None else manifest.weights_sha256)
            thresholds = thresholds.threshold
        self.options = {"device": device, "precision": precision, "batch": batch, **engine}
        if inputs is None:
            assert batch is not None
            inputs = load_images(data, self.config, device=device, batch=batch, count=count)
        self.inputs = inputs
        if eager:
            dtype = PRECISIONS[precision] or torch.float32
            self.model.to(device, dtype)
            self.inputs = torch.cat([normalise(part, self.config).to(dtype) for part in self.inputs.split(256)])
        self.images, self.exits = len(self.inputs), list[Any]()
        if manifest is None and engine.get("backend") in ("onnxruntime", "openvino"):
            self._scratch = tempfile.TemporaryDirectory()  # one export for all engines
            self._source = Path(self._scratch.name) / "export"
            export(self.model, self._source, format="onnx")
        if alone is not None:
            thresholds = math.inf  # nothing follows the round
        elif thresholds is None:
            thresholds = self._thresholds_for(continuing)
        self.thresholds = Policy.make(len(self.config.rounds), thresholds).thresholds

    def build(self, thresholds: Sequence[float] | None = None) -> None:
        limits = list(self.thresholds if thresholds is None else thresholds)
        self.runner: Any
        if self.eager:
            self.runner = EagerRounds(self.model, limits, self.alone)
        else:
            self.runner = Engine(self._source, limits, **self.options)

    def run(self, passes: int) -> None:
        batch = self.batch or self.runner.batch
        self.exits = []  # of an earlier run: their memory does not count twice
        self.exits = list(self.runner.stream(self.inputs.split(batch) * passes, deadline=None))

    def one(self, number: int) -> None:
        place = number % self.images
        self.exits = [] if number == 0 else self.exits
        self.exits += self.runner.classify(self.inputs[place : place + 1])

    def exit_shares(self) -> list[float]:
        """Share of the images of the last run that exited after each round."""
        numbers = [exit_.exit_round for exit_ in self.exits]
        return [numbers.count(s + 1) / len(numbers) for s in range(len(self.config.rounds))]

    def _thresholds_for(self, continuing: float | Sequence[float]) -> list[float]:
        limits: list[float] = []
        earlier = len(self.config.rounds) - 1
        for s, share in enumerate(continuing if isinstance(continuing, Sequence) else [continuing] * earlier):
            self.build([*limits, *[math.inf] * (len(self.config.rounds) - 1 - s)])  # all that reach round s exit there
            self.run(1)
            del self.runner  # its memory does not count
            entropies = [exit_.entropy for exit_ in self.exits if exit_.exit_round == s + 1]
            limits.append(threshold_between(entropies, share))
        return limits


def threshold_between(entropies: Sequence[float], continuing: float) -> float:
    """A threshold that this share of the entropies reaches."""
    ordered = sorted(entropies)
    exiting = len(ordered) - round(continuing * len(ordered))
    if exiting == len(ordered):
        return math.inf
    return (ordered[exiting - 1] + ordered[exiting]) / 2 if exiting else 0.0


def find_model(name: str) -> ProgResViT:
    """A model from a folder or the hub, or a preset with random weights, the same each time."""
    if name not in PRESETS:
        return api.as_progresvit(api.load(name), "the engine")
    torch.manual_seed(0)
    model = api.create_model(name).eval()
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(HEAD_SCALE)
    return model


def plain_config(config: ModelConfig) -> ModelConfig:
    """A plain ViT: the last round alone, without gates."""
    return config.replace(rounds=config.rounds[-1:], psg=False)


def load_images(data: str | None, config: ModelConfig, *, device: str, batch: int, count: int | None = None) -> Tensor:
    """Bytes (N, C, R, R) on the device, in whole batches: random, or of a folder or tar, repeated to fill the last."""
    on_gpu = device.startswith("cuda")
    count = count or (min(max(8 * batch, 256), 8192) if on_gpu else 32 if data is None else 128)
    count = batch * math.ceil(count / batch)
    if data is None:
        generator = torch.Generator(device).manual_seed(0)
        shape = (count, config.in_channels, config.input_side, config.input_side)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    dataset = find_unlabelled(data)
    numbers = random.Random(0).sample(range(len(dataset)), min(count, len(dataset)))
    opened = open_images([dataset.read(number) for number in numbers], config)
    if not len(opened.pixels):
        raise ValueError(f"{data}: none of {len(numbers)} images can be read; the first: {opened.errors[0]}.")
    places = torch.arange(batch * math.ceil(len(opened.pixels) / batch)) % len(opened.pixels)
    return torch.from_numpy(opened.pixels)[places].to(device)
