"""A folder that one run at a time uses: the file ``lock`` in it is locked by that run, and names its process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import warnings
from pathlib import Path
from typing import Any

LOCK_FILE = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of some network drives."""
WAIT = 0.2
"""Seconds until a lock counts as taken: a run that is just ending may still hold it."""


class FolderLock:
    """The lock of a folder, for other processes and within this one. It ends with the process, also if that is killed.

    Args:
        folder: It is created when it is locked.
        instead: The alternative to waiting that the error for a folder in use suggests.
    """

    def __init__(self, folder: Path, instead: str) -> None:
        self.folder, self.instead = folder, instead
        self._path = folder / LOCK_FILE
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._lock: Any = None
        self._is_new = False

    def acquire(self) -> None:
        """Refuse a folder that another run uses."""
        if self._lock is not None:
            return
        import filelock

        self._is_new = not self.folder.exists()
        lock = filelock.FileLock(self._path, timeout=WAIT, thread_local=False, fallback_to_soft=False)
        while not lock.is_locked:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except FileNotFoundError:  # the run that used the folder has just removed it
                continue
            except filelock.Timeout:
                raise ValueError(
                    f"{self.folder} is used by another run right now ({self._owner()}); wait until it ends, or "
                    f"{self.instead}."
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                warnings.warn(
                    f"{self.folder} is on a drive without locks; do not use it in two runs at a time.", stacklevel=2
                )
                return
        self._lock = lock
        with contextlib.suppress(OSError):  # Windows allows nobody to write a locked file
            self._path.write_text(self._process, encoding="utf-8")

    @property
    def is_held(self) -> bool:
        """Whether no other run uses the folder; False on a drive without locks, where nobody can tell."""
        return self._lock is not None

    def release(self) -> None:
        """Let other runs use the folder; if it was created for the lock and nothing else is in it, it is removed."""
        if self._lock is None:
            return
        if self._owner() == self._process:  # else someone removed the folder, and another run made it again
            with contextlib.suppress(OSError):
                self._path.unlink()
                if self._is_new:
                    self.folder.rmdir()
        self._lock.release()
        self._lock = None

    def _owner(self) -> str:
        """The text in the lock file, with which the run that has the lock describes itself."""
        with contextlib.suppress(OSError):
            if text := self._path.read_text(encoding="utf-8", errors="replace"):
                return text
        return "it is starting"
