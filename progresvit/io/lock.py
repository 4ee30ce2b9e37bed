"""A folder that one run at a time uses: the file ``lock`` in it is locked by that run, and names its process."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import warnings
from pathlib import Path

LOCK_FILE = "lock"


class FolderLock:
    """The lock of a folder. It ends with the process, also if that is killed.

    Args:
        folder: It is created when it is locked.
        instead: What the error for a folder in use suggests instead of waiting.
    """

    def __init__(self, folder: Path, instead: str) -> None:
        self.folder, self.instead = folder, instead
        self._handle: int | None = None
        self._is_new = False

    def acquire(self) -> None:
        """Refuse a folder that another process uses."""
        if self._handle is not None:
            return
        try:
            import fcntl
        except ImportError:  # Windows
            return
        self._is_new = not self.folder.exists()
        while self._handle is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / LOCK_FILE
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # the run that used the folder has just removed it
                continue
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                    os.truncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    self._handle, handle = handle, -1
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise ValueError(
                        f"{self.folder} is used by another run right now ({_text(handle)}); wait until it ends, or "
                        f"{self.instead}."
                    ) from None
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                warnings.warn(
                    f"{self.folder} is on a drive without locks; do not use it in two runs at a time.", stacklevel=2
                )
                return
            finally:
                if handle >= 0:
                    os.close(handle)

    def release(self) -> None:
        """Let other runs use the folder; if it was created for the lock and nothing else is in it, it is removed."""
        if self._handle is None:
            return
        path = self.folder / LOCK_FILE
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._handle), path.stat()):  # not that of a run after this one
                path.unlink()
                if self._is_new:
                    self.folder.rmdir()
        os.close(self._handle)
        self._handle = None


def _text(handle: int) -> str:
    """What the run that has the lock wrote about itself."""
    return os.pread(handle, 200, 0).decode("utf-8", "replace") or "it is starting"
