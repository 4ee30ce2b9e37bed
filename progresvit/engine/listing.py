"""Many image files as the input of a run: its shard of them, its batches, and what identifies them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from progresvit.data.dataset import Entry, ImageDataset
from progresvit.data.prepare import Request, request_of


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
    r"""The text as valid UTF-8: a byte of a file name that is not UTF-8 becomes ``\udcNN``, NN being its hex digits."""
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
    """The path without links, and the status of the file; None if it does not exist. ``real`` resolves folders."""
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
