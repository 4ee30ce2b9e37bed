"""One pass over the data: every round on every picture, once, into records.

The pictures are cut into chunks of fixed size; the processes share the chunks out, and each finished chunk is a file in
``NAME.parts`` next to the records. A run that was stopped goes on with the chunks that are missing, with any number of
processes. When all are there they become one file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from progresvit import __version__, checkpoint
from progresvit.atomic import replace_file
from progresvit.data.loader import numbered_batches
from progresvit.data.pictures import UNLABELLED, Pictures, find_pictures, find_unlabelled
from progresvit.data.preprocess import Corruption, NamedTransform, describe_preprocessing, normalise, preprocessing_hash
from progresvit.data.timm_pictures import find_timm_pictures, is_timm_name
from progresvit.evaluation.classes import class_numbers, relabel
from progresvit.evaluation.observe import Observed, observe
from progresvit.evaluation.records import Header, Records, read_records, write_records
from progresvit.model import ProgResViT
from progresvit.model.precision import autocast
from progresvit.processes import Processes

CHUNK = 1024
MOST_UNREADABLE = 0.01
"""Share of the pictures that may be unreadable; each is named in the records' header."""

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

    def find(self) -> Pictures:
        """The pictures, with targets by the data's own classes."""
        if self.unlabelled:
            if is_timm_name(self.data):
                raise ValueError("--unlabelled takes a folder or tars; timm's data sets have labels.")
            return find_unlabelled(self.data)
        if is_timm_name(self.data):
            return find_timm_pictures(self.data, self.split, None)
        return find_pictures(self.data, self.split)


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
    pictures = source.find()
    header = _header(model, source, pictures, name=name, how=how, device=processes.device)
    labels = [UNLABELLED] * len(pictures) if source.unlabelled else relabel(pictures, model.config)
    parts = out.with_name(out.name + ".parts")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; give the name of a file, such as {out / 'records.parquet'}.")
    if out.exists() and not how.overwrite:
        raise ValueError(f"{out} is there already; use --overwrite to replace it, or name another file.")
    autocast(processes.device, how.precision)  # refuses what the device cannot do before anything is written
    if processes.first:
        _claim(parts, header, how, pictures)
    processes.wait()  # until the parts of a replaced run are gone
    chunks = [range(first, min(first + CHUNK, len(pictures))) for first in range(0, len(pictures), CHUNK)]
    there = [number for number in range(len(chunks)) if _part(parts, number).exists()]
    done = set(processes.gather(there)[0])  # what the first saw: all must share out the same chunks
    left = [number for number in range(len(chunks)) if number not in done][processes.rank :: processes.count]
    model = model.to(processes.device).eval()
    transform = NamedTransform(model.config, source.corruption)
    seen, skipped = sum(len(chunks[number]) for number in done), dict[int, str]()
    if progress:
        progress(seen, len(pictures))
    for number, columns, unreadable in _run(model, pictures, chunks, left, header, how, transform, processes.device):
        _write_part(_part(parts, number), columns, unreadable)
        skipped |= unreadable
        _refuse_many(skipped, pictures, parts)
        seen += processes.count * len(chunks[number])
        if progress:
            progress(min(seen, len(pictures)), len(pictures))
    processes.wait()
    if processes.first:
        records = _merge(parts, len(chunks), header, pictures, labels)
        write_records(records, out)
        shutil.rmtree(parts)
    processes.wait()
    return read_records(out)


def intended_header(model: ProgResViT, source: DataSource, name: str, how: HowToRun, processes: Processes) -> Header:
    """The header that an evaluation would write, but for its outcome."""
    return _header(model, source, source.find(), name=name, how=how, device=processes.device)


def _header(
    model: ProgResViT, source: DataSource, pictures: Pictures, *, name: str, how: HowToRun, device: torch.device
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
        classes=restricted,
        corruption=f"{source.corruption.name}/{source.corruption.severity}" if source.corruption else None,
        version=__version__,
    )


