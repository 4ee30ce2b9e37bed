"""Sliding windows: a rectangular image as square windows of the model's input side, and their logits as one map.

The shorter side of the image is resized to the side of a window, times the scale. Windows lie a stride apart, and the
last ones end at the border. Where they overlap, logits are averaged. With several scales, or flipped copies, the class
probabilities of all views are averaged.

Letters: C channels, H and W height and width of the image, h and w of a view, r side of a window, V windows of a view,
K classes, g side of the patch grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.crop import describe_preprocessing, description_hash

_UPSAMPLED = 2**26  # largest number of values when logits are resized to the image


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How an image is divided into windows."""

    stride: float = 1.0
    """Distance of the windows, as a share of their side; below 1 they overlap everywhere."""
    scales: tuple[float, ...] = (1.0,)
    """Multi-scale inference: sizes of the image; at 1 its shorter side equals the side of a window."""
    flip: bool = False
    """Add a flipped copy of each."""

    def __post_init__(self) -> None:
        if not 0 < self.stride <= 1:
            raise ValueError(f"stride must be above 0 and at most 1, a share of the window; got {self.stride:g}.")
        if not self.scales or not all(1 <= scale < math.inf for scale in self.scales):
            raise ValueError(f"scales must be at least 1, since an image must fill a window; got {list(self.scales)}.")


def describe_windows(config: BaseConfig, options: WindowOptions) -> dict[str, Any]:
    """Everything that determines the windows of an image that a segmentation model sees; there is no crop."""
    preprocessing = {key: value for key, value in describe_preprocessing(config).items() if key != "crop"}
    windows = {"stride": float(options.stride), "scales": [float(scale) for scale in options.scales]}
    return {"task": "segmentation", **preprocessing, **windows, "flip": options.flip}


def windows_hash(config: BaseConfig, options: WindowOptions) -> str:
    """SHA-256 of the description: equal for equal preprocessing only."""
    return description_hash(describe_windows(config, options))


@dataclass(frozen=True)
class View:
    """An image at a scale, and where its windows lie."""

    height: int
    width: int
    side: int
    """Side of the windows, r."""
    tops: tuple[int, ...]
    lefts: tuple[int, ...]
    flipped: bool

    @property
    def count(self) -> int:
        """Number of windows, V."""
        return len(self.tops) * len(self.lefts)

    def cut(self, image: Tensor) -> Tensor:
        """(C, h, w) -> (V, C, r, r)"""
        image = image.flip(-1) if self.flipped else image
        return torch.stack(
            [image[:, top : top + self.side, left : left + self.side] for top in self.tops for left in self.lefts]
        )

    def merge(self, logits: Tensor) -> Tensor:
        """(V, K, g, g) -> (K, h, w), in float32."""
        side = (self.side, self.side)
        windows = F.interpolate(logits.float(), size=side, mode="bilinear", align_corners=False)  # (V, K, r, r)
        if self.count == 1:
            merged = windows[0]
        else:
            merged = windows.new_zeros(windows.shape[1], self.height, self.width)
            times = windows.new_zeros(self.height, self.width)
            places = [(top, left) for top in self.tops for left in self.lefts]
            for window, (top, left) in zip(windows, places):
                merged[:, top : top + self.side, left : left + self.side] += window
                times[top : top + self.side, left : left + self.side] += 1
            merged /= times
        return merged.flip(-1) if self.flipped else merged


class ImageWindows(NamedTuple):
    """An image that is cut into windows."""

    windows: Tensor
    """The windows of all views, normalised: (V, C, r, r)."""
    views: tuple[View, ...]
    size: tuple[int, int]
    """Height and width of the image."""


def views_of(height: int, width: int, side: int, options: WindowOptions) -> tuple[View, ...]:
    """The views of an image of this size."""
    views = []
    for scale in options.scales:
        shorter = round(side * scale)
        longer = max(shorter, round(shorter * max(height, width) / min(height, width)))
        h, w = (shorter, longer) if height <= width else (longer, shorter)
        stride = max(1, round(side * options.stride))
        tops, lefts = ((*range(0, length - side, stride), length - side) for length in (h, w))
        views += [View(h, w, side, tops, lefts, flipped) for flipped in ((False, True) if options.flip else (False,))]
    return tuple(views)


def label_map(logits: Sequence[Tensor], views: Sequence[View], size: tuple[int, int]) -> Tensor:
    """The class of every pixel, from the logits of the windows of each view: (V, K, g, g) each -> (H, W) uint8."""
    merged = [view.merge(windows) for view, windows in zip(views, logits)]  # (K, h, w) each
    if len(merged) == 1:
        return upsampled_argmax(merged[0], size)
    first = merged[0].shape[-2:]
    resized = [F.interpolate(view[None], size=first, mode="bilinear", align_corners=False) for view in merged]
    return upsampled_argmax(torch.stack([view[0].softmax(dim=0) for view in resized]).mean(dim=0), size)


def upsampled_argmax(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """The class of the highest score after bilinear resizing: (K, h, w) -> (H, W) uint8.

    Classes are resized in groups, so that 150 classes of a large photograph fit into memory.
    """
    group = max(1, _UPSAMPLED // (size[0] * size[1]))
    best, label = None, None
    for first in range(0, len(scores), group):
        resized = F.interpolate(scores[None, first : first + group], size=size, mode="bilinear", align_corners=False)
        highest, index = resized[0].max(dim=0)  # (k, H, W) -> (H, W) twice
        index = (index + first).to(torch.uint8)
        if best is None or label is None:
            best, label = highest, index
        else:
            label = torch.where(highest > best, index, label)
            best = torch.maximum(highest, best)
    assert label is not None
    return label
