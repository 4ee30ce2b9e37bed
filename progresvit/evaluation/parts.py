"""The finished chunks of a pass that is still going on: a folder beside the records, which a crash leaves whole.

A chunk is a run of pictures by number, of fixed size, so that any number of processes may go on with what others began.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from progresvit.data.dataset import ImageDataset
from progresvit.evaluation.records import Header
from progresvit.io import resumable
from progresvit.io.files import replace_file

SUFFIX = "npz"
CHUNK = 512
"""ImageDataset of a chunk, and so the most in a batch; what a crash can cost."""

Columns = dict[str, Any]
"""Arrays by name; ``index`` holds the numbers of the pictures."""


@dataclass(frozen=True)
class Parts:
    """The folder, and the pictures that it is for."""

    folder: Path
    pictures: ImageDataset

    @cached_property
    def chunks(self) -> list[range]:
        """The numbers of each chunk's pictures."""
        count = len(self.pictures)
        return [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]

    def claim(self, header: Header, *, keep_logits: bool, overwrite: bool) -> None:
        """Make the folder, or see that the one there is of this very run; another run's is replaced only if asked."""
        about = {**header.identity(), "chunk": CHUNK, "keep_logits": keep_logits}
        resumable.claim(self.folder, about, suffix=SUFFIX, overwrite=overwrite)

    def done(self) -> list[int]:
        """Chunks that are there and whole. A damaged one is as good as missing."""
        return [number for number in range(len(self.chunks)) if self._is_whole(number)]

    def write(self, number: int, columns: Columns, unreadable: Mapping[int, str]) -> None:
        """Put a finished chunk down."""
        buffer = io.BytesIO()
        np.savez(buffer, unreadable=np.array(json.dumps(sorted(unreadable.items()))), **columns)
        replace_file(self._path(number), buffer.getvalue())

    def merge(self) -> tuple[Columns, dict[int, str]]:
        """All chunks in order, and what could not be read."""
        columns: dict[str, list[Any]] = {}
        unreadable: dict[int, str] = {}
        for number in range(len(self.chunks)):
            with np.load(self._path(number)) as part:
                unreadable |= dict(json.loads(str(part["unreadable"])))
                if len(part["index"]):
                    for name in part.files:
                        columns.setdefault(name, []).append(part[name])
        columns.pop("unreadable", None)
        return {name: np.concatenate(values) for name, values in columns.items()}, unreadable

    def remove(self) -> None:
        """The folder has served."""
        resumable.clear(self.folder, suffix=SUFFIX)

    def _path(self, number: int) -> Path:
        return resumable.part(self.folder, number, suffix=SUFFIX)

    def _is_whole(self, number: int) -> bool:
        try:
            with zipfile.ZipFile(self._path(number)) as part:
                return part.testzip() is None
        except (OSError, zipfile.BadZipFile):
            return False
