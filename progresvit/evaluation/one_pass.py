"""One pass over the data: every round on every picture, once, into records.

The processes share out the chunks of pictures, and each finished chunk is a file in ``NAME.parts`` next to the records.
A run that was stopped goes on with the chunks that are missing. When all are there they become one file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from progresvit import __version__, checkpoint
from progresvit.data.crop import describe_preprocessing, preprocessing_hash
from progresvit.data.dataset import UNLABELLED, ImageDataset, find_images, find_unlabelled
from progresvit.data.loader import Unreadable, numbered_batches
from progresvit.data.timm_dataset import find_timm_images, is_timm_name
from progresvit.data.transforms import Corruption, NamedTransform, normalise
from progresvit.distributed import Processes
from progresvit.evaluation.classes import class_numbers, relabel
from progresvit.evaluation.observe import Observed, observe
from progresvit.evaluation.parts import Columns, Parts
from progresvit.evaluation.records import Header, Records, read_records, write_records
from progresvit.model import ProgResViT
from progresvit.model.precision import autocast

Progress = Callable[[int, int], None]
"""Told after each batch how many pictures are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where pictures come from and how they are shown."""

    data: str
    split: str = "val"
    unlabelled: bool = False
    restrict_classes: bool = False
    """Predictions choose among the classes of the data alone (ImageNet-A and -R)."""
    corruption: Corruption | None = None

    def find(self) -> ImageDataset:
        """The pictures, with targets by the data's own classes. Each must have a name of its own."""
        if self.unlabelled and is_timm_name(self.data):
            raise ValueError("--unlabelled takes a folder or tars; timm's data sets have labels.")
        if self.unlabelled:
            pictures = find_unlabelled(self.data)
        elif is_timm_name(self.data):
            pictures = find_timm_images(self.data, self.split, None)
        else:
            pictures = find_images(self.data, self.split)
        names = Counter(entry.name for entry in pictures.entries)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(
                f"{len(twice)} pictures of {self.data} share their name with another, such as {twice[0]}; records know "
                "pictures by name, so rename them or evaluate the sets apart."
            )
        return pictures


@dataclass(frozen=True, kw_only=True)
class HowToRun:
    """What does not change the outcome, precision apart."""

    precision: str = "fp32"
    batch: int = 128
    workers: int = 2
    keep_logits: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.workers < 0:
            raise ValueError(f"a batch holds one picture at least, not {self.batch}, and workers are 0 or more.")


def evaluate(
    model: ProgResViT,
    source: DataSource,
    out: Path,
    *,
    name: str,
    processes: Processes,
    how: HowToRun | None = None,
    progress: Progress | None = None,
) -> Records:
    """Write the records of a model on a data set to ``out``; ``name`` is how the header calls the model.

    Weights are taken as they are; the model is moved to the processes' device.
    """
    how = how or HowToRun()
    if model.config.num_classes == 0:
        raise ValueError("the model has no classes to choose from; give it a head with reset_classifier and train it.")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; give the name of a file, such as {out / 'records.parquet'}.")
    if out.exists() and not how.overwrite:
        raise ValueError(f"{out} is there already; use --overwrite to replace it, or name another file.")
    autocast(processes.device, how.precision)  # refuses what the device cannot do before anything is written
    pictures = source.find()
    header = _header(model, source, pictures, name=name, how=how, device=processes.device)
    labels = [UNLABELLED] * len(pictures) if source.unlabelled else relabel(pictures, model.config)
    parts = Parts(out.with_name(out.name + ".parts"), pictures)
    if processes.first:
        parts.claim(header, keep_logits=how.keep_logits, overwrite=how.overwrite)
    processes.wait()  # until the parts of another run are gone
    done = set(processes.gather(parts.done())[0])  # what the first saw: all must share out the same chunks
    left = [number for number in range(len(parts.chunks)) if number not in done][processes.rank :: processes.count]
    transform = NamedTransform(model.config, source.corruption)
    told = _Told(progress, len(pictures), sum(len(parts.chunks[number]) for number in done), processes.count)
    skipped = Unreadable(pictures)
    model = model.to(processes.device).eval()
    for number, columns, bad in _run(model, parts, left, header, how, transform, processes.device, told):
        parts.write(number, columns, bad)
        _skip(bad, skipped, parts)
    processes.wait()
    if processes.first:
        write_records(_gather(parts, header, labels), out)
        parts.remove()
    processes.wait()
    return read_records(out)


