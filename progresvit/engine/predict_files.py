"""Predictions for many image files, as one parquet table. An interrupted run can be resumed.

Finished parts are in ``NAME.parts`` next to the table until all of them are there.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from progresvit.data.dataset import Entry, ImageDataset
from progresvit.engine.engine import Engine
from progresvit.engine.images import UnreadImage
from progresvit.engine.prediction import Prediction
from progresvit.io.files import replace_file
from progresvit.io.resumable import PartialOutput

PART = 2048
"""Images per part."""

CANDIDATE = pa.struct(
    [
        pa.field("index", pa.int32(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("probability", pa.float32(), nullable=False),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("picture", pa.string(), nullable=False),  # the name of the image; tables of all versions have it
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


def classify_files(
    engine: Engine,
    dataset: ImageDataset,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Write the predictions for all images, in their order, to a parquet table. An interrupted run is continued.

    Args:
        engine: Makes the predictions.
        dataset: The images.
        out: The table.
        overwrite: Replace an existing table, and the parts of another run.
        progress: Called with the number of images that are done and their total.
    """
    folder, total = out.with_name(out.name + ".parts"), len(dataset)
    parts = PartialOutput(folder, total=total, size=PART, suffix="parquet", is_whole=_is_whole)
    if out.exists():
        if not overwrite:
            raise ValueError(f"{out} is there already; use --overwrite to replace it, or name another file.")
        parts.remove()  # of a run that was killed after it wrote the table
    parts.claim(_identity(engine, dataset), overwrite=overwrite)
    finished = set(parts.done())
    number = next((number for number in range(len(parts.ranges)) if number not in finished), len(parts.ranges))
    rows: list[dict[str, Any]] = []
    first = min(number * PART, total)
    for index, prediction in enumerate(predictions(engine, dataset, first), first):
        rows.append(row(dataset.entries[index].name, prediction, engine))
        if len(rows) == len(parts.ranges[number]):
            parts.write(number, _parquet(pa.Table.from_pylist(rows, SCHEMA)))
            number, rows = number + 1, []
        if progress is not None and (index % 64 == 0 or index + 1 == total):
            progress(index + 1, total)
    tables = [_with_ood_columns(pq.read_table(path)) for path in parts.paths()]
    table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    replace_file(out, _parquet(table))
    parts.remove()
    columns = (table[name].to_pylist() for name in ("exit_round", "gmacs", "abstained", "out_of_distribution"))
    return _summary(zip(*columns), len(engine.gmacs))


def predictions(
    engine: Engine, dataset: ImageDataset, first: int = 0, *, deadline: float | None = None
) -> Iterator[Prediction]:
    """Predictions from the image ``first`` on, in order; files are read as they are needed."""
    return engine.stream(_batches(dataset, first, engine.batch), deadline=deadline)


def row(name: str, prediction: Prediction, engine: Engine) -> dict[str, Any]:
    """A prediction in plain data."""
    ids = engine.config.class_ids
    class_id = ids[prediction.index] if ids is not None and prediction.index >= 0 else None
    return {"picture": name, "class_id": class_id, **asdict(prediction)}


def summarise(answers: Iterable[Prediction], rounds: int) -> Summary:
    """Totals of predictions by a model of so many rounds."""
    facts = ((answer.exit_round, answer.gmacs, answer.abstained, answer.out_of_distribution) for answer in answers)
    return _summary(facts, rounds)


def _with_ood_columns(part: pa.Table) -> pa.Table:
    """A part of version 0.1.0, which had no out-of-distribution score, gets the columns for it."""
    if "ood_score" in part.column_names:
        return part
    place, rows = part.column_names.index("abstained") + 1, part.num_rows
    part = part.add_column(place, SCHEMA.field("out_of_distribution"), pa.array([False] * rows, pa.bool_()))
    return part.add_column(place + 1, SCHEMA.field("ood_score"), pa.nulls(rows, pa.float32()))


def _summary(facts: Iterable[tuple[int, float, bool, bool]], rounds: int) -> Summary:
    """From exit round (0: it could not be opened), GMACs, abstained and out-of-distribution of each image."""
    known = list(facts)
    classified = [fact for fact in known if fact[0]]
    return Summary(
        images=len(known),
        errors=len(known) - len(classified),
        abstained=sum(fact[2] for fact in classified),
        out_of_distribution=sum(fact[3] for fact in classified),
        exits=tuple(sum(fact[0] == s + 1 for fact in classified) for s in range(rounds)),
        gmacs=sum(fact[1] for fact in classified) / len(classified) if classified else float("nan"),
    )


def _batches(dataset: ImageDataset, first: int, size: int) -> Iterator[list[bytes | UnreadImage]]:
    for begin in range(first, len(dataset), size):
        yield [_content(dataset, index) for index in range(begin, min(begin + size, len(dataset)))]


def _content(dataset: ImageDataset, index: int) -> bytes | UnreadImage:
    try:
        return dataset.read(index)
    except OSError as error:
        return UnreadImage(f"cannot be read ({error.strerror or error})")


def _identity(engine: Engine, dataset: ImageDataset) -> dict[str, Any]:
    """What must be equal for a run to be continued."""
    listing = json.dumps([_describe(entry) for entry in dataset.entries])
    return {"pictures": hashlib.sha256(listing.encode()).hexdigest(), "part": PART, **engine.identity()}


def _describe(entry: Entry) -> list[Any]:
    """Path, name, size and time of an image; a file that was changed is another image."""
    path = Path(entry.path).resolve()
    try:
        known = path.stat()
    except OSError:
        return [str(path), entry.name, None]
    return [str(path), entry.name, entry.offset, entry.size, known.st_size, known.st_mtime_ns]


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _is_whole(path: Path, items: int) -> bool:
    try:
        return bool(pq.read_table(path, columns=["index"]).num_rows == items)
    except (OSError, pa.ArrowInvalid):
        return False
