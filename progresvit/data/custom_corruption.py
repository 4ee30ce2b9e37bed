"""Corruptions of your own: functions that an import string names, ``my_module:my_corruption``.

H, W: height and width in pixels
"""

from __future__ import annotations

import inspect
from typing import Protocol

import numpy as np
from numpy.random import Generator
from PIL import Image

from progresvit.data.corruptions import CORRUPTIONS, SEVERITIES, Array, to_array, to_image
from progresvit.io.imports import import_named, is_import_string
from progresvit.io.parse import did_you_mean


class CustomCorruption(Protocol):
    """A function that corrupts an image."""

    def __call__(self, image: Array, severity: int, rng: Generator, /) -> Array:
        """An image (H, W, 3) with values from 0 to 1 -> the same, for a severity from 1 to 5; draw from ``rng`` only.

        Values beyond 0 and 1 are clipped.
        """
        ...


def find_corruption(where: str) -> CustomCorruption:
    """The function that an import string names."""
    function: CustomCorruption = import_named(where, what="corruption", kind="function")
    try:
        inspect.signature(function).bind(None, 1, None)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where} is no corruption: it is called with an image, a severity and a random generator, so define it as "
            "corrupt(image, severity, rng)."
        ) from None
    return function


def corrupt_custom(image: Image.Image, where: str, severity: int, seed: int) -> Image.Image:
    """A copy of an RGB image, corrupted by the function that an import string names."""
    array = to_array(image)
    found = np.asarray(find_corruption(where)(array.copy(), severity, np.random.default_rng(seed)))
    if found.shape != array.shape or not np.isfinite(found).all():
        problem = "values that are not finite" if found.shape == array.shape else f"an array of shape {found.shape}"
        raise ValueError(
            f"the corruption {where} gives {problem} for an image of shape {array.shape}; return an array of the same "
            "shape with values from 0 to 1."
        )
    return to_image(found)


def check_corruption(name: str) -> None:
    """Refuse an unknown name; a corruption of your own is tried on a small image, before workers run it."""
    if name in CORRUPTIONS:
        return
    if not is_import_string(name):
        raise ValueError(
            f"unknown corruption {name!r}; {did_you_mean(name, CORRUPTIONS)} Your own is my_module:my_corruption."
        )
    corrupt_custom(Image.new("RGB", (32, 32), (64, 128, 192)), name, SEVERITIES[0], 0)


def file_name(corruption: str) -> str:
    """The name of a corruption as a part of file names, in which some systems allow no colon."""
    return corruption.replace(":", ".")