class _Told:
    """What the progress bar knows. Of the other processes it assumes that they are as fast."""

    def __init__(self, progress: Progress | None, total: int, done: int, processes: int) -> None:
        self.progress, self.total, self.done, self.processes = progress, total, done, processes
        self.add(0)

    def add(self, pictures: int) -> None:
        self.done = min(self.done + pictures * self.processes, self.total)
        if self.progress:
            self.progress(self.done, self.total)


def intended_header(model: ProgResViT, source: DataSource, name: str, how: HowToRun, processes: Processes) -> Header:
    """The header that an evaluation would write, but for its outcome."""
    return _header(model, source, source.find(), name=name, how=how, device=processes.device)


def _header(
    model: ProgResViT, source: DataSource, pictures: ImageDataset, *, name: str, how: HowToRun, device: torch.device
) -> Header:
    restricted = None
    if source.restrict_classes:
        if source.unlabelled:
            raise ValueError("predictions cannot be restricted to the classes of pictures that have no labels.")
        restricted = tuple(sorted(class_numbers(pictures.class_ids, model.config)))
    return Header(
        model=name,
        weights=checkpoint.weights_hash(model),
        config=model.config.to_dict(),
        preprocessing=describe_preprocessing(model.config),
        preprocessing_hash=preprocessing_hash(model.config),
        precision=how.precision,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        data=source.data,
        split=None if source.unlabelled else source.split,
        pictures=len(pictures),
        drawn_from=pictures.drawn_from,
        names=hashlib.sha256("\n".join(entry.name for entry in pictures.entries).encode()).hexdigest(),
        classes=restricted,
        corruption=f"{source.corruption.name}/{source.corruption.severity}" if source.corruption else None,
        version=__version__,
    )


@torch.inference_mode()
def _run(
    model: ProgResViT,
    parts: Parts,
    numbers: Sequence[int],
    header: Header,
    how: HowToRun,
    transform: NamedTransform,
    device: torch.device,
    told: _Told,
) -> Iterator[tuple[int, Columns, dict[int, str]]]:
    """Each chunk's columns and unreadable pictures, as they are done."""
    owners, groups = [], []
    for number in numbers:
        chunk = list(parts.chunks[number])
        for first in range(0, len(chunk), how.batch):
            groups.append(chunk[first : first + how.batch])
            owners.append(number)
    batches = numbered_batches(parts.pictures, groups, transform=transform, workers=how.workers, device=device)
    found: list[Observed] = []
    unreadable: dict[int, str] = {}
    indices: list[int] = []
    for turn, (good, pixels, bad) in enumerate(batches):
        unreadable |= bad
        indices += good
        if pixels is not None:
            with autocast(device, how.precision):
                logits = [output.logits for output in model(normalise(pixels, model.config))]
            found.append(observe(logits, header.classes, keep_logits=how.keep_logits))
        told.add(len(groups[turn]))
        if turn + 1 == len(groups) or owners[turn + 1] != owners[turn]:
            columns: Columns = {"index": np.array(indices, np.int64)}
            for name in found[0] if found else ():
                columns[name] = torch.cat([part[name] for part in found]).cpu().numpy()
            yield owners[turn], columns, unreadable
            found, unreadable, indices = [], {}, []


def _skip(unreadable: Mapping[int, str], skipped: Unreadable, parts: Parts) -> None:
    """Too many are an error, and what was done goes with it, since the user will change the pictures."""
    try:
        for index, reason in unreadable.items():
            skipped.add(index, reason)
    except ValueError:
        parts.remove()
        raise


def _gather(parts: Parts, header: Header, labels: Sequence[int]) -> Records:
    """The records of all chunks."""
    columns, unreadable = parts.merge()
    skipped = Unreadable(parts.pictures)
    _skip(unreadable, skipped, parts)
    order = columns.pop("index")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Records(
        header=replace(header, unreadable=tuple(skipped.lines()), date=now),
        ids=np.array([parts.pictures.entries[index].name for index in order], dtype=np.str_),
        labels=np.array(labels, np.int64)[order],
        **columns,
    )
