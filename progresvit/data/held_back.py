"""Which pictures of a set without splits are held back: a fifth of each class, drawn by the hash of their names.

The draw needs nothing but the names, so training, resuming and evaluating find the same pictures, here or elsewhere,
in folders or in tars. There is no share to set, since a share would have to be told to every later command; who wants
another one lays the pictures out as ``train/<class>/`` and ``val/<class>/``.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

TRAIN, VAL = "train", "val"
"""The splits that a set without splits can be asked for."""

ONE_IN = 5


def hold_back(names: Sequence[str], *, class_id: str) -> set[str]:
    """The names of a class that are held back: one in five, but one at least, and one at least stays."""
    if len(names) < 2:
        raise ValueError(
            f"the class {class_id} has one picture only; two are the least, one to learn from and one to hold back, "
            "so add pictures or remove the folder."
        )
    count = max(1, round(len(names) / ONE_IN))
    return set(sorted(names, key=_draw)[:count])


def _draw(name: str) -> str:
    return hashlib.sha256(unicodedata.normalize("NFC", name).encode()).hexdigest()  # a Mac spells é as e and ´
