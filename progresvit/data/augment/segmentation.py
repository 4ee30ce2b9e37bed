"""Augmentation of image and mask: scale, crop, flip and photometric distortion, on the device, with independent draws
for each image.

The recipe of Segmenter: the image is resized so that its shorter side equals the side of the crop, times a random
scale; a square crop is drawn; where the image is smaller than the crop, the rest of the mask is ignored. Image and mask
are sampled at the same places. The mask takes the value of the nearest pixel and is never interpolated. A crop in which
one class covers too much is drawn again, as in mmsegmentation.

Letters: B images, C channels, H and W height and width of the stored images, r side of the crop, V values of a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.augment.classification import Range
from progresvit.data.augment.gpu_augment import change_hue_and_saturation, per_image, resize_matrix
from progresvit.data.segmentation.masks import IGNORE
from progresvit.data.transforms import mean_and_std
from progresvit.io.parse import Section

BRIGHTNESS = 32 / 255
CONTRAST = SATURATION = (0.5, 1.5)
HUE = 18 / 180  # OpenCV counts the circle of hues in 180 steps
"""Strength of the photometric distortion of SSD (Liu et al. 2016), which Segmenter uses; each with probability 1/2."""


REDRAWS = 10
"""How often a crop is drawn again if one class covers too much of it, as in mmsegmentation."""
_VALUES = 256


class SegmentationAugmentation(Section):
    """Random changes of a training image and its mask."""

    scale: Range = (0.5, 2.0)
    """Range of the size of the image; at 1 its shorter side equals the side of the crop."""
    flip: float = Field(0.5, ge=0, le=1)
    """Probability of a horizontal flip."""
    photometric: bool = True
    """Random brightness, contrast, saturation and hue."""
    cat_max_ratio: float = Field(1.0, gt=0, le=1)
    """Draw a crop again, up to ten times, unless it shows two or more classes and the largest of them covers a smaller
    share of the labelled pixels than this. 1 takes the first crop."""


class SegmentationBatch(NamedTuple):
    """Crops ready for the model, and their labels."""

    images: Tensor
    """(B, C, r, r), normalised."""
    masks: Tensor
    """(B, r, r) int64, IGNORE where a pixel has no label."""


class AugmentPairs:
    """Makes the training crops of segmentation, on the device or for one image in a worker process.

    Args:
        config: The model's config, for the normalisation and the side of the crops.
        augmentation: Random changes.
        device: Where the images are.
    """

    def __init__(self, config: BaseConfig, augmentation: SegmentationAugmentation, *, device: torch.device) -> None:
        self.augmentation, self.side = augmentation, config.input_side
        self.generator = torch.Generator(device)
        self.mean, self.std = mean_and_std(config, device)

    def __call__(self, images: Tensor, sizes: Tensor, masks: Tensor, seed: int) -> SegmentationBatch:
        """A crop of each image and of its mask: (B, C, H, W) and (B, H, W) bytes -> (B, C, r, r) and (B, r, r) int64.

        Args:
            images: RGB images, possibly squeezed from their original shape.
            sizes: Original height and width, (B, 2); crops are drawn in this shape.
            masks: Class indices, IGNORE where a pixel has none.
            seed: Determines all draws.
        """
        generator = self.generator.manual_seed(seed)
        boxes = sample_boxes(sizes, self.augmentation.scale, generator)
        to_stored = (torch.tensor(images.shape[-2:], device=sizes.device) / sizes).repeat(1, 2)  # (B, 4)
        if (ratio := self.augmentation.cat_max_ratio) < 1:
            for _ in range(REDRAWS):
                kept = is_varied(crop_masks(masks, boxes * to_stored, None, side=self.side), ratio)
                boxes = torch.where(kept.unsqueeze(1), boxes, place_boxes(boxes[:, 2], sizes, generator))
        boxes = boxes * to_stored  # to stored pixels
        flip = _uniform(len(images), generator) < self.augmentation.flip
        x, inside = crop_images(images, boxes, flip, side=self.side)
        if self.augmentation.photometric:
            x = distort(x, generator)
        x = torch.where(inside, (x - self.mean) / self.std, 0)
        return SegmentationBatch(x, crop_masks(masks, boxes, flip, side=self.side).long())


def sample_boxes(sizes: Tensor, scale: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Square crops (top, left, height, width) in pixels of the original sizes: (B, 2) -> (B, 4).

    A crop larger than the image begins at its border, so that the rest is below and to the right of the image.
    """
    factor = _uniform(len(sizes), generator) * (scale[1] - scale[0]) + scale[0]
    return place_boxes(sizes.float().amin(dim=1) / factor, sizes, generator)


