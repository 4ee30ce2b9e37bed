"""Augmentation of labelled images: timm's for a single image in a worker process, the same changes of whole batches on
the device.

Both draw from the same distributions, but not the same numbers. RandAugment replaces colour jitter in both.

Letters: B images, C channels, S side of the stored images, r side of the training images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from PIL.Image import Image, new
from pydantic import AfterValidator, Field, field_validator
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.augment import gpu_augment
from progresvit.data.augment.rand_augment import RandAugment
from progresvit.data.crop import INTERPOLATION
from progresvit.data.transforms import mean_and_std
from progresvit.io.parse import Section

Colour = tuple[Tensor, Tensor] | None
"""Factors and order of the changes of colour."""


class Batch(NamedTuple):
    """Images ready for the model, and their classes."""

    images: Tensor
    """(B, C, r, r), normalised."""
    targets: Tensor
    """(B,)"""


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if not 0 < value[0] <= value[1]:
        raise ValueError(f"a range must go from small to large, both above 0; got {list(value)}")
    return value


Range = Annotated[tuple[float, float], AfterValidator(_ordered)]


class Augmentation(Section):
    """Random changes of a training image, in the order in which they are made; for single images and for batches."""

    crop_scale: Range = (0.08, 1.0)
    """Range of the share of the image's area that a crop keeps."""
    crop_ratio: Range = (3 / 4, 4 / 3)
    """Range of the aspect ratio of a crop."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    rand_augment: str | None = None
    """timm's RandAugment, such as rand-m9-mstd0.5-inc1; it replaces colour jitter."""
    colour: tuple[float, float, float] | None = None
    """Strength of brightness, contrast and saturation jitter."""
    erasing: float = Field(0.0, ge=0, le=1)
    """Probability of erasing a rectangle with noise."""
    erase_before_mixing: bool = False
    """Erase each image before mixup and cutmix, as this package did before the key existed. By default the mixed batch
    is erased, as with timm's prefetcher."""

    @field_validator("rand_augment")
    @classmethod
    def _notation(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("rand-"):
            raise ValueError("timm's notation is needed, such as rand-m9-mstd0.5-inc1, or null")
        return value

    @property
    def early_erasing(self) -> float:
        """Probability of erasing an image before its batch is mixed."""
        return self.erasing if self.erase_before_mixing else 0.0

    @property
    def late_erasing(self) -> float:
        """Probability of erasing an image of a mixed batch."""
        return 0.0 if self.erase_before_mixing else self.erasing


def training_transform(config: BaseConfig, augmentation: Augmentation) -> Callable[[Image], Tensor]:
    """timm's transform for single images: an RGB image -> (C, r, r)."""
    import progresvit._torchvision  # noqa: F401  (ahead of timm)

    # isort: split
    from timm.data import auto_augment, create_transform  # slow to import, and inference does not need it

    transform: Callable[[Image], Tensor] = create_transform(
        input_size=(config.in_channels, config.input_side, config.input_side),
        is_training=True,
        scale=augmentation.crop_scale,
        ratio=augmentation.crop_ratio,
        hflip=augmentation.flip,
        auto_augment=augmentation.rand_augment,
        color_jitter=augmentation.colour,
        interpolation=INTERPOLATION,
        mean=config.mean,
        std=config.std,
        re_prob=augmentation.early_erasing,
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


class AugmentImages:
    """Makes the training batches of classification on the device.

    Args:
        config: The model's config, for the normalisation and r.
        augmentation: Random changes.
        device: Where the images are.
        compiled: Compile the work on pixels.
    """

    def __init__(
        self, config: BaseConfig, augmentation: Augmentation, *, device: torch.device, compiled: bool = False
    ) -> None:
        self.augmentation, self.side = augmentation, config.input_side
        self.generator = torch.Generator(device)
        self.rand_augment = None
        if augmentation.rand_augment is not None:
            self.rand_augment = RandAugment.parse(augmentation.rand_augment, config.mean)
        self.mean, self.std = mean_and_std(config, device)
        self._render = torch.compile(_render, dynamic=False) if compiled else _render
        self._crop = torch.compile(_crop, dynamic=False) if compiled else _crop
        self._normalise = torch.compile(_normalise, dynamic=False) if compiled else _normalise

    def __call__(self, images: Tensor, sizes: Tensor, targets: Tensor, seed: int) -> Batch:
        """Crop, flip, RandAugment or colour, normalise: (B, C, S, S) bytes -> (B, C, r, r).

        With ``erase_before_mixing`` also erase; otherwise the task erases after mixing.

        Args:
            images: Whole images, resized to squares.
            sizes: Original height and width, (B, 2); crops are drawn in this shape.
            targets: Classes, (B,).
            seed: Determines all draws.
        """
        options, generator = self.augmentation, self.generator.manual_seed(seed)
        boxes = gpu_augment.sample_crops(sizes, scale=options.crop_scale, ratio=options.crop_ratio, generator=generator)
        boxes = boxes * (images.shape[-1] / sizes.repeat(1, 2))  # pixels of the original -> pixels of the square
        flip = torch.rand(len(images), generator=generator, device=generator.device) < options.flip
        x: Tensor
        if self.rand_augment is None:
            x = self._render(images, boxes, flip, self._sample_colour(len(images)), self.mean, self.std, self.side)
        else:  # groups of images whose sizes change from batch to batch: not compiled
            x = self._normalise(
                self.rand_augment(self._crop(images, boxes, flip, self.side), seed), None, self.mean, self.std
            )
        return Batch(self._erase(x), targets)

    def change_cropped(self, images: Tensor, targets: Tensor, seed: int) -> Batch:
        """As the call, for images that are cropped and flipped already: (B, C, r, r) bytes -> (B, C, r, r)."""
        self.generator.manual_seed(seed)
        colour = None
        if self.rand_augment is not None:
            images = self.rand_augment(images, seed)
        else:
            colour = self._sample_colour(len(images))
        return Batch(self._erase(self._normalise(images, colour, self.mean, self.std)), targets)

    def _sample_colour(self, count: int) -> Colour:
        colour = self.augmentation.colour
        return None if colour is None else gpu_augment.sample_colour(count, colour, self.generator)

    def _erase(self, x: Tensor) -> Tensor:
        return gpu_augment.erase_randomly(x, self.augmentation.early_erasing, self.generator)


def _render(
    images: Tensor, boxes: Tensor, flip: Tensor, colour: Colour, mean: Tensor, std: Tensor, resolution: int
) -> Tensor:
    """All work on pixels, after the random draws, so that it can be compiled: (B, C, S, S) -> (B, C, r, r)."""
    x = gpu_augment.crop_and_resize(images, boxes, flip, resolution=resolution)
    if colour is not None:
        x = gpu_augment.change_colour(x, *colour)
    return (x - mean) / std


def _crop(images: Tensor, boxes: Tensor, flip: Tensor, resolution: int) -> Tensor:
    """The first part of the work on pixels, in front of RandAugment: (B, C, S, S) -> (B, C, r, r) bytes."""
    cropped = gpu_augment.crop_and_resize(images, boxes, flip, resolution=resolution)
    return (cropped * 255).round().to(torch.uint8)


def _normalise(images: Tensor, colour: Colour, mean: Tensor, std: Tensor) -> Tensor:
    """The second part, after RandAugment or instead of it: (B, C, r, r) bytes -> (B, C, r, r)."""
    x = images / 255
    if colour is not None:
        x = gpu_augment.change_colour(x, *colour)
    return (x - mean) / std
