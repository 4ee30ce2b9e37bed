"""Graphs in int8, and their cost: answers and exit decisions compared with float32, on real images.

Graphs for onnxruntime are quantised dynamically. OpenVINO runs such graphs slower than float32 ones, so its own have
static ranges, set by NNCF. Letters: B images of a batch, N images, S rounds.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from progresvit.data.dataset import UNLABELLED, ImageDataset
from progresvit.data.evaluation_batches import numbered_batches
from progresvit.data.loading import Unreadable
from progresvit.data.transforms import NamedTransform
from progresvit.engine.export.manifest import Manifest, graph_files, write_manifest
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.io.parse import count_of
from progresvit.routing.decide import exit_rounds
from progresvit.routing.scores import top10_entropy
from progresvit.routing.settings import SettingWarning

METHODS: Mapping[str, str] = {
    "onnx": "dynamic: weights per channel in int8, activations in uint8; matrix products of the blocks",
    "openvino": "static, by NNCF: weights per channel and activations in int8, SmoothQuant, bias correction",
}
"""How graphs are quantised, by format."""
CALIBRATION_IMAGES = 300
"""Most images from which static ranges are taken: NNCF's default. With fewer there is a warning."""


Feed = dict[str, NDArray[Any]]
"""The inputs of a graph by name."""


@dataclass(frozen=True, kw_only=True)
class Int8Check:
    """The images on which int8 is compared with float32; static ranges are taken from a part of them."""

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


def quantise_export(
    manifest: Manifest, plain: Path, staged: Path, check: Int8Check, report: Callable[[str], None]
) -> Manifest:
    """int8 graphs in ``staged`` from the ONNX graphs in ``plain``; the manifest with their measured cost."""
    count = len(manifest.files)
    calibrated: list[int] = []
    of_plain = {"kind": "onnx", "precision": "fp32"}
    files = tuple(dict.fromkeys(graph_files("onnx", s), "") for s in range(count))
    write_manifest(manifest.model_copy(update={**of_plain, "files": files}), plain)
    feeds: list[list[Feed]] = []
    if manifest.kind == "openvino":
        calibrated = draw_calibration(len(check.dataset))
        report(f"{count_of(len(calibrated), 'image')} for the ranges")
        if len(calibrated) < CALIBRATION_IMAGES:
            warnings.warn(
                f"the ranges of int8 come from {count_of(len(calibrated), 'image')} instead of {CALIBRATION_IMAGES}, "
                f"so activations of other images may not fit them; give {2 * CALIBRATION_IMAGES} images or more: half "
                f"of them, at most {CALIBRATION_IMAGES}, give the ranges, and the others measure the cost.",
                SettingWarning,
                stacklevel=3,  # the caller of export
            )
        graphs = GraphRounds(plain, backend="openvino", threads=check.threads)
        feeds = round_feeds(graphs, (pixels for _, pixels in _batches(check, graphs, calibrated)))
    for s in range(count):
        report(f"round {s + 1} to int8")
        source, target = plain / graph_files("onnx", s)[0], staged / graph_files(manifest.kind, s)[0]
        if manifest.kind == "openvino":
            quantise_for_openvino(source, target, feeds[s])
        else:
            quantise(source, target)
    write_manifest(manifest, staged)
    report("measuring int8")
    return manifest.model_copy(update={"int8": measure_int8(plain, staged, check, calibrated)})


def quantise(source: Path, target: Path) -> None:
    """The graph of a round with the matrix products of its blocks in int8."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # the quantiser uses them, and they are wrong once it has changed types
    with _quiet_quantiser():  # it recommends a pass that would only fold constants
        quantize_dynamic(
            model,
            target,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=_layers_of_blocks(model.graph),
            per_channel=True,
            weight_type=QuantType.QInt8,
        )


def quantise_for_openvino(source: Path, target: Path, feeds: Sequence[Feed]) -> None:
    """The graph of a round as one of OpenVINO in int8, with the ranges that these inputs have."""
    import nncf
    import openvino

    with _quiet_quantiser():
        quantised = nncf.quantize(
            openvino.convert_model(source),
            nncf.Dataset(feeds),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.PERFORMANCE,
            subset_size=len(feeds),
        )
    openvino.save_model(quantised, target, compress_to_fp16=False)


def draw_calibration(count: int) -> list[int]:
    """The numbers of the images that give the ranges, evenly spread; at least half are left to measure the cost on."""
    if count < 2:
        raise ValueError(
            f"int8 for OpenVINO takes ranges from some images and is measured on others; give more than {count}."
        )
    spread = np.linspace(0, count - 1, min(CALIBRATION_IMAGES, count // 2))
    return [round(position) for position in spread.tolist()]


def round_feeds(graphs: GraphRounds, batches: Iterable[NDArray[np.uint8]]) -> list[list[Feed]]:
    """The inputs of each round for single images; the tokens come from the float32 graphs."""
    feeds: list[list[Feed]] = [[] for _ in graphs.manifest.config.rounds]
    for pixels in batches:
        tokens = None
        for s, of_round in enumerate(feeds):
            batch: Feed = {"pixels": pixels}
            if tokens is not None:
                batch["previous"] = tokens
            of_round += [{name: value[i : i + 1] for name, value in batch.items()} for i in range(len(pixels))]
            _, tokens = graphs.run(s, pixels, tokens)
    if not feeds[0]:
        raise ValueError("none of the images for the ranges of int8 can be read; give others.")
    return feeds


@contextmanager
def _quiet_quantiser() -> Iterator[None]:
    """Without warnings and progress bars of the packages that quantise."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def measure_int8(before: Path, after: Path, check: Int8Check, calibrated: Sequence[int] = ()) -> dict[str, Any]:
    """Run both exports on the images: top-1, and how often answers and exit decisions agree.

    Images whose numbers are in ``calibrated`` gave the ranges and are left out.
    """
    small_rounds = GraphRounds(after, threads=check.threads)
    rounds = GraphRounds(before, backend=small_rounds.backend, threads=check.threads), small_rounds
    manifest = small_rounds.manifest
    measured = sorted(set(range(len(check.dataset))) - set(calibrated))
    numbers: list[int] = []
    batches: tuple[list[GraphAnswers], list[GraphAnswers]] = ([], [])
    for indices, pixels in _batches(check, rounds[0], measured):
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
    report: dict[str, Any] = {"method": METHODS[manifest.kind], "data": check.data, "images": len(numbers)}
    if calibrated:
        report["calibration_images"] = len(calibrated)
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


def _batches(
    check: Int8Check, rounds: GraphRounds, wanted: Sequence[int]
) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
    dataset = check.dataset
    groups = [list(wanted[first : first + check.batch]) for first in range(0, len(wanted), check.batch)]
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
    labelled = labels != UNLABELLED
    top1 = [float((index[labelled] == labels[labelled]).mean()) if labelled.any() else None for index in (plain, small)]
    return {"top1_fp32": top1[0], "top1_int8": top1[1], "same_answer": float((plain == small).mean())}


def _layers_of_blocks(graph: Any) -> list[str]:
    """Names of the matrix products with weights after the first norm; those before it make the tokens."""
    weights = {tensor.name for tensor in graph.initializer}
    operations = [node.op_type for node in graph.node]
    blocks = list(graph.node)[operations.index("LayerNormalization") :]
    return [node.name for node in blocks if node.op_type == "MatMul" and node.input[1] in weights]
