"""Which pictures of a set without splits are held back: a fifth of each class, drawn by the hash of their names.

The draw needs nothing but the names, so training, resuming and evaluating find the same pictures, here or elsewhere,
in folders or in tars. A set that grows is drawn anew, so a model keeps a list of what it learned from, by which a later
evaluation can tell. There is no share to set, since a share would have to be told to every later command; who wants
another one lays the pictures out as ``train/<class>/`` and ``val/<class>/``.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

from progresvit.io.files import replace_file

TRAIN, VAL = "train", "val"
"""The splits that a set without splits can be asked for."""

ONE_IN = 5

LEARNED_FILE = "learned_from.json"
"""In a model's folder: hashes of the names of the pictures that it learned from, where these were drawn."""


def hold_back(names: Sequence[str], *, class_id: str) -> set[str]:
    """The names of a class that are held back: one in five, but one at least, and one at least stays."""
    if len(names) < 2:
        raise ValueError(
            f"the class {class_id} has one picture only; two are the least, one to learn from and one to hold back, "
            "so add pictures or remove the folder (--split . measures on all pictures and holds none back)."
        )
    count = max(1, round(len(names) / ONE_IN))
    return set(sorted(names, key=_draw)[:count])


def list_learned(folder: Path, names: Iterable[str]) -> None:
    """Leave the list with a model."""
    replace_file(folder / LEARNED_FILE, json.dumps(sorted(_draw(name) for name in names)) + "\n")


def count_learned(folder: Path, names: Iterable[str]) -> int:
    """How many of the pictures the model has learned from; none if it has no list."""
    path = folder / LEARNED_FILE
    learned = set(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else set()
    return sum(_draw(name) in learned for name in names)


def _draw(name: str) -> str:
    return hashlib.sha256(unicodedata.normalize("NFC", name).encode()).hexdigest()  # a Mac spells é as e and ´
