"""What the benchmark puts to work: the engine, one of its rounds, and the yardsticks beside it.

Letters: B images, C channels, R side of the images, N pictures, S rounds, s a round from 0.
"""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from progresvit import compute
from progresvit.api import create_model, load
from progresvit.config import PRESETS, ModelConfig, plain_vit
from progresvit.data.preprocess import normalise
from progresvit.engine.bench import Case
from progresvit.engine.engine import Engine
from progresvit.engine.fold import fold
from progresvit.engine.rooms import Room
from progresvit.model import ProgResViT
from progresvit.model.precision import PRECISIONS
from progresvit.routing import top10_entropy

SPREAD = 30.0
"""A fresh head is so even that every image is equally unsure; scaled, random weights tell random pictures apart."""
DEIT_BATCHES = 2
MIX = 32
"""Batches over which the share of compiled rounds is kept."""


class Subject(Protocol):
    """Something at work on pictures that are on the device already."""

    images: int
    """In one pass."""
    waiting_bytes: int
    """What the pictures take on the device."""

    def build(self) -> None:
        """Make the model ready; its memory counts from here on."""
        ...

    def run(self, passes: int) -> None:
        """Start so many passes; what was computed may still be on its way when this returns."""
        ...

    def one(self, number: int) -> None:
        """One picture, until its answer is on the host."""
        ...

    def facts(self) -> dict[str, Any]:
        """What was found in the last run: at least ``gmacs`` an image."""
        ...


def open_subject(case: Case) -> Subject:
    """The subject of a case, with its pictures and thresholds, not yet built."""
    kinds: dict[str, Callable[[Case], Subject]] = {
        "engine": RoutedEngine, "round": RoundAlone, "eager": EagerRounds, "compiled": CompiledRounds, "deit": PlainViT,
    }  # fmt: skip
    return kinds[case.subject](case)


class Exit(NamedTuple):
    """One image's end."""

    round: int
    """From 1."""
    entropy: float
    index: int


class Pool(NamedTuple):
    """The pictures of a case."""

    pixels: Tensor
    """Bytes, (N, C, R, R)."""
    labels: list[int] | None

    @classmethod
    def of(cls, case: Case, config: ModelConfig) -> Pool:
        """From the case's file, or random; as many as the case asks for."""
        if case.pictures is not None:
            with np.load(case.pictures) as held:
                pixels, labels = held["pixels"][: case.images], held.get("labels")
            return cls(torch.from_numpy(pixels).to(case.device), None if labels is None else labels.tolist())
        wanted = case.images or (min(max(8 * case.batch, 256), 8192) if case.on_gpu else 32)
        count = case.batch * math.ceil(wanted / case.batch)
        generator = torch.Generator(case.device).manual_seed(0)
        shape = (count, config.in_channels, config.input_side, config.input_side)
        made = torch.randint(0, 256, shape, dtype=torch.uint8, device=case.device, generator=generator)
        return cls(made, None)


