"""Augmentation of whole batches on the device, with independent draws for each image.

Crop, flip, colour and erasing are those of timm's transforms for single images, and are drawn from the same
distributions. Mixup and cutmix are timm's own, which work on batches already.

Letters: B images, C channels, S side of the stored images, r side of the output.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ATTEMPTS = 10  # draws of a box, as in timm
ERASED_AREA = (0.02, 1 / 3)  # share of the image
ERASED_ASPECT = (0.3, 1 / 0.3)
GREY = (0.299, 0.587, 0.114)


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


def _whole(high: Tensor, generator: torch.Generator) -> Tensor:
    """Integers from 0 to ``high``, both included."""
    draw = torch.rand(high.shape, generator=generator, device=generator.device)
    return torch.minimum((draw * (high + 1)).floor(), high)


def _first(fits: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """The first attempt of each image that fits: (B, 10) -> (B,)."""
    first = fits.float().argmax(dim=1, keepdim=True)  # (B, 10) -> (B, 1)
    return tuple(value.gather(1, first).squeeze(1) for value in values)


def sample_crops(
    sizes: Tensor, *, scale: tuple[float, float], ratio: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """Boxes (top, left, height, width) in pixels of the original sizes (height, width): (B, 2) -> (B, 4)."""
    height, width = sizes.float().unbind(1)
    shape = (len(sizes), ATTEMPTS)
    area = _uniform(*scale, shape, generator) * (height * width).unsqueeze(1)
    aspect = _uniform(math.log(ratio[0]), math.log(ratio[1]), shape, generator).exp()
    w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (w <= width.unsqueeze(1)) & (h <= height.unsqueeze(1))
    h, w = _first(fits, h, w)
    h, w = h.clamp(min=1), w.clamp(min=1)
    top, left = _whole((height - h).clamp(min=0), generator), _whole((width - w).clamp(min=0), generator)
    # No attempt fits: the largest centred box of an allowed aspect.
    wide_h, wide_w = (
        torch.minimum(height, (width / ratio[0]).round()),
        torch.minimum(width, (height * ratio[1]).round()),
    )
    centred = torch.stack([((height - wide_h) / 2).floor(), ((width - wide_w) / 2).floor(), wide_h, wide_w], dim=1)
    boxes = torch.stack([top, left, h, w], dim=1)
    return torch.where(fits.any(dim=1, keepdim=True), boxes, centred)  # (B, 4)


def resize_matrix(start: Tensor, length: Tensor, *, source: int, target: int) -> Tensor:
    """Bicubic with antialias as in Pillow, for a section of each row: (B,), (B,) -> (B, target, source)."""
    device = start.device
    step = (length / target).view(-1, 1, 1)
    reach = step.clamp(min=1)
    centre = (torch.arange(target, device=device) + 0.5).view(1, -1, 1) * step + start.view(-1, 1, 1)
    pixel = (torch.arange(source, device=device) + 0.5).view(1, 1, -1)
    weight = _cubic((pixel - centre) / reach)
    inside = (pixel > start.view(-1, 1, 1)) & (pixel < (start + length).view(-1, 1, 1))  # the others do not count
    nearest = (pixel - centre).abs() <= 0.5  # a section of less than a pixel uses the pixel it is in
    weight = torch.where(inside.any(dim=2, keepdim=True), weight * inside, nearest.float())
    return weight / weight.sum(dim=2, keepdim=True)


def _cubic(x: Tensor, a: float = -0.5) -> Tensor:
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0))


def crop_and_resize(images: Tensor, boxes: Tensor, flip: Tensor, *, resolution: int) -> Tensor:
    """Boxes in pixels of the stored images, flipped where ``flip``: (B, C, S, S) bytes -> (B, C, r, r) in 0..1."""
    side = images.shape[-1]
    top, left, height, width = boxes.unbind(1)
    rows = resize_matrix(top, height, source=side, target=resolution)  # (B, r, S)
    columns = resize_matrix(left, width, source=side, target=resolution)  # (B, r, S)
    columns = torch.where(flip.view(-1, 1, 1), columns.flip(1), columns)
    rows = rows.unsqueeze(1) / 255  # bytes to 0..1
    cropped = rows @ images.float() @ columns.mT.unsqueeze(1)  # (B, C, S, S) -> (B, C, r, r)
    return cropped.clamp_(0, 1)


def sample_colour(
    count: int, strengths: tuple[float, float, float], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Factors within 1 ± strength for brightness, contrast and saturation, and their random order: both (count, 3)."""
    factors = torch.stack([_uniform(max(0.0, 1 - s), 1 + s, (count,), generator) for s in strengths], dim=1)
    return factors, torch.rand(count, 3, generator=generator, device=generator.device).argsort(dim=1)


def change_colour(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast and saturation by the factors, in the order: (B, 3, r, r) in 0..1, (B, 3), (B, 3)."""
    factors = factors.view(-1, 3, 1, 1, 1)
    for turn in range(3):
        which = order[:, turn].view(-1, 1, 1, 1)
        grey = _grey(images)
        towards = torch.where(which == 0, 0.0, torch.where(which == 1, grey.mean(dim=(2, 3), keepdim=True), grey))
        factor = torch.where(which == 0, factors[:, 0], torch.where(which == 1, factors[:, 1], factors[:, 2]))
        images = torch.lerp(towards, images, factor).clamp_(0, 1)
    return images


def _grey(images: Tensor) -> Tensor:
    """(B, 3, r, r) -> (B, 1, r, r)"""
    red, green, blue = images.unbind(1)
    return (GREY[0] * red + GREY[1] * green).add_(blue, alpha=GREY[2]).unsqueeze(1)


def sample_erasing(count: int, side: int, *, probability: float, generator: torch.Generator) -> Tensor:
    """Boxes (top, left, height, width) to erase, empty where nothing is erased: (count, 4)."""
    shape = (count, ATTEMPTS)
    area = _uniform(*ERASED_AREA, shape, generator) * side * side
    aspect = _uniform(math.log(ERASED_ASPECT[0]), math.log(ERASED_ASPECT[1]), shape, generator).exp()
    h, w = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (h < side) & (w < side)
    h, w = _first(fits, h, w)
    erased = fits.any(dim=1) & (_uniform(0, 1, (count,), generator) < probability)
    h, w = h * erased, w * erased
    return torch.stack([_whole(side - h, generator), _whole(side - w, generator), h, w], dim=1)


def erase(images: Tensor, boxes: Tensor, generator: torch.Generator) -> Tensor:
    """Normal noise in the boxes of normalised images: (B, C, r, r) -> (B, C, r, r)."""
    top, left, height, width = (value.view(-1, 1) for value in boxes.unbind(1))
    pixel = torch.arange(images.shape[-1], device=images.device).view(1, -1)
    rows, columns = (pixel >= top) & (pixel < top + height), (pixel >= left) & (pixel < left + width)
    inside = (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)  # (B, 1, r, r)
    noise = torch.randn(images.shape, generator=generator, device=generator.device)
    return torch.where(inside, noise, images)
