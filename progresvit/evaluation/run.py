"""Evaluation: every round on every image, once, into records.

Processes share the chunks of images. Each finished chunk is a file in ``NAME.parts`` beside the records, and the
batches of a chunk in progress are kept there every few seconds, so a run that was stopped continues with the images
that are missing. When all chunks are there they become one file.

Letters: B images, S rounds, K classes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from progresvit import __version__
from progresvit.compute import CONVENTIONS
from progresvit.data.augment.corruption import Corruption
from progresvit.data.corrupted_cache import CorruptedCache
from progresvit.data.crop import describe_preprocessing, preprocessing_hash
from progresvit.data.dataset import UNLABELLED, ImageDataset, find_images, find_unlabelled
from progresvit.data.evaluation_batches import Numbered, numbered_batches
from progresvit.data.gpu_decode import plan_for
from progresvit.data.timm_dataset import find_timm_images, is_timm_name
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.distributed import Processes
from progresvit.evaluation.classes import class_numbers, relabel
from progresvit.evaluation.header import Header
from progresvit.evaluation.parts import FinishedBatch, Parts
from progresvit.evaluation.record_files import read_records, write_records
from progresvit.evaluation.records import Records
from progresvit.io.part_formats import Columns
from progresvit.io.weights import weights_hash
from progresvit.model.interface import RoundModel
from progresvit.model.precision import autocast
from progresvit.routing import full_entropy, logit_statistics, top10_entropy

TOP = 5

ProgressCallback = Callable[[int, int], None]
"""Called after each batch with the number of images that are done and the total."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where images come from and how they are prepared."""

    data: str
    """A folder, tars, or a name that timm knows (``hfds/…``, ``wds/…``)."""
    split: str = "val"
    unlabelled: bool = False
    """Take all images of all folders; there are no labels."""
    restrict_classes: bool = False
    """Predictions choose only among the classes of the data (ImageNet-A and -R)."""
    corruption: Corruption | None = None
    others: dict[str, Mapping[str, int]] = field(default_factory=dict, compare=False)
    """By split (``.`` if it was drawn), the number of files that are no images, by suffix. :meth:`find` fills it."""

    def find(self) -> ImageDataset:
        """The images, with targets by the data's own classes. Names must be unique."""
        if self.unlabelled and is_timm_name(self.data):
            raise ValueError("--unlabelled takes a folder or tars; timm's datasets have labels.")
        if self.unlabelled:
            images = find_unlabelled(self.data, others := Counter[str]())
            images = replace(images, others=others)
        elif is_timm_name(self.data):
            images = find_timm_images(self.data, self.split, None)
        else:
            images = find_images(self.data, self.split)
        self.others["." if images.drawn_from is not None else self.split] = images.others
        counts = Counter(entry.name for entry in images.entries)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                f"{len(twice)} images of {self.data} share their name with another, such as {twice[0]}; records "
                "identify images by name, so rename them or evaluate the sets separately."
            )
        return images


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How an evaluation runs. Only the precision and ``decode`` change its outcome."""

    precision: str = "fp32"
    batch: int = 128
    workers: int = 2
    """Processes that decode images; 0 decodes in this one."""
    decode: str = "cpu"
    """Where images are decoded and cropped: cpu is exact; gpu, or auto with a GPU that can, is faster and differs by
    rounding."""
    keep_logits: bool = False
    overwrite: bool = False
    cache: Path | None = None
    """Folder that keeps corrupted images for later models; None generates them each time."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.workers < 0:
            raise ValueError(f"a batch holds at least one image, not {self.batch}, and workers are 0 or more.")


def default_batch(device: torch.device) -> int:
    """Images per batch. On a CPU few are as fast, and only whole batches are kept when a run is stopped."""
    return 32 if device.type == "cpu" else 128