def place_boxes(box: Tensor, sizes: Tensor, generator: torch.Generator) -> Tensor:
    """Square crops of these sides at random places: (B,), (B, 2) -> (B, 4)."""
    height, width = sizes.float().unbind(1)
    top, left = (_uniform(len(sizes), generator) * (length - box).clamp(min=0) for length in (height, width))
    return torch.stack([top, left, box, box], dim=1)


def is_varied(masks: Tensor, ratio: float) -> Tensor:
    """Whether a mask has two classes or more, the largest with a smaller share of the labelled pixels than ``ratio``.

    (B, r, r) bytes -> (B,)
    """
    values = masks.flatten(1).long()  # (B, r, r) -> (B, r * r)
    counts = torch.zeros(len(masks), _VALUES, device=masks.device)  # scatter_add_ needs no sync, bincount does
    counts = counts.scatter_add_(1, values, torch.ones_like(values, dtype=counts.dtype))  # (B, V)
    counts[:, IGNORE] = 0
    return ((counts > 0).sum(dim=1) > 1) & (counts.amax(dim=1) < ratio * counts.sum(dim=1))


def crop_images(images: Tensor, boxes: Tensor, flip: Tensor, *, side: int) -> tuple[Tensor, Tensor]:
    """Crops in 0..1, bicubic with antialias, and which of their pixels lie inside of the image.

    (B, C, H, W) bytes -> (B, C, r, r) and (B, 1, r, r)
    """
    top, left, height, width = boxes.unbind(1)
    rows = resize_matrix(top, height, source=images.shape[-2], target=side).nan_to_num(0, 0, 0)  # (B, r, H)
    columns = resize_matrix(left, width, source=images.shape[-1], target=side).nan_to_num(0, 0, 0)  # (B, r, W)
    columns = torch.where(flip.view(-1, 1, 1), columns.flip(1), columns)
    cropped = (rows.unsqueeze(1) / 255) @ images.float() @ columns.mT.unsqueeze(1)  # (B, C, H, W) -> (B, C, r, r)
    row, column = _centres(boxes, flip, side)
    inside = (row < images.shape[-2]).unsqueeze(2) & (column < images.shape[-1]).unsqueeze(1)  # (B, r, r)
    return cropped.clamp_(0, 1), inside.unsqueeze(1)


def crop_masks(masks: Tensor, boxes: Tensor, flip: Tensor | None, *, side: int) -> Tensor:
    """The same crops of the masks, IGNORE outside of the image: (B, H, W) -> (B, r, r)."""
    row, column = _centres(boxes, flip, side)
    height, width = masks.shape[-2:]
    inside = (row < height).unsqueeze(2) & (column < width).unsqueeze(1)  # (B, r, r)
    row, column = row.long().clamp(max=height - 1), column.long().clamp(max=width - 1)
    batch = torch.arange(len(masks), device=masks.device).view(-1, 1, 1)
    return torch.where(inside, masks[batch, row.unsqueeze(2), column.unsqueeze(1)], IGNORE)


def _centres(boxes: Tensor, flip: Tensor | None, side: int) -> tuple[Tensor, Tensor]:
    """Where the centres of the output's rows and columns lie in the stored image: (B, r) each."""
    top, left, height, width = (value.view(-1, 1) for value in boxes.unbind(1))
    place = (torch.arange(side, device=boxes.device) + 0.5).view(1, -1) / side
    column = left + place * width
    if flip is None:
        return top + place * height, column
    return top + place * height, torch.where(flip.view(-1, 1), column.flip(1), column)


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Change brightness, contrast (first or last), saturation and hue: (B, 3, r, r) in 0..1."""
    count = len(images)
    brightness = (2 * _uniform(count, generator) - 1) * BRIGHTNESS * _coin(count, generator)
    contrast, saturation = (
        torch.where(_coin(count, generator), _uniform(count, generator) * (high - low) + low, 1)
        for low, high in (CONTRAST, SATURATION)
    )
    hue = (2 * _uniform(count, generator) - 1) * HUE * _coin(count, generator)
    before = _coin(count, generator)
    x = (images + per_image(brightness)).clamp(0, 1)
    x = (x * per_image(torch.where(before, contrast, 1))).clamp(0, 1)
    x = change_hue_and_saturation(x, hue, saturation)
    return (x * per_image(torch.where(before, 1, contrast))).clamp(0, 1)


def _uniform(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, device=generator.device)


def _coin(count: int, generator: torch.Generator) -> Tensor:
    return _uniform(count, generator) < 0.5