def _claim(parts: Path, header: Header, how: HowToRun, pictures: Pictures) -> None:
    """Make the folder of the parts, or see that the one there is of this very run."""
    names = hashlib.sha256("\n".join(entry.name for entry in pictures.entries).encode()).hexdigest()
    about = {**header.identity(), "chunk": CHUNK, "keep_logits": how.keep_logits, "names of pictures": names}
    about = json.loads(json.dumps(about))
    file = parts / "run.json"
    if how.overwrite:
        shutil.rmtree(parts, ignore_errors=True)
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        differing = sorted(key for key in {*before, *about} if before.get(key) != about.get(key))
        if differing:
            raise ValueError(
                f"{parts} holds the beginning of another run (other {', '.join(differing)}); go on with that one, "
                "use --overwrite, or name another file."
            )
        return
    parts.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(about))


@torch.inference_mode()
def _run(
    model: ProgResViT,
    pictures: Pictures,
    chunks: Sequence[range],
    numbers: Sequence[int],
    header: Header,
    how: HowToRun,
    transform: NamedTransform,
    device: torch.device,
) -> Iterator[tuple[int, dict[str, Any], dict[int, str]]]:
    """Each chunk's columns and unreadable pictures, as they are done."""
    owners, groups = [], []
    for number in numbers:
        for first in range(0, len(chunks[number]), how.batch):
            groups.append(list(chunks[number][first : first + how.batch]))
            owners.append(number)
    batches = numbered_batches(pictures, groups, transform=transform, workers=how.workers, device=device)
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
        if turn + 1 == len(groups) or owners[turn + 1] != owners[turn]:
            columns: dict[str, Any] = {"index": np.array(indices, np.int64)}
            for name in found[0] if found else ():
                columns[name] = torch.cat([part[name] for part in found]).cpu().numpy()
            yield owners[turn], columns, unreadable
            found, unreadable, indices = [], {}, []


def _refuse_many(unreadable: Mapping[int, str], pictures: Pictures, parts: Path) -> None:
    """An error beyond the limit; what was done goes, since the user will change the pictures."""
    if len(unreadable) > MOST_UNREADABLE * len(pictures):
        some = "; ".join(f"{pictures.entries[index].name}: {reason}" for index, reason in list(unreadable.items())[:5])
        shutil.rmtree(parts, ignore_errors=True)
        raise ValueError(
            f"{len(unreadable)} of {len(pictures)} pictures cannot be read, more than {MOST_UNREADABLE:.0%}: {some}. "
            "Mend or remove them."
        )


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:06d}.npz"


def _write_part(path: Path, columns: dict[str, Any], unreadable: dict[int, str]) -> None:
    staged = path.with_suffix(".tmp")
    with open(staged, "wb") as file:
        np.savez(file, unreadable=np.array(json.dumps(sorted(unreadable.items()))), **columns)
    staged.replace(path)


def _merge(parts: Path, count: int, header: Header, pictures: Pictures, labels: Sequence[int]) -> Records:
    columns: dict[str, list[Any]] = {}
    unreadable: dict[int, str] = {}
    for number in range(count):
        with np.load(_part(parts, number)) as part:
            unreadable |= dict(json.loads(str(part["unreadable"])))
            if len(part["index"]):
                for name in part.files:
                    columns.setdefault(name, []).append(part[name])
    _refuse_many(unreadable, pictures, parts)
    lines = tuple(f"{pictures.entries[index].name}: {reason}" for index, reason in unreadable.items())
    whole = {name: np.concatenate(values) for name, values in columns.items() if name != "unreadable"}
    order = whole.pop("index")
    return Records(
        header=replace(header, unreadable=lines, date=datetime.now(UTC).isoformat(timespec="seconds")),
        ids=np.array([pictures.entries[index].name for index in order], dtype=np.str_),
        labels=np.array(labels, np.int64)[order],
        **whole,
    )
