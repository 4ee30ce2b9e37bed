"""Augmentation of whole batches on the device, with independent draws for each image.

Crop, flip, colour and erasing follow timm's transforms for single images and are drawn from the same distributions.
Mixup and cutmix are timm's own, since they work on batches.

Letters: B images, C channels, S side of the stored images, r side of the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ATTEMPTS = 10  # draws of a box, as in timm
ERASED_AREA = (0.02, 1 / 3)  # share of the image
ERASED_ASPECT = (0.3, 1 / 0.3)
GREY = (0.299, 0.587, 0.114)


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low


def _integers(high: Tensor, generator: torch.Generator) -> Tensor:
    """Integers from 0 to ``high``, both included."""
    draw = torch.rand(high.shape, generator=generator, device=generator.device)
    return torch.minimum((draw * (high + 1)).floor(), high)


def per_image(values: Tensor) -> Tensor:
    """A number for each image, to be multiplied with the images: (B,) -> (B, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)


def _first(fits: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """The values of the first attempt that fits, for each image: (B, 10) -> (B,)."""
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
    top, left = _integers((height - h).clamp(min=0), generator), _integers((width - w).clamp(min=0), generator)
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


def sample_colour(count: int, strengths: Sequence[float], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Factors within 1 ± strength for brightness, contrast and saturation, and their random order: both (count, 3).

    A fourth strength is for the hue, which is turned by a share of the circle within ± strength: both (count, 4).
    """
    changes = [_uniform(max(0.0, 1 - s), 1 + s, (count,), generator) for s in strengths[:3]]
    changes += [_uniform(-s, s, (count,), generator) for s in strengths[3:]]
    order = torch.rand(count, len(changes), generator=generator, device=generator.device).argsort(dim=1)
    return torch.stack(changes, dim=1), order


def change_colour(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast and saturation by the factors, in the order; a fourth column turns the hue.

    (B, 3, r, r) in 0..1, (B, 3), (B, 3) -> (B, 3, r, r)
    """
    changes = factors.shape[1]
    each = factors.view(-1, changes, 1, 1, 1)
    for turn in range(changes):
        which = per_image(order[:, turn])
        level = grey(images)
        towards = torch.where(which == 0, 0.0, torch.where(which == 1, level.mean(dim=(2, 3), keepdim=True), level))
        factor = torch.where(which == 0, each[:, 0], torch.where(which == 1, each[:, 1], each[:, 2]))
        changed = torch.lerp(towards, images, factor).clamp_(0, 1)
        if changes == 4:
            turned = change_hue_and_saturation(images, factors[:, 3], torch.ones_like(factors[:, 3]))
            changed = torch.where(which == 3, turned, changed)
        images = changed
    return images


def change_hue_and_saturation(images: Tensor, hue: Tensor, saturation: Tensor) -> Tensor:
    """In HSV: hue is turned by a share of the circle, saturation multiplied: (B, 3, r, r) in 0..1, (B,), (B,)."""
    value, lowest = images.amax(dim=1), images.amin(dim=1)  # (B, r, r)
    chroma = value - lowest
    red, green, blue = images.unbind(1)
    safe = chroma.clamp(min=1e-8)
    sixth = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixth = sixth + 6 * hue.view(-1, 1, 1)
    chroma = torch.minimum(chroma * saturation.view(-1, 1, 1), value)
    channels = []
    for start in (5, 3, 1):  # red, green, blue
        k = (sixth + start) % 6
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def grey(images: Tensor) -> Tensor:
    """(B, 3, r, r) -> (B, 1, r, r)"""
    red, green, blue = images.unbind(1)
    return (GREY[0] * red + GREY[1] * green).add_(blue, alpha=GREY[2]).unsqueeze(1)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Gaussian blur with a deviation in pixels for each image, 0 for none: (B, C, r, r), (B,) -> (B, C, r, r).

    One matrix for rows and columns. Pixels outside of the image do not count.
    """
    place = torch.arange(images.shape[-1], device=images.device)
    distance = (place[:, None] - place).square().float()  # (r, r)
    weight = torch.exp(-distance / (2 * sigma.clamp(min=1e-3).square()).view(-1, 1, 1))  # (B, r, r)
    weight = (weight / weight.sum(dim=2, keepdim=True)).unsqueeze(1)  # (B, 1, r, r)
    return weight @ images @ weight.mT


def solarise(images: Tensor, selected: Tensor) -> Tensor:
    """Invert pixels of at least 128 (of 255) in the selected images: (B, C, r, r) in 0..1, (B,) -> (B, C, r, r)."""
    return torch.where(per_image(selected) & (images >= 128 / 255), 1 - images, images)


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
    return torch.stack([_integers(side - h, generator), _integers(side - w, generator), h, w], dim=1)


def erase(images: Tensor, boxes: Tensor, generator: torch.Generator) -> Tensor:
    """Normal noise in the boxes of normalised images: (B, C, r, r) -> (B, C, r, r)."""
    top, left, height, width = (value.view(-1, 1) for value in boxes.unbind(1))
    pixel = torch.arange(images.shape[-1], device=images.device).view(1, -1)
    rows, columns = (pixel >= top) & (pixel < top + height), (pixel >= left) & (pixel < left + width)
    inside = (rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1)  # (B, 1, r, r)
    noise = torch.randn(images.shape, generator=generator, device=generator.device)
    return torch.where(inside, noise, images)


def erase_randomly(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Erase a random rectangle of some of the images: (B, C, r, r) -> (B, C, r, r)."""
    if not probability:
        return images
    boxes = sample_erasing(len(images), images.shape[-1], probability=probability, generator=generator)
    return erase(images, boxes, generator)
