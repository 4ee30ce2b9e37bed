"""An output that is written in parts and can be resumed: a folder of numbered parts, and ``run.json``.

``run.json`` identifies the run that the parts belong to. A part covers a fixed range of items, so any number of
processes can continue what others began. Parts are written atomically; a damaged one counts as missing. Of a part that
is not complete, the first items are kept in ``begun-NUMBER``, which is written again every few seconds and at the end.
A run that uses the folder locks it (lock.py).
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from progresvit.io.files import replace_file
from progresvit.io.lock import LOCK_FILE, FolderLock

KEEP_EVERY = 3.0
"""Seconds after which the items of an incomplete part are kept."""
RUN_FILE = "run.json"
WRITTEN = "written"
"""In ``run.json``: size and time of the whole output, as soon as it is about to replace an older one."""


class PartialOutput:
    """An unfinished output: its finished parts.

    Args:
        folder: Where the parts are.
        total: Number of items.
        size: Items per part; a crash loses what is not in a part yet.
        suffix: Of the files of the parts.
        is_whole: Whether a file is a complete part with the number of items given.
    """

    def __init__(
        self, folder: Path, *, total: int, size: int, suffix: str, is_whole: Callable[[Path, int], bool]
    ) -> None:
        self.folder, self.suffix = folder, suffix
        self.ranges = [range(first, min(first + size, total)) for first in range(0, total, size)]
        """The items of each part."""
        self._is_whole = is_whole
        lock = FolderLock(folder, "name another file")
        self.lock, self.release = lock.acquire, lock.release
        self._kept_at = time.monotonic()

    def claim(self, about: Mapping[str, Any], *, overwrite: bool) -> None:
        """Lock the folder, which is created, or check that it belongs to the run that ``about`` identifies.

        Parts of another run are removed only with ``overwrite``; files that no run wrote are never touched.
        """
        self._kept_at = time.monotonic()
        self.lock()
        try:
            self._claim(about, overwrite=overwrite)
        except BaseException:
            self.release()
            raise

    def _claim(self, about: Mapping[str, Any], *, overwrite: bool) -> None:
        wanted = json.loads(json.dumps(about))
        if self.folder.exists():
            known = _read(self.folder / RUN_FILE)
            known.pop(WRITTEN, None)
            differing = sorted(key for key in {*known, *wanted} if known.get(key) != wanted.get(key))
            if not differing:
                return
            self._check_replaceable(known, differing, overwrite=overwrite)
            self._remove_files(LOCK_FILE)
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / RUN_FILE, json.dumps(wanted))

    def done(self) -> list[int]:
        """Numbers of the parts that are complete."""
        return [number for number, items in enumerate(self.ranges) if self._is_whole(self.path(number), len(items))]

    def write(self, number: int, content: bytes) -> None:
        """Write a part."""
        replace_file(self.path(number), content)
        self.begun_path(number).unlink(missing_ok=True)
        self._kept_at = time.monotonic()

    def keep(self, number: int, items: int, content: bytes) -> None:
        """Write the first items of a part, or the part if these are all."""
        if items == len(self.ranges[number]):
            self.write(number, content)
        else:
            replace_file(self.begun_path(number), content)
            self._kept_at = time.monotonic()

    @property
    def is_keeping_due(self) -> bool:
        """Whether the last items were kept more than a few seconds ago."""
        return time.monotonic() - self._kept_at >= KEEP_EVERY

    def begun_path(self, number: int) -> Path:
        """The file of the first items of a part."""
        return self.folder / f"begun-{number:06d}.{self.suffix}"

    def path(self, number: int) -> Path:
        """The file of a part."""
        return self.folder / f"{number:06d}.{self.suffix}"

    def paths(self) -> list[Path]:
        """The files of all parts, in order."""
        return [self.path(number) for number in range(len(self.ranges))]

    def note_written(self, staged: Path) -> None:
        """Record that a file holds the whole output, before it is moved to its place."""
        run = self.folder / RUN_FILE
        replace_file(run, json.dumps({**_read(run), WRITTEN: _stamp(staged)}))

    def has_written(self, whole: Path, about: Mapping[str, Any] | None = None) -> bool:
        """Whether a file is the whole output of these parts, which a kill left there; and of the run ``about``."""
        known = _read(self.folder / RUN_FILE)
        is_written = known.pop(WRITTEN, None) == _stamp(whole)
        return is_written and (about is None or known == json.loads(json.dumps(about)))

    def remove(self) -> None:
        """Remove the files of the run, and the folder if nothing else is in it, and release it."""
        self._remove_files()
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        self.release()

    def _remove_files(self, *but: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process may remove it too
            for path in sorted(self.folder.iterdir()):  # run.json is the last
                if self._is_ours(path) and path.name not in but:
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def kept_if_begun(self, *, first: bool) -> Iterator[None]:
        """After an error in the block, remove the folder if no part is begun, so that any other run may use it.

        If the user has to change something (ValueError), it is removed if no part is complete. Only the ``first``
        process does: the others may still be writing.
        """
        try:
            yield
        except BaseException as error:  # Ctrl-C too
            is_begun = not isinstance(error, ValueError) and any(self.folder.glob("begun-*"))
            if first and not is_begun and not self.done():
                self.remove()
            self.release()
            raise

    def _check_replaceable(self, known: Mapping[str, Any], differing: list[str], *, overwrite: bool) -> None:
        foreign = [path.name for path in self.folder.iterdir() if not self._is_ours(path)]
        if foreign:
            raise ValueError(
                f"{self.folder} holds {foreign[0]}, which no run wrote; move it away or name another file."
            )
        if overwrite:
            return
        if known:
            raise ValueError(
                f"{self.folder} holds the beginning of another run (other {', '.join(differing)}); continue that one, "
                "use --overwrite, or name another file."
            )
        if any(self.folder.glob(f"*.{self.suffix}")):
            raise ValueError(f"{self.folder / RUN_FILE} is damaged; use --overwrite to start again.")

    def _is_ours(self, path: Path) -> bool:
        """A part, ``run.json``, or the temporary file of one of them after a crash."""
        name = rf"(run\.json|{LOCK_FILE}|(begun-)?\d{{6}}\.{self.suffix})"
        return re.fullmatch(rf"{name}|\.{name}\.[0-9a-f]{{8}}", path.name) is not None


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


def _stamp(path: Path) -> list[int]:
    known = path.stat()
    return [known.st_size, known.st_mtime_ns]


def _read(path: Path) -> dict[str, Any]:
    """Empty if the file is missing or damaged."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