class RoutedEngine:
    """The engine as a stream sees it."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, find_model(case.model)
        self.config = config = self.model.config
        self.pool = Pool.of(case, config)
        self.images, self.waiting_bytes = len(self.pool.pixels), self.pool.pixels.nbytes
        self.exits: list[Exit] = []
        self.engine: Engine | None = None
        self.threshold = find_threshold(case, config, self._probe)

    def build(self) -> None:
        self.exits = []
        self.engine = make_engine(self.case, self.model, self.threshold)

    def run(self, passes: int) -> None:
        assert self.engine is not None
        batches = self.pool.pixels.split(self.case.batch) * passes
        self.exits = [Exit(p.exit_round, p.entropy, p.index) for p in self.engine.stream(batches, deadline=None)]

    def one(self, number: int) -> None:
        assert self.engine is not None
        (p,) = self.engine.classify(self._picture(number))
        self.exits = [*self.exits[: number and None], Exit(p.exit_round, p.entropy, p.index)]

    def facts(self) -> dict[str, Any]:
        assert self.engine is not None
        found = routed_facts(self.exits, self.config, self.threshold, self.pool.labels)
        if self.engine.batch < self.case.batch:
            found["note"] = f"memory ran out; {self.engine.batch} images at a time"
        return found

    def _picture(self, number: int) -> Tensor:
        place = number % self.images
        return self.pool.pixels[place : place + 1]

    def _probe(self, threshold: Sequence[float]) -> list[Exit]:
        engine = make_engine(self.case, self.model, threshold)
        found = engine.stream(self.pool.pixels.split(self.case.batch), deadline=None)
        return [Exit(p.exit_round, p.entropy, p.index) for p in found]


class RoundAlone:
    """One of the engine's rounds, full batches again and again."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, find_model(case.model)
        self.config = self.model.config
        self.s = checked_round(case, self.config)
        self.images = case.batch
        self.pool = Pool.of(Case.from_dict({**case.to_dict(), "images": case.batch}), self.config)
        self.waiting_bytes = self.pool.pixels.nbytes

    def build(self) -> None:
        """The rooms are filled as the engine fills them: everybody goes on until this round."""
        engine = make_engine(self.case, self.model, [0.0] * (len(self.config.rounds) - 1))
        self.rounds, batch = engine.rounds, self.case.batch
        pixels = self.pool.pixels[:batch]
        self.images = batch = len(pixels)
        room = self._room(0, batch)
        self.rounds.load(room, self.rounds.receive(self.rounds.send(pixels)))
        for s in range(self.s):
            ran = self.rounds.run(s, room, 0, batch)
            ran.answers()
            following = self._room(s + 1, batch)
            self.rounds.move(room, 0, ran, np.arange(batch), following)
            room = following
        self.room = room

    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.rounds.run(self.s, self.room, 0, self.images)

    def one(self, number: int) -> None:
        self.rounds.run(self.s, self.room, 0, self.images).answers()

    def facts(self) -> dict[str, Any]:
        return {"gmacs": compute.round_macs(self.config, "executed")[self.s].total / 1e9}

    def _room(self, s: int, batch: int) -> Room:
        return self.rounds.make_room(s, batch, self.pool.pixels.shape[-1])


class EagerRounds:
    """The model itself, round by round, on what is left of each batch; images come normalised."""

    def __init__(self, case: Case) -> None:
        self.case, dtype = case, PRECISIONS[case.precision] or torch.float32
        self.source = find_model(case.model)
        self.config = self.source.config
        pool = Pool.of(case, self.config)
        self.labels, self.dtype = pool.labels, dtype
        self.pictures = torch.cat([normalise(some, self.config).to(dtype) for some in pool.pixels.split(256)])
        self.images, self.waiting_bytes = len(self.pictures), self.pictures.nbytes
        self.found: list[Tensor] = []
        self.threshold: tuple[float, ...] = ()
        self.build()
        self.threshold = find_threshold(case, self.config, self._probe)
        del self.model

    def build(self) -> None:
        self.found = []
        self.model = self.source.to(self.case.device, self.dtype)

    def run(self, passes: int) -> None:
        batches = self.pictures.split(self.case.batch) * passes
        self.found = [self._route(batch, self.threshold) for batch in batches]

    def one(self, number: int) -> None:
        place = number % self.images
        found = self._route(self.pictures[place : place + 1], self.threshold).cpu()
        self.found = [*self.found[: number and None], found]

    def facts(self) -> dict[str, Any]:
        return routed_facts(self._exits(self.found), self.config, self.threshold, self.labels)

    @torch.inference_mode()
    def _route(self, images: Tensor, threshold: Sequence[float]) -> Tensor:
        """(B, C, R, R) -> (3, B): round from 1, entropy, class."""
        ends = torch.zeros(3, len(images), device=images.device)
        places = torch.arange(len(images), device=images.device)
        tokens = None
        for s in range(len(self.config.rounds)):
            output = self.model.run_round(s, images, previous=tokens)
            entropy = top10_entropy(output.logits)
            ends[:, places] = torch.stack(
                [torch.full_like(entropy, s + 1), entropy, output.logits.argmax(dim=-1).float()]
            )
            if s == len(threshold):
                break
            stays = entropy.double() >= threshold[s]
            images, tokens, places = images[stays], output.tokens[stays], places[stays]  # (B, ...) -> (b, ...)
            if not len(places):
                break
        return ends

    def _probe(self, threshold: Sequence[float]) -> list[Exit]:
        return self._exits([self._route(batch, threshold) for batch in self.pictures.split(self.case.batch)])

    def _exits(self, found: Sequence[Tensor]) -> list[Exit]:
        rows = torch.cat(list(found), dim=1).T.tolist()  # (3, N) -> (N, 3)
        return [Exit(int(number), entropy, int(index)) for number, entropy, index in rows]


