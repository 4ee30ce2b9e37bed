"""Graphs in int8, and their cost: answers and exit decisions compared with those of float32, on real images.

Letters: B images of a batch, N images, S rounds.
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
    """The images on which int8 is compared with float32."""

    dataset: ImageDataset
    labels: tuple[int, ...]
    """The model's class of each image, or -1 if it is unknown."""
    data: str = ""
    """Name of the dataset in the report."""
    batch: int = 32
    workers: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        if len(self.dataset) != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels for {len(self.dataset)} images; give one for each.")
        if self.batch < 1 or self.workers < 0:
            raise ValueError(f"a batch has at least one image, not {self.batch}, and workers are 0 or more.")


@dataclass(frozen=True)
class GraphAnswers:
    """The answers of an export for all images; both (N, S)."""

    index: NDArray[np.int64]
    entropy: NDArray[np.float32]


def quantise(source: Path, target: Path) -> None:
    """The graph of a round with the matrix products of its blocks in int8."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # the quantiser uses them, and they are wrong once it has changed types
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it recommends a pass that would only fold constants
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
    """Run both exports on every image: top-1, and how often answers and exit decisions agree."""
    rounds = GraphRounds(before, threads=check.threads), GraphRounds(after, threads=check.threads)
    manifest = rounds[1].manifest
    numbers: list[int] = []
    batches: tuple[list[GraphAnswers], list[GraphAnswers]] = ([], [])
    for indices, pixels in _batches(check, rounds[0]):
        numbers += indices
        for graphs, answers in zip(rounds, batches):
            answers.append(_run(graphs, pixels))
    plain, small = (
        GraphAnswers(
            np.concatenate([batch.index for batch in answers]), np.concatenate([batch.entropy for batch in answers])
        )
        for answers in batches
    )
    labels = np.array(check.labels, np.int64)[numbers]
    every = np.arange(len(numbers))
    report: dict[str, Any] = {"method": METHOD, "data": check.data, "images": len(numbers)}
    report["rounds"] = [
        _compare(plain.index[:, s], small.index[:, s], labels) for s in range(len(manifest.config.rounds))
    ]
    if manifest.threshold is not None:
        exits = [exit_rounds(answers.entropy, manifest.threshold) for answers in (plain, small)]
        report["routed"] = {
            **_compare(plain.index[every, exits[0]], small.index[every, exits[1]], labels),
            "same_exit": float((exits[0] == exits[1]).mean()),
            "gmacs_fp32": float(np.asarray(manifest.gmacs)[exits[0]].mean()),
            "gmacs_int8": float(np.asarray(manifest.gmacs)[exits[1]].mean()),
        }
    return report


def _batches(check: Int8Check, rounds: GraphRounds) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
    count, dataset = len(check.dataset), check.dataset
    groups = [list(range(first, min(first + check.batch, count))) for first in range(0, count, check.batch)]
    unreadable = Unreadable(dataset)
    transform = NamedTransform(rounds.manifest.config)
    device = torch.device("cpu")
    for numbers, pixels, bad in numbered_batches(
        dataset, groups, transform=transform, workers=check.workers, device=device
    ):
        for index, reason in bad.items():
            unreadable.add(index, reason)
        if pixels is not None:
            yield numbers, pixels.numpy()


def _run(graphs: GraphRounds, pixels: NDArray[np.uint8]) -> GraphAnswers:
    index, entropy, tokens = [], [], None
    for s in range(len(graphs.manifest.config.rounds)):
        logits, tokens = graphs.run(s, pixels, tokens)
        entropy.append(top10_entropy(logits))
        index.append(np.where(np.isfinite(entropy[-1]), logits.argmax(axis=-1), -2))  # no class, and not UNLABELLED
    return GraphAnswers(np.stack(index, axis=1), np.stack(entropy, axis=1))  # S times (B,) -> (B, S)


def _compare(plain: NDArray[np.int64], small: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, Any]:
    known = labels != UNLABELLED
    top1 = [float((index[known] == labels[known]).mean()) if known.any() else None for index in (plain, small)]
    return {"top1_fp32": top1[0], "top1_int8": top1[1], "same_answer": float((plain == small).mean())}


def _layers_of_blocks(graph: Any) -> list[str]:
    """Names of the matrix products with weights after the first norm; those before it make the tokens."""
    weights = {tensor.name for tensor in graph.initializer}
    operations = [node.op_type for node in graph.node]
    blocks = list(graph.node)[operations.index("LayerNormalization") :]
    return [node.name for node in blocks if node.op_type == "MatMul" and node.input[1] in weights]
