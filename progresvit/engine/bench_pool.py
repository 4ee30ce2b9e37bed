"""Pictures, models and thresholds of the inference benchmark: who goes on, and what came of it.

Letters: C channels, R side of the images, N pictures, s a round from 0.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from progresvit import compute
from progresvit.api import create_model, load
from progresvit.config import MLP_RATIO, PRESETS, ModelConfig
from progresvit.engine.bench_case import Case
from progresvit.engine.engine import Engine
from progresvit.engine.prediction import Prediction
from progresvit.model import ProgResViT

SPREAD = 30.0
"""A fresh head is so even that every image is equally unsure; scaled, random weights tell random pictures apart."""


class Exit(NamedTuple):
    """One image's end."""

    round: int
    """From 1."""
    entropy: float
    answer: int


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
                pixels = torch.from_numpy(held["pixels"][: case.images])
                labels = held["labels"][: case.images].tolist() if "labels" in held else None
            short = -len(pixels) % case.batch  # batches are full for everybody, so some pictures come again
            again = torch.arange(len(pixels) + short) % len(pixels)
            return cls(pixels[again].to(case.device), None if labels is None else [labels[i] for i in again.tolist()])
        wanted = case.images or (min(max(8 * case.batch, 256), 8192) if case.on_gpu else 32)
        count = case.batch * math.ceil(wanted / case.batch)
        generator = torch.Generator(case.device).manual_seed(0)
        shape = (count, config.in_channels, config.input_side, config.input_side)
        made = torch.randint(0, 256, shape, dtype=torch.uint8, device=case.device, generator=generator)
        return cls(made, None)


def find_model(name: str) -> ProgResViT:
    """A preset with random weights, the same each time, or a model from a folder or the hub."""
    if name not in PRESETS:
        return load(name)
    torch.manual_seed(0)
    model = create_model(name).eval()
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(SPREAD)
    return model


def make_engine(case: Case, model: ProgResViT, threshold: Sequence[float]) -> Engine:
    """The case's engine; for other backends than torch the model is exported once."""
    source: ProgResViT | str = model if case.backend in (None, "torch") else _exported(case.model)
    return Engine(
        source,
        list(threshold),
        backend=case.backend,  # type: ignore[arg-type]  # a case knows only those
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
    exits: Sequence[Exit],
    config: ModelConfig,
    threshold: Sequence[float],
    labels: Sequence[int] | None,
    *,
    folded: bool,
) -> dict[str, Any]:
    """Shares, GMACs an image as executed, and top-1 where the classes are known. Exits go round the pictures."""
    rounds = [end.round for end in exits]
    shares = [rounds.count(s + 1) / len(rounds) for s in range(len(config.rounds))]
    top1 = None
    if labels is not None:
        top1 = sum(end.answer == labels[place % len(labels)] for place, end in enumerate(exits)) / len(exits)
    return {
        "exit_shares": shares,
        "share_continuing": 1 - shares[0] if len(shares) > 1 else None,
        "gmacs": compute.average_gmacs(config, shares, "executed")
        - (shares[-1] * unread_gmacs(config) if folded else 0),
        "threshold": tuple(threshold),
        "top1": top1,
    }


def unread_gmacs(config: ModelConfig) -> float:
    """What folded rounds leave out: in the last block of the last round, all but keys and values of the patches."""
    last = config.rounds[-1]
    patches, d = config.grid(last) ** 2, last.width
    layers = (2 + 2 * MLP_RATIO) * d * d  # a query, the projection, the MLP
    attention = 2 * (patches + 1) * d
    return patches * (layers + attention) / 1e9


def exits_of(found: Iterable[Prediction]) -> list[Exit]:
    """What the engine said, in short."""
    return [Exit(one.exit_round, one.entropy, one.index) for one in found]


def checked_round(case: Case, config: ModelConfig) -> int:
    """The case's round, from 0."""
    assert case.round is not None
    if not 1 <= case.round <= len(config.rounds):
        raise ValueError(f"there is no round {case.round}; {case.model} has rounds 1 to {len(config.rounds)}.")
    return case.round - 1
