"""The evaluation crop, with Pillow and numpy only, and the description of the preprocessing. Needs no torch.

Letters: C channels, r the side of the model's input.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from progresvit.data.decode import ImageError

if TYPE_CHECKING:
    from progresvit.config import BaseConfig  # it imports pydantic, which worker processes need not

INTERPOLATION = "bicubic"

Box = tuple[float, float, float, float]
"""A section of an image: left, top, right and bottom, in its pixels."""


@dataclass(frozen=True)
class EvaluationCrop:
    """The shorter side is resized, and the centre square is kept. Byte for byte the evaluation transform of timm."""

    side: int
    """Side of the square, r."""
    share: float
    """Share of the resized image's shorter side that the square keeps."""
    channels: int

    @classmethod
    def of(cls, config: BaseConfig) -> EvaluationCrop:
        """The crop for the images of a model."""
        return cls(config.input_side, config.crop, config.in_channels)

    @property
    def byte_count(self) -> int:
        """Size of the result."""
        return self.channels * self.side**2

    def __call__(self, image: Image.Image, section: Box | None = None) -> NDArray[np.uint8]:
        """An RGB image -> (C, r, r) bytes, not normalised yet.

        ``section`` replaces the position of the crop, for an image that was decoded at a smaller scale. With
        :meth:`box` as section, the result is the crop, except for the rounding of positions.
        """
        r, interpolation = self.side, Image.Resampling[INTERPOLATION.upper()]
        if self.channels == 1:
            image = image.convert("L")
        if section is None:
            size, (left, top) = self.place(image.size)
            if size[0] * size[1] > (Image.MAX_IMAGE_PIXELS or math.inf):
                raise ImageError(f"too long and thin to be resized safely ({image.width} x {image.height})")
            image = image.resize(size, interpolation).crop((left, top, left + r, top + r))
        else:
            image = image.resize((r, r), interpolation, box=section)
        pixels = np.array(image).reshape(r, r, -1)  # (r, r, C), or (r, r) -> (r, r, 1) of a grey image
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))  # (r, r, C) -> (C, r, r)

    def box(self, size: tuple[int, int]) -> Box:
        """The section that the crop keeps of an image of this width and height."""
        resized, (left, top) = self.place(size)
        r, x, y = self.side, size[0] / resized[0], size[1] / resized[1]
        return left * x, top * y, min(size[0], (left + r) * x), min(size[1], (top + r) * y)

    def place(self, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Width and height of the whole image at the scale of the crop, and the left and top end of the crop there."""
        shorter = math.floor(self.side / self.share)
        width, height = size
        if not width or not height:
            raise ImageError("it has no pixels")
        longer = int(shorter * max(width, height) / min(width, height))
        resized = (shorter, longer) if width <= height else (longer, shorter)
        left, top = (round((length - self.side) / 2) for length in resized)
        return resized, (left, top)


def crop(image: Image.Image, config: BaseConfig) -> NDArray[np.uint8]:
    """The evaluation crop of an RGB image for a model: -> (C, r, r) bytes, not normalised yet."""
    return EvaluationCrop.of(config)(image)


def describe_preprocessing(config: BaseConfig) -> dict[str, Any]:
    """Everything that determines the pixels that a model sees of an image."""
    return {
        "resolution": config.input_side,
        "crop": config.crop,
        "interpolation": INTERPOLATION,
        "channels": config.in_channels,
        "mean": list(config.mean),
        "std": list(config.std),
    }


def preprocessing_hash(config: BaseConfig) -> str:
    """SHA-256 of the description: equal for equal preprocessing only."""
    return description_hash(describe_preprocessing(config))


def description_hash(description: Mapping[str, Any]) -> str:
    """SHA-256 of a description of preprocessing."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
