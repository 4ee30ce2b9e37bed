"""Many pictures into one table, in a run that can be stopped at any moment and goes on.

Finished stretches of pictures lie in ``NAME.parts`` beside the table until all are there.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from progresvit.data.dataset import Entry, ImageDataset
from progresvit.engine.engine import Engine
from progresvit.engine.images import Unread
from progresvit.engine.prediction import Prediction
from progresvit.io import resumable
from progresvit.io.files import replace_file

SUFFIX = "parquet"
PART = 2048
"""Pictures of a part; a crash costs what is not yet in one."""

CANDIDATE = pa.struct(
    [
        pa.field("index", pa.int32(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("probability", pa.float32(), nullable=False),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("picture", pa.string(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("class_id", pa.string()),
        pa.field("label", pa.string()),
        pa.field("probability", pa.float32(), nullable=False),
        pa.field("exit_round", pa.int8(), nullable=False),
        pa.field("entropy", pa.float32(), nullable=False),
        pa.field("gmacs", pa.float32(), nullable=False),
        pa.field("abstained", pa.bool_(), nullable=False),
        pa.field("top", pa.list_(CANDIDATE), nullable=False),
        pa.field("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class Summary:
    """What became of the pictures."""

    pictures: int
    errors: int
    abstained: int
    exits: tuple[int, ...]
    """Pictures that left after each round."""
    gmacs: float
    """Average over those that were looked at; NaN if none was."""


def classify_files(
    engine: Engine,
    pictures: ImageDataset,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Predictions for all pictures, in their order, as a parquet table. A stopped run goes on where it stopped."""
    parts = _Parts(out.with_name(out.name + ".parts"), len(pictures))
    if out.exists():
        if not overwrite:
            raise ValueError(f"{out} is there already; use --overwrite to replace it, or name another file.")
        parts.remove()  # what a run left that was killed at its very end
    parts.claim(_identity(engine, pictures), overwrite=overwrite)
    done = min(parts.whole() * PART, len(pictures))
    waiting: list[dict[str, Any]] = []
    first = done
    for place, prediction in enumerate(predictions(engine, pictures, done), done):
        waiting.append(row(pictures.entries[place].name, prediction, engine))
        if len(waiting) == PART:
            parts.write(first // PART, waiting)
            first, waiting = first + PART, []
        if progress is not None and (place % 64 == 0 or place + 1 == len(pictures)):
            progress(place + 1, len(pictures))
    if waiting:
        parts.write(first // PART, waiting)
    table = parts.merge()
    replace_file(out, _parquet(table))
    parts.remove()
    columns = (table[name].to_pylist() for name in ("exit_round", "gmacs", "abstained"))
    return _summary(zip(*columns), len(engine.gmacs))


def predictions(
    engine: Engine, pictures: ImageDataset, first: int = 0, *, deadline: float | None = None
) -> Iterator[Prediction]:
    """One for each picture from a place on, in their order; files are read as they are needed."""
    return engine.stream(_batches(pictures, first, engine.batch), deadline=deadline)


def row(name: str, prediction: Prediction, engine: Engine) -> dict[str, Any]:
    """A prediction in plain data."""
    ids = engine.config.class_ids
    class_id = ids[prediction.index] if ids is not None and prediction.index >= 0 else None
    return {"picture": name, "class_id": class_id, **asdict(prediction)}


def summarise(answers: Iterable[Prediction], rounds: int) -> Summary:
    """Of predictions by a model of so many rounds."""
    return _summary(((one.exit_round, one.gmacs, one.abstained) for one in answers), rounds)


def _summary(facts: Iterable[tuple[int, float, bool]], rounds: int) -> Summary:
    """From the round of exit, GMACs, and whether there was no answer; round 0 stands for a picture not opened."""
    every = list(facts)
    seen = [one for one in every if one[0]]
    return Summary(
        pictures=len(every),
        errors=len(every) - len(seen),
        abstained=sum(abstained for _, _, abstained in seen),
        exits=tuple(sum(exit_ == s + 1 for exit_, _, _ in seen) for s in range(rounds)),
        gmacs=sum(gmacs for _, gmacs, _ in seen) / len(seen) if seen else float("nan"),
    )


def _batches(pictures: ImageDataset, first: int, size: int) -> Iterator[list[bytes | Unread]]:
    for begin in range(first, len(pictures), size):
        yield [_content(pictures, place) for place in range(begin, min(begin + size, len(pictures)))]


def _content(pictures: ImageDataset, place: int) -> bytes | Unread:
    try:
        return pictures.read(place)
    except OSError as error:
        return Unread(f"cannot be read ({error.strerror or error})")


def _identity(engine: Engine, pictures: ImageDataset) -> dict[str, Any]:
    """What a run must have in common with one that it goes on with."""
    listing = json.dumps([_about(entry) for entry in pictures.entries])
    return {"pictures": hashlib.sha256(listing.encode()).hexdigest(), "part": PART, **engine.identity()}


def _about(entry: Entry) -> list[Any]:
    """Where a picture lies, and which it is; a file that was changed is another picture."""
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


class _Parts:
    """The folder, for so many pictures."""

    def __init__(self, folder: Path, pictures: int) -> None:
        self.folder, self.pictures = folder, pictures

    def claim(self, about: dict[str, Any], *, overwrite: bool) -> None:
        """Make the folder, or see that the one there is of this very run."""
        resumable.claim(self.folder, about, suffix=SUFFIX, overwrite=overwrite)

    def whole(self) -> int:
        """How many parts are there and whole, from the first on without a gap."""
        number = 0
        while number * PART < self.pictures and self._is_whole(number):
            number += 1
        return number

    def write(self, number: int, rows: Sequence[dict[str, Any]]) -> None:
        replace_file(self._path(number), _parquet(pa.Table.from_pylist(list(rows), SCHEMA)))

    def merge(self) -> pa.Table:
        tables = [pq.read_table(self._path(number)) for number in range(self.whole())]
        return pa.concat_tables(tables) if tables else SCHEMA.empty_table()

    def remove(self) -> None:
        """The folder has served."""
        resumable.clear(self.folder, suffix=SUFFIX)

    def _is_whole(self, number: int) -> bool:
        try:
            rows = pq.read_table(self._path(number), columns=["index"]).num_rows
        except (OSError, pa.ArrowInvalid):
            return False
        return bool(rows == min(PART, self.pictures - number * PART))

    def _path(self, number: int) -> Path:
        return resumable.part(self.folder, number, suffix=SUFFIX)
