"""The folder of a run that is not finished: numbered parts and ``run.json``, which says whose they are."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from progresvit.io.files import replace_file

ABOUT = "run.json"


def claim(folder: Path, about: Mapping[str, Any], *, suffix: str, overwrite: bool) -> None:
    """Make the folder, or see that the one there is of this very run; another run's is replaced only if asked.

    ``about`` tells runs apart, ``suffix`` is that of the parts. What is not a run's is never touched.
    """
    wanted = json.loads(json.dumps(about))
    if folder.exists():
        before = _read(folder / ABOUT)
        differing = sorted(key for key in {*before, *wanted} if before.get(key) != wanted.get(key))
        if not differing:
            return
        foreign = [path.name for path in folder.iterdir() if not _is_ours(path, suffix)]
        if foreign:
            raise ValueError(f"{folder} holds {foreign[0]}, which is not ours; move it away or name another file.")
        if not before and any(folder.glob(f"*.{suffix}")) and not overwrite:
            raise ValueError(f"{folder / ABOUT} is damaged; use --overwrite to begin again.")
        if before and not overwrite:
            raise ValueError(
                f"{folder} holds the beginning of another run (other {', '.join(differing)}); go on with that one, use "
                "--overwrite, or name another file."
            )
        clear(folder, suffix=suffix)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / ABOUT, json.dumps(wanted))


def clear(folder: Path, *, suffix: str) -> None:
    """Remove what is a run's, and the folder unless it holds more."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _is_ours(path, suffix):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def part(folder: Path, number: int, *, suffix: str) -> Path:
    """Where a part lies."""
    return folder / f"{number:06d}.{suffix}"


def _is_ours(path: Path, suffix: str) -> bool:
    """A part, ``run.json``, or what a crash left of writing one of them."""
    name = rf"(run\.json|\d{{6}}\.{suffix})"
    return re.fullmatch(rf"{name}|\.{name}\.[0-9a-f]{{8}}", path.name) is not None


def _read(path: Path) -> dict[str, Any]:
    """Nothing if it is missing or damaged."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}
