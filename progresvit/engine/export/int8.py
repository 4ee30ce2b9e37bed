"""Graphs in int8 and what that costs: answers and exit decisions beside those of float32, on real pictures.

Letters: B images, N of them all, S rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from progresvit.data.dataset import UNLABELLED, ImageDataset
from progresvit.data.loader import Unreadable, numbered_batches
from progresvit.data.transforms import NamedTransform
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.routing.decide import exit_rounds
from progresvit.routing.scores import top10_entropy

METHOD = "dynamic: weights per channel in int8, activations in uint8; matrix products of the blocks"


@dataclass(frozen=True, kw_only=True)
class Int8Check:
    """The pictures on which int8 is compared with float32."""

    pictures: ImageDataset
    labels: tuple[int, ...]
    """The model's class of each picture, or -1 where it is not known."""
    data: str = ""
    """How the report calls them."""
    batch: int = 32
    workers: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        if len(self.pictures) != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels for {len(self.pictures)} pictures; give one for each.")
        if self.batch < 1 or self.workers < 0:
            raise ValueError(f"a batch holds one picture at least, not {self.batch}, and workers are 0 or more.")


@dataclass(frozen=True)
class Seen:
    """What graphs said of every picture; both (N, S)."""

    index: NDArray[np.int64]
    entropy: NDArray[np.float32]


def quantise(source: Path, target: Path) -> None:
    """The graph of a round with the matrix products of its blocks in int8."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # the quantiser trusts them, and they are wrong after it has changed types
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it advises a pass over the graph that would only fold constants
    try:
        quantize_dynamic(
            model,
            target,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=_layers_of_blocks(model.graph),
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        logging.disable(before)


def measure_int8(before: Path, after: Path, check: Int8Check) -> dict[str, Any]:
    """Both exports on every picture: top-1, and how often answers and exit decisions are the same."""
    rounds = GraphRounds(before, threads=check.threads), GraphRounds(after, threads=check.threads)
    manifest = rounds[1].manifest
    numbers: list[int] = []
    parts: tuple[list[Seen], list[Seen]] = ([], [])
    for some, pixels in _batches(check, rounds[0]):
        numbers += some
        for graphs, found in zip(rounds, parts):
            found.append(_look(graphs, pixels))
    plain, small = (
        Seen(np.concatenate([one.index for one in found]), np.concatenate([one.entropy for one in found]))
        for found in parts
    )
    labels = np.array(check.labels, np.int64)[numbers]
    every = np.arange(len(numbers))
    report: dict[str, Any] = {"method": METHOD, "data": check.data, "images": len(numbers)}
    report["rounds"] = [
        _compare(plain.index[:, s], small.index[:, s], labels) for s in range(len(manifest.config.rounds))
    ]
    if manifest.threshold is not None:
        left = [exit_rounds(seen.entropy, manifest.threshold) for seen in (plain, small)]
        report["routed"] = {
            **_compare(plain.index[every, left[0]], small.index[every, left[1]], labels),
            "same_exit": float((left[0] == left[1]).mean()),
            "gmacs_fp32": float(np.asarray(manifest.gmacs)[left[0]].mean()),
            "gmacs_int8": float(np.asarray(manifest.gmacs)[left[1]].mean()),
        }
    return report


def _batches(check: Int8Check, rounds: GraphRounds) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
    count, pictures = len(check.pictures), check.pictures
    groups = [list(range(first, min(first + check.batch, count))) for first in range(0, count, check.batch)]
    unreadable = Unreadable(pictures)
    transform = NamedTransform(rounds.manifest.config)
    device = torch.device("cpu")
    for numbers, pixels, bad in numbered_batches(
        pictures, groups, transform=transform, workers=check.workers, device=device
    ):
        for index, reason in bad.items():
            unreadable.add(index, reason)
        if pixels is not None:
            yield numbers, pixels.numpy()


def _look(graphs: GraphRounds, pixels: NDArray[np.uint8]) -> Seen:
    index, entropy, tokens = [], [], None
    for s in range(len(graphs.manifest.config.rounds)):
        logits, tokens = graphs.run(s, pixels, tokens)
        entropy.append(top10_entropy(logits))
        index.append(np.where(np.isfinite(entropy[-1]), logits.argmax(axis=-1), -2))  # no class, and not UNLABELLED
    return Seen(np.stack(index, axis=1), np.stack(entropy, axis=1))  # S times (B,) -> (B, S)


def _compare(plain: NDArray[np.int64], small: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, Any]:
    known = labels != UNLABELLED
    top1 = [float((one[known] == labels[known]).mean()) if known.any() else None for one in (plain, small)]
    return {"top1_fp32": top1[0], "top1_int8": top1[1], "same_answer": float((plain == small).mean())}


def _layers_of_blocks(graph: Any) -> list[str]:
    """Names of the products with weights from the first norm on; what comes before it makes the tokens."""
    weights = {one.name for one in graph.initializer}
    operations = [node.op_type for node in graph.node]
    blocks = list(graph.node)[operations.index("LayerNormalization") :]
    return [node.name for node in blocks if node.op_type == "MatMul" and node.input[1] in weights]
