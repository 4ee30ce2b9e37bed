"""Which augmentation, how much of it: one description for both ways of feeding, pictures or whole batches."""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
from collections.abc import Callable

from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, field_validator
from timm.data import create_transform
from torch import Tensor

from progresvit.config import ModelConfig


class Augmentation(BaseModel):
    """Random changes of a training picture, in the order in which they are made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Share of the picture's area that a crop keeps."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Aspect of the crop."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of mirroring left and right."""
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


def training_transform(config: ModelConfig, augmentation: Augmentation, resolution: int) -> Callable[[Image], Tensor]:
    """timm's transform for single pictures: an RGB picture -> (C, r, r), r the resolution given."""
    transform: Callable[[Image], Tensor] = create_transform(
        input_size=(config.in_channels, resolution, resolution),
        is_training=True,
        scale=augmentation.crop_scale,
        ratio=augmentation.crop_ratio,
        hflip=augmentation.flip,
        auto_augment=augmentation.rand_augment,
        color_jitter=augmentation.colour,
        interpolation="bicubic",
        mean=config.mean,
        std=config.std,
        re_prob=augmentation.erasing,
        re_mode="pixel",
    )
    return transform
