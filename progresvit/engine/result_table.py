"""A parquet table with a row for each image of a dataset, in their order. An interrupted run can be resumed.

Finished parts are in ``NAME.parts`` next to the table until all of them are there.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from progresvit.data.dataset import Entry, ImageDataset
from progresvit.engine.images import UnreadImage
from progresvit.io.files import replacing_file
from progresvit.io.resumable import PartialOutput

Row = dict[str, Any]
Progress = Callable[[int, int], None]
"""Called with the number of images that are done and their total."""


class ResultTable:
    """An unfinished table: :meth:`fill` writes the missing parts, :meth:`finish` makes the table of them.

    Args:
        out: The table.
        schema: Of the rows.
        total: Number of images.
        part: Images per part.
        identity: What must be equal for a run to be continued, in plain data.
        overwrite: Replace an existing table, and the parts of another run.
    """

    def __init__(
        self, out: Path, schema: pa.Schema, *, total: int, part: int, identity: Mapping[str, Any], overwrite: bool
    ) -> None:
        self.out, self.schema, self.total = out, schema, total
        is_whole = partial(_is_whole, schema.names[0])
        self._parts = PartialOutput(
            out.with_name(out.name + ".parts"), total=total, size=part, suffix="parquet", is_whole=is_whole
        )
        if out.exists():
            if not overwrite:
                raise ValueError(f"{out} is there already; use --overwrite to replace it, or name another file.")
            self._parts.remove()  # of a run that was killed after it wrote the table
        self._parts.claim(identity, overwrite=overwrite)

    def missing(self) -> list[range]:
        """The images of the first part that is missing and of all later ones, part by part."""
        ranges, finished = self._parts.ranges, set(self._parts.done())
        return ranges[next((number for number in range(len(ranges)) if number not in finished), len(ranges)) :]

    def fill(self, missing: list[range], rows: Iterable[Row], progress: Progress | None = None) -> None:
        """Write the missing parts from the rows of their images."""
        coming = iter(rows)
        for number, items in enumerate(missing, len(self._parts.ranges) - len(missing)):
            part = []
            for index, row in zip(items, coming):
                part.append(row)
                if progress is not None and (index % 64 == 0 or index + 1 == self.total):
                    progress(index + 1, self.total)
            assert len(part) == len(items)
            self._parts.write(number, _parquet(pa.Table.from_pylist(part, self.schema)))
        assert next(coming, None) is None

    def parts(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The parts in order, after :meth:`fill`; some columns of them if asked."""
        return (pq.read_table(path, columns=columns) for path in self._parts.paths())

    def finish(self, parts: Iterable[pa.Table], schema: pa.Schema | None = None) -> None:
        """Write the table from its parts, one at a time, and remove their files.

        Args:
            parts: Those of :meth:`parts`, with other columns if ``schema`` has others.
            schema: Of the table, with its metadata; by default that of the rows.
        """
        with replacing_file(self.out) as staged, pq.ParquetWriter(staged, schema or self.schema) as writer:
            for part in parts:
                writer.write_table(part)
        self._parts.remove()


def image_batches(dataset: ImageDataset, items: range, size: int) -> Iterator[list[bytes | UnreadImage]]:
    """The files of these images in batches; they are read as they are needed."""
    for first in items[::size]:
        yield [_content(dataset, index) for index in range(first, min(first + size, items.stop))]


def listing_hash(dataset: ImageDataset) -> str:
    """SHA-256 of path, name, size and time of all images; a file that was changed is another image."""
    listing = json.dumps([_describe(entry) for entry in dataset.entries])
    return hashlib.sha256(listing.encode()).hexdigest()


def _content(dataset: ImageDataset, index: int) -> bytes | UnreadImage:
    try:
        return dataset.read(index)
    except OSError as error:
        return UnreadImage(f"cannot be read ({error.strerror or error})")


def _describe(entry: Entry) -> list[Any]:
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


def _is_whole(column: str, path: Path, items: int) -> bool:
    """``column`` is any column of the part."""
    try:
        return bool(pq.read_table(path, columns=[column]).num_rows == items)
    except (OSError, pa.ArrowInvalid):
        return False