class CompiledRounds:
    """The folded rounds under torch.compile on full batches: what compiling would give if moving images were free."""

    def __init__(self, case: Case) -> None:
        self.case, self.source = case, find_model(case.model)
        self.config = config = self.source.config
        count = len(config.rounds)
        if case.threshold is not None:
            raise ValueError("compiled rounds are given a share of images that go on, not a threshold.")
        if case.round is not None:
            self.turns = [int(s == checked_round(case, config)) for s in range(count)]
        else:
            assert case.continuing is not None
            self.turns = [round(MIX * case.continuing**s) for s in range(count)]
        self.images = max(self.turns) * case.batch
        self.pool = Pool.of(Case.from_dict({**case.to_dict(), "images": case.batch}), config)
        self.waiting_bytes = self.pool.pixels.nbytes

    @torch.inference_mode()
    def build(self) -> None:
        dtype = PRECISIONS[self.case.precision] or torch.float32
        pixels = self.pool.pixels[: self.case.batch]
        self.inputs: list[tuple[Tensor, Tensor | None]] = [(pixels, None)]
        self.rounds: list[Callable[..., Any]] = []
        for folded in fold(self.source).to(self.case.device, dtype):

            def work(pixels: Tensor, tokens: Tensor | None, folded: Any = folded) -> Any:
                return folded(normalise(pixels, self.config).to(dtype), tokens)

            self.rounds.append(torch.compile(work, fullgraph=True, dynamic=False))
            tokens = work(*self.inputs[-1]).tokens.clone()
            self.inputs.append((pixels, tokens))

    @torch.inference_mode()
    def run(self, passes: int) -> None:
        for _ in range(passes):
            for turns, work, inputs in zip(self.turns, self.rounds, self.inputs):
                for _ in range(turns):
                    work(*inputs)

    def one(self, number: int) -> None:
        raise ValueError("there is no latency of compiled rounds without a host that routes; measure the engine's.")

    def facts(self) -> dict[str, Any]:
        each = [macs.total / 1e9 for macs in compute.round_macs(self.config, "executed")]
        total = sum(turns * gmacs for turns, gmacs in zip(self.turns, each))
        share = self.turns[1] / self.turns[0] if self.case.round is None and len(each) > 1 else None
        return {"gmacs": total / max(self.turns), "share_continuing": share, "note": "moving images not included"}


class PlainViT:
    """timm's DeiT with random weights, on normalised images; compiled on a GPU."""

    def __init__(self, case: Case) -> None:
        assert case.resolution is not None
        self.case, self.images = case, case.batch
        self.dtype = PRECISIONS[case.precision] or torch.float32
        shape = (DEIT_BATCHES, case.batch, 3, case.resolution, case.resolution)
        self.pictures = torch.randn(shape, dtype=self.dtype, device=case.device)
        self.waiting_bytes = self.pictures.nbytes
        self.turn = 0

    def build(self) -> None:
        import timm

        model = timm.create_model(self.case.model, img_size=self.case.resolution).eval()
        self.heads = model.blocks[0].attn.num_heads
        model = model.to(self.case.device, self.dtype)
        self.model = torch.compile(model, fullgraph=True, dynamic=False) if self.case.on_gpu else model

    @torch.inference_mode()
    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.turn = (self.turn + 1) % DEIT_BATCHES
            self.model(self.pictures[self.turn])

    @torch.inference_mode()
    def one(self, number: int) -> None:
        self.model(self.pictures[number % DEIT_BATCHES]).argmax(dim=-1).tolist()

    def facts(self) -> dict[str, Any]:
        assert self.case.resolution is not None
        return {"gmacs": deit_gmacs(self.case.resolution, self.heads)}


