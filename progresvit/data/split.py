"""The split of a dataset without splits: a fifth of each class is held out, drawn by the hash of the names.

The draw depends on the names only, so training, resuming and evaluating find the same images, in folders or in tars, on
any machine. A dataset that grows is drawn anew, so a model keeps a list of its training images, which later evaluations
check. The share is fixed, since otherwise every later command would have to know it; for another share, lay the images
out as ``train/<class>/`` and ``val/<class>/``.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from progresvit.io.files import replace_file

TRAIN, VAL = "train", "val"
"""The splits that are drawn from a dataset without splits."""

ONE_IN = 5

TRAINING_LIST_FILE = "learned_from.json"
"""File in a model folder with the hashes of the names of its training images, if the split was drawn."""

SPLITS_FILE = "trained_on.json"
"""File in a model folder with hashes of the names of its training and its validation images."""


def hold_out(names: Sequence[str], *, class_id: str, one_in: int = ONE_IN) -> set[str]:
    """The names of a class that are held out: one in ``one_in``, and at least one. At least one stays for training."""
    if len(names) < 2:
        raise ValueError(
            f"the class {class_id} has only one image; at least two are needed, one to train on and one to hold out, "
            "so add images or remove the folder (evaluate with split='.' holds none out)."
        )
    count = max(1, round(len(names) / one_in))
    return set(sorted(names, key=_hash_name)[:count])


def halves_by_name(names: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of two halves, each in the order of ``names``: the names with the lower hashes, and the others.

    The half of an image depends on the names only, not on their order. The second half of an odd number has one more.
    """
    ranked = sorted(range(len(names)), key=lambda index: _hash_name(names[index]))
    middle = len(ranked) // 2
    return sorted(ranked[:middle]), sorted(ranked[middle:])


def save_training_list(folder: Path, names: Iterable[str]) -> None:
    """Write the list of training images to a model folder."""
    replace_file(folder / TRAINING_LIST_FILE, json.dumps(sorted(_hash_name(name) for name in names)) + "\n")


def save_splits(
    folder: Path, *, training: Iterable[str], validation: Iterable[str], evaluations: int | None = None
) -> None:
    """Write to a model folder which images it was trained and validated on.

    ``evaluations`` is the number of evaluations among which the validation images chose the model; None for no choice.
    """
    about: dict[str, Any] = {"training_sha256": _hash_names(training), "validation_sha256": _hash_names(validation)}
    if evaluations is not None:
        about["evaluations"] = evaluations
    replace_file(folder / SPLITS_FILE, json.dumps(about) + "\n")


def count_training_images(folder: Path | None, names: Collection[str]) -> int | None:
    """Number of these images that the model was trained on; None if its folder does not tell.

    Of a training split that was not drawn, only the whole split is known again.
    """
    if folder is None:
        return None
    if (path := folder / TRAINING_LIST_FILE).is_file():
        hashes = set(json.loads(path.read_text(encoding="utf-8")))
        return sum(_hash_name(name) in hashes for name in names)
    splits = _read_splits(folder)
    return len(names) if splits.get("training_sha256") == _hash_names(names) else None


def count_evaluations(folder: Path | None, names: Iterable[str]) -> int | None:
    """Number of evaluations on these images among which the model was chosen; None if it was not chosen on them."""
    splits = _read_splits(folder)
    chosen = "evaluations" in splits and splits["validation_sha256"] == _hash_names(names)
    return splits["evaluations"] if chosen else None


def _read_splits(folder: Path | None) -> dict[str, Any]:
    path = None if folder is None else folder / SPLITS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}


def _hash_names(names: Iterable[str]) -> str:
    """The same for any order."""
    return hashlib.sha256("".join(sorted(map(_hash_name, names))).encode()).hexdigest()


def _hash_name(name: str) -> str:
    normalised = unicodedata.normalize("NFC", name)  # macOS stores é as e and a combining accent
    return hashlib.sha256(normalised.encode()).hexdigest()
