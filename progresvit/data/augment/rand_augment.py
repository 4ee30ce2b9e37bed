"""timm's RandAugment for whole batches on the device, with independent draws for each image.

The draws are made on the host, so the device is never waited for. Images with the same operation are changed together.
Every operation works on bytes and returns the bytes of Pillow, which timm uses for single images.

Letters: B images, b images with the same operation, C = 3 channels, r side of the images, n layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Doubles = npt.NDArray[np.float64]

_LEVELS = 10.0  # the magnitude at which an operation has its full strength
_WEIGHTED = {  # the order and shares of timm's set "weights"
    "Rotate": 3, "ShearX": 2, "ShearY": 2, "TranslateXRel": 1, "TranslateYRel": 1, "ColorIncreasing": 0.25,
    "SharpnessIncreasing": 0.25, "AutoContrast": 0.25, "SolarizeIncreasing": 0.05, "SolarizeAdd": 0.05,
    "ContrastIncreasing": 0.05, "BrightnessIncreasing": 0.05, "Equalize": 0.05, "PosterizeIncreasing": 0.05,
    "Invert": 0.05,
}  # fmt: skip


@dataclass(frozen=True)
class Draws:
    """The random choices for a batch, on the host; all are (B, n)."""

    operation: npt.NDArray[np.int64]
    """Index into ``RandAugment.operations``."""
    argument: Doubles
    """Angle, shift, factor, threshold or bits of the operation; 0 if it takes none."""
    applied: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RandAugment:
    """A number of random operations per image, drawn as timm draws them."""

    operations: tuple[str, ...]
    """timm's names."""
    weights: tuple[float, ...] | None
    """Share of each operation; None draws all with equal shares, and may repeat an operation in the next layer."""
    magnitude: float
    deviation: float
    """Standard deviation of the magnitude; infinity draws it uniformly from 0 to ``magnitude``."""
    limit: float
    """Largest magnitude."""
    layers: int
    probability: float
    """Probability that a drawn operation is applied."""
    fill: tuple[int, ...]
    """Colour of pixels that come from outside of the image, one byte per channel."""

    @classmethod
    def parse(cls, notation: str, mean: Sequence[float] = (0.5, 0.5, 0.5)) -> RandAugment:
        """From timm's notation, such as ``rand-m9-mstd0.5-inc1``.

        Args:
            notation: Sections m (magnitude), n (layers), p (probability), mstd (deviation), mmax (largest magnitude),
                inc (1: operations that grow with the magnitude) and tweights (timm's weighted set).
            mean: Mean of each channel in 0..1, the colour outside of the image.
        """
        name, *sections = notation.split("-")
        if name != "rand":
            raise _refused(notation, "it does not start with rand-")
        values = {"m": "10", "n": "2", "p": "0.5", "mstd": "0", "mmax": "10", "inc": "0", "t": ""}
        for section in sections:
            match = re.fullmatch(r"(m|n|mmax|inc)(\d+)|(p|mstd)(\d+(?:\.\d*)?)|(t)(weights)", section)
            if match is None:
                raise _refused(notation, f"the section {section!r} is unknown there")
            key, value = filter(None, match.groups())
            values[key] = value
        weighted = bool(values["t"])
        operations = tuple(_WEIGHTED) if weighted else _INCREASING if int(values["inc"]) else _PLAIN
        layers, deviation = int(values["n"]), float(values["mstd"])
        if weighted and layers > len(operations):
            raise _refused(notation, f"it needs {layers} different operations and there are {len(operations)}")
        return cls(
            operations=operations,
            weights=tuple(_WEIGHTED.values()) if weighted else None,
            magnitude=float(values["m"]),
            deviation=math.inf if deviation > 100 else deviation,
            limit=float(values["mmax"]) or _LEVELS,
            layers=layers,
            probability=float(values["p"]),
            fill=tuple(min(255, round(255 * channel)) for channel in mean),
        )

    def sample(self, count: int, generator: np.random.Generator) -> Draws:
        """Draw operations, magnitudes and signs for a number of images."""
        shape = (count, self.layers)
        if self.weights is None:
            operation = generator.integers(len(self.operations), size=shape)
        else:  # without replacement: the largest of log weight + Gumbel noise, then the second largest, ...
            noise = generator.gumbel(size=(count, len(self.operations)))
            operation = np.argsort(-(np.log(self.weights) + noise), axis=1)[:, : self.layers]  # -> (B, n)
        applied = generator.random(shape) < self.probability
        magnitude = np.full(shape, self.magnitude)
        if math.isinf(self.deviation):
            magnitude *= generator.random(shape)
        else:
            magnitude += self.deviation * generator.standard_normal(shape)
        level = magnitude.clip(0, self.limit) / _LEVELS
        sign = np.where(generator.random(shape) > 0.5, -1.0, 1.0)
        argument = np.zeros(shape)
        for number, name in enumerate(self.operations):
            drawn = operation == number
            argument[drawn] = OPERATIONS[name].argument(level[drawn], sign[drawn])
        return Draws(operation, argument, applied)

    def augment(self, images: Tensor, draws: Draws) -> Tensor:
        """Apply the draws: (B, 3, r, r) -> (B, 3, r, r), without waiting for the device.

        Args:
            images: Bytes, or floats in 0..255 that are rounded to bytes. The result has the same type.
            draws: One row per image.
        """
        assert images.shape[1:] == (3, images.shape[3], images.shape[3]), images.shape
        assert len(images) == len(draws.operation), (len(images), len(draws.operation))
        kept = images.dtype
        images = images.clone() if kept == torch.uint8 else images.round().clamp_(0, 255).to(torch.uint8)
        groups = [  # layer by layer, the images of each operation
            (name, layer, np.flatnonzero(draws.applied[:, layer] & (draws.operation[:, layer] == number)))
            for layer in range(self.layers)
            for number, name in enumerate(self.operations)
        ]
        groups = [group for group in groups if len(group[2])]
        if not groups:
            return images.to(kept)
        lengths = [len(rows) for _, _, rows in groups]
        indices = _send(np.concatenate([rows for _, _, rows in groups]), images.device)
        arguments = _send(np.concatenate([draws.argument[rows, layer] for _, layer, rows in groups]), images.device)
        fill = _send(np.array(self.fill, np.uint8), images.device).view(1, 3, 1, 1)
        for (name, _, _), index, argument in zip(groups, indices.split(lengths), arguments.split(lengths)):
            # (B, C, r, r) -> (b, C, r, r) -> (B, C, r, r); one argument per image: (b,) -> (b, 1, 1, 1)
            changed = OPERATIONS[name].apply(images.index_select(0, index), argument.view(-1, 1, 1, 1), fill)
            images.index_copy_(0, index, changed)
        return images.to(kept)

    def __call__(self, images: Tensor, seed: int) -> Tensor:
        """Draw from a seed and apply: (B, 3, r, r) -> (B, 3, r, r)."""
        return self.augment(images, self.sample(len(images), np.random.default_rng(seed)))


