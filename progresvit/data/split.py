"""The split of a dataset without splits: a fifth of each class is held out, drawn by the hash of the names.

The draw depends on the names only, so training, resuming and evaluating find the same images, in folders or in tars, on
any machine. A dataset that grows is drawn anew, so a model keeps a list of its training images, which later evaluations
check. The share is fixed, since otherwise every later command would have to know it; for another share, lay the images
out as ``train/<class>/`` and ``val/<class>/``.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

TRAIN, VAL = "train", "val"
"""The splits that are drawn from a dataset without splits."""

ONE_IN = 5


def hold_out(names: Sequence[str], *, class_id: str, one_in: int = ONE_IN) -> set[str]:
    """The names of a class that are held out: one in ``one_in``, and at least one. At least one stays for training."""
    if len(names) < 2:
        raise ValueError(
            f"the class {class_id} has only one image; at least two are needed, one to train on and one to hold out, "
            "so add images or remove the folder (evaluate with split='.' holds none out)."
        )
    count = max(1, round(len(names) / one_in))
    return set(sorted(names, key=hash_name)[:count])


def halves_by_name(names: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of two halves, each in the order of ``names``: the names with the lower hashes, and the others.

    The half of an image depends on the names only, not on their order. The second half of an odd number has one more.
    """
    ranked = sorted(range(len(names)), key=lambda index: hash_name(names[index]))
    middle = len(ranked) // 2
    return sorted(ranked[:middle]), sorted(ranked[middle:])


def draw_sample(names: Sequence[str], limit: int, *, seed: int) -> list[int]:
    """Indices of a random sample of ``limit`` images, in the order of ``names``.

    The draw depends on the seed and the names only. A larger sample with the same seed contains the smaller one.
    """
    ranked = sorted(range(len(names)), key=lambda index: hash_name(f"{seed}/{names[index]}"))
    return sorted(ranked[:limit])


def hash_name(name: str) -> str:
    """The same for a name on any system."""
    normalised = unicodedata.normalize("NFC", name)  # macOS stores é as e and a combining accent
    return hashlib.sha256(normalised.encode()).hexdigest()
