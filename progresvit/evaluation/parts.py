"""The finished parts of an evaluation that is still running: a folder next to the records, as npz files.

Processes share the parts that are missing. Each keeps the batches of its part in progress every few seconds.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from progresvit.data.dataset import ImageDataset
from progresvit.data.loader import Unreadable
from progresvit.distributed import Processes
from progresvit.evaluation.records import Header
from progresvit.io.files import writing
from progresvit.io.resumable import PartialOutput, signals_held
from progresvit.model.registry import DEFAULT_KIND

CHUNK = 512
"""Images per part, and so the largest batch."""

Columns = dict[str, Any]
"""Arrays or tensors by name; ``index`` holds the indices of the images."""
FinishedBatch = tuple[int, Columns, Mapping[int, str], int]
"""Some images of a part: its number, their columns, why others are unreadable, and the last index that is done."""


class Parts:
    """The parts of the records of a dataset, in a folder next to the file ``out``.

    Args:
        out: The file that the parts become.
        dataset: The images.
        size: Images per part; None: ``CHUNK``.
    """

    def __init__(self, out: Path, dataset: ImageDataset, *, size: int | None = None) -> None:
        self.out, self.dataset, self.size = out, dataset, size or CHUNK
        folder = out.with_name(out.name + ".parts")
        self._parts = PartialOutput(folder, total=len(dataset), size=self.size, suffix="npz", is_whole=_is_whole)
        self.chunks = self._parts.ranges
        self.done, self.remove = self._parts.done, self._parts.remove
        self._begun: dict[int, tuple[Columns, dict[int, str]]] = {}

    def share(
        self, header: Header, processes: Processes, *, keep_logits: bool, overwrite: bool
    ) -> tuple[list[int], int]:
        """The numbers of the parts that this process makes, and how many images are done already."""
        if processes.first:
            self.claim(header, keep_logits=keep_logits, overwrite=overwrite)
        processes.wait()  # until the parts of another run are removed
        done = set(processes.gather(self.done())[0])  # as the first process sees it: all must share the same chunks
        left = [number for number in range(len(self.chunks)) if number not in done]
        mine = left[processes.rank :: processes.count]
        self._begun = {number: begun for number in mine if (begun := self._read_begun(number))}
        begun = sum(processes.gather(sum(len(self.chunks[n]) - len(self.left(n)) for n in mine)))
        return mine, begun + sum(len(self.chunks[number]) for number in done)

    def left(self, number: int) -> range:
        """The images of a missing part that an interrupted run has not done."""
        columns, unreadable = self._begun.get(number, ({}, {}))
        return self.chunks[number][len(columns.get("index", ())) + len(unreadable) :]

    def claim(self, header: Header, *, keep_logits: bool, overwrite: bool) -> None:
        """Create the folder, or check that it belongs to this evaluation."""
        about = {**header.identity(), "chunk": self.size, "keep_logits": keep_logits}
        about["pictures"] = about.pop("images")  # as version 0.1.0 wrote it, so that its parts are continued
        if about["config"].get("kind") == DEFAULT_KIND:
            about["config"] = {key: value for key, value in about["config"].items() if key != "kind"}
        with writing(self.out):
            self._parts.claim(about, overwrite=overwrite)

    def fill(self, finished: Iterable[FinishedBatch], *, first: bool = True) -> None:
        """Write parts from their batches. If it is interrupted, finished batches are kept.

        An error of the ``first`` process before any batch is finished leaves no folder.
        """
        skipped = Unreadable(self.dataset)
        part = _Growing()
        with self._parts.kept_if_begun(first=first):
            try:
                for number, columns, unreadable, last in finished:
                    if number != part.number:
                        part = _Growing(number, self._begun.pop(number, None))
                    part.add(columns, unreadable)
                    self._skip(unreadable, skipped)
                    if last + 1 == self.chunks[number].stop or self._parts.is_keeping_due:
                        self._keep(part)
            except ValueError:  # the user will change something
                raise
            except BaseException:  # Ctrl-C too
                with signals_held():
                    if self._parts.folder.exists():  # the first process removes it before anything is finished
                        self._keep(part)
                raise

    def _keep(self, part: _Growing) -> None:
        """Write the images that a part has so far."""
        if part.has_new:
            with writing(self.out):
                self._parts.keep(part.number, part.count, part.content())
            part.has_new = False

    def _read_begun(self, number: int) -> tuple[Columns, dict[int, str]] | None:
        """The first images of a part, which an interrupted run has kept; None if there are none."""
        path, chunk = self._parts.begun_path(number), self.chunks[number]
        if not _is_whole(path, len(chunk)):
            return None
        columns, unreadable = _read_part(path)
        done = sorted([*columns["index"].tolist(), *unreadable])
        return (columns, unreadable) if done == list(chunk[: len(done)]) else None

    def collect(self) -> tuple[Columns, tuple[str, ...]]:
        """The columns of all parts in order, and a line for each unreadable image."""
        columns, unreadable = self.merge()
        skipped = Unreadable(self.dataset)
        self._skip(unreadable, skipped)
        return columns, tuple(skipped.lines())

    def column(self, name: str) -> Any:
        """One column of all parts, in order, as an array; the other columns are not read."""
        whole, filled = None, 0
        for path in self._parts.paths():
            with np.load(path) as part:
                if not len(part["index"]):  # no image of the part can be read
                    continue
                values = part[name]
            if whole is None:
                whole = np.empty((len(self.dataset), *values.shape[1:]), values.dtype)
            whole[filled : filled + len(values)] = values
            filled += len(values)
        assert whole is not None, "that no image can be read is an error before"
        return whole[:filled]

    def skipped(self) -> tuple[str, ...]:
        """A line for each unreadable image of all parts."""
        skipped = Unreadable(self.dataset)
        for path in self._parts.paths():
            with np.load(path) as part:
                self._skip(dict(json.loads(str(part["unreadable"]))), skipped)
        return tuple(skipped.lines())

    def _skip(self, unreadable: Mapping[int, str], skipped: Unreadable) -> None:
        """Count unreadable images. Too many are an error that removes the parts, since the user will change them."""
        try:
            for index, reason in unreadable.items():
                skipped.add(index, reason)
        except ValueError:
            self.remove()
            raise

    def merge(self) -> tuple[Columns, dict[int, str]]:
        """The columns of all parts in order, and why images are unreadable.

        A column that some parts lack is left out: parts of version 0.1.0 have no ``log_probability``.
        """
        columns: dict[str, list[Any]] = {}
        unreadable: dict[int, str] = {}
        for path in self._parts.paths():
            with np.load(path) as part:
                unreadable |= dict(json.loads(str(part["unreadable"])))
                if len(part["index"]):
                    for name in part.files:
                        columns.setdefault(name, []).append(part[name])
        columns.pop("unreadable", None)
        whole = len(columns.get("index", ()))
        return {name: np.concatenate(values) for name, values in columns.items() if len(values) == whole}, unreadable


class _Growing:
    """A part in progress: its batches so far, and what an interrupted run has kept of it."""

    def __init__(self, number: int = -1, begun: tuple[Columns, dict[int, str]] | None = None) -> None:
        self.number, self.has_new, self.count = number, False, 0
        self._batches: list[Columns] = []
        self._unreadable: dict[int, str] = {}
        if begun is not None:
            self.add(*begun)

    def add(self, columns: Columns, unreadable: Mapping[int, str]) -> None:
        """Add a batch."""
        self._unreadable |= unreadable
        if len(columns["index"]):
            self._batches.append(columns)
        self.count += len(columns["index"]) + len(unreadable)  # last: a signal may come before it
        self.has_new = True

    def content(self) -> bytes:
        """As a file."""
        columns: Columns = {"index": np.zeros(0, np.int64)}
        for name in self._batches[0] if self._batches else ():
            columns[name] = np.concatenate([_array(batch[name]) for batch in self._batches])
        buffer = io.BytesIO()
        np.savez(buffer, unreadable=np.array(json.dumps(sorted(self._unreadable.items()))), **columns)
        return buffer.getvalue()


def _array(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else values


def _read_part(path: Path) -> tuple[Columns, dict[int, str]]:
    with np.load(path) as part:
        columns = {name: part[name] for name in part.files if name != "unreadable"}
        return columns, dict(json.loads(str(part["unreadable"])))


def _is_whole(path: Path, items: int) -> bool:
    try:
        with zipfile.ZipFile(path) as part:
            return part.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
