"""Atomic replacement of files and folders: after a crash the old or the new one is there, complete."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SWAP = 2  # RENAME_EXCHANGE on Linux, RENAME_SWAP on macOS
_AT_FDCWD = -100  # Linux: paths are relative to the working directory
_NO_SWAP = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CONTINUES = "run the same again: what is finished is kept, and the run continues"


class WriteError(OSError):
    """An output that cannot be written, with the remedy.

    Args:
        path: The output.
        error: What the system reported.
        then: What to do when the cause is removed.
    """

    def __init__(self, path: Path, error: OSError, then: str) -> None:
        remedy = "free some space there" if error.errno in NO_SPACE else "remove the cause"
        reason = os.strerror(error.errno) if error.errno in NO_SPACE else error.strerror or error
        super().__init__(f"{path} cannot be written ({reason}); {remedy} and {then}.")
        self.errno = error.errno


@contextmanager
def writing(path: Path, then: str = CONTINUES) -> Iterator[None]:
    """An error of the disk in the block is a :class:`WriteError`."""
    try:
        yield
    except OSError as error:
        raise error if isinstance(error, WriteError) else WriteError(path, error, then) from error


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder. It replaces ``target`` if the block succeeds, and is removed otherwise.

    Everything is on the disk before the replacement, which is one system call. Only on a system that cannot exchange
    two folders (Windows, some network drives) the old folder is first renamed to ``.NAME.previous`` next to it, where
    it remains after a crash at that moment.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    staged.mkdir()
    try:
        if target.exists():
            staged.chmod(target.stat().st_mode)
        yield staged
        for path in (*staged.rglob("*"), staged):
            _sync(path)
        _put(staged, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)  # after a failure, or the old folder after an exchange


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file that fits in memory; readers see the old content or the new one."""
    with replacing_file(path) as staged:
        staged.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields where to write a file. It replaces ``path`` if the block succeeds, and is removed otherwise."""
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield staged
        _sync(staged)
        staged.replace(path)
        _sync(path.parent)
    finally:
        staged.unlink(missing_ok=True)


def is_staged(path: Path, names: str) -> bool:
    """Whether a killed process has left a path while it replaced a file or folder with a name of this pattern."""
    return re.fullmatch(rf"\.({names})\.[0-9a-f]{{8}}", path.name) is not None


def remove_staged(folder: Path, names: str) -> None:
    """Remove what killed processes have left in a folder. Others that are writing there would fail, so lock it before.

    Args:
        folder: It may be missing.
        names: A pattern of the names of the files and folders that were replaced.
    """
    for path in [path for path in folder.iterdir() if is_staged(path, names)] if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _put(staged: Path, target: Path) -> None:
    try:
        staged.rename(target)  # there is no target, or an empty one
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        _exchange(staged, target)


def _exchange(new: Path, old: Path) -> None:
    """Exchange two folders."""
    libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    here, there = os.fsencode(new), os.fsencode(old)
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, here, _AT_FDCWD, there, _SWAP)  # type: ignore[union-attr]
    elif sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(here, there, _SWAP)  # type: ignore[union-attr]
    else:
        return _exchange_in_steps(new, old)
    if not failed:
        return None
    code = ctypes.get_errno()
    if code in _NO_SWAP:
        return _exchange_in_steps(new, old)
    raise OSError(code, os.strerror(code), str(old))


def _exchange_in_steps(new: Path, old: Path) -> None:
    aside = old.with_name(f".{old.name}.previous")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    aside.rename(new)


def _sync(path: Path) -> None:
    """Wait until a file, or the list of entries of a folder, is on the disk."""
    if os.name != "posix" and path.is_dir():
        return  # only POSIX systems can open folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
