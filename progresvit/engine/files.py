"""What a run over many image files reads and writes: its shard, batches and identity, and its table of results.

Tables are Parquet, CSV or JSON lines, by suffix, and are written and read in pieces. CSV has empty cells for missing
values, and lists as JSON. A line of JSON lines is the row without missing numbers.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.csv import ConvertOptions, CSVWriter, ParseOptions, open_csv

from progresvit.data.dataset import Entry, ImageDataset
from progresvit.data.prepare import Request, request_of
from progresvit.table import escape_formulas, restore_formulas


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
        numbers = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
        if numbers is None or not int(numbers[2]):
            raise ValueError(f"shard {text!r} is not of the form i/n, such as 2/4 for the second of four.")
        return cls(int(numbers[1]), int(numbers[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def items(self, total: int) -> range:
        """The range of its images among all images."""
        return range(total * (self.number - 1) // self.count, total * self.number // self.count)

    def path(self, out: Path) -> Path:
        """The file of its results: ``NAME-00002-of-00004.parquet``."""
        return out.with_name(f"{out.stem}-{self.number:05d}-of-{self.count:05d}{out.suffix}")

    def others(self) -> list[Shard]:
        """The other shards."""
        return [Shard(number, self.count) for number in range(1, self.count + 1) if number != self.number]


def input_batches(dataset: ImageDataset, items: range, size: int) -> Iterator[list[Request]]:
    """These images in batches, as the engine takes them; the threads that decode files read them."""
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
    r"""The text as valid UTF-8: a byte of a file name that is not UTF-8 becomes ``\udcNN``, NN being its hex digits."""
    return text.encode("utf-8", "backslashreplace").decode()


def _hash_list(values: Iterable[object]) -> str:
    """SHA-256 of a JSON list, of which never more than one value is in memory."""
    digest = hashlib.sha256(b"[")
    for number, value in enumerate(values):
        digest.update(f"{', ' if number else ''}{json.dumps(value)}".encode())
    digest.update(b"]")
    return digest.hexdigest()


def _describe(entry: Entry, path: str, status: os.stat_result | None) -> list[Any]:
    if status is None:
        return [path, entry.name, None]
    return [path, entry.name, entry.offset, entry.size, status.st_size, status.st_mtime_ns]


def _locate(real: Callable[[str], str], path: str) -> tuple[str, os.stat_result | None]:
    """The path without links, and the status of the file; None if it does not exist. ``real`` resolves folders."""
    try:
        folder, name = os.path.split(path)
        if name not in ("", ".", ".."):
            path = os.path.join(real(folder), name)
            status = os.lstat(path)
            if not stat.S_ISLNK(status.st_mode):
                return path, status
        path = os.path.realpath(path)
        return path, os.stat(path)
    except (OSError, ValueError):  # a null character in the path
        return path, None


def write_table(path: Path, schema: pa.Schema, suffix: str, parts: Iterable[pa.Table]) -> None:
    """Write a new file in the format of a suffix, one part of the table at a time."""
    if suffix == ".csv":
        plain = pa.schema(
            [pa.field(field.name, pa.string() if pa.types.is_nested(field.type) else field.type) for field in schema]
        )
        with CSVWriter(path, plain) as writer:
            for part in parts:
                writer.write_table(_csv_table(part, plain))
    elif suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for part in parts:
                file.writelines(f"{json_line(row)}\n" for row in part.to_pylist())
    else:
        with pq.ParquetWriter(path, schema) as parquet:
            for part in parts:
                parquet.write_table(part)


def read_pieces(path: Path, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
    """The columns of a schema, which are plain values, in pieces of about ``rows`` rows."""
    if path.suffix == ".csv":
        types = ConvertOptions(
            include_columns=schema.names,
            column_types={field.name: field.type for field in schema},
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        with open_csv(path, parse_options=ParseOptions(newlines_in_values=True), convert_options=types) as reader:
            yield from map(restore_formulas, reader)
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            while lines := list(islice(file, rows)):
                values = [json.loads(line) for line in lines]
                columns = [pa.array([row.get(field.name) for row in values], field.type) for field in schema]
                yield pa.record_batch(columns, names=schema.names)
    else:
        with pq.ParquetFile(path) as table:
            yield from table.iter_batches(rows, columns=schema.names)


def column_names(path: Path) -> list[str]:
    """The columns of a table. For JSON lines, the columns of the first row, which may lack some."""
    if path.suffix == ".parquet":
        return list(pq.read_schema(path).names)
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), []) if path.suffix == ".csv" else list(json.loads(file.readline() or "{}"))


def has_columns(path: Path, columns: list[str]) -> bool:
    """Whether a file that a run has written has these columns; JSON lines need not have all of them."""
    return path.suffix == ".jsonl" or column_names(path) == columns


def json_line(row: dict[str, Any]) -> str:
    """A row without NaN, which JSON cannot hold, and without an empty ``top``."""
    missing = {key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    kept = {key: value for key, value in row.items() if key not in missing and (key != "top" or value)}
    return json.dumps(kept, allow_nan=False)


def _csv_table(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    import pyarrow.compute as pc  # slow to import, and an answer in the terminal does not need it

    columns = []
    for field in schema:
        column = rows[field.name]
        if pa.types.is_nested(column.type):
            column = pa.array([json.dumps(value) if value else None for value in column.to_pylist()], pa.string())
        elif pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)
        columns.append(escape_formulas(column))
    return pa.table(columns, schema=schema)
