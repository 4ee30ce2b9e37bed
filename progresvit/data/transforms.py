"""The evaluation transform of a single image: crop, corruption if one is asked for, normalisation.

Letters: B images, C channels, r resolution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.augment.corruption import Corruption
from progresvit.data.crop import EvaluationCrop


def evaluation_transform(config: BaseConfig, *, as_bytes: bool = False) -> Callable[[Image], Tensor]:
    """Resize, centre crop and normalise at the config's input resolution: an RGB image -> (C, r, r).

    With ``as_bytes`` the result is uint8 and not normalised yet.
    """
    return partial(_transform, crop=EvaluationCrop.of(config), config=None if as_bytes else config)


def _transform(image: Image, *, crop: EvaluationCrop, config: BaseConfig | None) -> Tensor:
    pixels = torch.from_numpy(crop(image))
    return pixels if config is None else normalise(pixels, config)


def normalise(pixels: Tensor, config: BaseConfig) -> Tensor:
    """Bytes to normalised values, on the device of the bytes: (…, C, r, r) -> (…, C, r, r)."""
    mean, std = mean_and_std(config, pixels.device)
    return (pixels.float() / 255 - mean) / std


def mean_and_std(config: BaseConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the normalisation, (C, 1, 1) each."""
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (config.mean, config.std))
    return mean, std


class NamedTransform:
    """The evaluation crop of an image and its name, as bytes (C, r, r), followed by a corruption if one is given."""

    def __init__(self, config: BaseConfig, corruption: Corruption | None = None) -> None:
        if corruption is not None and config.in_channels != 3:
            raise ValueError(f"corruptions are for RGB images, and the model takes {config.in_channels} channels.")
        self.config, self.crop, self.corruption = config, EvaluationCrop.of(config), corruption

    def __call__(self, image: Image, name: str) -> Tensor:
        pixels = self.crop(image)  # (C, r, r)
        if self.corruption is None:
            return torch.from_numpy(pixels)
        corrupted = self.corruption(fromarray(pixels.transpose(1, 2, 0)), name)
        return torch.from_numpy(np.array(corrupted)).permute(2, 0, 1)  # (r, r, C) -> (C, r, r)
