"""The evaluation crop, with Pillow and numpy only, and the description of the preprocessing. Needs no torch.

Letters: C channels, r the side of the model's input.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from progresvit.config import BaseConfig
from progresvit.data.decode import ImageError

INTERPOLATION = "bicubic"


def crop(image: Image.Image, config: BaseConfig) -> NDArray[np.uint8]:
    """Resize the shorter side and keep the centre square: an image -> (C, r, r) bytes, not normalised yet.

    Byte for byte the evaluation transform of timm.
    """
    size, (left, top) = resized_size(image.size, config)
    r = config.input_side
    if size[0] * size[1] > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ImageError(f"too long and thin to be resized safely ({image.width} x {image.height})")
    image = image.resize(size, Image.Resampling[INTERPOLATION.upper()])
    return _channels_first(image.crop((left, top, left + r, top + r)))


def crop_section(image: Image.Image, config: BaseConfig, box: tuple[float, float, float, float]) -> NDArray[np.uint8]:
    """A section of an image, resized in the same way: left, top, right and bottom -> (C, r, r) bytes.

    With the box of :func:`crop_box` it is the crop, but for the rounding of positions.
    """
    r = config.input_side
    return _channels_first(image.resize((r, r), Image.Resampling[INTERPOLATION.upper()], box=box))


def crop_box(size: tuple[int, int], config: BaseConfig) -> tuple[float, float, float, float]:
    """What the crop keeps of an image of this width and height: left, top, right and bottom, in its pixels."""
    resized, (left, top) = resized_size(size, config)
    r, x, y = config.input_side, size[0] / resized[0], size[1] / resized[1]
    return left * x, top * y, min(size[0], (left + r) * x), min(size[1], (top + r) * y)


def resized_size(size: tuple[int, int], config: BaseConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Width and height of the whole image at the scale of the crop, and the left and top end of the crop there."""
    shorter = math.floor(config.input_side / config.crop)
    width, height = size
    if not width or not height:
        raise ImageError("it has no pixels")
    longer = int(shorter * max(width, height) / min(width, height))
    resized = (shorter, longer) if width <= height else (longer, shorter)
    left, top = (round((side - config.input_side) / 2) for side in resized)
    return resized, (left, top)


def _channels_first(image: Image.Image) -> NDArray[np.uint8]:
    pixels = np.array(image)  # (r, r, C), or (r, r) of a grey image
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))  # (r, r, C) -> (C, r, r)


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
