"""The finished parts of an evaluation that is still running: a resumable table of images, beside the records.

Processes share the parts that are missing. Each keeps the batches of its part in progress every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from progresvit.data.dataset import ImageDataset
from progresvit.data.loading import Unreadable
from progresvit.distributed import Processes
from progresvit.evaluation.header import Header
from progresvit.io.part_formats import Columns, NpzColumns, merge_columns, read_column
from progresvit.io.resumable import ResumableTable
from progresvit.model.registry import DEFAULT_KIND

CHUNK = 512
"""Images per part, and so the largest batch."""

FinishedBatch = tuple[int, Columns]
"""The number of a part, and some of its images: their columns, and why others are unreadable."""


class Parts(ResumableTable[Columns]):
    """The parts of the records of a dataset, in a folder next to the file ``out``.

    Args:
        out: The file that the parts become.
        dataset: The images.
        size: Images per part; None: ``CHUNK``.
    """

    def __init__(self, out: Path, dataset: ImageDataset, *, size: int | None = None) -> None:
        super().__init__(out, NpzColumns(), total=len(dataset), size=size or CHUNK)
        self.dataset = dataset

    def share_run(
        self, header: Header, processes: Processes, *, keep_logits: bool, overwrite: bool
    ) -> tuple[list[int], int]:
        """The numbers of the parts that this process makes, and how many images are done already."""
        identity = {**header.identity(), "chunk": self.size, "keep_logits": keep_logits}
        identity["pictures"] = identity.pop("images")  # as version 0.1.0 wrote it, so that its parts are continued
        if identity["config"].get("kind") == DEFAULT_KIND:
            identity["config"] = {key: value for key, value in identity["config"].items() if key != "kind"}
        return self.share(identity, processes, overwrite=overwrite)

    def fill(self, pieces: Iterable[FinishedBatch], *, first: bool = True) -> None:
        """As of any resumable table, but too many unreadable images are an error."""
        skipped = Unreadable(self.dataset)

        def counted() -> Iterator[FinishedBatch]:
            for number, columns in pieces:
                self._skip(columns.skipped, skipped)
                yield number, columns

        super().fill(counted(), first=first)

    def collect(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The columns of all parts in order, and a line for each unreadable image."""
        columns = merge_columns(self.parts())
        skipped = Unreadable(self.dataset)
        self._skip(columns.skipped, skipped)
        return dict(columns.arrays), tuple(skipped.lines())

    def column(self, name: str) -> Any:
        """One column of all parts, in order, as an array; the other columns are not read."""
        return read_column(self.paths(), name, len(self.dataset))

    def skipped(self) -> tuple[str, ...]:
        """A line for each unreadable image of all parts."""
        skipped = Unreadable(self.dataset)
        for columns in self.parts():
            self._skip(columns.skipped, skipped)
        return tuple(skipped.lines())

    def _skip(self, unreadable: Mapping[int, str], skipped: Unreadable) -> None:
        """Count unreadable images. Too many are an error that removes the parts, since the user will change them."""
        try:
            for index, reason in unreadable.items():
                skipped.add(index, reason)
        except ValueError:
            self.remove()
            raise