def deit_gmacs(resolution: int, heads: int) -> float:
    """GMACs an image of a plain ViT."""
    return compute.cumulative_gmacs(plain_vit(resolution=resolution, heads=heads), "executed")[-1]


def find_model(name: str) -> ProgResViT:
    """A preset with random weights, the same each time, or a model from a folder or the hub."""
    if name not in PRESETS:
        return load(name)
    torch.manual_seed(0)
    model = create_model(name).eval()
    with torch.no_grad():
        model.head.weight.mul_(SPREAD)
    return model


def make_engine(case: Case, model: ProgResViT, threshold: Sequence[float]) -> Engine:
    """The case's engine; for other backends than torch the model is exported once."""
    source: ProgResViT | str = model if case.backend in (None, "torch") else _exported(case.model)
    return Engine(
        source,
        list(threshold),
        backend=case.backend,
        device=case.device,
        precision=case.precision,
        batch=case.batch,
        kernels=case.kernels,
        threads=case.threads,
    )


_folders: list[tempfile.TemporaryDirectory[str]] = []  # they go when the process does


@functools.cache
def _exported(name: str) -> str:
    from progresvit.engine.export import export

    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name) / "export"
    export(find_model(name), folder, format="onnx")
    return str(folder)


def find_threshold(
    case: Case, config: ModelConfig, probe: Callable[[Sequence[float]], list[Exit]]
) -> tuple[float, ...]:
    """One for each round but the last: the case's, or those that let the wanted share go on after each round.

    ``probe`` says how the case's own pictures end for given thresholds.
    """
    decisions = len(config.rounds) - 1
    if case.threshold is not None:
        return case.threshold * decisions if len(case.threshold) == 1 else case.threshold
    assert case.continuing is not None
    found: tuple[float, ...] = ()
    for s in range(decisions):
        ends = probe((*found, *[math.inf] * (decisions - s)))  # whoever comes to round s leaves there
        found += (split([end.entropy for end in ends if end.round == s + 1], case.continuing),)
    return found


def split(entropies: Sequence[float], continuing: float) -> float:
    """A threshold that this share of the images reaches."""
    ordered = sorted(entropies)
    leaving = len(ordered) - round(continuing * len(ordered))
    if leaving == len(ordered):
        return math.inf
    return (ordered[leaving - 1] + ordered[leaving]) / 2 if leaving else 0.0


def routed_facts(
    exits: Sequence[Exit], config: ModelConfig, threshold: Sequence[float], labels: Sequence[int] | None
) -> dict[str, Any]:
    """Shares, GMACs an image as executed, and top-1 where the classes are known. Exits go round the pictures."""
    rounds = [end.round for end in exits]
    shares = [rounds.count(s + 1) / len(rounds) for s in range(len(config.rounds))]
    top1 = None
    if labels is not None:
        top1 = sum(end.index == labels[place % len(labels)] for place, end in enumerate(exits)) / len(exits)
    return {
        "exit_shares": shares,
        "share_continuing": 1 - shares[0] if len(shares) > 1 else None,
        "gmacs": compute.average_gmacs(config, shares, "executed"),
        "threshold": tuple(threshold),
        "top1": top1,
    }


def checked_round(case: Case, config: ModelConfig) -> int:
    """The case's round, from 0."""
    assert case.round is not None
    if not 1 <= case.round <= len(config.rounds):
        raise ValueError(f"there is no round {case.round}; {case.model} has rounds 1 to {len(config.rounds)}.")
    return case.round - 1
