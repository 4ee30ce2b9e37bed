"""What a results file holds, and how it is read: one JSON file per measurement, complete in itself.

Accuracy is kept image by image, as bits, so that two models are compared on the images on which they differ. Shares are
0 to 1, seconds are of the wall clock, GMACs are given in both conventions. Files of format 1 call images "pictures".
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from progresvit.io.parse import Section, parse
from progresvit.metrics.miou import ClassCounts
from progresvit.routing.settings import Loss
from repro.study import ProbeTask

FORMAT = 1
FULL = -1
"""The last round's index: the full path."""

Share = Annotated[float, Field(ge=0, le=1)]
Shares = tuple[Share, ...]
"""One for each round, unless a field says otherwise."""


def _packed(kind: str, *, compressed: bool) -> tuple[PlainValidator, PlainSerializer]:
    """An array of numbers of this type, which is base64 in a JSON file."""

    def load(value: Any) -> NDArray[Any]:
        if not isinstance(value, str):
            return np.asarray(value, kind)
        content = b64decode(value, validate=True)
        return np.frombuffer(zlib.decompress(content) if compressed else content, kind)

    def dump(array: NDArray[Any]) -> str:
        content = np.ascontiguousarray(array).tobytes()
        return b64encode(zlib.compress(content, 9) if compressed else content).decode("ascii")

    return PlainValidator(load), PlainSerializer(dump, when_used="json")


def _load_flags(value: Any) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(value), np.uint8)) if isinstance(value, str) else value
    return np.asarray(bits, bool)


Flags = Annotated[
    NDArray[np.bool_],
    PlainValidator(_load_flags),
    PlainSerializer(lambda flags: np.packbits(flags).tobytes().hex(), when_used="json"),
]
"""True or false for each image, in a JSON file hexadecimal with the first image in the highest bit. Zeros fill the last
byte of what was read from a file; ``flags_of`` cuts them off."""
Halves = Annotated[NDArray[np.float16], *_packed("<f2", compressed=False)]
"""A number for each image: float16, in a JSON file base64."""
Singles = Annotated[NDArray[np.float32], *_packed("<f4", compressed=True)]
"""A number for each image: float32, in a JSON file compressed (zlib), base64."""
Counts = Annotated[NDArray[np.int32], *_packed("<i4", compressed=True)]
"""Whole numbers: int32, in a JSON file compressed (zlib), base64."""


