"""The 15 common corruptions of ImageNet-C at five severities, generated on the fly for any dataset.

From D. Hendrycks and T. Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
ICLR 2019. The constants come from the authors' generator for 224-pixel images (make_imagenet_c.py in
github.com/hendrycks/robustness); lengths are scaled by the shorter side, so that images of 160 or 384 pixels are
corrupted alike. The code is our own.

The results are not pixel-identical to ImageNet-C and must not be called ImageNet-C results:

- Frost is procedural. ImageNet-C adds photographs of frost, which cannot be shipped here; ice is generated from noise
  and added with the published weights.
- Glass blur, motion blur, snow and fog follow the published description and constants, but are own implementations.
- Elastic transform interpolates once instead of twice, and its displacement wraps around the border.
- ImageNet-C stores everything as JPEG of quality 85; here only jpeg_compression compresses.

H, W: height and width in pixels
s:    scale, the shorter side over 224
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from progresvit.io.parse import did_you_mean

Pixels = NDArray[np.floating[Any]]
"""An image (H, W, 3) with values from 0 to 1, unless a comment states another shape."""
Constants = tuple[float, ...]
"""The constants of one severity; lengths are in pixels of a 224-pixel image."""

SEVERITIES = (1, 2, 3, 4, 5)


def corrupt(image: Image.Image, corruption: str, severity: int, seed: int) -> Image.Image:
    """A corrupted copy of an RGB image; equal arguments give equal pixels, so give each image its own seed."""
    if corruption not in _TABLE:
        raise ValueError(f"unknown corruption {corruption!r}; {did_you_mean(corruption, CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"unknown severity {severity!r}; use one of 1 (mild), 2, 3, 4 and 5 (strong).")
    if image.mode != "RGB":
        raise ValueError(f"an image of mode {image.mode} cannot be corrupted; use image.convert('RGB') first.")
    function, constants = _TABLE[corruption]
    rng, scale = np.random.default_rng(seed), min(image.size) / 224
    return to_image(function(to_array(image), rng, scale, *constants[SEVERITIES.index(severity)]))


def to_array(image: Image.Image) -> Pixels:
    """Bytes to values from 0 to 1: (H, W, 3)."""
    return np.asarray(image, np.float32) / np.float32(255)


def to_image(image: Pixels) -> Image.Image:
    """The inverse; values beyond 0 and 1 are clipped."""
    return Image.fromarray((np.clip(image, 0, 1) * 255).round().astype(np.uint8))


def _gaussian_noise(image: Pixels, rng: Generator, scale: float, deviation: float) -> Pixels:
    return image + np.float32(deviation) * rng.standard_normal(image.shape, np.float32)


def _shot_noise(image: Pixels, rng: Generator, scale: float, photons: float) -> Pixels:
    """Each value is a Poisson count of photons; the constant is the count at full brightness."""
    return (rng.poisson(image * photons) / photons).astype(np.float32)


def _impulse_noise(image: Pixels, rng: Generator, scale: float, share: float) -> Pixels:
    """Salt and pepper, independently in each channel."""
    draw = rng.random(image.shape, np.float32)
    return np.where(draw < share, (draw < share / 2).astype(np.float32), image)


def _defocus_blur(image: Pixels, rng: Generator, scale: float, radius: float, softness: float) -> Pixels:
    """Each point becomes a disk."""
    from scipy import ndimage  # slow to import, and inference does not need it

    radius = max(radius * scale, 1.0)  # softness smooths pixel steps, so it is not scaled
    reach = int(radius) + 2
    square = np.arange(-reach, reach + 1) ** 2
    disk = (square[:, None] + square <= radius**2).astype(np.float32)
    disk = ndimage.gaussian_filter(disk, softness)
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    size = padded.shape[:2]
    spectrum = np.fft.rfft2(padded, axes=(0, 1)) * np.fft.rfft2(disk / disk.sum(), size)[..., None]
    blurred = np.fft.irfft2(spectrum, size, axes=(0, 1))
    return blurred[2 * reach :, 2 * reach :].astype(np.float32)  # (H + 2 reach, W + 2 reach, 3) -> (H, W, 3)


def _glass_blur(image: Pixels, rng: Generator, scale: float, *constants: float) -> Pixels:
    """Each pixel swaps places with a neighbour, between two soft blurs (the authors' code copies instead)."""
    from scipy import ndimage

    sigma, delta, rounds = constants[0] * scale, max(round(constants[1] * scale), 1), int(constants[2])
    height, width = image.shape[:2]
    source = np.arange(height * width).reshape(height, width)  # (H, W): the source of each pixel
    # Pixels 2 delta apart never swap with the same neighbour, so all of them swap at once.
    for _, top, left in np.ndindex(rounds, 2 * delta, 2 * delta):
        y = np.arange(height - delta - top, delta, -2 * delta)[:, None]
        x = np.arange(width - delta - left, delta, -2 * delta)[None, :]
        dy, dx = rng.integers(-delta, delta, (2, y.size, x.size))
        here, there = source[y, x], source[y + dy, x + dx]
        source[y, x], source[y + dy, x + dx] = there, here
    soft = ndimage.gaussian_filter(image, sigma, mode="nearest", axes=(0, 1))
    shuffled = soft.reshape(-1, 3)[source]  # (H W, 3) -> (H, W, 3)
    blurred: Pixels = ndimage.gaussian_filter(shuffled, sigma, mode="nearest", axes=(0, 1))
    return blurred


def _motion_blur(image: Pixels, rng: Generator, scale: float, radius: float, sigma: float) -> Pixels:
    return _drag(image, radius * scale, sigma * scale, rng.uniform(-45, 45))


def _drag(image: Pixels, radius: float, sigma: float, angle: float) -> Pixels:
    """Blur each point in one direction over twice the radius, with the weights of half a Gaussian."""
    steps = np.arange(2 * max(round(radius), 1) + 1)
    weights = np.exp(-0.5 * (steps / sigma) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    radians = np.deg2rad(angle)
    down, right = np.rint(np.outer((np.sin(radians), np.cos(radians)), steps)).astype(int)
    height, width, reach = *image.shape[:2], steps[-1]
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    dragged = np.zeros_like(image)
    for weight, y, x in zip(weights, down + reach, right + reach):
        dragged += weight * padded[y : y + height, x : x + width]
    return dragged


def _zoom_blur(image: Pixels, rng: Generator, scale: float, end: float, step: float) -> Pixels:
    """The mean of the image and of increasingly magnified views of its centre."""
    views = [image, *(_magnify(image, factor) for factor in np.arange(1, end, step))]
    mean: Pixels = np.mean(views, axis=0)
    return mean


def _magnify(image: Pixels, factor: float) -> Pixels:
    """The centre of an array (H, W, channels), interpolated to the size of the array."""
    for axis in (0, 1):
        last = image.shape[axis] - 1
        at = (np.arange(last + 1) - last / 2) / factor + last / 2
        low = at.astype(int)
        part = np.expand_dims((at - low).astype(np.float32), (1, 2) if axis == 0 else 1)
        image = image.take(low, axis) * (1 - part) + image.take(np.minimum(low + 1, last), axis) * part
    return image


def _snow(image: Pixels, rng: Generator, scale: float, *constants: float) -> Pixels:
    """Streaks of flakes in two directions over a brightened image."""
    mean, deviation, zoom, threshold, radius, sigma, blend = constants
    height, width, angle = *image.shape[:2], rng.uniform(-135, -45)
    flakes = rng.normal(mean, deviation, (height, width, 1)).astype(np.float32)
    flakes = np.clip(_magnify(flakes, max(zoom * scale, 1.0)), 0, 1)
    flakes[flakes < threshold] = 0
    streaks = _drag(flakes, radius * scale, sigma * scale, angle)
    grey = image @ np.array([[0.299], [0.587], [0.114]], np.float32)  # (H, W, 3) -> (H, W, 1)
    pale: Pixels = blend * image + (1 - blend) * np.maximum(image, 1.5 * grey + 0.5)
    return pale + streaks + streaks[::-1, ::-1]


def _frost(image: Pixels, rng: Generator, scale: float, weight: float, frost_weight: float) -> Pixels:
    """Feathers of ice in three directions, added to a darkened image."""
    first = rng.uniform(0, 60)
    feathers = [_feathers(image.shape[:2], first + turn, rng) for turn in (0, 60, 120)]
    ice: Pixels = np.max(feathers, axis=0)[..., None]  # 3 of (H, W) -> (H, W, 1)
    glass, white = np.array([0.16, 0.22, 0.3], np.float32), np.array([0.86, 0.95, 1], np.float32)
    return weight * image + frost_weight * (glass + (white - glass) * ice)


def _feathers(size: tuple[int, ...], angle: float, rng: Generator) -> Pixels:
    """Shafts along the angle with barbs at 60 degrees on both sides, in patches: (H, W), values from 0 to 1."""
    short = min(size)
    y, x = np.fft.fftfreq(size[0], 1 / short)[:, None], np.fft.rfftfreq(size[1], 1 / short)  # periods a shorter side
    white = np.fft.rfft2(rng.standard_normal(size))

    def noise(band: Pixels) -> Pixels:
        field = np.fft.irfft2(white * band, size)
        return field / max(float(field.std()), 1e-6)

    def fibres(periods: float, degrees: float) -> Pixels:
        """Noise that changes slowly along the direction; its zeros are long lines."""
        radians = np.deg2rad(degrees)
        along, across = x * np.cos(radians) + y * np.sin(radians), y * np.cos(radians) - x * np.sin(radians)
        return noise(np.exp(-2 * (np.abs(across) / periods - 1) ** 2 - 12 * (along / periods) ** 2))

    side = fibres(5, angle)
    ice = 0.8 * np.exp(-((6 * side) ** 2))
    for periods, strength in ((14, 0.6), (28, 0.6), (56, 0.5)):
        barbs = np.where(side > 0, fibres(periods, angle + 60), fibres(periods, angle - 60))
        ice += strength * np.exp(-(side**2) - (2.5 * barbs) ** 2)
    patches = 0.5 + 0.5 * np.tanh(noise(np.exp(-(x**2 + y**2) / 8)))
    return np.clip(ice * patches, 0, 1).astype(np.float32)


def _fog(image: Pixels, rng: Generator, scale: float, strength: float, decay: float) -> Pixels:
    side = max(round(256 * scale), 1)
    clouds = Image.fromarray(_clouds(decay, rng)).resize((side, side), Image.Resampling.BILINEAR)
    rows, columns = (np.arange(length) % side for length in image.shape[:2])
    fog = np.asarray(clouds)[rows[:, None], columns, None]  # (256 s, 256 s) -> (H, W, 1)
    brightest = float(image.max())
    share = brightest / (brightest + strength)  # the brightest pixel in the densest fog keeps its value
    foggy: Pixels = share * (image + strength * fog)
    return foggy


def _clouds(decay: float, rng: Generator) -> Pixels:
    """A fractal from 0 to 1 that tiles without a seam: a point, doubled eight times, each time with weaker noise."""
    height = np.zeros((1, 1))
    for octave in range(8):
        for axis in (0, 1):  # (n, n) -> (2n, 2n)
            height = height.repeat(2, axis)
            height = (height + np.roll(height, -1, axis)) / 2
        noise = rng.uniform(-1, 1, height.shape) * decay ** (-2 * octave)  # the published wibble comes squared, too
        noise[::2, ::2] = 0  # only new points move
        height += noise
    lowest, highest = float(height.min()), float(height.max())
    return ((height - lowest) / (highest - lowest)).astype(np.float32)


def _brightness(image: Pixels, rng: Generator, scale: float, more: float) -> Pixels:
    """More value in HSV: hue and saturation stay, so the three channels grow by one factor."""
    value: Pixels = image.max(-1, keepdims=True)  # (H, W, 3) -> (H, W, 1)
    brighter: Pixels = np.minimum(value + more, 1)
    return np.where(value > 0, image * (brighter / np.maximum(value, 1e-6)), brighter)


def _contrast(image: Pixels, rng: Generator, scale: float, factor: float) -> Pixels:
    mean: Pixels = image.mean((0, 1))  # (H, W, 3) -> (3,)
    flattened: Pixels = (image - mean) * factor + mean
    return flattened


def _elastic_transform(image: Pixels, rng: Generator, scale: float, *constants: float) -> Pixels:
    """A random affine map of three corners of a square, then a smooth random displacement."""
    from scipy import ndimage

    # The mean of n random values shrinks with the root of n, so the strength is scaled twice.
    strength, sigma, pull = np.array(constants) * 244 * (scale**2, scale, scale)
    height, width = image.shape[:2]
    centre, reach = np.array([height // 2, width // 2]), max(min(height, width) // 3, 1)
    corners = centre + reach * np.array([[1, 1], [1, -1], [-1, -1]])  # (3, 2)
    pulled = corners + rng.uniform(-pull, pull, corners.shape)
    back = np.linalg.solve(np.column_stack((pulled, np.ones(3))), corners)  # (3, 2): maps a point to its source
    waves = strength * np.stack([_smooth(field, sigma) for field in rng.uniform(-1, 1, (2, height, width))])
    target = np.mgrid[:height, :width] + waves  # (2, H, W)
    at = np.tensordot(back[:2].T, target, 1) + back[2, :, None, None]  # (2, H, W)
    channels = [ndimage.map_coordinates(image[..., channel], at, order=1, mode="mirror") for channel in range(3)]
    return np.stack(channels, -1)


def _smooth(field: Pixels, sigma: float) -> Pixels:
    """A Gaussian blur with periodic borders, at a cost that does not depend on its width."""
    from scipy import ndimage

    blurred = ndimage.fourier_gaussian(np.fft.rfft2(field), sigma, n=field.shape[1])
    return np.fft.irfft2(blurred, field.shape)


def _pixelate(image: Pixels, rng: Generator, scale: float, share: float) -> Pixels:
    full = to_image(image)
    width, height = (max(int(side * share), 1) for side in full.size)
    return to_array(full.resize((width, height), Image.Resampling.BOX).resize(full.size, Image.Resampling.BOX))


def _jpeg_compression(image: Pixels, rng: Generator, scale: float, quality: float) -> Pixels:
    file = io.BytesIO()
    to_image(image).save(file, "JPEG", quality=int(quality))
    return to_array(Image.open(file, formats=["JPEG"]))


_TABLE: dict[str, tuple[Callable[..., Pixels], tuple[Constants, ...]]] = {
    "gaussian_noise": (_gaussian_noise, ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,))),
    "shot_noise": (_shot_noise, ((60,), (25,), (12,), (5,), (3,))),
    "impulse_noise": (_impulse_noise, ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,))),
    "defocus_blur": (_defocus_blur, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "glass_blur": (_glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": (_motion_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": (_zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "snow": (
        _snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": (_frost, ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": (_fog, ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))),
    "brightness": (_brightness, ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,))),
    "contrast": (_contrast, ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,))),
    "elastic_transform": (
        _elastic_transform,  # in units of 244 pixels: the authors meant 224, and kept what they had run
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    ),
    "pixelate": (_pixelate, ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,))),
    "jpeg_compression": (_jpeg_compression, ((25,), (18,), (15,), (10,), (7,))),
}
CORRUPTIONS = tuple(_TABLE)
"""ImageNet-C's names, in its order."""
