"""Crop and resize images of different sizes into one batch, with one Triton kernel.

Antialiased bicubic as in Pillow, with its rounding to bytes after each of the two passes. Images lie anywhere in the
device's memory: planar or interleaved, in any of the eight orientations of EXIF. Runs on a GPU, or on a CPU with
``TRITON_INTERPRET=1``.

Letters: B images, r side of the result, W, H width and height of an image as it is seen (upright).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from progresvit.data.prepare import upright_size


@dataclass(frozen=True, slots=True)
class Placed:
    """An image in memory: a pixel is at ``address + x * step[0] + y * step[1] + c * step[2]``."""

    address: int
    size: tuple[int, int]
    """Width and height, as stored."""
    step: tuple[int, int, int]
    """Bytes from a pixel to the next in x, y, and channel."""
    orientation: int = 1

    @classmethod
    def planar(cls, image: Tensor, orientation: int = 1) -> Placed:
        """(3, H, W), contiguous."""
        _, height, width = image.shape
        return cls(image.data_ptr(), (width, height), (1, width, height * width), orientation)

    @classmethod
    def interleaved(cls, address: int, size: tuple[int, int]) -> Placed:
        """(H, W, 3), contiguous."""
        return cls(address, size, (3, 3 * size[0], 1))

    def upright(self) -> Placed:
        """The same pixels in upright order; orientation is expressed by address and steps."""
        (width, height), (dx, dy, dc) = self.size, self.step
        last_x, last_y = (width - 1) * dx, (height - 1) * dy
        shift, step_x, step_y = {
            1: (0, dx, dy),
            2: (last_x, -dx, dy),
            3: (last_x + last_y, -dx, -dy),
            4: (last_y, dx, -dy),
            5: (0, dy, dx),
            6: (last_y, -dy, dx),
            7: (last_x + last_y, -dy, -dx),
            8: (last_x, dy, -dx),
        }[self.orientation]
        return Placed(self.address + shift, upright_size(self.size, self.orientation), (step_x, step_y, dc))


@triton.jit
def _cubic(x):
    x = tl.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def _crop(layout, boxes, flips, target, r, block: tl.constexpr):
    """One row of one image for all channels: (B, 3, r, r)."""
    b, y = tl.program_id(0), tl.program_id(1)
    address = tl.load(layout + b * 4)
    dx, dy, dc = tl.load(layout + b * 4 + 1), tl.load(layout + b * 4 + 2), tl.load(layout + b * 4 + 3)
    left, top = tl.load(boxes + b * 8), tl.load(boxes + b * 8 + 1)  # the section that becomes the result
    scale_x, scale_y = tl.load(boxes + b * 8 + 2), tl.load(boxes + b * 8 + 3)  # pixels per pixel of the result
    low_x, low_y = tl.load(boxes + b * 8 + 4), tl.load(boxes + b * 8 + 5)  # only pixels from low to high are read
    high_x, high_y = tl.load(boxes + b * 8 + 6), tl.load(boxes + b * 8 + 7)
    source = address.to(tl.pointer_type(tl.uint8))
    x = tl.arange(0, block)
    inside = x < r
    # positions in float64: a float32 has too few digits for large images
    centre_x = left + (x.to(tl.float64) + 0.5) * scale_x
    centre_y = top + (y.to(tl.float64) + 0.5) * scale_y
    wide_x, wide_y = tl.maximum(scale_x, 1.0), tl.maximum(scale_y, 1.0)
    first_x = tl.maximum(low_x, tl.floor(centre_x - 2.0 * wide_x + 0.5))
    last_x = tl.minimum(high_x, tl.floor(centre_x + 2.0 * wide_x + 0.5))
    first_y = tl.maximum(low_y, tl.floor(centre_y - 2.0 * wide_y + 0.5))
    last_y = tl.minimum(high_y, tl.floor(centre_y + 2.0 * wide_y + 0.5))
    near_x = (first_x + 0.5 - centre_x).to(tl.float32)
    near_y = (first_y + 0.5 - centre_y).to(tl.float32)
    taps_x = (4.0 * wide_x).to(tl.int32) + 2
    taps_y = (last_y - first_y).to(tl.int32)
    shrink_x, shrink_y = (1.0 / wide_x).to(tl.float32), (1.0 / wide_y).to(tl.float32)
    count_x = (last_x - first_x).to(tl.int32)
    mass_x = tl.zeros((block,), tl.float32)
    for t in range(taps_x):
        mass_x += tl.where(t < count_x, _cubic((near_x + t) * shrink_x), 0.0)
    place = source + first_x.to(tl.int64) * dx + first_y.to(tl.int64) * dy
    red, green, blue = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    mass_y = 0.0
    for ty in range(taps_y):
        share_y = _cubic((near_y + ty) * shrink_y)
        mass_y += share_y
        line = place + ty * dy
        r0, g0, b0 = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
        for tx in range(taps_x):
            used = inside & (tx < count_x)
            share = _cubic((near_x + tx) * shrink_x)
            r0 += share * tl.load(line + tx * dx, used, other=0).to(tl.float32)
            g0 += share * tl.load(line + tx * dx + dc, used, other=0).to(tl.float32)
            b0 += share * tl.load(line + tx * dx + 2 * dc, used, other=0).to(tl.float32)
        red += share_y * _as_byte(r0 / mass_x)
        green += share_y * _as_byte(g0 / mass_x)
        blue += share_y * _as_byte(b0 / mass_x)
    column = tl.where(tl.load(flips + b) != 0, r - 1 - x, x)
    row = target + (b.to(tl.int64) * 3 * r + y) * r + column
    tl.store(row, _as_byte(red / mass_y).to(tl.uint8), inside)
    tl.store(row + r * r, _as_byte(green / mass_y).to(tl.uint8), inside)
    tl.store(row + 2 * r * r, _as_byte(blue / mass_y).to(tl.uint8), inside)


@triton.jit
def _as_byte(value):
    return tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0)


def crop_placed(
    images: Sequence[Placed],
    boxes: Sequence[tuple[float, float, float, float]],
    side: int,
    *,
    device: torch.device,
    clip: bool = False,
    flip: Sequence[bool] | None = None,
) -> Tensor:
    """A section of each image, resized to a square: (B, 3, r, r) bytes.

    Args:
        images: The images; their memory must stay valid until the kernel has run.
        boxes: Left, top, right and bottom, in pixels of the upright image.
        side: r.
        device: Where the images are.
        clip: Resize the section as if it were the whole image (crop first), instead of reading beyond its border.
        flip: Which results are mirrored horizontally.
    """
    layout, table = np.empty((len(images), 4), np.int64), np.empty((len(images), 8), np.float64)
    for number, (image, (left, top, right, bottom)) in enumerate(zip(images, boxes)):
        seen = image.upright()
        layout[number] = (seen.address, *seen.step)
        low, high = ((left, top), (right, bottom)) if clip else ((0, 0), seen.size)
        table[number] = (left, top, (right - left) / side, (bottom - top) / side, *low, *high)
    flips = np.zeros(len(images), np.int32) if flip is None else np.asarray(flip, np.int32)
    sent = [_send(torch.from_numpy(values), device) for values in (layout, table, flips)]
    target = torch.empty(len(images), 3, side, side, dtype=torch.uint8, device=device)
    if len(images):
        _crop[(len(images), side)](*sent, target, side, triton.next_power_of_2(side), num_warps=4)
    return target


def _send(values: Tensor, device: torch.device) -> Tensor:
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
