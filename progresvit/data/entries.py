"""Where images are stored: files, or ranges of bytes in tars, millions of them in little memory."""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import NamedTuple, overload

from progresvit.data.decode import ImageError, has_signature

MOST_BYTES = 2**30
"""The most bytes of an image file."""
TRUSTED_BYTES = 64 * 2**20
"""A larger file is read only if it begins like an image."""
_HEAD = 2**20
"""Bytes that tell whether a file without a signature is a TGA image."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an image is stored: a file, or a range of bytes in a tar."""

    path: str
    name: str
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        """The content of the image file."""
        return read_file(self.path, self.offset, self.size)


def read_file(path: str | os.PathLike[str], offset: int = 0, size: int = -1) -> bytes:
    """The content of an image file, or a range of it.

    Pipes, devices and files that are too large to be images are an :class:`ImageError` and are not read.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("not a file but a pipe or a device")
        if size < 0:
            size = max(0, status.st_size - offset)
        if size > MOST_BYTES:
            raise ImageError(f"a file of {size / 2**30:.1f} GiB; the limit is {MOST_BYTES / 2**30:.0f} GiB")
        file.seek(offset)
        if size > TRUSTED_BYTES:
            if not has_signature(file.read(_HEAD)):
                raise ImageError("not an image, or of a format that Pillow does not read")
            file.seek(offset)
        return file.read(size)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a pipe although nothing writes to it; it is refused then."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


class _Prefix(NamedTuple):
    """What the entries of one folder, or of one tar, have in common."""

    path: str
    name: str
    has_whole_path: bool
    """The path of every entry is ``path``, as in a tar; else path and name both end with the text of the entry."""


class Entries(Sequence[Entry]):
    """Millions of entries in little memory: their texts are one block of bytes, and an entry is made when it is read.

    It equals a tuple of the same entries. A slice shares the memory.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._texts, self._ends = bytearray(), array("Q")
        self._prefixes: list[_Prefix] = []
        self._prefix_of = array("I")
        self._ranges = array("q")  # offset and size of each entry; empty if all of them are whole files
        numbers: dict[_Prefix, int] = {}
        prefix = _Prefix("", "", has_whole_path=False)
        for entry in entries:
            prefix, text = _split(entry, prefix)
            number = numbers.setdefault(prefix, len(numbers))
            if number == len(self._prefixes):
                self._prefixes.append(prefix)
            if (entry.offset, entry.size) != (0, -1) and not self._ranges:
                self._ranges = array("q", (0, -1)) * len(self._ends)
            self._texts += text.encode("utf-8", "surrogatepass")
            self._ends.append(len(self._texts))
            self._prefix_of.append(number)
            if self._ranges or (entry.offset, entry.size) != (0, -1):
                self._ranges.extend((entry.offset, entry.size))
        self._items = range(len(self._ends))

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Entries: ...
    def __getitem__(self, index: int | slice) -> Entry | Entries:
        if isinstance(index, slice):
            part = Entries.__new__(Entries)
            part.__dict__.update(self.__dict__, _items=self._items[index])
            return part
        item = self._items[index]
        text = self._texts[self._ends[item - 1] if item else 0 : self._ends[item]].decode("utf-8", "surrogatepass")
        prefix = self._prefixes[self._prefix_of[item]]
        path = prefix.path if prefix.has_whole_path else prefix.path + text
        return Entry(path, prefix.name + text, *(self._ranges[2 * item : 2 * item + 2]))

    def __add__(self, other: Sequence[Entry]) -> Entries:
        return Entries(chain(self, other))

    def __radd__(self, other: Sequence[Entry]) -> Entries:
        return Entries(chain(other, self))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entries | tuple):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Entries of {len(self)} images"


def _split(entry: Entry, last: _Prefix) -> tuple[_Prefix, str]:
    """The prefix of an entry and the rest of its name; the prefix of the ``last`` entry is used again if it fits."""
    path, name = entry.path, entry.name
    if entry.size < 0:
        text = path[len(last.path) :]
        if not last.has_whole_path and path.startswith(last.path) and name == last.name + text:
            return last, text
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(path), reversed(name))))
        if common:
            text = name[len(name) - common :]
            return _Prefix(path[: len(path) - common], name[: len(name) - common], has_whole_path=False), text
    return _Prefix(path, "", has_whole_path=True), name
