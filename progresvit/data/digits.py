"""scikit-learn's handwritten digits, 1,797 real ones of 8 × 8 pixels inside its wheel, as a set of picture files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SPLITS = {"train": 1097, "val": 400, "test": 300}
"""To learn from, to calibrate on, and held back. The writers are the same in all three."""
INNER, MARGIN = 32, 2
"""Pixels of a digit, each of the 8 × 8 enlarged to 4 × 4, and of the black edge around it, which evaluation crops."""


def write_digits(folder: Path) -> None:
    """Every digit to ``folder/<split>/<digit>/<its number in the set>.png``, in the same split each time.

    What is there already is written again; a picture that is not of the set is an error, as it would count as one.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    paths = [folder / name for name in _names(data.target)]
    foreign = {path for path in folder.rglob("*") if path.is_file()} - set(paths)
    if foreign:
        raise ValueError(f"{min(foreign)} is none of the digits; move it away, or name another folder.")
    for path, pixels in zip(paths, data.images):
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray((pixels * (255 / 16)).round().astype(np.uint8))  # 0 … 16 -> bytes
        ImageOps.expand(small.resize((INNER, INNER), Image.Resampling.BICUBIC), MARGIN).save(path)


def _names(digits: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[str]:
    """Where each digit goes: a shuffle that is always the same, cut into the splits."""
    splits = np.repeat(list(SPLITS), list(SPLITS.values()))
    place = np.empty(len(digits), dtype=np.int64)
    place[np.random.default_rng(0).permutation(len(digits))] = np.arange(len(digits))
    return [f"{splits[place[number]]}/{digit}/{number:04d}.png" for number, digit in enumerate(digits)]
