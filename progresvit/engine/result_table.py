"""A table with a row for each image of a dataset, in their order. An interrupted run can be resumed.

Finished parts are in ``NAME.parts`` next to the table until all of them are there, and the rows of the part in progress
are written there every few seconds. Memory does not grow with the number of images: rows are kept until their part is
full, and the table is written from its parts, one at a time, as its suffix says (result_formats.py).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from progresvit.data.dataset import Entry, ImageDataset
from progresvit.data.prepare import Request, request_of
from progresvit.engine.result_formats import has_columns, open_writer
from progresvit.io.files import replacing_file, writing
from progresvit.io.resumable import PartialOutput, signals_held

Row = dict[str, Any]
Progress = Callable[[int, int], None]
"""Called with the number of images that are done and their total."""

REPORT_EVERY = 0.1
"""Seconds between two reports of progress."""


class ResultTable:
    """An unfinished table: :meth:`fill` writes the missing parts, :meth:`finish` makes the table of them.

    Args:
        out: The table.
        schema: Of the rows.
        total: Number of images.
        part: Images per part.
        identity: What must be equal for a run to be continued, in plain data.
        overwrite: Replace an existing table, and the parts of another run.
        columns: Names of the columns of the table; by default those of the rows.
        batch: Rows of an incomplete part are kept in multiples of this, so that a resumed run has the same batches.
    """

    def __init__(
        self,
        out: Path,
        schema: pa.Schema,
        *,
        total: int,
        part: int,
        identity: Mapping[str, Any],
        overwrite: bool,
        columns: list[str] | None = None,
        batch: int = 1,
    ) -> None:
        self.out, self.schema, self.total = out, schema, total
        self._batch = batch
        self._begun = schema.empty_table()
        self.is_finished = False
        """The same run has already written the table, and was killed before it removed the parts."""
        is_whole = partial(_is_whole, schema.names[0])
        self._parts = PartialOutput(
            out.with_name(out.name + ".parts"), total=total, size=part, suffix="parquet", is_whole=is_whole
        )
        if out.exists():
            if self._parts.folder.exists():
                self._parts.lock()
            is_ours = self._parts.has_written(out, identity)
            self.is_finished = not overwrite and is_ours and has_columns(out, columns or schema.names)
            if not self.is_finished and not overwrite:
                self._parts.release()
                raise ValueError(f"{out} is there already; use --overwrite to replace it, or name another file.")
            if self._parts.has_written(out):
                self._parts.remove()
        if not self.is_finished:
            with writing(self.out):
                self._parts.claim(identity, overwrite=overwrite)

    def __enter__(self) -> ResultTable:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.release()

    def missing(self) -> list[range]:
        """The images without a row: those of the first part that is missing, and of all later ones, part by part."""
        ranges, finished = self._parts.ranges, set(self._parts.done())
        number = next((number for number in range(len(ranges)) if number not in finished), len(ranges))
        missing = ranges[number:]
        if missing:
            self._begun = self._read_begun(number)
            missing[0] = missing[0][self._begun.num_rows :]
        return missing

    def fill(self, missing: list[range], rows: Iterable[Row], progress: Progress | None = None) -> None:
        """Write the missing parts from the rows of their images. If it is interrupted, finished rows are kept."""
        coming = iter(rows)
        if progress is not None and missing:
            progress(missing[0].start, self.total)
        reported = time.monotonic()
        for number, items in enumerate(missing, len(self._parts.ranges) - len(missing)):
            part: list[Row] = []
            try:
                for index, row in zip(items, coming):
                    part.append(row)
                    if self._parts.is_keeping_due:
                        self._keep(number, part)
                    now = time.monotonic()
                    if progress is not None and (now - reported >= REPORT_EVERY or index + 1 == self.total):
                        progress(index + 1, self.total)
                        reported = now
                assert len(part) == len(items)
                self._keep(number, part)
            except BaseException:  # Ctrl-C too
                with signals_held():
                    self._keep(number, part)
                raise
            self._begun = self.schema.empty_table()
        assert next(coming, None) is None

    def _keep(self, number: int, part: list[Row]) -> None:
        """Write the rows that a part has so far."""
        columns = [pa.array([row[field.name] for row in part], field.type) for field in self.schema]
        table = pa.concat_tables([self._begun, pa.table(columns, schema=self.schema)]).combine_chunks()
        if table.num_rows < len(self._parts.ranges[number]):
            table = table[: table.num_rows // self._batch * self._batch]
            if table.num_rows <= self._begun.num_rows:
                return
        with writing(self.out):
            self._parts.keep(number, table.num_rows, _parquet(table))

    def _read_begun(self, number: int) -> pa.Table:
        """The first rows of a part, which an interrupted run has kept."""
        try:
            table = pq.read_table(self._parts.begun_path(number))
        except (OSError, pa.ArrowInvalid):  # none, or damaged
            return self.schema.empty_table()
        is_ours = table.schema.equals(self.schema) and table.num_rows < len(self._parts.ranges[number])
        return table if is_ours else self.schema.empty_table()

    def parts(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The parts in order, after :meth:`fill`; some columns of them if asked."""
        return (pq.read_table(path, columns=columns) for path in self._parts.paths())

    def finish(self, parts: Iterable[pa.Table], schema: pa.Schema | None = None) -> None:
        """Write the table from its parts, one at a time, and remove their files.

        Args:
            parts: Those of :meth:`parts`, with other columns if ``schema`` has others.
            schema: Of the table, with its metadata; by default that of the rows.
        """
        with writing(self.out):
            self._remove_staged()
            with replacing_file(self.out) as staged:
                with open_writer(staged, schema or self.schema, self.out.suffix) as write:
                    for part in parts:
                        write(part)
                self._parts.note_written(staged)
        self._parts.remove()

    def _remove_staged(self) -> None:
        """Remove what a kill left of an unfinished table; it may be as large as the table."""
        for path in self.out.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(self.out.name)}\.[0-9a-f]{{8}}", path.name):
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Shard:
    """One of several nearly equal, contiguous ranges of the images, such as 2/4: the second of four."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"shard {self} does not exist; name one of 1/{self.count} to {self.count}/{self.count}.")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From ``2/4``."""
        known = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
        if known is None or not int(known[2]):
            raise ValueError(f"shard {text!r} is not of the form i/n, such as 2/4 for the second of four.")
        return cls(int(known[1]), int(known[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def items(self, total: int) -> range:
        """Its images among all images."""
        return range(total * (self.number - 1) // self.count, total * self.number // self.count)

    def path(self, out: Path) -> Path:
        """The file of its results: ``NAME-00002-of-00004.parquet``."""
        return out.with_name(f"{out.stem}-{self.number:05d}-of-{self.count:05d}{out.suffix}")

    def others(self) -> list[Shard]:
        """The other shards."""
        return [Shard(number, self.count) for number in range(1, self.count + 1) if number != self.number]


def input_batches(dataset: ImageDataset, items: range, size: int) -> Iterator[list[Request]]:
    """These images in batches, as the engine takes them; files are read by those that decode them."""
    for first in items[::size]:
        yield [request_of(dataset, index) for index in range(first, min(first + size, items.stop))]


def listing_hash(dataset: ImageDataset, items: range | None = None) -> str:
    """SHA-256 of path, name, size and time of all images, or of some; a file that was changed is another image."""
    locate = lru_cache(16)(partial(_locate, lru_cache(1024)(os.path.realpath)))  # a tar has many images
    entries = (dataset.entries[index] for index in (range(len(dataset)) if items is None else items))
    return _hash_list(_describe(entry, *locate(entry.path)) for entry in entries)


def names_hash(dataset: ImageDataset) -> str:
    """SHA-256 of the names of all images in their order."""
    return _hash_list(entry.name for entry in dataset.entries)


def valid_text(text: str) -> str:
    r"""The text as UTF-8 has it: a byte of a file name that is none becomes ``\udcNN``, NN being its hex digits."""
    return text.encode("utf-8", "backslashreplace").decode()


def _hash_list(values: Iterable[object]) -> str:
    """SHA-256 of a JSON list, of which never more than one value is in memory."""
    digest = hashlib.sha256(b"[")
    for number, value in enumerate(values):
        digest.update(f"{', ' if number else ''}{json.dumps(value)}".encode())
    digest.update(b"]")
    return digest.hexdigest()


def _describe(entry: Entry, path: str, known: os.stat_result | None) -> list[Any]:
    if known is None:
        return [path, entry.name, None]
    return [path, entry.name, entry.offset, entry.size, known.st_size, known.st_mtime_ns]


def _locate(real: Callable[[str], str], path: str) -> tuple[str, os.stat_result | None]:
    """The path without links, and what is known of the file; None if there is none. ``real`` resolves folders."""
    try:
        folder, name = os.path.split(path)
        if name not in ("", ".", ".."):
            path = os.path.join(real(folder), name)
            known = os.lstat(path)
            if not stat.S_ISLNK(known.st_mode):
                return path, known
        path = os.path.realpath(path)
        return path, os.stat(path)
    except (OSError, ValueError):  # a null character in the path
        return path, None


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _is_whole(column: str, path: Path, items: int) -> bool:
    """``column`` is any column of the part."""
    try:
        return bool(pq.read_table(path, columns=[column]).num_rows == items)
    except (OSError, pa.ArrowInvalid):
        return False
