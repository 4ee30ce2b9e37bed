"""scikit-learn's handwritten digits, 1,797 images of 8 × 8 pixels that its wheel contains, as a dataset of files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

SPLITS = {"train": 1097, "val": 400, "test": 300}
"""Images for training, for calibration, and held out. The writers are the same in all three."""
INNER, MARGIN = 32, 2
"""Side of a digit, in which each of the 8 × 8 pixels becomes 4 × 4, and width of the black border around it, which the
evaluation crop removes."""


def write_digits(folder: Path) -> None:
    """Write every digit to ``folder/<split>/<digit>/<index>.png``; the splits are always the same.

    Existing digits are overwritten. Other files in the folder are an error, since they would count as digits.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    paths = [folder / name for name in _names(data.target)]
    foreign = {path for path in folder.rglob("*") if path.is_file()} - set(paths)
    if foreign:
        raise ValueError(f"{min(foreign)} is not one of the digits; move it away, or choose another folder.")
    for path, pixels in zip(paths, data.images):
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray((pixels * (255 / 16)).round().astype(np.uint8))  # 0 … 16 -> bytes
        ImageOps.expand(small.resize((INNER, INNER), Image.Resampling.BICUBIC), MARGIN).save(path)


def _names(digits: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[str]:
    """The path of each digit: a fixed shuffle, cut into the splits."""
    splits = np.repeat(list(SPLITS), list(SPLITS.values()))
    place = np.empty(len(digits), dtype=np.int64)
    place[np.random.default_rng(0).permutation(len(digits))] = np.arange(len(digits))
    return [f"{splits[place[number]]}/{digit}/{number:04d}.png" for number, digit in enumerate(digits)]
