"""The evaluation crop with Pillow and numpy alone, for hosts without torch: the same bytes as the transform gives.

Letters: C channels, r the side of the model's input.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from progresvit.config import ModelConfig
from progresvit.data.decode import PictureError

INTERPOLATION = "bicubic"


def crop(picture: Image.Image, config: ModelConfig) -> NDArray[np.uint8]:
    """Resize the shorter side, keep the middle square: a picture -> (C, r, r), before normalisation.

    Equal to ``evaluation_transform(config, as_bytes=True)``, byte for byte.
    """
    r = config.input_side
    shorter = math.floor(r / config.crop)
    width, height = picture.size
    if not width or not height:
        raise PictureError("it has no pixels")
    longer = int(shorter * max(width, height) / min(width, height))
    size = (shorter, longer) if width <= height else (longer, shorter)
    if shorter * longer > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise PictureError(f"too long and thin to be resized safely ({width} x {height})")
    picture = picture.resize(size, Image.Resampling[INTERPOLATION.upper()])
    left, top = (round((side - r) / 2) for side in size)
    pixels = np.array(picture.crop((left, top, left + r, top + r)))  # (r, r, C), or (r, r) of a grey picture
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))  # (r, r, C) -> (C, r, r)
