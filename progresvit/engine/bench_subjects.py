"""What the benchmark puts to work: the engine, one of its rounds, and the yardsticks beside it.

Letters: B images, C channels, R side of the images, N pictures, S rounds, s a round from 0.
"""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from progresvit import compute
from progresvit.config import ModelConfig, plain_vit
from progresvit.data.preprocess import normalise
from progresvit.engine.bench_case import Case
from progresvit.engine.bench_pool import (
    Exit,
    Pool,
    checked_round,
    exits_of,
    find_model,
    find_threshold,
    make_engine,
    routed_facts,
    unread_gmacs,
)
from progresvit.engine.engine import Engine
from progresvit.engine.fold import fold
from progresvit.engine.prediction import Prediction
from progresvit.engine.rooms import Room
from progresvit.model.precision import PRECISIONS
from progresvit.routing import top10_entropy

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


class RoutedEngine:
    """The engine as a stream sees it."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, find_model(case.model)
        self.config = config = self.model.config
        self.pool = Pool.of(case, config)
        self.images, self.waiting_bytes = len(self.pool.pixels), self.pool.pixels.nbytes
        self.found: list[Prediction] = []
        self.engine: Engine | None = None
        self.threshold = find_threshold(case, config, self._probe)

    def build(self) -> None:
        self.engine = make_engine(self.case, self.model, self.threshold)

    def run(self, passes: int) -> None:
        assert self.engine is not None
        batches = self.pool.pixels.split(self.case.batch) * passes
        self.found = list(self.engine.stream(batches, deadline=None))

    def one(self, number: int) -> None:
        assert self.engine is not None
        place = number % self.images
        if number == 0:
            self.found = []
        self.found += self.engine.classify(self.pool.pixels[place : place + 1])

    def facts(self) -> dict[str, Any]:
        assert self.engine is not None
        found = routed_facts(exits_of(self.found), self.config, self.threshold, self.pool.labels, folded=True)
        if self.engine.batch < self.case.batch:
            found["note"] = f"memory ran out; {self.engine.batch} images at a time"
        return found

    def _probe(self, threshold: Sequence[float]) -> list[Exit]:
        engine = make_engine(self.case, self.model, threshold)
        return exits_of(engine.stream(self.pool.pixels.split(self.case.batch), deadline=None))


class RoundAlone:
    """One of the engine's rounds, full batches again and again."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, find_model(case.model)
        self.config = self.model.config
        self.s = checked_round(case, self.config)
        self.pool = Pool.of(Case.from_dict({**case.to_dict(), "images": case.batch}), self.config)
        self.images = len(self.pool.pixels)
        self.waiting_bytes = self.pool.pixels.nbytes

    def build(self) -> None:
        """The rooms are filled as the engine fills them: everybody goes on until this round."""
        engine = make_engine(self.case, self.model, [0.0] * (len(self.config.rounds) - 1))
        self.rounds, batch = engine.rounds, self.images
        room = self._room(0, batch)
        self.rounds.load(room, self.rounds.receive(self.rounds.send(self.pool.pixels)))
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
        return {"gmacs": folded_gmacs(self.config)[self.s]}

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
        self.model = self.source.to(self.case.device, self.dtype)

    def run(self, passes: int) -> None:
        batches = self.pictures.split(self.case.batch) * passes
        self.found = [self._route(batch, self.threshold) for batch in batches]

    def one(self, number: int) -> None:
        place = number % self.images
        if number == 0:
            self.found = []
        self.found.append(self._route(self.pictures[place : place + 1], self.threshold).cpu())

    def facts(self) -> dict[str, Any]:
        return routed_facts(self._ends(self.found), self.config, self.threshold, self.labels, folded=False)

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
        return self._ends([self._route(batch, threshold) for batch in self.pictures.split(self.case.batch)])

    def _ends(self, found: Sequence[Tensor]) -> list[Exit]:
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
        self.pool = Pool.of(Case.from_dict({**case.to_dict(), "images": case.batch}), config)
        self.images = max(self.turns) * len(self.pool.pixels)
        self.waiting_bytes = self.pool.pixels.nbytes

    @torch.inference_mode()
    def build(self) -> None:
        dtype = PRECISIONS[self.case.precision] or torch.float32
        pixels = self.pool.pixels
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
        each = folded_gmacs(self.config)
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
        if self.case.on_gpu:
            # the engine replays CUDA graphs; where launches are what takes the time, so may the yardstick
            mode = "reduce-overhead" if self.case.measure == "latency" else "default"
            model = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
        self.model = model

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


def folded_gmacs(config: ModelConfig) -> list[float]:
    """GMACs of each round as the engine runs it."""
    each = [macs.total / 1e9 for macs in compute.round_macs(config, "executed")]
    return [*each[:-1], each[-1] - unread_gmacs(config)]


def deit_gmacs(resolution: int, heads: int) -> float:
    """GMACs an image of a plain ViT."""
    return compute.cumulative_gmacs(plain_vit(resolution=resolution, heads=heads), "executed")[-1]
