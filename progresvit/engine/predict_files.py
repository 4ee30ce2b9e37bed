"""Predictions for many image files, as one table. An interrupted run can be resumed (io/resumable.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from progresvit.data.dataset import ImageDataset
from progresvit.engine.engine import Engine
from progresvit.engine.files import (
    Shard,
    column_names,
    has_columns,
    input_batches,
    listing_hash,
    names_hash,
    read_pieces,
    valid_text,
    write_table,
)
from progresvit.engine.prediction import Candidate, Prediction
from progresvit.io.files import replace_file
from progresvit.io.part_formats import ParquetRows
from progresvit.io.resumable import KEEP_EVERY, RUN_FILE, Progress, ResumableTable

PART = 2048
"""Images per part."""
NAMED = 20
"""The most unreadable images that a summary names."""
SHARD_KEY = b"progresvit_shard"
"""In the metadata of a shard's table: which shard of which images it is, as JSON."""

CANDIDATE = pa.struct(
    [
        pa.field("index", pa.int32(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("probability", pa.float32(), nullable=False),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("image", pa.string(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("class_id", pa.string()),
        pa.field("label", pa.string()),
        pa.field("probability", pa.float32(), nullable=False),
        pa.field("exit_round", pa.int8(), nullable=False),
        pa.field("entropy", pa.float32(), nullable=False),
        pa.field("gmacs", pa.float32(), nullable=False),
        pa.field("abstained", pa.bool_(), nullable=False),
        pa.field("out_of_distribution", pa.bool_(), nullable=False),
        pa.field("ood_score", pa.float32()),
        pa.field("top", pa.list_(CANDIDATE), nullable=False),
        pa.field("error", pa.string()),
    ]
)
OLD_NAME = "picture"
"""The name of the column ``image`` in tables and parts of earlier versions."""


@dataclass(frozen=True)
class Summary:
    """Totals of a run."""

    images: int
    errors: int
    abstained: int
    out_of_distribution: int
    """These are among the abstained."""
    exits: tuple[int, ...]
    """Number of images that exited after each round."""
    gmacs: float
    """Average over the images that were classified; NaN if there are none."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """Names of the first images that could not be opened, each with the reason."""


def classify_files(
    engine: Engine,
    dataset: ImageDataset,
    out: Path,
    *,
    shard: Shard | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write the predictions for all images, in their order, to a table. An interrupted run is continued.

    Args:
        engine: Makes the predictions.
        dataset: The images.
        out: The table: Parquet, or CSV (``.csv``) or JSON lines (``.jsonl``).
        shard: Only these of the images, to the table ``shard.path(out)``.
        overwrite: Replace an existing table, and the parts of another run.
        progress: Called with the number of images that are done and their total.
    """
    items, schema = range(len(dataset)), SCHEMA
    about = {}
    if shard is not None:
        about = {"shard": str(shard), "images": len(dataset), "names": names_hash(dataset)}
        _check_shards(shard, out, about)
        schema = SCHEMA.with_metadata({SHARD_KEY: json.dumps(about)})
        items, out = shard.items(len(dataset)), shard.path(out)
    identity = {"pictures": listing_hash(dataset, items), "part": PART, **about, **engine.identity()}
    with ResumableTable(out, ParquetRows(schema, _upgrade), total=len(items), size=PART) as table:
        if table.begin(identity, overwrite=overwrite, is_complete=_is_complete):
            remaining = table.remaining()
            if remaining:
                first = next(iter(remaining.values())).start
                table.fill_in_order(remaining, _rows(engine, dataset, items[first:]), progress)
            if shard is not None and out.suffix != ".parquet":
                replace_file(_shard_file(out), json.dumps(about))
            table.finish(lambda staged: write_table(staged, schema, out.suffix, table.parts()))
    return _read_summary(out, len(engine.gmacs))


def predictions(engine: Engine, dataset: ImageDataset, *, deadline: float | None = None) -> Iterator[Prediction]:
    """Predictions for all images, in order; files are read as they are needed."""
    return engine.stream(input_batches(dataset, range(len(dataset)), engine.batch), deadline=deadline)


def row(name: str, prediction: Prediction, engine: Engine) -> dict[str, Any]:
    """A prediction in plain data."""
    ids = engine.config.class_ids
    class_id = ids[prediction.index] if ids is not None and prediction.index >= 0 else None
    cells = {key: getattr(prediction, key) for key in _FIELDS}
    cells["top"] = [{key: getattr(candidate, key) for key in _CANDIDATE_FIELDS} for candidate in prediction.top]
    if prediction.error is not None:
        cells["error"] = valid_text(prediction.error)
    return {"image": valid_text(name), "class_id": class_id, **cells}


def summarise(answers: Iterable[Prediction], rounds: int) -> Summary:
    """Totals of predictions by a model with this number of rounds."""
    answers, totals = list(answers), _Totals(rounds)
    totals.add(*([getattr(answer, key) for answer in answers] for key in _COUNTED))
    return totals.summary()


_FIELDS = tuple(field.name for field in fields(Prediction))
_CANDIDATE_FIELDS = tuple(field.name for field in fields(Candidate))
_COUNTED = ("exit_round", "gmacs", "abstained", "out_of_distribution")


class _Totals:
    """Sums over images, which are added in pieces."""

    def __init__(self, rounds: int) -> None:
        self._exits = np.zeros(rounds + 1, np.int64)  # the first: could not be opened
        self._gmacs, self._abstained, self._unknown = 0.0, 0, 0
        self._unreadable: list[tuple[str, str]] = []

    def add(self, exit_round: Any, gmacs: Any, abstained: Any, out_of_distribution: Any) -> None:
        """One value for each image."""
        rounds = np.asarray(exit_round, np.int64)
        is_classified = rounds > 0
        self._exits += np.bincount(rounds, minlength=len(self._exits))
        self._gmacs += float(np.asarray(gmacs, np.float64)[is_classified].sum())
        self._abstained += int(np.asarray(abstained, bool)[is_classified].sum())
        self._unknown += int(np.asarray(out_of_distribution, bool)[is_classified].sum())

    def name_unreadable(self, names: pa.Array, errors: pa.Array) -> None:
        """Keep the first names of images with an error."""
        is_bad = errors.is_valid()
        if len(self._unreadable) < NAMED and is_bad.true_count:
            first = (texts.filter(is_bad)[: NAMED - len(self._unreadable)].to_pylist() for texts in (names, errors))
            self._unreadable += zip(*first)

    def summary(self) -> Summary:
        """Totals over all images that were added."""
        classified = int(self._exits[1:].sum())
        return Summary(
            images=int(self._exits.sum()),
            errors=int(self._exits[0]),
            abstained=self._abstained,
            out_of_distribution=self._unknown,
            exits=tuple(self._exits[1:].tolist()),
            gmacs=self._gmacs / classified if classified else float("nan"),
            unreadable=tuple(self._unreadable),
        )


def _read_summary(out: Path, rounds: int) -> Summary:
    """Totals of a table, which is read in pieces."""
    totals = _Totals(rounds)
    name = OLD_NAME if OLD_NAME in column_names(out) else "image"
    columns = pa.schema([pa.field(name, pa.string()), *(SCHEMA.field(key) for key in (*_COUNTED, "error"))])
    for batch in read_pieces(out, columns, PART):
        totals.add(*(batch[key].to_numpy(zero_copy_only=False) for key in _COUNTED))
        totals.name_unreadable(batch[name], batch["error"])
    return totals.summary()


def _rows(engine: Engine, dataset: ImageDataset, items: range) -> Iterator[dict[str, Any]]:
    """The rows of these images; none waits for a full batch for so long that those behind it cannot be kept."""
    answers = engine.stream(input_batches(dataset, items, engine.batch), deadline=KEEP_EVERY, processes=True)
    names = (dataset.entries[index].name for index in items)
    return (row(name, answer, engine) for answer, name in zip(answers, names))


def _check_shards(shard: Shard, out: Path, about: dict[str, Any]) -> None:
    """Other shards must be of the same images, finished or not; else images would be missing or duplicated."""
    for other in shard.others():
        path = other.path(out)
        about_other = _read_shard(path)
        if about_other is None or all(about_other.get(key) == about[key] for key in ("images", "names")):
            continue
        raise ValueError(
            f"{path} was made of other images ({about_other.get('images')}, and here are {about['images']}); give "
            "every shard the same files in the same order, such as a list, or name another file."
        )


def _read_shard(path: Path) -> dict[str, Any] | None:
    """Number and images of a shard; None if the file is missing or cannot be read."""
    unfinished = path.with_name(path.name + ".parts") / RUN_FILE
    try:
        if unfinished.exists():
            about = json.loads(unfinished.read_text(encoding="utf-8"))
        elif path.exists() and path.suffix != ".parquet":
            about = json.loads(_shard_file(path).read_text(encoding="utf-8"))
        elif path.exists():
            about = json.loads((pq.read_schema(path).metadata or {})[SHARD_KEY])
        else:
            return None
    except (OSError, ValueError, KeyError):  # another machine may be writing or removing it
        return None
    return about if isinstance(about, dict) else None


def _shard_file(path: Path) -> Path:
    """The file that describes a shard in CSV or JSON lines; Parquet files hold the description themselves."""
    return path.with_name(path.name + ".shard.json")


def _is_complete(path: Path) -> bool:
    """Whether a finished table has all columns, with the names of this version or of earlier ones."""
    return has_columns(path, SCHEMA.names) or has_columns(path, [OLD_NAME, *SCHEMA.names[1:]])


def _upgrade(part: pa.Table) -> pa.Table:
    """A part as this version writes it. Version 0.1.0 had no out-of-distribution score."""
    part = part.rename_columns(["image" if name == OLD_NAME else name for name in part.column_names])
    if "ood_score" in part.column_names:
        return part
    place, rows = part.column_names.index("abstained") + 1, part.num_rows
    part = part.add_column(place, SCHEMA.field("out_of_distribution"), pa.array([False] * rows, pa.bool_()))
    return part.add_column(place + 1, SCHEMA.field("ood_score"), pa.nulls(rows, pa.float32()))
