"""Masks and labels: from the bytes of a mask to class indices, and the files that name the classes.

A mask is a PNG with one label number per pixel: grey values or the indices of a palette. Labels say which label number
(a raw value) is which class. A label file is text with one class name per line for the raw values 0, 1, 2, …, or JSON:
a list of names, or an object ``{"raw value": "name"}``. Classes are in the order of their raw values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import UnidentifiedImageError

from progresvit.data.dataset import some_of
from progresvit.data.decode import identify

IGNORE = 255
"""The class index of ignored pixels."""

NAME_LABELS = "labels=… to evaluate, task_options.labels=… to train"
NAME_IGNORED = "ignore=… to evaluate, task_options.ignore=… to train"
"""Arguments with which a user names labels and ignored values, for messages."""

HIGHEST = 65535
"""The highest raw value of a mask."""

MODES = ("L", "P", "1", "I", "I;16", "I;16L", "I;16B", "I;16N")
"""Pillow's modes whose pixels are label numbers."""

_UNKNOWN = -1


class MaskError(ValueError):
    """A mask that cannot be used, and the reason."""


class Labels(NamedTuple):
    """The classes of a dataset."""

    names: tuple[str, ...]
    values: tuple[int, ...]
    """The raw value of each class."""
    ignored: tuple[int, ...] = ()
    """Raw values that are ignored in every dataset with these labels."""


_CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")

BUILT_IN = {
    "camvid": Labels(_CAMVID, tuple(range(len(_CAMVID))), ignored=(11,)),  # 11: void in the copy of SegNet
    "pets": Labels(("pet", "background", "border"), (1, 2, 3)),
}


def decode_mask(content: bytes) -> NDArray[Any]:
    """The label numbers of a mask, integers (H, W)."""
    try:
        mask = identify(content)
        mask.load()
    except UnidentifiedImageError as error:
        raise MaskError("is not an image, or of a format that Pillow does not read; save it as a PNG") from error
    except Exception as error:  # Pillow's plugins raise many kinds of exceptions on damaged files
        raise MaskError(f"is damaged or truncated ({error}); save or copy it again") from error
    if mask.mode not in MODES:
        raise MaskError(
            f"has {mask.mode} pixels, not label numbers; save the label numbers as an 8-bit grey or palette PNG"
        )
    pixels: NDArray[Any] = np.asarray(mask)
    if mask.mode == "1":
        pixels = pixels.astype(np.uint8)
    if mask.mode == "L" and mask.format == "PNG":
        depth = content[24]  # in the header: bits per pixel
        pixels = pixels // (255 // (2**depth - 1))  # Pillow scales 2 and 4 bits to 0..255
    return pixels


def class_indices(raw: NDArray[Any], values: tuple[int, ...], ignored: tuple[int, ...]) -> NDArray[np.uint8]:
    """The class of each raw value, or IGNORE. A value that is neither a label nor ignored is an error."""
    inside = raw if raw.itemsize < 4 else np.where((raw < 0) | (raw > HIGHEST), HIGHEST + 1, raw)
    indices: NDArray[np.int16] = _table(values, ignored)[inside]
    if indices.min() == _UNKNOWN:
        unknown = np.unique(raw[indices == _UNKNOWN]).tolist()
        raise MaskError(
            f"has pixels of value {_ranges(unknown)}, which no label names: the raw values of the {len(values)} "
            f"classes are {_ranges(values)}, ignored are {_ranges(ignored) or 'none'}; add the value to the labels "
            f"({NAME_LABELS}) or to the ignored values ({NAME_IGNORED})"
        )
    return indices.astype(np.uint8)


@lru_cache(maxsize=8)
def _table(values: tuple[int, ...], ignored: tuple[int, ...]) -> NDArray[np.int16]:
    """The class of every raw value; the last entry is for values out of range."""
    table = np.full(HIGHEST + 2, _UNKNOWN, np.int16)
    table[np.array(values, np.intp)] = np.arange(len(values))
    table[np.array(ignored, np.intp)] = IGNORE
    return table


def _ranges(values: Iterable[int]) -> str:
    """Numbers for a message, with neighbours joined: 0–10, 255."""
    runs: list[tuple[int, int]] = []
    for value in sorted(values):
        first = runs.pop()[0] if runs and runs[-1][1] == value - 1 else value
        runs.append((first, value))
    return some_of([str(first) if first == last else f"{first}–{last}" for first, last in runs])


def check_values(names: Sequence[str], values: Sequence[int], ignored: Sequence[int]) -> None:
    """Refuse more classes than a mask holds, values that a mask cannot have, and values both named and ignored."""
    if len(names) > IGNORE:
        raise ValueError(
            f"the labels name {len(names)} classes, and at most {IGNORE} are possible; leave classes out and ignore "
            f"their values ({NAME_IGNORED})."
        )
    wrong = sorted(value for value in {*values, *ignored} if not 0 <= value <= HIGHEST)
    if wrong:
        raise ValueError(f"{wrong[0]} cannot be a value of a mask; labels and ignored values are 0 to {HIGHEST}.")
    both = [f"{value} ({name})" for name, value in zip(names, values) if value in ignored]
    if both:
        raise ValueError(
            f"labels and ignored values have {some_of(both)} in common; remove it from the labels or from the ignored "
            f"values ({NAME_IGNORED})."
        )


def parse_labels(content: bytes, place: str, *, is_json: bool) -> Labels:
    """The labels in the content of a label file; errors name its place."""
    text = _decode_text(content, place)
    if is_json:
        try:
            parsed = json.loads(text, object_pairs_hook=tuple)  # a tuple of pairs, which may repeat a value
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is not valid JSON ({error}).") from error
        if not isinstance(parsed, tuple | list):
            raise ValueError(f'{place} holds no labels; write a list of names, or an object {{"raw value": "name"}}.')
        pairs = list(parsed) if isinstance(parsed, tuple) else list(enumerate(parsed))
    else:
        pairs = list(enumerate(text.rstrip().splitlines()))
    return _to_labels(pairs, place)


def parse_object_info(content: bytes, place: str) -> Labels:
    """The labels of ADE20K's ``objectInfo150.txt``: one row per class, number first, names last; 0 is ignored."""
    rows = [line.split("\t") for line in _decode_text(content, place).splitlines()[1:] if line.strip()]
    return _to_labels([(row[0].strip(), row[-1].split(",")[0]) for row in rows], place)._replace(ignored=(0,))


def _decode_text(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text; save it as UTF-8.") from error


def _to_labels(pairs: Sequence[tuple[int | str, object]], place: str) -> Labels:
    """Labels from pairs (raw value, name), in the order of the values."""
    names: dict[int, str] = {}
    for raw, name in pairs:
        if not str(raw).isdecimal() or int(raw) > HIGHEST:
            raise ValueError(f"{place}: {raw!r} is not a raw value of a mask; use whole numbers from 0 to {HIGHEST}.")
        value = int(raw)
        if value in names:
            raise ValueError(f"{place} names the raw value {value} twice; keep one of the names.")
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{place}: the raw value {value} has no name (but {name!r}); give each class a name.")
        if name.strip() in names.values():
            raise ValueError(f"{place} has the class {name.strip()} twice; give each class a name of its own.")
        names[value] = name.strip()
    if not names:
        raise ValueError(f"{place} names no classes; write one name per line.")
    values = tuple(sorted(names))
    return Labels(tuple(names[value] for value in values), values)
