"""From a picture to the square, normalised image that a model takes."""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, fromarray
from timm.data import create_transform
from torch import Tensor

from progresvit.config import ModelConfig
from progresvit.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from progresvit.data.crop import INTERPOLATION
from progresvit.data.sampler import Draw, mix_seed


def evaluation_transform(config: ModelConfig, *, as_bytes: bool = False) -> Callable[[Image], Tensor]:
    """Resize, centre crop and normalise at the config's input resolution: an RGB picture -> (C, r, r).

    As bytes it is not normalised yet.
    """
    transform: Callable[[Image], Tensor] = create_transform(
        input_size=(config.in_channels, config.input_side, config.input_side),
        is_training=False,
        interpolation=INTERPOLATION,
        crop_pct=config.crop,
        mean=config.mean,
        std=config.std,
        normalize=not as_bytes,
    )
    return transform


@dataclass(frozen=True)
class Corruption:
    """One of the generated corruptions at a severity from 1 to 5."""

    name: str
    severity: int

    @classmethod
    def parse(cls, text: str) -> Corruption:
        """From ``fog/3``."""
        name, _, severity = text.partition("/")
        if name not in CORRUPTIONS or severity not in map(str, SEVERITIES):
            raise ValueError(
                f"{text!r} is no corruption with a severity from 1 to 5, such as fog/3; the names are "
                f"{', '.join(CORRUPTIONS)}."
            )
        return cls(name, int(severity))

    def __call__(self, picture: Image, name: str) -> Image:
        """Draws follow from the picture's name, so every run and every worker gives the same pixels."""
        seed = mix_seed(Draw.CORRUPTION, CORRUPTIONS.index(self.name), self.severity, zlib.crc32(name.encode()))
        return corrupt(picture, self.name, self.severity, seed)


class NamedTransform:
    """The evaluation crop of a picture and its name, as bytes (C, r, r); then a corruption if one is asked for."""

    def __init__(self, config: ModelConfig, corruption: Corruption | None = None) -> None:
        if corruption is not None and config.in_channels != 3:
            raise ValueError(f"corruptions are for RGB pictures, and the model takes {config.in_channels} channels.")
        self.corruption = corruption
        self.transform = evaluation_transform(config, as_bytes=True)

    def __call__(self, picture: Image, name: str) -> Tensor:
        pixels = self.transform(picture)  # (C, r, r)
        if self.corruption is None:
            return pixels
        damaged = self.corruption(fromarray(pixels.permute(1, 2, 0).numpy()), name)
        return torch.from_numpy(np.array(damaged)).permute(2, 0, 1)  # (r, r, C) -> (C, r, r)


def normalise(pixels: Tensor, config: ModelConfig) -> Tensor:
    """What the evaluation transform does after the crop, for a batch on its device: bytes -> (B, C, r, r)."""
    mean, std = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (config.mean, config.std))
    return (pixels.float() / 255 - mean) / std


def describe_preprocessing(config: ModelConfig) -> dict[str, Any]:
    """Everything that decides which pixels a model sees of a picture."""
    return {
        "resolution": config.input_side,
        "crop": config.crop,
        "interpolation": INTERPOLATION,
        "channels": config.in_channels,
        "mean": list(config.mean),
        "std": list(config.std),
    }


def preprocessing_hash(config: ModelConfig) -> str:
    """The same for equal preprocessing only."""
    return hashlib.sha256(json.dumps(describe_preprocessing(config), sort_keys=True).encode()).hexdigest()
