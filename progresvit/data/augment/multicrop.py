"""Multi-crop (DINO): two large and several small crops of each image, each augmented on its own, on the device.

Every source hands over whole images, resized to a square; crops are drawn in their original shape and rendered for the
whole batch at once.

Letters: B images, C channels, S side of the stored images, V crops of an image, r side of the crops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.augment import gpu_augment
from progresvit.data.transforms import mean_and_std
from progresvit.io.parse import Section

GLOBAL_CROPS = 2
RATIO = (3 / 4, 4 / 3)
"""Aspect of the crops."""
SIGMA = (0.1, 2.0)
"""Deviation of the blur, in pixels."""

Scale = tuple[float, float]


class MultiCropOptions(Section):
    """Which crops are drawn and how they are augmented; the defaults are DINO's."""

    global_scale: Scale = (0.4, 1.0)
    """Share of the image's area that each of the two global crops keeps."""
    local_crops: int = Field(8, ge=0)
    """Local crops of each image."""
    local_scale: Scale = (0.05, 0.4)
    """Share of the image's area that a local crop keeps."""
    local_side: int = Field(96, ge=1)
    """Side of the local crops in the last round, in pixels. Earlier rounds see them smaller, as they see the image."""
    flip: float = Field(0.5, ge=0, le=1)
    colour: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    """Strength of brightness, contrast, saturation and hue jitter."""
    colour_probability: float = Field(0.8, ge=0, le=1)
    grey: float = Field(0.2, ge=0, le=1)
    """Probability of a grey image."""
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    """Probability of a blur: first global crop, second global crop, local crops."""
    solarise: float = Field(0.2, ge=0, le=1)
    """Probability of inverting the bright pixels of the second global crop."""

    @field_validator("global_scale", "local_scale")
    @classmethod
    def _shares(cls, value: Scale) -> Scale:
        if not 0 < value[0] <= value[1] <= 1:
            raise ValueError(f"a range must go from small to large, above 0 and at most 1; got {list(value)}")
        return value

    @field_validator("colour")
    @classmethod
    def _hue(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if min(value) < 0 or value[3] > 0.5:
            raise ValueError(f"strengths must be at least 0, and the hue's at most 0.5; got {list(value)}")
        return value

    @field_validator("blur")
    @classmethod
    def _probabilities(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= probability <= 1 for probability in value):
            raise ValueError(f"probabilities must be from 0 to 1; got {list(value)}")
        return value


class MultiCropBatch(NamedTuple):
    """Normalised crops."""

    global_crops: Tensor
    """(2, B, C, r, r)"""
    local_crops: Tensor
    """(V, B, C, r', r')"""


class MultiCrop:
    """Makes the training batches of DINO on the device.

    Args:
        config: The model's config, for the normalisation and the side of the global crops.
        options: Which crops are drawn.
        device: Where the images are.
        compiled: Compile the work on pixels.
    """

    def __init__(
        self, config: BaseConfig, options: MultiCropOptions, *, device: torch.device, compiled: bool = False
    ) -> None:
        self.options, self.side = options, config.input_side
        self.generator = torch.Generator(device)
        self.mean, self.std = mean_and_std(config, device)
        self._distort = torch.compile(_distort, dynamic=False) if compiled else _distort

    def __call__(self, images: Tensor, sizes: Tensor, targets: Tensor, seed: int) -> MultiCropBatch:
        """All crops of a batch: (B, C, S, S) bytes -> (2, B, C, r, r) and (V, B, C, r', r').

        Args:
            images: Whole images, resized to squares.
            sizes: Original height and width, (B, 2); crops are drawn in this shape.
            targets: Classes, which are not used.
            seed: Determines all draws.
        """
        self.generator.manual_seed(seed)
        options, pixels = self.options, images.float()
        first, second, local = options.blur
        solarise = (0.0, options.solarise)
        return MultiCropBatch(
            self._views(pixels, sizes, options.global_scale, self.side, blur=(first, second), solarise=solarise),
            self._views(
                pixels,
                sizes,
                options.local_scale,
                options.local_side,
                blur=(local,) * options.local_crops,
                solarise=(0.0,) * options.local_crops,
            ),
        )

    def _views(
        self,
        pixels: Tensor,
        sizes: Tensor,
        scale: Scale,
        side: int,
        *,
        blur: Sequence[float],
        solarise: Sequence[float],
    ) -> Tensor:
        """One crop of every image for each entry of ``blur`` and ``solarise``: -> (V, B, C, r, r)."""
        count, views, generator = len(pixels), len(blur), self.generator
        if not views:
            return pixels.new_zeros(0, count, pixels.shape[1], side, side)
        crops = torch.cat([self._crop(pixels, sizes, scale, side) for _ in range(views)])  # (V * B, C, r, r)

        def draw(probabilities: Sequence[float]) -> Tensor:
            """Whether each crop is changed, by the probabilities of the views: -> (V * B,)"""
            threshold = torch.tensor(probabilities, device=generator.device).repeat_interleave(count)
            return torch.rand(len(crops), generator=generator, device=generator.device) < threshold

        factors, order = gpu_augment.sample_colour(len(crops), self.options.colour, generator)
        sigma = torch.rand(len(crops), generator=generator, device=generator.device)
        crops = self._distort(
            crops,
            draw((self.options.colour_probability,) * views),
            factors,
            order,
            draw((self.options.grey,) * views),
            (SIGMA[0] + sigma * (SIGMA[1] - SIGMA[0])) * draw(blur),
            draw(solarise),
            self.mean,
            self.std,
        )
        rendered: Tensor = crops.unflatten(0, (views, count))  # (V * B, C, r, r) -> (V, B, C, r, r)
        return rendered

    def _crop(self, pixels: Tensor, sizes: Tensor, scale: Scale, side: int) -> Tensor:
        """A random crop of every image, flipped at random: (B, C, S, S) -> (B, C, r, r) in 0..1."""
        boxes = gpu_augment.sample_crops(sizes, scale=scale, ratio=RATIO, generator=self.generator)
        boxes = boxes * (pixels.shape[-1] / sizes.repeat(1, 2))  # pixels of the original -> pixels of the square
        flip = torch.rand(len(pixels), generator=self.generator, device=self.generator.device) < self.options.flip
        return gpu_augment.crop_and_resize(pixels, boxes, flip, resolution=side)


def _distort(
    crops: Tensor,
    coloured: Tensor,
    factors: Tensor,
    order: Tensor,
    grey: Tensor,
    sigma: Tensor,
    solarised: Tensor,
    mean: Tensor,
    std: Tensor,
) -> Tensor:
    """All work on pixels after the crop, without random draws, so that it can be compiled: (B, C, r, r) -> same."""
    x = torch.where(gpu_augment.per_image(coloured), gpu_augment.change_colour(crops, factors, order), crops)
    x = torch.where(gpu_augment.per_image(grey), gpu_augment.grey(x), x)  # (B, 1, r, r) is expanded
    x = gpu_augment.blur(x, sigma)
    x = gpu_augment.solarise(x, solarised)
    return (x - mean) / std
