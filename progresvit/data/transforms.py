"""Transforms of single images: random ones for training, the evaluation crop, and corruptions after it.

Letters: B images, C channels, r resolution.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL.Image import Image, fromarray, new
from pydantic import Field, field_validator
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from progresvit.data.crop import INTERPOLATION, crop
from progresvit.data.custom_corruption import check_corruption, corrupt_custom, find_corruption
from progresvit.data.sampler import Draw, mix_seed
from progresvit.io.imports import is_import_string, source_hash
from progresvit.io.parse import Section


class Augmentation(Section):
    """Random changes of a training image, in the order in which they are made; for single images and for batches."""

    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Range of the share of the image's area that a crop keeps."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the aspect ratio of a crop."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    rand_augment: str | None = None
    """timm's RandAugment, such as rand-m9-mstd0.5-inc1; it replaces colour jitter."""
    colour: tuple[float, float, float] | None = None
    """Strength of brightness, contrast and saturation jitter."""
    erasing: float = Field(0.0, ge=0, le=1)
    """Probability of erasing a rectangle with noise."""

    @field_validator("crop_scale", "crop_ratio")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"a range from small to large is needed, both above 0, not {list(value)}")
        return value

    @field_validator("rand_augment")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("rand-"):
            raise ValueError("timm's notation is needed, such as rand-m9-mstd0.5-inc1, or null")
        return value


def training_transform(config: BaseConfig, augmentation: Augmentation, resolution: int) -> Callable[[Image], Tensor]:
    """timm's transform for single images: an RGB image -> (C, r, r), r the resolution given."""
    import progresvit._torchvision  # noqa: F401  (ahead of timm)

    # isort: split
    from timm.data import auto_augment, create_transform  # slow to import, and inference does not need it

    transform: Callable[[Image], Tensor] = create_transform(
        input_size=(config.in_channels, resolution, resolution),
        is_training=True,
        scale=augmentation.crop_scale,
        ratio=augmentation.crop_ratio,
        hflip=augmentation.flip,
        auto_augment=augmentation.rand_augment,
        color_jitter=augmentation.colour,
        interpolation=INTERPOLATION,
        mean=config.mean,
        std=config.std,
        re_prob=augmentation.erasing,
        re_mode="pixel",
    )
    for step in getattr(transform, "transforms", ()):
        for operation in step.ops if isinstance(step, auto_augment.RandAugment) else ():
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = _posterize
    return transform


def _posterize(image: Image, bits: int, **options: object) -> Image:
    """timm asks for 0 bits at full strength, which Pillow refuses from version 13 on; it gave black before."""
    from timm.data import auto_augment

    return new(image.mode, image.size) if bits < 1 else auto_augment.posterize(image, bits, **options)


def evaluation_transform(config: BaseConfig, *, as_bytes: bool = False) -> Callable[[Image], Tensor]:
    """Resize, centre crop and normalise at the config's input resolution: an RGB image -> (C, r, r).

    With ``as_bytes`` the result is uint8 and not normalised yet.
    """
    return partial(_transform, config=config, as_bytes=as_bytes)


def _transform(image: Image, *, config: BaseConfig, as_bytes: bool) -> Tensor:
    pixels = torch.from_numpy(crop(image, config))
    return pixels if as_bytes else normalise(pixels, config)


def normalise(pixels: Tensor, config: BaseConfig) -> Tensor:
    """Bytes to normalised values, on the device of the bytes: (…, C, r, r) -> (…, C, r, r)."""
    mean, std = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (config.mean, config.std))
    return (pixels.float() / 255 - mean) / std


@dataclass(frozen=True)
class Corruption:
    """A generated corruption, or one of your own by import string, at a severity from 1 to 5."""

    name: str
    severity: int

    @classmethod
    def parse(cls, text: str) -> Corruption:
        """From ``fog/3`` or ``my_module:my_corruption/3``."""
        name, _, severity = text.partition("/")
        if not (name in CORRUPTIONS or is_import_string(name)) or severity not in map(str, SEVERITIES):
            raise ValueError(
                f"{text!r} is no corruption with a severity from 1 to 5, such as fog/3; the names are "
                f"{', '.join(CORRUPTIONS)}, and your own is my_module:my_corruption/3."
            )
        check_corruption(name)
        return cls(name, int(severity))

    @property
    def source(self) -> str | None:
        """SHA-256 of the file of a corruption of your own."""
        return source_hash(find_corruption(self.name)) if self.name not in CORRUPTIONS else None

    def __call__(self, image: Image, name: str) -> Image:
        """Random draws depend on the image's name only, so every run and every worker gives the same pixels."""
        known = self.name in CORRUPTIONS
        number = CORRUPTIONS.index(self.name) if known else zlib.crc32(self.name.encode())
        seed = mix_seed(Draw.CORRUPTION, number, self.severity, zlib.crc32(name.encode()))
        return (corrupt if known else corrupt_custom)(image, self.name, self.severity, seed)


class NamedTransform:
    """The evaluation crop of an image and its name, as bytes (C, r, r), followed by a corruption if one is given."""

    def __init__(self, config: BaseConfig, corruption: Corruption | None = None) -> None:
        if corruption is not None and config.in_channels != 3:
            raise ValueError(f"corruptions are for RGB images, and the model takes {config.in_channels} channels.")
        self.config, self.corruption = config, corruption

    def __call__(self, image: Image, name: str) -> Tensor:
        pixels = crop(image, self.config)  # (C, r, r)
        if self.corruption is None:
            return torch.from_numpy(pixels)
        corrupted = self.corruption(fromarray(pixels.transpose(1, 2, 0)), name)
        return torch.from_numpy(np.array(corrupted)).permute(2, 0, 1)  # (r, r, C) -> (C, r, r)
