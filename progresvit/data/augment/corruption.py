"""A corruption at a severity: one of the generated corruptions, or a function of your own.

H, W: height and width in pixels
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.random import Generator
from PIL import Image

from progresvit.data.augment.corruptions import CORRUPTIONS, SEVERITIES, Pixels, corrupt, to_array, to_image
from progresvit.data.sampler import Draw, mix_seed
from progresvit.io.imports import check_call, check_name, is_import_string, name_of, resolve, source_hash


class CustomCorruption(Protocol):
    """A function that corrupts an image."""

    def __call__(self, image: Pixels, severity: int, rng: Generator, /) -> Pixels:
        """An image (H, W, 3) with values from 0 to 1 -> the same, for a severity from 1 to 5; draw from ``rng`` only.

        Values beyond 0 and 1 are clipped.
        """
        ...


@dataclass(frozen=True)
class Corruption:
    """A corruption at a severity from 1 to 5."""

    name: str
    """A generated corruption such as ``fog``, or the import string of a function, ``my_module:my_corruption``."""
    severity: int
    function: CustomCorruption | None = field(default=None, compare=False)
    """The function; None: the one that the name means."""

    @classmethod
    def of(cls, function: CustomCorruption, severity: int) -> Corruption:
        """A corruption by a function of your own, which is tried on a small image."""
        name = name_of(function)
        if not (is_import_string(name) and hasattr(function, "__qualname__")):
            raise ValueError(
                f"{name} cannot identify a corruption; define it as a function at the top of a module, whose name and "
                "file the records keep."
            )
        _try_function(name, function)
        return cls(name, severity, function)

    @classmethod
    def parse(cls, text: str) -> Corruption:
        """From ``fog/3`` or ``my_module:my_corruption/3``."""
        name, _, severity = text.partition("/")
        check_corruption(name, example="my_module:my_corruption/3")
        if severity not in map(str, SEVERITIES):
            raise ValueError(f"{text!r} is not a corruption with a severity from 1 to 5, such as {name}/3.")
        return cls(name, int(severity))

    @property
    def source(self) -> str | None:
        """SHA-256 of the file of a function of your own."""
        return None if self.name in CORRUPTIONS else source_hash(self._function())

    def __call__(self, image: Image.Image, name: str) -> Image.Image:
        """Random draws depend on the image's name only, so every run and every worker gives the same pixels."""
        is_generated = self.name in CORRUPTIONS
        number = CORRUPTIONS.index(self.name) if is_generated else zlib.crc32(self.name.encode())
        seed = mix_seed(Draw.CORRUPTION, number, self.severity, zlib.crc32(name.encode()))
        if is_generated:
            return corrupt(image, self.name, self.severity, seed)
        return _corrupt_custom(image, self.name, self._function(), self.severity, seed)

    def _function(self) -> CustomCorruption:
        return find_corruption(self.name) if self.function is None else self.function


def _corrupt_custom(image: Image.Image, name: str, function: CustomCorruption, severity: int, seed: int) -> Image.Image:
    """A copy of an RGB image, corrupted by a function."""
    check_call(function, None, 1, None, what="corruption", example="corrupt(image, severity, rng)")
    array = to_array(image)
    corrupted = np.asarray(function(array.copy(), severity, np.random.default_rng(seed)))
    if corrupted.shape != array.shape or not np.isfinite(corrupted).all():
        is_whole = corrupted.shape == array.shape
        problem = "values that are not finite" if is_whole else f"an array of shape {corrupted.shape}"
        raise ValueError(
            f"the corruption {name} gives {problem} for an image of shape {array.shape}; return an array of the same "
            "shape with values from 0 to 1."
        )
    return to_image(corrupted)


def _try_function(name: str, function: CustomCorruption) -> None:
    _corrupt_custom(Image.new("RGB", (32, 32), (64, 128, 192)), name, function, SEVERITIES[0], 0)


def find_corruption(where: str) -> CustomCorruption:
    """The function that an import string names."""
    function: CustomCorruption = resolve(where, what="corruption", kind="function")
    return function


def check_corruption(name: str, *, example: str = "my_module:my_corruption") -> None:
    """Refuse an unknown name; a corruption of your own is tried on a small image, before workers run it."""
    check_name(name, CORRUPTIONS, what="corruption", example=example)
    if name not in CORRUPTIONS:
        _try_function(name, find_corruption(name))


def file_name(corruption: str) -> str:
    """The name of a corruption as a part of file names, in which some systems allow no colon."""
    return corruption.replace(":", ".")
