"""What a model folder says about the images of its training, which certificates need to know."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from itertools import takewhile
from pathlib import Path

from pydantic import Field

from progresvit.data.split import hash_name
from progresvit.io.files import replace_file
from progresvit.io.model_folder import SPLITS_FILE, TRAINING_LIST_FILE
from progresvit.io.parse import Section, read_json


def save_training_list(folder: Path, names: Iterable[str]) -> None:
    """Write the list of training images to a model folder."""
    replace_file(folder / TRAINING_LIST_FILE, json.dumps(sorted(hash_name(name) for name in names)) + "\n")


class _Splits(Section):
    """What a training left in the folder of its model."""

    training_sha256: str
    validation_sha256: str
    evaluations: int | None = Field(None, ge=1)


def save_splits(
    folder: Path, *, training: Iterable[str], validation: Iterable[str], evaluations: int | None = None
) -> None:
    """Write to a model folder which images it was trained and validated on.

    ``evaluations`` is the number of evaluations among which the validation images chose the model; None for no choice.
    """
    about = _Splits(
        training_sha256=_hash_names(training), validation_sha256=_hash_names(validation), evaluations=evaluations
    )
    replace_file(folder / SPLITS_FILE, about.model_dump_json(exclude_none=True) + "\n")


def count_training_images(folder: Path | None, names: Collection[str]) -> int | None:
    """Number of these images that the model was trained on; None if its folder does not tell.

    A training split that was not drawn is known again only as a whole.
    """
    if folder is None:
        return None
    if (path := folder / TRAINING_LIST_FILE).is_file():
        try:
            hashes = json.loads(path.read_text(encoding="utf-8"))  # ImageNet's list exceeds the limit of other files
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}); restore it, or delete it.") from error
        if not isinstance(hashes, list) or not all(isinstance(value, str) for value in hashes):
            raise ValueError(f"{path} is not a list of hashes; restore it, or delete it.")
        hashes = set(hashes)
        return sum(hash_name(name) in hashes for name in names)
    splits = _read_splits(folder)
    if splits is None or splits.training_sha256 == splits.validation_sha256:  # equal names in both splits
        return None
    return len(names) if splits.training_sha256 == _hash_names(names) else None


def count_evaluations(folder: Path | None, names: Iterable[str]) -> int | None:
    """Number of evaluations on these images among which the model was chosen; None if it was not chosen on them."""
    splits = _read_splits(folder)
    if splits is None or splits.evaluations is None or splits.validation_sha256 != _hash_names(names):
        return None
    return splits.evaluations


def _read_splits(folder: Path | None) -> _Splits | None:
    path = None if folder is None else folder / SPLITS_FILE
    if path is None or not path.is_file():
        return None
    return read_json(_Splits, path, what="record of a training", remedy="train again, or delete it.")


def _hash_names(names: Iterable[str]) -> str:
    """The same in any order, and for a split of a dataset (``val/cat/1.jpg``) as for its folder (``cat/1.jpg``)."""
    parts = [name.split("/") for name in names]
    shared = len(list(takewhile(lambda level: len(set(level)) == 1, zip(*(part[:-1] for part in parts)))))
    inner = ["/".join(part[shared:]) for part in parts]
    return hashlib.sha256("".join(sorted(map(hash_name, inner))).encode()).hexdigest()
