"""Whole images for evaluation, at the sizes from which their windows are cut.

Letters: C channels, H and W height and width of an image, h and w of a view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.decode import ImageError
from progresvit.data.loading import Unreadable, load_in_workers
from progresvit.data.segmentation.dataset import SegmentationDataset
from progresvit.data.segmentation.windows import ImageWindows, View, WindowOptions, views_of
from progresvit.data.transforms import normalise


class EvaluationImage(NamedTuple):
    """A whole image at the sizes from which its windows are cut."""

    pixels: tuple[Tensor, ...]
    """The image at each scale, (C, h, w) bytes."""
    views: tuple[View, ...]
    size: tuple[int, int]
    """Height and width of the image."""
    mask: Tensor | None
    """(H, W) bytes, IGNORE where a pixel has no label; None without labels."""

    def cut(self, config: BaseConfig, device: torch.device) -> ImageWindows:
        """The windows of all views, normalised."""
        scaled = {tuple(pixels.shape[-2:]): pixels for pixels in self.pixels}
        windows = [view.cut(scaled[view.height, view.width].to(device)) for view in self.views]
        return ImageWindows(normalise(torch.cat(windows), config), self.views, self.size)

    def to(self, device: torch.device) -> EvaluationImage:
        """The same image on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        return self._replace(pixels=tuple(pixels.to(device) for pixels in self.pixels), mask=mask)


def size_problem(height: int, width: int, config: BaseConfig, options: WindowOptions | None = None) -> str | None:
    """Why an image of this size cannot be used, or None if it can; with options, also whether it can be resized."""
    patch = getattr(config, "patch_size", 1)
    if min(height, width) < patch:
        return f"smaller than a patch of {patch} pixels ({width} x {height})"
    views = () if options is None else views_of(height, width, config.input_side, options)
    if any(view.height * view.width > (Image.MAX_IMAGE_PIXELS or math.inf) for view in views):
        return f"too long and thin to be resized safely ({width} x {height})"
    return None


def check_size(height: int, width: int, config: BaseConfig, name: str, options: WindowOptions | None = None) -> None:
    """Refuse an image whose size cannot be used."""
    problem = size_problem(height, width, config, options)
    if problem is not None:
        raise ValueError(f"{name} is {problem}; leave it out, or enlarge or crop image and mask.")


def evaluation_image(
    image: Image.Image, mask: np.ndarray[Any, Any] | None, config: BaseConfig, options: WindowOptions, name: str
) -> EvaluationImage:
    """An RGB image at all scales; the mask keeps its size."""
    width, height = image.size
    check_size(height, width, config, name, options)
    views = views_of(height, width, config.input_side, options)
    sizes = dict.fromkeys((view.height, view.width) for view in views)
    pixels = [
        torch.from_numpy(np.array(image.resize((w, h), Image.Resampling.BICUBIC))).permute(2, 0, 1) for h, w in sizes
    ]  # (h, w, C) -> (C, h, w)
    return EvaluationImage(
        tuple(pixels), views, (height, width), None if mask is None else torch.from_numpy(mask.copy())
    )


def evaluation_images(
    dataset: SegmentationDataset,
    indices: Sequence[int],
    *,
    config: BaseConfig,
    options: WindowOptions,
    workers: int,
    unreadable: Unreadable,
) -> Iterator[tuple[int, EvaluationImage]]:
    """The readable images among these, with their indices; a wrong mask is an error."""
    load, groups = partial(_load_image, dataset, config, options), [[index] for index in indices]
    images = load_in_workers(load, groups, collate=itemgetter(0), workers=workers)  # of different sizes, one at a time
    for index, image in zip(indices, images):
        if isinstance(image, ImageError):
            unreadable.add(index, str(image))
        elif isinstance(image, ValueError):
            raise ValueError(str(image))
        else:
            yield index, image


def _load_image(
    dataset: SegmentationDataset, config: BaseConfig, options: WindowOptions, index: int
) -> EvaluationImage | ValueError:
    try:
        image, mask = dataset.read_pair(index)
        return evaluation_image(image, mask, config, options, dataset.entries[index].name)
    except ValueError as error:
        return error
