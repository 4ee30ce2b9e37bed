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
    r = config.input_side
    shorter = math.floor(r / config.crop)
    width, height = image.size
    if not width or not height:
        raise ImageError("it has no pixels")
    longer = int(shorter * max(width, height) / min(width, height))
    size = (shorter, longer) if width <= height else (longer, shorter)
    if shorter * longer > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ImageError(f"too long and thin to be resized safely ({width} x {height})")
    image = image.resize(size, Image.Resampling[INTERPOLATION.upper()])
    left, top = (round((side - r) / 2) for side in size)
    pixels = np.array(image.crop((left, top, left + r, top + r)))  # (r, r, C), or (r, r) of a grey image
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
