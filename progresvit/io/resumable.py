"""A table that is written in parts and can be resumed: a folder of numbered parts, and ``run.json``.

``run.json`` identifies the run that the parts belong to. A part covers a fixed range of items, so any number of
processes can continue what others began. Parts are written atomically; a damaged part counts as missing. The first
items of an incomplete part are kept in ``begun-NUMBER``, which is written again every few seconds and at the end.
Memory does not grow with the number of items. part_formats.py defines how a part stores its items. A run that uses the
folder locks it (lock.py).
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self

from progresvit.io.files import is_staged, remove_staged, replace_file, replacing_file, writing
from progresvit.io.lock import LOCK_FILE, FolderLock
from progresvit.io.parse import parse_json, read_text
from progresvit.io.part_formats import PartFormat, Piece

if TYPE_CHECKING:
    from progresvit.distributed import Processes  # it imports torch

KEEP_EVERY = 3.0
"""Seconds after which the items of an incomplete part are kept."""
REPORT_EVERY = 0.1
"""Seconds between two reports of progress."""
RUN_FILE = "run.json"
WRITTEN = "written"
"""Key of ``run.json`` for size and time of the whole table, written just before it replaces an older one."""

Progress = Callable[[int, int], None]
"""Called with the number of items that are done and their total."""

BeginProgress = Callable[[str], Progress]
"""Starts a progress bar with a label."""


class ResumableTable(Generic[Piece]):
    """An unfinished table: :meth:`fill` writes the missing parts, :meth:`finish` makes the table from them.

    Use it in a ``with`` block, at the end of which its folder is unlocked.

    Args:
        out: The table that the parts become. They are in a folder next to it.
        format: How items are stored in a part.
        total: Number of items.
        size: Items per part.
        ending: The folder is named as the table, with this ending.
        step: The items of an incomplete part are kept in multiples of this, so that a resumed run has the same batches.
    """

    def __init__(
        self, out: Path, format: PartFormat[Piece], *, total: int, size: int, ending: str = ".parts", step: int = 1
    ) -> None:
        self.out, self.format, self.total, self.size, self._step = out, format, total, size, step
        self.folder = out.with_name(out.name + ending)
        self.ranges = [range(first, min(first + size, total)) for first in range(0, total, size)]
        """The items of each part."""
        self._begun: dict[int, Piece] = {}
        self._lock = FolderLock(self.folder, "name another file")
        self._kept_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def begin(self, identity: Mapping[str, Any], *, overwrite: bool, is_complete: Callable[[Path], bool]) -> bool:
        """Claim the folder. False if the same run has written the table and was killed before it removed the parts.

        Args:
            identity: What must be equal for a run to be continued, in plain data.
            overwrite: Replace an existing table, and the parts of another run.
            is_complete: Whether a table of the same run has all columns that are wanted now.
        """
        if self.out.exists():
            if self.folder.exists():
                self._lock.acquire()
            if not overwrite:
                if self._has_written(identity) and is_complete(self.out):
                    self.remove()
                    return False
                raise ValueError(f"{self.out} already exists; pass overwrite=True to replace it, or name another file.")
            if self._has_written():
                self.remove()
        self.claim(identity, overwrite=overwrite)
        return True

    def claim(self, identity: Mapping[str, Any], *, overwrite: bool) -> None:
        """Lock the folder, which is created, or check that it belongs to the run with this identity.

        Parts of another run are removed only with ``overwrite``; files that no run wrote are never touched. Temporary
        files of killed runs are removed.
        """
        self._kept_at = time.monotonic()
        with writing(self.out):
            self._lock.acquire()
            if self._lock.is_held:
                remove_staged(self.folder, self._names)
                remove_staged(self.out.parent, re.escape(self.out.name))  # as large as the table
            before, own = self._read_run_file(), json.loads(json.dumps(identity))
            before.pop(WRITTEN, None)
            differing = sorted(key for key in {*before, *own} if before.get(key) != own.get(key))
            if not differing:
                return
            foreign = [path.name for path in self.folder.iterdir() if not self._is_ours(path)]
            if foreign:
                raise ValueError(
                    f"{self.folder} holds {foreign[0]}, which no run wrote; move it away or name another file."
                )
            if before and not overwrite:
                raise ValueError(
                    f"{self.folder} holds the beginning of another run (other {', '.join(differing)}); continue that "
                    "one, pass overwrite=True, or name another file."
                )
            if any(self.folder.glob(f"*.{self.format.suffix}")) and not overwrite:
                raise ValueError(f"{self.folder / RUN_FILE} is damaged; pass overwrite=True to start again.")
            self._remove_files(LOCK_FILE)
            replace_file(self.folder / RUN_FILE, json.dumps(own))

    def share(self, identity: Mapping[str, Any], processes: Processes, *, overwrite: bool) -> tuple[list[int], int]:
        """Claim the folder. Numbers of the parts that this process makes, and how many items are done in all."""
        if processes.first:
            self.claim(identity, overwrite=overwrite)
        processes.wait()  # until the parts of another run are removed
        done = set(processes.gather(self.done())[0])  # as the first process sees it: all must share the same parts
        missing = [number for number in range(len(self.ranges)) if number not in done]
        mine = missing[processes.rank :: processes.count]
        self._read_begun(mine)
        begun = sum(processes.gather(sum(len(self.ranges[number]) - len(self.left(number)) for number in mine)))
        return mine, begun + sum(len(self.ranges[number]) for number in done)

    def remaining(self) -> dict[int, range]:
        """The missing items by part, from the first incomplete part to the end of the table."""
        done = set(self.done())
        first = next((number for number in range(len(self.ranges)) if number not in done), len(self.ranges))
        self._read_begun([first] if first < len(self.ranges) else [])
        return {number: self.left(number) for number in range(first, len(self.ranges))}

    def done(self) -> list[int]:
        """Numbers of the parts that are complete."""
        return [number for number, items in enumerate(self.ranges) if self.format.is_whole(self.path(number), items)]

    def left(self, number: int) -> range:
        """The items of a missing part that an interrupted run has not done."""
        begun = self._begun.get(number)
        return self.ranges[number][0 if begun is None else self.format.count(begun) :]

    def _read_begun(self, numbers: Iterable[int]) -> None:
        """Read what an interrupted run has kept of incomplete parts."""
        for number in numbers:
            if (piece := self.format.read_begun(self.begun_path(number), self.ranges[number])) is not None:
                self._begun[number] = piece

    def fill(self, pieces: Iterable[tuple[int, Piece]], *, first: bool = True) -> None:
        """Write parts from their pieces. If it is interrupted, finished pieces are kept.

        An error of the ``first`` process before any piece is finished leaves no folder.

        Args:
            pieces: The number of a part, and the next items of it. The pieces of a part follow each other.
            first: Whether this process is the one that claimed the folder.
        """
        part: _GrowingPart[Piece] = _GrowingPart(-1, [], 0)
        with self.kept_if_begun(first=first):
            try:
                for number, piece in pieces:
                    if number != part.number:
                        begun = self._begun.pop(number, None)
                        kept = 0 if begun is None else self.format.count(begun)
                        part = _GrowingPart(number, [] if begun is None else [begun], kept, kept)
                    part.pieces.append(piece)
                    part.count += self.format.count(piece)  # last: a signal may come before it
                    is_due = time.monotonic() - self._kept_at >= KEEP_EVERY
                    if is_due or part.count == len(self.ranges[number]):
                        self._keep_part(part)
            except ValueError:  # the user will change something
                raise
            except BaseException:  # Ctrl-C too
                with signals_held():
                    if self.folder.exists():  # the first process removes it before anything is finished
                        self._keep_part(part)
                raise

    def fill_in_order(
        self, remaining: Mapping[int, range], rows: Iterable[Piece], progress: Progress | None = None
    ) -> None:
        """Write the parts of :meth:`remaining` from a piece for each of their items, in order."""
        items = ((number, index) for number, indices in remaining.items() for index in indices)

        def numbered() -> Iterator[tuple[int, Piece]]:
            reported = time.monotonic()
            for (number, index), row in zip(items, rows, strict=True):
                yield number, row
                now = time.monotonic()
                if progress is not None and (now - reported >= REPORT_EVERY or index + 1 == self.total):
                    progress(index + 1, self.total)
                    reported = now

        if progress is not None and remaining:
            progress(next(iter(remaining.values())).start, self.total)
        self.fill(numbered())

    def _keep_part(self, part: _GrowingPart[Piece]) -> None:
        """Write the items that a part has so far."""
        is_whole = part.count == len(self.ranges[part.number])
        count = part.count if is_whole else part.count // self._step * self._step
        if count > part.kept:
            with writing(self.out):
                content = self.format.encode(part.pieces, count)
                if is_whole:
                    self.write(part.number, content)
                else:
                    replace_file(self.begun_path(part.number), content)
            part.kept, self._kept_at = count, time.monotonic()

    def write(self, number: int, content: bytes) -> None:
        """Write a part."""
        replace_file(self.path(number), content)
        self.begun_path(number).unlink(missing_ok=True)

    def begun_path(self, number: int) -> Path:
        """The file of the first items of a part."""
        return self.folder / f"begun-{number:06d}.{self.format.suffix}"

    def path(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"{number:06d}.{self.format.suffix}"

    def paths(self) -> list[Path]:
        """The files of all parts, in order."""
        return [self.path(number) for number in range(len(self.ranges))]

    def parts(self) -> Iterator[Piece]:
        """The parts in order, one in memory at a time."""
        return (self.format.read(path) for path in self.paths())

    def finish(self, write: Callable[[Path], None]) -> None:
        """Write the table from its parts, and remove their files.

        Args:
            write: Writes the table to a path, from :meth:`parts`.
        """
        with writing(self.out), replacing_file(self.out) as staged:
            write(staged)
            run = {**self._read_run_file(), WRITTEN: _size_and_time(staged)}
            replace_file(self.folder / RUN_FILE, json.dumps(run))
        self.remove()

    def remove(self) -> None:
        """Remove the files of the run, and the folder if nothing else is in it, and unlock it."""
        self._remove_files()
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        self._lock.release()

    def _remove_files(self, *but: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process may remove it too
            for path in sorted(self.folder.iterdir()):  # run.json is the last
                if self._is_ours(path) and path.name not in but:
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def kept_if_begun(self, *, first: bool) -> Iterator[None]:
        """After an error in the block, remove the folder if no part is begun, so that any other run may use it.

        If the user has to change something (ValueError), it is removed if no part is complete. Only the ``first``
        process removes it: the others may still be writing.
        """
        try:
            yield
        except BaseException as error:  # Ctrl-C too
            is_begun = not isinstance(error, ValueError) and any(self.folder.glob("begun-*"))
            if first and not is_begun and not self.done():
                self.remove()
            raise

    def _has_written(self, identity: Mapping[str, Any] | None = None) -> bool:
        """Whether the table was written from these parts, and by the run with this identity."""
        before = self._read_run_file()
        is_written = before.pop(WRITTEN, None) == _size_and_time(self.out)
        return is_written and (identity is None or before == json.loads(json.dumps(identity)))

    def _read_run_file(self) -> dict[str, Any]:
        """Empty if ``run.json`` is missing or damaged."""
        try:
            content = parse_json(read_text(self.folder / RUN_FILE))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _is_ours(self, path: Path) -> bool:
        """A part, ``run.json``, or the temporary file of one of them after a crash."""
        return re.fullmatch(self._names, path.name) is not None or is_staged(path, self._names)

    @property
    def _names(self) -> str:
        return rf"run\.json|{LOCK_FILE}|(begun-)?\d{{6}}\.{self.format.suffix}"


@dataclass
class _GrowingPart(Generic[Piece]):
    """A part in progress."""

    number: int
    pieces: list[Piece]
    """What an interrupted run has kept of it, and the pieces since."""
    count: int
    """Number of items."""
    kept: int = 0
    """Number of items that are written."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM during the block take effect after it."""
    if threading.current_thread() is not threading.main_thread():  # no signal interrupts another thread
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if came:
        signal.raise_signal(came[0])


def _size_and_time(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
