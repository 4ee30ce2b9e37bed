"""A dataset of images with masks for semantic segmentation, by index, in a folder or in tars with the same layout.

- Pairs: ``images/<split>/NAME.jpg`` and ``annotations/<split>/NAME.png``, with a label file at the top (``labels.txt``
  or ``labels.json``, see ``masks.py``) or given. The split ``.`` means all images. Without split folders, train and val
  are drawn (``split.py``).
- ADE20K as released: pairs with the splits ``training`` and ``validation`` (train and val mean these) and
  ``objectInfo150.txt`` at the top.
- Oxford-IIIT Pets as released: ``images/`` (or ``original/``), ``annotations/trimaps/``, and the lists
  ``annotations/trainval.txt`` and ``annotations/test.txt``. Train and val are drawn from trainval, breed by breed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image

from progresvit.data.dataset import SUFFIXES, UNLABELLED, Entry, ImageDataset, find_roots, is_hidden, tar_members
from progresvit.data.segmentation.masks import (
    BUILT_IN,
    NAME_LABELS,
    Labels,
    MaskError,
    check_values,
    class_indices,
    decode_mask,
    parse_labels,
    parse_object_info,
)
from progresvit.data.split import TRAIN, VAL, hold_out

_IMAGES, _OTHER_IMAGES, _MASKS = "images", "original", "annotations"
_LABEL_FILES = ("labels.txt", "labels.json")
_OBJECT_INFO, _ADE_SPLITS = "objectInfo150.txt", {TRAIN: "training", VAL: "validation"}
_TRIMAPS, _TRAINVAL, _TEST = f"{_MASKS}/trimaps", "trainval", "test"


@dataclass(frozen=True, kw_only=True)
class SegmentationDataset(ImageDataset):
    """A split of a dataset of images with masks. Its class ids are the names of the classes; images have no class."""

    masks: tuple[Entry, ...]
    """The mask of each image."""
    values: tuple[int, ...]
    """The raw value of each class in the masks."""
    ignored: tuple[int, ...]
    """The raw values of ignored pixels."""

    def __post_init__(self) -> None:
        check_values(self.class_ids, self.values, self.ignored)

    def subset(self, indices: Iterable[int]) -> SegmentationDataset:
        indices = list(indices)
        images = super().subset(indices)
        assert isinstance(images, SegmentationDataset)
        return replace(images, masks=tuple(self.masks[index] for index in indices))

    def read_mask(self, index: int) -> NDArray[np.uint8]:
        """The class index of each pixel, or IGNORE: (H, W). A problem with the file is a :class:`MaskError`."""
        entry = self.masks[index]
        try:
            return class_indices(decode_mask(entry.read()), self.values, self.ignored)
        except OSError as error:
            raise MaskError(f"the mask {_place(entry)} cannot be read ({error.strerror or error}).") from error
        except MaskError as error:
            raise MaskError(f"the mask {_place(entry)} {error}.") from error

    def read_pair(self, index: int) -> tuple[Image, NDArray[np.uint8]]:
        """The RGB image and its mask, of the same size.

        A problem with the image file is an ``ImageError``, any other a :class:`MaskError`.
        """
        image, mask = self.read_image(index, reduce=False), self.read_mask(index)
        height, width = mask.shape
        if image.size != (width, height):
            raise MaskError(
                f"the mask {_place(self.masks[index])} is {width}×{height}, and its image {self.entries[index].name} "
                f"is {image.width}×{image.height} (after EXIF rotation); give both the same size and orientation."
            )
        return image, mask


def _place(entry: Entry) -> str:
    return entry.path if entry.size < 0 else f"{entry.name} in {entry.path}"


def find_segmentation(
    source: str | os.PathLike[str],
    split: str,
    *,
    labels: str | os.PathLike[str] | None = None,
    ignore: Iterable[int] = (255,),
    default_names: Sequence[str] | None = None,
) -> SegmentationDataset:
    """The images and masks of a split.

    Args:
        source: Folder or tar in one of the layouts above.
        split: Name of the split.
        labels: Label file, or a built-in list: camvid, pets, or ade20k (needs ``objectInfo150.txt`` at the top of the
            source). By default the label file at the top of the source, else the labels of the layout.
        ignore: Raw values of the masks to ignore.
        default_names: Names of the raw values 0, 1, 2, … for data that does not name its classes; the model's labels.
    """
    files = _find_files(source)
    are_pets = any(name.startswith((f"{_TRIMAPS}/", f"{_MASKS}/{_TRAINVAL}.txt")) for name in files)
    pairs = _find_pets(files, source, split) if are_pets else _find_pairs(files, source, split)
    classes = _find_labels(files, source, labels, are_pets=are_pets, default_names=default_names)
    return SegmentationDataset(
        classes.names,
        pairs.images,
        (UNLABELLED,) * len(pairs.images),
        pairs.drawn_from,
        masks=pairs.masks,
        values=classes.values,
        ignored=tuple(sorted({*classes.ignored, *ignore})),
    )


def _find_files(source: str | os.PathLike[str]) -> dict[str, Entry]:
    """The files at the top and below the folders of images and masks, by name."""
    files: dict[str, Entry] = {}
    for root in find_roots(os.fspath(source)):
        members = tar_members(root, (*SUFFIXES, ".txt", ".json")) if root.suffix == ".tar" else _folder_members(root)
        for parts, entry in members:
            if (len(parts) == 1 or parts[0] in (_IMAGES, _OTHER_IMAGES, _MASKS)) and not is_hidden(parts):
                files.setdefault(entry.name, entry)  # a tar may be next to its unpacked contents
    return files


def _folder_members(root: Path) -> Iterator[tuple[tuple[str, ...], Entry]]:
    paths = [path for path in root.iterdir() if path.is_file()]
    for top in (_IMAGES, _OTHER_IMAGES, _MASKS):
        paths += [Path(folder, name) for folder, _, names in os.walk(root / top, followlinks=True) for name in names]
    for path in paths:
        inside = path.relative_to(root)
        yield inside.parts, Entry(str(path), inside.as_posix())


def _by_stem(files: Mapping[str, Entry], folder: str, suffixes: Collection[str] = SUFFIXES) -> dict[str, Entry]:
    """The images below a folder, sorted, by their path in it without the suffix."""
    images: dict[str, Entry] = {}
    for name in sorted(files):
        stem, suffix = os.path.splitext(name.removeprefix(f"{folder}/"))
        if not name.startswith(f"{folder}/") or suffix.lower() not in suffixes:
            continue
        if stem in images:
            raise ValueError(f"{images[stem].name} and {name} differ in the suffix only; keep one of them.")
        images[stem] = files[name]
    return images


class _Pairs(NamedTuple):
    images: tuple[Entry, ...]
    masks: tuple[Entry, ...]
    drawn_from: int | None


def _find_pairs(files: Mapping[str, Entry], source: str | os.PathLike[str], split: str) -> _Pairs:
    """The pairs of a split: equal names below ``images/`` and ``annotations/``."""
    images = _by_stem(files, _IMAGES)
    if not images:
        raise ValueError(
            f"{source} has no images under {_IMAGES}/; lay the data out as {_IMAGES}/<split>/NAME.jpg and "
            f"{_MASKS}/<split>/NAME.png, in a folder or in tars."
        )
    folders = {stem.split("/")[0] for stem in images if "/" in stem}
    if _OBJECT_INFO in files and split not in folders:
        split = _ADE_SPLITS.get(split, split)
    prefix = PurePosixPath(split).parts  # none for "."
    stems = [stem for stem in images if PurePosixPath(stem).parts[: len(prefix)] == prefix]
    drawn_from = None
    if split in (TRAIN, VAL) and not folders:
        held_out = hold_out([entry.name for entry in images.values()], class_id=_IMAGES)
        stems = [stem for stem, entry in images.items() if (entry.name in held_out) == (split == VAL)]
        drawn_from = len(images)
    if not stems:
        raise ValueError(
            f"{source} has no images under {_IMAGES}/{split}/; its splits are "
            f"{', '.join(sorted(folders) or (TRAIN, VAL))}, and '.' for all images."
        )
    return _to_pairs(images, stems, drawn_from, files=files, mask_folder=_MASKS, source=source)


def _find_pets(files: Mapping[str, Entry], source: str | os.PathLike[str], split: str) -> _Pairs:
    """The pairs of a split of the Oxford-IIIT Pets, which a list names."""
    if split not in (TRAIN, VAL, _TRAINVAL, _TEST):
        raise ValueError(f"{source} (Oxford-IIIT Pets) has no split {split}; use train, val, trainval or test.")
    listing = f"{_MASKS}/{_TEST if split == _TEST else _TRAINVAL}.txt"
    if listing not in files:
        raise ValueError(f"{source} lacks {listing}, the list of {split}; copy it from the release of the Pets.")
    lines = files[listing].read().decode().splitlines()
    names = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    tops = {name.split("/")[0] for name in files}
    folder = _OTHER_IMAGES if _OTHER_IMAGES in tops and _IMAGES not in tops else _IMAGES
    images = _by_stem(files, folder)
    missing = [name for name in names if name not in images]
    if missing:
        raise ValueError(
            f"{source} has no images of {len(missing)} of the {len(names)} names in {listing}, the first is "
            f"{folder}/{missing[0]}.jpg; copy them from the release of the Pets."
        )
    selected, drawn_from = set(names), None
    if split in (TRAIN, VAL):
        breeds: dict[str, list[str]] = {}
        for name in names:
            breeds.setdefault(name.rpartition("_")[0], []).append(name)
        held_out = set().union(*(hold_out(breeds[breed], class_id=breed) for breed in breeds))
        selected, drawn_from = held_out if split == VAL else selected - held_out, len(names)
    stems = [stem for stem in images if stem in selected]
    return _to_pairs(images, stems, drawn_from, files=files, mask_folder=_TRIMAPS, source=source)


def _to_pairs(
    images: Mapping[str, Entry],
    stems: list[str],
    drawn_from: int | None,
    *,
    files: Mapping[str, Entry],
    mask_folder: str,
    source: str | os.PathLike[str],
) -> _Pairs:
    masks = _by_stem(files, mask_folder, (".png",))
    missing = [stem for stem in stems if stem not in masks]
    if missing:
        image, place = images[missing[0]].name, f"{mask_folder}/{missing[0]}"
        others = f" (and {len(missing) - 1} more images have none)" if len(missing) > 1 else ""
        remedy = "add the mask or remove the image"
        if other := next((place + suffix for suffix in SUFFIXES if place + suffix in files), None):
            remedy = f"{other} exists, but masks must be PNG, since JPEG changes their values: save them again as PNG"
        raise ValueError(f"{image} of {source} has no mask {place}.png{others}; {remedy}.")
    return _Pairs(tuple(images[stem] for stem in stems), tuple(masks[stem] for stem in stems), drawn_from)


def _find_labels(
    files: Mapping[str, Entry],
    source: str | os.PathLike[str],
    labels: str | os.PathLike[str] | None,
    *,
    are_pets: bool,
    default_names: Sequence[str] | None,
) -> Labels:
    """The requested labels, else the label file at the top, else the labels of the layout, else the default names."""
    at_top = [name for name in _LABEL_FILES if name in files]
    if labels is not None and os.fspath(labels) != "ade20k":
        return _open_labels(os.fspath(labels))
    if labels is None and len(at_top) > 1:
        raise ValueError(
            f"{source} has {' and '.join(at_top)}; keep one of them, or name the label file ({NAME_LABELS})."
        )
    if labels is None and at_top:
        entry = files[at_top[0]]
        return parse_labels(entry.read(), _place(entry), is_json=entry.name.endswith(".json"))
    if _OBJECT_INFO in files:
        return parse_object_info(files[_OBJECT_INFO].read(), _place(files[_OBJECT_INFO]))
    if labels is not None:
        raise ValueError(f"the labels ade20k are read from {_OBJECT_INFO} of the release; copy it to {source}.")
    if are_pets:
        return BUILT_IN["pets"]
    if default_names is not None:
        return Labels(tuple(default_names), tuple(range(len(default_names))))
    raise ValueError(
        f"{source} does not say what its classes are; add a file labels.txt with a class name per line, for the mask "
        'values 0, 1, 2, …, or labels.json with {"value": "name", …}, or name a label file or a built-in list '
        f"({', '.join(BUILT_IN)}) as {NAME_LABELS}."
    )


def _open_labels(name: str) -> Labels:
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name).expanduser()
    if not path.is_file() or path.suffix not in (".txt", ".json"):
        raise ValueError(
            f"{name} is not a label file; pass a .txt with one class name per line, a .json, or a built-in list "
            f"({', '.join(BUILT_IN)}, ade20k) as {NAME_LABELS}."
        )
    return parse_labels(path.read_bytes(), str(path), is_json=path.suffix == ".json")