def flags_of(flags: NDArray[np.bool_], images: int) -> NDArray[np.bool_]:
    """Without the zeros that fill the last byte: (N,)."""
    if len(flags) not in (images, 8 * -(-images // 8)):
        raise ValueError(f"{len(flags)} bits for {images} images; measure again.")
    return flags[:images]


class Part(Section):
    """A piece of a results file. Numbers are finite: not every JSON reader knows infinity."""

    model_config = ConfigDict(allow_inf_nan=False)


class Extended(Part):
    """A piece with fields that earlier versions did not have; they are written only if they are there."""

    @model_serializer(mode="wrap")
    def _without_absent(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        newer = {name for name, field in type(self).model_fields.items() if not field.is_required()}
        return {key: value for key, value in values.items() if value is not None or key not in newer}


class Machine(Part):
    """The hardware and software of a measurement."""

    device: str
    """The GPU's name, or the processor's."""
    processes: int
    """Processes of one command, under torchrun."""
    jobs: int
    """Commands that shared the machine at a time. Seconds are longer for it."""
    python: str
    torch: str


class Data(Part):
    """The images. Runs of one comparison must agree in all of it."""

    name: str
    train: int | None
    """Training images, if the study trained the model."""
    val: int
    """Images measured on."""
    classes: int
    names: str
    """Hash of the measured images' names, in the order of the bits."""
    learned: str | None
    """Hash of the names of all images of a training run, both splits."""


class Rounds(Extended):
    """Each round's cost and, image by image, whether it is right."""

    resolutions: tuple[int, ...]
    heads: tuple[int, ...] | None = None
    """None if the kind of model has rounds without heads."""
    gmacs_paper: tuple[float, ...]
    """GMACs of an image that exits after each round, earlier rounds included; alternatives are counted alone."""
    gmacs_executed: tuple[float, ...]
    right: tuple[int, ...]
    """Images that each round has right."""
    bits: tuple[Flags, ...]
    """Whether each round is right, image by image."""
    log_loss: tuple[Halves, ...] | None = None
    """Minus the natural logarithm of the label's probability, image by image. None in files of earlier versions, and if
    it is not finite for every image."""
    entropy: tuple[Halves, ...] | None = None
    """Top-10 entropy after each round but the last, image by image. None for one round, for rounds that are
    alternatives, and in files of earlier versions."""
    trained_gmacs: float | None = None
    """GMACs of an image in training, for a model that is evaluated with merged tokens and was trained without."""

    @model_validator(mode="after")
    def _agree(self) -> Rounds:
        if tuple(int(bits.sum()) for bits in self.bits) != self.right:
            raise ValueError("right and bits disagree")
        return self

    def correct(self, images: int) -> NDArray[np.bool_]:
        """(N, S)"""
        return np.stack([flags_of(bits, images) for bits in self.bits], axis=1)

    def log_losses(self, images: int) -> NDArray[np.float64] | None:
        """(N, S)"""
        return _columns(self.log_loss, images)

    def entropies(self, images: int) -> NDArray[np.float64] | None:
        """(N, S - 1)"""
        return _columns(self.entropy, images)


def _columns(columns: Sequence[NDArray[np.float16]] | None, images: int) -> NDArray[np.float64] | None:
    """A column for each round."""
    for values in columns or ():
        if len(values) != images:
            raise ValueError(f"{len(values)} values for {images} images; measure again.")
    return None if columns is None else np.stack(columns, axis=1).astype(np.float64)


class Point(Part):
    """The outcome of a threshold."""

    threshold: float | tuple[float, ...]
    """One, or one for each round but the last; instead of infinity, one above every entropy."""
    top1: Share
    gmacs_paper: float
    gmacs_executed: float
    exit_shares: Shares


class Measurement(Part):
    """What every file says."""

    format: Literal[1]
    name: str
    """The file's name without .json."""
    commands: tuple[str, ...]
    """What it was measured from. DATA and RUNS stand for the reader's folders."""
    seed: int | None
    """Seed of the training or of random draws; None if nothing was drawn."""
    seconds: float
    """Seconds of the steps of a training, including the first and its compilation; otherwise of all commands."""
    date: str
    revision: str
    """Git revision of the code."""
    machine: Machine
    data: Data
    precision: str


class Probe(Part):
    """What predicts from the features of a model in place of its head."""

    task: ProbeTask
    words: tuple[str, ...] = ()
    """More words of the command that evaluated the model."""
    settings: dict[str, Any]
    """The number of neighbours, the labelled images that the prediction was learned from, and so on."""
    chosen: dict[str, Any] | None = None
    """What was chosen on held-out images, such as a learning rate; None for k-NN."""


class TrainingCurves(Part):
    """A training of the task ``dino`` over time, at up to 60 of the logged steps; all values are in nats."""

    epochs: tuple[float, ...]
    """Epochs done; the others have a value of each round for each of them."""
    losses: tuple[tuple[float, ...], ...]
    teacher_entropy: tuple[tuple[float, ...], ...]
    """Entropy of the teacher's output for an image, mean over images."""
    mean_entropy: tuple[tuple[float, ...], ...]
    """Entropy of the mean of these outputs over images."""
    centre_entropy: tuple[tuple[float, ...], ...]
    """Entropy of the centre."""

    @model_validator(mode="after")
    def _agree(self) -> TrainingCurves:
        values = (self.losses, self.teacher_entropy, self.mean_entropy, self.centre_entropy)
        if {len(curve) for curve in values} != {len(self.epochs)}:
            raise ValueError("curves have a value for each of the epochs")
        return self


class RunResult(Measurement, Extended):
    """A model that the study trained, every round of it on every held-out image."""

    kind: Literal["run"]
    run: str
    """Its name in the study; runs that differ in the seed alone share it."""
    recipe: dict[str, Any]
    epochs: int
    parameters: int
    rounds: Rounds
    frontier: tuple[Point, ...]
    """Points from the cheapest to the full path; empty if the rounds are alternatives, which are not routed."""
    near_lossless: Point | None
    """None if the rounds are alternatives."""
    history: tuple[tuple[int, Shares], ...]
    """Epochs done, and top-1 of each round then; in a training of the task ``dino``, top-1 of k-NN."""
    probe: Probe | None = None
    """None if the head of the model predicts."""
    curves: TrainingCurves | None = None
    """Curves of a training of the task ``dino``; None for others, and for a run that evaluates another run's models."""


class Spread(Part):
    """A value over repeated draws."""

    mean: float
    lowest: float
    highest: float


class HalvesResult(Part):
    """A threshold calibrated on random halves of the images, measured on the other halves."""

    number: int
    drop: Spread
    """Top-1 of the full path minus top-1 of the routed answers."""
    saving: Spread
    wrong: Spread
    """Error rate among answered images."""
    harm: Spread | None = None
    """Share of the images that an early exit turns from right to wrong; None in files of earlier versions."""
    disagreement: Spread | None = None
    """Share of the images whose answer is another than the full path's; None in files of earlier versions."""
    broken: int | None = None
    """Files of earlier versions count the halves whose share of harm was above the bound. The other half is noisy
    itself, so this says little of the guarantee."""


class DrawsResult(Part):
    """A guarantee on bootstrap draws of calibration images, with the measured images as the population."""

    draws: int
    images: int
    """Images of one draw, with replacement."""
    exceeded: int
    """Draws whose threshold is beyond the bound in the population."""
    mean: float
    """Mean over draws of the bounded share in the population."""
    highest: float
    saving: float
    """Mean over draws."""


class SettingResult(Part):
    """A calibrated threshold, on the images it was calibrated on and on others."""

    name: str
    point: Point
    epsilon: float | None
    """Guaranteed maximum drop, with probability 1 - delta."""
    delta: float | None
    loss: Loss | None = None
    """What the guarantee bounds: ``labelled`` harm, ``unlabelled`` disagreement with the full path. None without a
    guarantee; files of earlier versions have guarantees of harm alone."""
    abstain: float | None
    """Entropy from which an answer is withheld."""
    answered: Share
    top1_of_answered: Share
    halves: HalvesResult | None
    draws: DrawsResult | None = None
    """None without a guarantee, and in files of earlier versions."""


class GroupAt(Part):
    """A group of classes at a setting."""

    setting: str
    top1: Share
    gmacs_paper: float
    exit_shares: Shares
    answered: Share
    top1_of_answered: Share | None


class GroupResult(Part):
    """A group of classes alone."""

    name: str
    pictures: int
    top1: Shares
    at: tuple[GroupAt, ...]


class MatchedResult(Part):
    """A router against entropy when the same share of images continues to the last round."""

    router: str
    fitted_on: str
    fits: int
    """Routers fitted with different seeds; values are means over them."""
    shares: Shares
    """Shares of images that continue; the other tuples have a value for each."""
    gmacs_paper: tuple[float, ...]
    entropy_top1: Shares
    router_top1: Shares
    lowest: tuple[float, ...]
    """95 % interval of router minus entropy: percentiles of its mean over a thousand resamples of images and fits. The
    images that continue are not chosen again in a resample."""
    highest: tuple[float, ...]


class RiskCurve(Part):
    """Risk against coverage when uncertain answers are withheld."""

    name: str
    coverage: Shares
    risk: Shares
    area: float


class EqualAccuracy(Part):
    """Compute of a rule whose thresholds were chosen on other images for an allowed drop; means over random splits."""

    rule: str
    splits: int
    drop: float | None
    top1: Share
    gmacs_paper: float
    saving: float
    given_up: Share | None
    given_up_wrong: Share | None
    """Share of the given-up images that are wrong in every round."""
    errors_added: Spread | None = None
    """For a rule that rejects: its error rate minus the rate without rejection, at the same allowed drop. Lowest and
    highest are the 95 % interval over resamples of images and splits; None in files of earlier versions."""
    saving_added: Spread | None = None
    """The saving minus the saving without rejection."""


class RoutingResult(Measurement):
    """One model's thresholds, routers and withheld answers."""

    kind: Literal["routing"]
    model: str
    weights: str
    max_error: float | None = None
    """Error rate among answered images at which ``careful`` withholds; None in files of earlier versions: 0.05."""
    rounds: Rounds
    frontier: tuple[Point, ...]
    settings: tuple[SettingResult, ...]
    groups: tuple[GroupResult, ...]
    matched: tuple[MatchedResult, ...]
    abstention: tuple[RiskCurve, ...]
    equal_accuracy: tuple[EqualAccuracy, ...]
    rejection: tuple[MatchedResult, ...] = ()
    """Entropy that stops at images which a router predicts to be unrecoverable, against entropy alone when the same
    share of images continues; empty in files of earlier versions."""


BUDGET = "budget-"


def budget_setting(budget: float) -> str:
    """Name of the setting that keeps to an average of these GMACs at each severity."""
    return f"{BUDGET}{budget:g}"


class ShiftedAt(Extended):
    """A setting under shift: calibrated on clean images, or a budget whose threshold keeps to it at each severity."""

    setting: str
    top1: Share
    gmacs_paper: float
    exit_shares: Shares
    harm: Share | None = None
    """Share of the images that the full path has right and the routed answer has wrong: what a guarantee bounds. None
    for a budget, and in files of earlier versions."""
    epsilon: float | None = None
    """The bound that the setting guarantees for images like the clean ones; None without a guarantee."""


class ShiftedSet(Extended):
    """One corruption at one severity; the clean images have no corruption and severity 0."""

    corruption: str | None
    severity: int
    pictures: int
    top1: Shares
    at: tuple[ShiftedAt, ...]
    bits: tuple[Flags, ...] | None = None
    """Whether the last round is right, image by image, then each setting of ``at``. None in files of earlier
    versions."""

    @model_validator(mode="after")
    def _agree(self) -> ShiftedSet:
        if self.bits is None:
            return self
        right = [int(bits.sum()) for bits in self.bits]
        if right != [round(top1 * self.pictures) for top1 in (self.top1[FULL], *(at.top1 for at in self.at))]:
            raise ValueError("top1 and bits disagree")
        return self


class SeverityFrontier(Part):
    """All corruptions of a severity together."""

    severity: int
    pictures: int
    frontier: tuple[Point, ...]


class ShiftResult(Measurement):
    """A model under corruption."""

    kind: Literal["shift"]
    model: str
    weights: str
    gmacs_paper: tuple[float, ...]
    sets: tuple[ShiftedSet, ...]
    severities: tuple[SeverityFrontier, ...]


class CostPoint(Part):
    """Speed and energy of one point of a run's frontier."""

    run: str
    point: str
    """Its name, as ``repro.frontier.points_of`` gives it."""
    gmacs_paper: float
    """Average over the images."""
    images_per_s: float
    """Median of the repeats."""
    spread: float
    """Highest minus lowest of the repeats, divided by the median."""
    latency_ms: float
    """Mean, one image at a time."""
    joules: float | None
    """Per image, at the batch."""
    engine_images_per_s: float | None = None
    """Images per second in the package's engine, for models of kind progresvit."""
    engine_spread: float | None = None
    """None in files of earlier versions too."""
    engine_latency_ms: float | None = None
    engine_joules: float | None = None


class CostResult(Measurement):
    """What the points of a frontier cost on one device."""

    kind: Literal["cost"]
    batch: int
    runtime: str
    """How the models were run, for readers."""
    points: tuple[CostPoint, ...]


class CommandResult(Measurement):
    """The tables and figures that a progresvit command wrote, with the model of a row if it has rows."""

    kind: Literal["command"]
    data: Data | None = None  # type: ignore[assignment]  # each command has its own
    model: str
    weights: str | None
    """None for a command of no single model."""
    tables: dict[str, tuple[tuple[str, ...], ...]]
    """Heads and rows by the name of the file."""
    figures: tuple[str, ...]
    """Files in the folder ``FILES`` of the results."""
    page: str | None
    """An HTML page among them."""
    printed: str | None
    """What the command printed, if the page shows it."""


FILES = "files"
"""Folder of the results for files of commands, a folder each."""


class SegmentedImages(Part):
    """Every round of a segmentation model on every image of a split; images are in the order of their names."""

    split: str
    images: int
    names: str
    """Hash of the images' names."""
    windows: Counts
    """Windows of each image."""
    scores: tuple[Singles, ...]
    """Uncertainty after each round but the last."""
    labelled: Counts
    """Pixels of each class in each image."""
    intersection: tuple[Counts, ...]
    """Pixels in each round that are labelled and predicted as the class."""
    predicted: tuple[Counts, ...]

    @model_validator(mode="after")
    def _agree(self) -> SegmentedImages:
        if not len(self.intersection) == len(self.predicted) == len(self.scores) + 1:
            raise ValueError("scores are of each round but the last, and counts of each round")
        counts = self.counts()
        if not np.array_equal(counts.labelled.sum(axis=-1), counts.predicted.sum(axis=-1)):
            raise ValueError("an image has other numbers of labelled and predicted pixels")
        return self

    def counts(self) -> ClassCounts:
        """(N, S, K) each."""
        parts = ([self.labelled] * len(self.predicted), self.intersection, self.predicted)
        labelled, intersection, predicted = (
            np.stack([counts.reshape(self.images, -1) for counts in part], axis=1).astype(np.int64) for part in parts
        )
        return ClassCounts(intersection, labelled, predicted)

    def score_array(self) -> NDArray[np.float64]:
        """(N, S); the last round's, by which nothing is decided, are 0."""
        return np.stack([*self.scores, np.zeros(self.images)], axis=1)


class SegmentationResult(Measurement):
    """A segmentation model that the study trained; ``data`` describes the test images."""

    kind: Literal["segmentation"]
    run: str
    """Its name in the study; runs that differ in the seed alone share it."""
    recipe: dict[str, Any]
    epochs: int
    parameters: int
    labels: tuple[str, ...]
    resolutions: tuple[int, ...]
    heads: tuple[int, ...]
    gmacs_paper: tuple[float, ...]
    """GMACs of a window after each round, earlier rounds included."""
    gmacs_executed: tuple[float, ...]
    val: SegmentedImages
    """Images that chose thresholds."""
    test: SegmentedImages
    history: tuple[tuple[int, Shares], ...]
    """Epochs done, and mIoU of each round then, on the validation images."""


KINDS: dict[str, type[Measurement]] = {
    "run": RunResult,
    "segmentation": SegmentationResult,
    "routing": RoutingResult,
    "shift": ShiftResult,
    "cost": CostResult,
    "command": CommandResult,
}


AnyMeasurement = TypeVar("AnyMeasurement", bound=Measurement)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All measurements of a folder, by name."""

    runs: dict[str, RunResult]
    routing: dict[str, RoutingResult]
    shift: dict[str, ShiftResult]
    cost: dict[str, CostResult]
    segmentation: dict[str, SegmentationResult]
    command: dict[str, CommandResult]

    @classmethod
    def of(cls, measured: Iterable[Measurement], folder: Path) -> Results:
        """The measurements of a folder by kind; refused if two are costs on the same device."""
        results = list(measured)

        def of_kind(kind: type[AnyMeasurement]) -> dict[str, AnyMeasurement]:
            return {result.name: result for result in results if isinstance(result, kind)}

        measured_on: dict[str, str] = {}
        for cost in of_kind(CostResult).values():
            device = cost.machine.device
            if (other := measured_on.setdefault(device, cost.name)) != cost.name:
                raise ValueError(f"{folder} holds {other} and {cost.name}, both costs on {device}; keep one.")
        return cls(
            runs=of_kind(RunResult),
            routing=of_kind(RoutingResult),
            shift=of_kind(ShiftResult),
            cost=of_kind(CostResult),
            segmentation=of_kind(SegmentationResult),
            command=of_kind(CommandResult),
        )

    @property
    def all(self) -> list[Measurement]:
        kinds = (self.runs, self.routing, self.shift, self.cost, self.segmentation, self.command)
        return [result for results in kinds for result in results.values()]


def read_measurement(path: Path) -> Measurement:
    """One results file. Errors name the file, the field and what to do."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); delete it and measure again.") from error
    result = check_measurement(values, origin=str(path))
    if result.name != path.stem:
        raise ValueError(f"{path} calls itself {result.name}; rename the file to {result.name}.json.")
    return result


def check_measurement(values: Any, *, origin: str) -> Measurement:
    """The measurement of these values, validated. Errors begin with the origin."""
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"{origin} does not hold a measurement: its kind is {kind!r}, not {', '.join(KINDS)}; move it out of the "
            "folder."
        )
    if (layout := values.get("format")) != FORMAT:
        raise ValueError(
            f"{origin} has format {layout!r} and this version reads format {FORMAT}; delete it and measure again, or "
            f"use the version that wrote it (revision {values.get('revision', 'unknown')})."
        )
    return parse(KINDS[kind], values, origin=origin)


def to_json(result: Measurement) -> str:
    """The text of a results file."""
    return json.dumps(result.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def check_comparable(results: Sequence[Measurement], what: str) -> None:
    """Refuse to compare measurements of different images or precisions."""
    for other in results[1:]:
        first = results[0]
        for field in (*(f"data.{name}" for name in Data.model_fields), "precision"):
            ours, theirs = (getattr(run.data, field[5:]) if "." in field else run.precision for run in (first, other))
            if ours != theirs:
                raise ValueError(
                    f"{what} compares {first.name} and {other.name}, which differ in {field}: {ours} and {theirs}. "
                    "Measure both on the same images in the same way, or take one of them out."
                )