def _refused(notation: str, reason: str) -> ValueError:
    return ValueError(
        f"RandAugment {notation!r} cannot run on batches: {reason}. Use m, n, p, mstd, mmax, inc with a number each, "
        f"or tweights, such as rand-m9-mstd0.5-inc1; or data.mode=loader with data.decode=cpu for all of timm's."
    )


def _send(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


# --- Operations: (b, 3, r, r) bytes, an argument for each image (b, 1, 1, 1) in double precision -> (b, 3, r, r) bytes


def _lookup(images: Tensor, table: Tensor) -> Tensor:
    """The value of each byte in its channel's table: (b, 3, r, r), (b, 3, 256) -> (b, 3, r, r)."""
    values = table.to(torch.uint8).gather(2, images.flatten(2).long())  # (b, 3, r * r)
    return values.view_as(images)


def _bytes(values: Tensor) -> Tensor:
    """Clip and truncate, without rounding."""
    return values.clamp_(0, 255).to(torch.uint8)


def _auto_contrast(images: Tensor, argument: Tensor, fill: Tensor) -> Tensor:
    lowest, highest = images.flatten(2).aminmax(dim=2, keepdim=True)  # (b, 3, 1)
    spread = (highest.double() - lowest).clamp(min=1)
    scale = torch.full_like(spread, 255) / spread  # a number / a tensor is rounded twice
    byte = torch.arange(256, device=images.device)
    table = (byte * scale + -lowest.double() * scale).clamp_(0, 255)  # (b, 3, 256)
    return _lookup(images, torch.where(highest > lowest, table, byte))


def _equalize(images: Tensor, argument: Tensor, fill: Tensor) -> Tensor:
    channels = images.flatten(0, 1).flatten(1).long()  # (b * 3, r * r)
    start = 256 * torch.arange(len(channels), device=images.device)
    bins = (channels + start.view(-1, 1)).flatten()
    ones = torch.ones((), dtype=torch.int32, device=images.device).expand(len(bins))
    counts = torch.zeros(256 * len(channels), dtype=torch.int32, device=images.device).scatter_add_(0, bins, ones)
    counts = counts.view(-1, 256).long()
    most = channels.amax(dim=1, keepdim=True)
    step = (channels.shape[1] - counts.gather(1, most)) // 255  # (b * 3, 1)
    below = counts.cumsum(dim=1) - counts
    table = ((step // 2 + below) // step.clamp(min=1)).clamp_(max=255)  # (b * 3, 256)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return _lookup(images, table.view(-1, 3, 256))


def _invert(images: Tensor, argument: Tensor, fill: Tensor) -> Tensor:
    return 255 - images


def _posterize(images: Tensor, bits: Tensor, fill: Tensor) -> Tensor:
    """Keep the highest bits; 0 bits are black, as in Pillow before it refused them."""
    dropped = (8 - bits.clamp(0, 8)).int()
    mask = torch.bitwise_left_shift(torch.full_like(dropped, 255), dropped) & 255
    return images & mask.to(torch.uint8)


def _solarize(images: Tensor, threshold: Tensor, fill: Tensor) -> Tensor:
    return torch.where(images < threshold.short(), images, 255 - images)


def _solarize_add(images: Tensor, added: Tensor, fill: Tensor) -> Tensor:
    return torch.where(images < 128, (images + added.short()).clamp_(max=255), images).to(torch.uint8)


def _blend(plain: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Interpolate from plain (0) to the images (1), or extrapolate, in single precision."""
    return _bytes(plain + factor.float() * (images.float() - plain))


def _grey(images: Tensor) -> Tensor:
    """(b, 3, r, r) -> (b, 1, r, r) bytes, as integers"""
    red, green, blue = images.int().split(1, dim=1)
    return torch.bitwise_right_shift(19595 * red + 38470 * green + 7471 * blue + 32768, 16)


def _colour(images: Tensor, factor: Tensor, fill: Tensor) -> Tensor:
    return _blend(_grey(images).float(), images, factor)


def _contrast(images: Tensor, factor: Tensor, fill: Tensor) -> Tensor:
    total, count = _grey(images).sum(dim=(2, 3), keepdim=True), images.shape[2] * images.shape[3]  # (b, 1, 1, 1)
    mean = (2 * total + count) // (2 * count)  # rounded
    return _blend(mean.float(), images, factor)


def _brightness(images: Tensor, factor: Tensor, fill: Tensor) -> Tensor:
    return _bytes(factor.float() * images)


def _sharpness(images: Tensor, factor: Tensor, fill: Tensor) -> Tensor:
    pixels = images.short()
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]  # (b, 3, r - 2, r)
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]  # (b, 3, r - 2, r - 2)
    total += 4 * pixels[:, :, 1:-1, 1:-1]
    smooth = images.float()
    smooth[:, :, 1:-1, 1:-1] = (2 * total + 13) // 26  # a thirteenth, rounded; the border stays
    return _blend(smooth, images, factor)


# Positions and sums follow Pillow's order and precision: it truncates to bytes, so the last digit of a sum counts.


def _around(position: Tensor, side: int) -> tuple[list[Tensor], Tensor]:
    """The four pixels around a position on an axis, and the distance from the second of them."""
    position = position - 0.5
    floor = position.floor()
    pixel = floor.long()
    return [(pixel + number).clamp_(0, side - 1) for number in range(-1, 3)], position - floor


def _cubic(values: Sequence[Tensor], distance: Tensor) -> Tensor:
    """Interpolate between the second and the third of four values, in double precision (a = -1)."""
    first, second, third, fourth = values
    curve = (second - first - third + fourth) * distance
    curve += 2 * (first - second) + third - fourth
    curve *= distance
    curve += third - first
    curve *= distance
    curve += second
    return curve


def _inside(position: Tensor, side: int) -> Tensor:
    return (position >= 0) & (position < side)


def _centres(images: Tensor) -> tuple[Tensor, Tensor]:
    """Centres of the pixels in their row and in their column: (r,), (r, 1)."""
    centre = torch.arange(images.shape[3], device=images.device, dtype=torch.float64) + 0.5
    return centre, centre.view(-1, 1)


def _move(images: Tensor, position: Tensor, fill: Tensor, *, dim: int) -> Tensor:
    """Pixels from a position on one axis: (b, 3, r, r), (b, 1, r or 1, r or 1) -> (b, 3, r, r)."""
    side, pixels = images.shape[dim], images.short()
    around, distance = _around(position, side)
    moved = _cubic([pixels.gather(dim, index.expand_as(pixels)) for index in around], distance)
    return torch.where(_inside(position, side), _bytes(moved), fill)


def _shear_x(images: Tensor, factor: Tensor, fill: Tensor) -> Tensor:
    x, y = _centres(images)
    return _move(images, x + factor * y, fill, dim=3)


def _shear_y(images: Tensor, factor: Tensor, fill: Tensor) -> Tensor:
    x, y = _centres(images)
    return _move(images, factor * x + y, fill, dim=2)


def _translate_x(images: Tensor, share: Tensor, fill: Tensor) -> Tensor:
    return _move(images, _centres(images)[0] + share * images.shape[3], fill, dim=3)


def _translate_y(images: Tensor, share: Tensor, fill: Tensor) -> Tensor:
    return _move(images, _centres(images)[1] + share * images.shape[2], fill, dim=2)


def _rotate(images: Tensor, degrees: Tensor, fill: Tensor) -> Tensor:
    side, pixels = images.shape[3], images.short().flatten(2)  # (b, 3, r * r)
    angle = -torch.deg2rad(degrees)
    cos, sin = angle.cos().round(decimals=15), angle.sin().round(decimals=15)
    (x, y), half = _centres(images), side / 2
    # The centre stays where it is: (b, 1, r, r)
    left, top = -cos * half - sin * half + half, sin * half - cos * half + half
    x, y = cos * x + sin * y + left, cos * y - sin * x + top
    columns, across = _around(x, side)
    rows, down = _around(y, side)

    def row(start: Tensor) -> Tensor:
        places = [(start + column).flatten(2).expand_as(pixels) for column in columns]
        return _cubic([pixels.gather(2, place).view_as(images) for place in places], across)

    rotated = _cubic([row(number * side) for number in rows], down)
    return torch.where(_inside(x, side) & _inside(y, side), _bytes(rotated), fill)


class Operation(NamedTuple):
    """The argument for a drawn level, and the change that it controls."""

    argument: Callable[[Doubles, Doubles], Doubles]
    """Level (1 at magnitude 10) and sign of each image -> argument."""
    apply: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Images, argument, fill -> images."""


def _none(level: Doubles, sign: Doubles) -> Doubles:
    return np.zeros_like(level)


def _signed(strength: float) -> Callable[[Doubles, Doubles], Doubles]:
    return lambda level, sign: sign * (level * strength)


def _factor(level: Doubles, sign: Doubles) -> Doubles:
    return level * 1.8 + 0.1


def _factor_increasing(level: Doubles, sign: Doubles) -> Doubles:
    return np.maximum(0.1, 1.0 + sign * (level * 0.9))


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": Operation(_none, _auto_contrast),
    "Equalize": Operation(_none, _equalize),
    "Invert": Operation(_none, _invert),
    "Rotate": Operation(_signed(30.0), _rotate),
    "Posterize": Operation(lambda level, sign: np.trunc(level * 4), _posterize),
    "Solarize": Operation(lambda level, sign: np.trunc(level * 256).clip(max=256), _solarize),
    "SolarizeAdd": Operation(lambda level, sign: np.trunc(level * 110).clip(max=128), _solarize_add),
    "Color": Operation(_factor, _colour),
    "Contrast": Operation(_factor, _contrast),
    "Brightness": Operation(_factor, _brightness),
    "Sharpness": Operation(_factor, _sharpness),
    "ShearX": Operation(_signed(0.3), _shear_x),
    "ShearY": Operation(_signed(0.3), _shear_y),
    "TranslateXRel": Operation(_signed(0.45), _translate_x),
    "TranslateYRel": Operation(_signed(0.45), _translate_y),
}
_PLAIN = tuple(OPERATIONS)
OPERATIONS |= {
    "PosterizeIncreasing": Operation(lambda level, sign: 4 - np.trunc(level * 4), _posterize),
    "SolarizeIncreasing": Operation(lambda level, sign: 256 - np.trunc(level * 256).clip(max=256), _solarize),
    "ColorIncreasing": Operation(_factor_increasing, _colour),
    "ContrastIncreasing": Operation(_factor_increasing, _contrast),
    "BrightnessIncreasing": Operation(_factor_increasing, _brightness),
    "SharpnessIncreasing": Operation(_factor_increasing, _sharpness),
}
_INCREASING = tuple(f"{name}Increasing" if f"{name}Increasing" in OPERATIONS else name for name in _PLAIN)