def evaluate(
    model: RoundModel,
    source: DataSource,
    out: Path,
    *,
    name: str,
    processes: Processes,
    options: EvalOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Records:
    """Write the records of a model on a dataset, and return them.

    Args:
        model: It is moved to the device of the processes and set to evaluation mode.
        source: The images.
        out: The file to write.
        name: The model's name in the header.
        processes: Processes that share the work, and their device.
        options: Precision, batch size and so on.
        progress: Called after each batch.
    """
    options = options or EvalOptions()
    _check_task(model)
    if model.config.num_classes == 0:
        raise ValueError(
            "the model has no classes to choose from; evaluate its features with progresvit evaluate --task knn or "
            "--task linear, or give it a head with reset_classifier and train it."
        )
    check_run(out, options, processes.device)
    images = source.find()
    header = source_header(model, source, images, name=name, options=options, device=processes.device)
    labels = [UNLABELLED] * len(images) if source.unlabelled else relabel(images, model.config)
    device = processes.device
    model = model.to(device).eval()

    def columns_of(indices: Sequence[int], pixels: Tensor) -> dict[str, Tensor]:
        with autocast(device, options.precision):
            logits = [output.logits for output in model(normalise(pixels, model.config))]
        targets = None if source.unlabelled else torch.tensor([labels[index] for index in indices], device=device)
        return record_columns(logits, header.classes, targets, keep_logits=options.keep_logits)

    transform = NamedTransform(model.config, source.corruption)
    with Parts(out, images) as parts:
        fill_parts(parts, header, transform, columns_of, options=options, processes=processes, progress=progress)
        if processes.first:
            write_records(gather_records(parts, header, labels), out)
            parts.remove()
        processes.wait()
    return read_records(out)


def _check_task(model: RoundModel) -> None:
    if model.config.task != "classification":
        raise ValueError(
            "the model segments images, and this takes classification models; evaluate it with progresvit evaluate, or "
            "evaluate_segmentation in Python."
        )


def check_run(out: Path, options: EvalOptions, device: torch.device) -> None:
    """Errors before anything is read or written."""
    if out.is_dir():
        raise ValueError(f"{out} is a folder; give the name of a file, such as {out / 'records.parquet'}.")
    if out.exists() and not options.overwrite:
        raise ValueError(f"{out} is there already; use --overwrite to replace it, or name another file.")
    autocast(device, options.precision)


LoadBatches = Callable[[Sequence[list[int]]], Iterator[Numbered]]
"""Gives each group of indices as a batch."""


def _batch_loader(
    images: ImageDataset,
    transform: NamedTransform,
    options: EvalOptions,
    processes: Processes,
    progress: ProgressCallback | None,
) -> LoadBatches:
    """Decodes images, or reads corrupted ones from the cache, which the first process fills before."""
    if options.cache is None or transform.corruption is None:
        return partial(
            numbered_batches,
            images,
            transform=transform,
            workers=options.workers,
            device=processes.device,
            decode=options.decode,
        )
    cache = CorruptedCache(options.cache, images, transform)
    if processes.first:
        cache.fill(workers=options.workers, progress=progress)
    processes.wait()
    return partial(cache.batches, device=processes.device)


class ProgressCounter:
    """Counts images for the callback, assuming that the other processes are as fast as this one."""

    def __init__(self, callback: ProgressCallback | None, total: int, done: int, processes: int) -> None:
        self.callback, self.total, self.done, self.processes = callback, total, done, processes
        self.add(0)

    def add(self, images: int) -> None:
        """Count images of this process."""
        self.done = min(self.done + images * self.processes, self.total)
        if self.callback:
            self.callback(self.done, self.total)


def intended_header(
    model: RoundModel, source: DataSource, name: str, options: EvalOptions, processes: Processes
) -> Header:
    """The header that an evaluation would write, without its outcome."""
    _check_task(model)
    return source_header(model, source, source.find(), name=name, options=options, device=processes.device)


def source_header(
    model: RoundModel,
    source: DataSource,
    images: ImageDataset,
    *,
    name: str,
    options: EvalOptions,
    device: torch.device,
) -> Header:
    """The header for images of a source, without the outcome."""
    restricted = None
    if source.restrict_classes:
        if source.unlabelled:
            raise ValueError("predictions cannot be restricted to the classes of images that have no labels.")
        restricted = tuple(sorted(class_numbers(images.class_ids, model.config)))
    preprocessing = describe_preprocessing(model.config)
    if source.corruption is None and plan_for(model.config, device, options.decode).jpeg:
        preprocessing["decode"] = "gpu"
    return make_header(
        model,
        images,
        name=name,
        options=options,
        device=device,
        preprocessing=preprocessing,
        preprocessing_sha256=preprocessing_hash(model.config),
        data=source.data,
        split=None if source.unlabelled else source.split,
        classes=restricted,
        corruption=f"{source.corruption.name}/{source.corruption.severity}" if source.corruption else None,
        corruption_sha256=source.corruption.source if source.corruption else None,
    )


def make_header(
    model: RoundModel, images: ImageDataset, *, name: str, options: EvalOptions, device: torch.device, **about: Any
) -> Header:
    """A header; ``about`` holds the fields that depend on the kind of model."""
    return Header(
        model=name,
        weights_sha256=weights_hash(model),
        config=model.config.to_dict(),
        gmacs={convention: model.gmacs(convention) for convention in CONVENTIONS},
        routable=model.config.routable,
        precision=getattr(model, "precision", options.precision),  # graphs of an export may be int8
        backend=getattr(model, "backend", None),
        graphs_sha256=getattr(model, "graphs_sha256", None),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        images=len(images),
        drawn_from=images.drawn_from,
        names_sha256=hashlib.sha256("\n".join(entry.name for entry in images.entries).encode()).hexdigest(),
        version=__version__,
        **about,
    )


def finished(header: Header, unreadable: tuple[str, ...]) -> Header:
    """The header of an evaluation that is complete."""
    return replace(header, unreadable=unreadable, date=datetime.now(UTC).isoformat(timespec="seconds"))


ColumnsOf = Callable[[Sequence[int], Tensor], Mapping[str, Tensor]]
"""Gives the columns of a batch, each (B, ...), from the indices of its images and their pixels, bytes (B, C, r, r)."""


def fill_parts(
    parts: Parts,
    header: Header,
    transform: NamedTransform,
    columns_of: ColumnsOf,
    *,
    options: EvalOptions,
    processes: Processes,
    progress: ProgressCallback | None = None,
) -> None:
    """Make the parts that are missing; all processes share them, and all are done when this returns.

    Args:
        parts: The parts of a dataset.
        header: It identifies the run.
        transform: Makes the pixels of an image.
        columns_of: Makes the columns of a batch.
        options: Batch size and so on.
        processes: Processes that share the work, and their device.
        progress: Called after each batch.
    """
    load = _batch_loader(parts.dataset, transform, options, processes, progress)
    mine, done = parts.share_run(header, processes, keep_logits=options.keep_logits, overwrite=options.overwrite)
    counter = ProgressCounter(progress, len(parts.dataset), done, processes.count)
    parts.fill(_run(parts, mine, columns_of, options, load, counter), first=processes.first)
    processes.wait()


@torch.inference_mode()
def _run(
    parts: Parts,
    numbers: Sequence[int],
    columns_of: ColumnsOf,
    options: EvalOptions,
    load: LoadBatches,
    counter: ProgressCounter,
) -> Iterator[FinishedBatch]:
    """The columns and unreadable images of each batch as it is finished."""
    owners, groups = [], []
    for number in numbers:
        chunk = list(parts.left(number))
        for first in range(0, len(chunk), options.batch):
            groups.append(chunk[first : first + options.batch])
            owners.append(number)
    for turn, (good, pixels, bad) in enumerate(load(groups)):
        columns = {} if pixels is None else columns_of(good, pixels)
        counter.add(len(groups[turn]))
        yield owners[turn], Columns({"index": np.array(good, np.int64), **columns}, bad)


def record_columns(
    rounds: Sequence[Tensor],
    classes: Sequence[int] | None = None,
    targets: Tensor | None = None,
    *,
    keep_logits: bool = False,
) -> dict[str, Tensor]:
    """What records keep of a batch: S tensors of logits (B, K) -> columns by name, each (B, S, ...).

    With ``classes``, predictions choose only among them, and the probability of the label is one among them; entropies
    and statistics are of all classes. ``targets`` are the labels (B,), if there are any.
    """
    columns: dict[str, list[Tensor]] = {}
    for logits in rounds:
        values = logits.float()
        labels, probabilities = _top5(values, classes)
        round_columns = {
            "top5_labels": labels,
            "top5_probabilities": probabilities,
            "top10_entropy": top10_entropy(values),
            "entropy": full_entropy(values),
            "statistics": logit_statistics(values),
        }
        if targets is not None:
            round_columns["log_probability"] = _log_probability(values, classes, targets)
        if keep_logits:
            round_columns["logits"] = values
        for name, column in round_columns.items():
            columns.setdefault(name, []).append(column)
    return {name: torch.stack(parts, dim=1) for name, parts in columns.items()}  # S times (B, ...) -> (B, S, ...)


def _top5(logits: Tensor, classes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """The likeliest classes and their probabilities: (B, K) -> (B, 5) twice, padded with -1 and NaN."""
    numbers = torch.arange(logits.shape[-1]) if classes is None else torch.tensor(classes)
    numbers = numbers.to(logits.device)
    candidates = logits[:, numbers]
    probabilities, ranks = candidates.softmax(dim=-1).topk(min(TOP, len(numbers)), dim=-1)
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    labels = numbers[ranks].where(finite, -1)
    probabilities = probabilities.where(finite, torch.nan)
    missing = TOP - labels.shape[1]
    return (
        torch.nn.functional.pad(labels, (0, missing), value=-1),
        torch.nn.functional.pad(probabilities, (0, missing), value=torch.nan),
    )


def _log_probability(logits: Tensor, classes: Sequence[int] | None, targets: Tensor) -> Tensor:
    """Natural logarithm of the label's probability: (B, K), (B,) -> (B,), NaN where logits are not finite."""
    finite = logits.isfinite().all(dim=-1)
    if classes is not None:
        excluded = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
        excluded[list(classes)] = False
        logits = logits.masked_fill(excluded, -torch.inf)
    chosen = logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]  # (B, K) -> (B,)
    return chosen.where(finite, torch.nan)


def gather_records(parts: Parts, header: Header, labels: Sequence[int]) -> Records:
    """The records of all chunks; ``labels`` are those of the whole dataset."""
    columns, unreadable = parts.collect()
    order = columns.pop("index")
    return Records(
        header=finished(header, unreadable),
        ids=np.array([parts.dataset.entries[index].name for index in order], dtype=np.str_),
        labels=np.array(labels, np.int64)[order],
        **columns,
    )
