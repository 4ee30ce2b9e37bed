"""How the items of a part of a resumable table are stored: as arrays (npz), as rows (Parquet), or as tensors."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Piece = TypeVar("Piece")


class PartFormat(Protocol[Piece]):
    """A format of parts. A piece is any number of consecutive items in memory."""

    suffix: str

    def is_whole(self, path: Path, items: range) -> bool:
        """Whether a file is the complete part of these items."""

    def count(self, piece: Piece) -> int:
        """The number of items of a piece."""

    def encode(self, pieces: Sequence[Piece], count: int) -> bytes:
        """The first ``count`` items of consecutive pieces, as a file."""

    def read(self, path: Path) -> Piece:
        """The items of a file."""

    def read_begun(self, path: Path, items: range) -> Piece | None:
        """The first items of an incomplete part; None if the file is missing, damaged or holds other items."""


class Columns(NamedTuple):
    """Items as arrays or tensors by name; ``index`` holds their numbers."""

    arrays: Mapping[str, Any]
    skipped: Mapping[int, str]
    """Items that are not in the arrays, by number, and why."""


class NpzColumns:
    """Parts of :class:`Columns`, as npz files."""

    suffix = "npz"

    def is_whole(self, path: Path, items: range) -> bool:
        """Whether the file is undamaged; complete parts have names of their own."""
        try:
            with zipfile.ZipFile(path) as part:
                return part.testzip() is None
        except (OSError, zipfile.BadZipFile):
            return False

    def count(self, piece: Columns) -> int:
        return len(piece.arrays["index"]) + len(piece.skipped)

    def encode(self, pieces: Sequence[Columns], count: int) -> bytes:
        """All items: pieces are kept as a whole."""
        filled = [piece.arrays for piece in pieces if len(piece.arrays["index"])]
        arrays: dict[str, Any] = {"index": np.zeros(0, np.int64)}
        for name in filled[0] if filled else ():
            arrays[name] = np.concatenate([_to_array(values[name]) for values in filled])
        skipped = sorted(item for piece in pieces for item in piece.skipped.items())
        buffer = io.BytesIO()
        np.savez(buffer, unreadable=np.array(json.dumps(skipped)), **arrays)
        return buffer.getvalue()

    def read(self, path: Path) -> Columns:
        with np.load(path) as part:
            arrays = {name: part[name] for name in part.files if name != "unreadable"}
            return Columns(arrays, dict(json.loads(str(part["unreadable"]))))

    def read_begun(self, path: Path, items: range) -> Columns | None:
        if not self.is_whole(path, items):
            return None
        piece = self.read(path)
        done = sorted([*piece.arrays["index"].tolist(), *piece.skipped])
        return piece if done == list(items[: len(done)]) else None


def merge_columns(parts: Iterable[Columns]) -> Columns:
    """All parts as one.

    An array that some parts lack is left out: parts of version 0.1.0 have no ``log_probability``.
    """
    arrays: dict[str, list[Any]] = {}
    skipped: dict[int, str] = {}
    for part in parts:
        skipped |= part.skipped
        if len(part.arrays["index"]):
            for name, values in part.arrays.items():
                arrays.setdefault(name, []).append(values)
    count = len(arrays.get("index", ()))
    return Columns({name: np.concatenate(values) for name, values in arrays.items() if len(values) == count}, skipped)


def read_column(paths: Iterable[Path], name: str, total: int) -> Any:
    """One array of all parts, in order, from npz files that have at most ``total`` items; no other array is read.

    None if a part lacks it, as parts of earlier versions lack newer arrays.
    """
    column, filled = None, 0
    for path in paths:
        with np.load(path) as part:
            if not len(part["index"]):  # all items of the part were skipped
                continue
            if name not in part:
                return None
            values = part[name]
        if column is None:
            column = np.empty((total, *values.shape[1:]), values.dtype)
        column[filled : filled + len(values)] = values
        filled += len(values)
    assert column is not None, "that no image can be read is an error before"
    return column[:filled]


def _to_array(values: Any) -> Any:
    """An array, or a tensor of any device."""
    return values.cpu().numpy() if hasattr(values, "cpu") else values


Cells = dict[str, Any]
"""The cells of an item, which is one row, by column."""


class ParquetRows:
    """Parts of rows as Parquet files. A piece is a row, or a table of rows.

    Args:
        schema: Names and types of the columns.
        upgrade: Gives the rows that an earlier version wrote the columns of the schema.
    """

    suffix = "parquet"

    def __init__(self, schema: pa.Schema, upgrade: Callable[[pa.Table], pa.Table] = lambda table: table) -> None:
        self.schema, self._upgrade = schema, upgrade

    def is_whole(self, path: Path, items: range) -> bool:
        try:
            return bool(pq.read_table(path, columns=pq.read_schema(path).names[:1]).num_rows == len(items))
        except (OSError, pa.ArrowInvalid):
            return False

    def count(self, piece: Cells | pa.Table) -> int:
        return 1 if isinstance(piece, dict) else int(piece.num_rows)

    def encode(self, pieces: Sequence[Cells | pa.Table], count: int) -> bytes:
        tables = [piece for piece in pieces if not isinstance(piece, dict)]  # only the first piece can be a table
        rows = pieces[len(tables) :]
        columns = [pa.array([row[field.name] for row in rows], field.type) for field in self.schema]
        table = pa.concat_tables([*tables, pa.table(columns, schema=self.schema)]).combine_chunks()
        buffer = io.BytesIO()
        pq.write_table(table[:count], buffer)
        return buffer.getvalue()

    def read(self, path: Path) -> pa.Table:
        return self._upgrade(pq.read_table(path))

    def read_begun(self, path: Path, items: range) -> pa.Table | None:
        try:
            table = self.read(path)
        except (OSError, pa.ArrowInvalid):
            return None
        return table if table.schema.equals(self.schema) and table.num_rows < len(items) else None


class Checkpoint(NamedTuple):
    """The state of a training after an epoch, which is the only item of its part."""

    tensors: Mapping[str, Any]
    metadata: Mapping[str, str]


class SafetensorsCheckpoints:
    """Parts of one :class:`Checkpoint` each, as safetensors files."""

    suffix = "safetensors"

    def is_whole(self, path: Path, items: range) -> bool:
        import safetensors

        try:
            with safetensors.safe_open(path, framework="pt"):
                return True
        except (OSError, safetensors.SafetensorError):
            return False

    def count(self, piece: Checkpoint) -> int:
        return 1

    def encode(self, pieces: Sequence[Checkpoint], count: int) -> bytes:
        import safetensors.torch

        (checkpoint,) = pieces
        return safetensors.torch.save(dict(checkpoint.tensors), dict(checkpoint.metadata))

    def read(self, path: Path) -> Checkpoint:
        import safetensors.torch

        with safetensors.safe_open(path, framework="pt") as file:
            return Checkpoint(safetensors.torch.load_file(path), file.metadata())

    def read_begun(self, path: Path, items: range) -> Checkpoint | None:
        return None
