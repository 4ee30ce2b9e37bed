"""The finished parts of an evaluation that is still running: a folder next to the records, as npz files."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from progresvit.data.dataset import ImageDataset
from progresvit.evaluation.records import Header
from progresvit.io.resumable import PartialOutput
from progresvit.model.registry import DEFAULT_KIND

CHUNK = 512
"""Images per part, and so the largest batch."""

Columns = dict[str, Any]
"""Arrays by name; ``index`` holds the indices of the images."""


class Parts:
    """The parts of the records of a dataset."""

    def __init__(self, folder: Path, dataset: ImageDataset) -> None:
        self.dataset = dataset
        self._parts = PartialOutput(folder, total=len(dataset), size=CHUNK, suffix="npz", is_whole=_is_whole)
        self.chunks = self._parts.ranges
        self.done, self.remove = self._parts.done, self._parts.remove

    def claim(self, header: Header, *, keep_logits: bool, overwrite: bool) -> None:
        """Create the folder, or check that it belongs to this evaluation."""
        about = {**header.identity(), "chunk": CHUNK, "keep_logits": keep_logits}
        about["pictures"] = about.pop("images")  # as version 0.1.0 wrote it, so that its parts are continued
        if about["config"].get("kind") == DEFAULT_KIND:
            about["config"] = {key: value for key, value in about["config"].items() if key != "kind"}
        self._parts.claim(about, overwrite=overwrite)

    def write(self, number: int, columns: Columns, unreadable: Mapping[int, str]) -> None:
        """Write a finished part."""
        buffer = io.BytesIO()
        np.savez(buffer, unreadable=np.array(json.dumps(sorted(unreadable.items()))), **columns)
        self._parts.write(number, buffer.getvalue())

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


def _is_whole(path: Path, items: int) -> bool:
    try:
        with zipfile.ZipFile(path) as part:
            return part.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
