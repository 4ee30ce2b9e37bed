"""Sets that fit: decoded once in parallel, kept as bytes on the device, augmented there in whole batches.

Letters: B images, C channels, N pictures, S side of the stored pictures, r the resolution of the images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from progresvit.config import ModelConfig
from progresvit.data import gpu_augment
from progresvit.data.dataset import Pictures
from progresvit.data.decode import PictureError
from progresvit.data.loader import Batch, Unreadable, open_picture
from progresvit.data.preprocess import evaluation_transform, normalise
from progresvit.data.sampler import Draw, Order, mix_seed
from progresvit.data.transforms import Augmentation

_CHUNK = 1024  # pictures on the way to the device at a time


class ResidentPictures:
    """Square pictures as bytes on the device; those that cannot be read are left out."""

    def __init__(
        self,
        pictures: Pictures,
        *,
        side: int,
        prepare: Callable[[Image.Image], Tensor],
        device: torch.device,
    ) -> None:
        self.unreadable = Unreadable(pictures)
        self.images = torch.empty((len(pictures), 3, side, side), dtype=torch.uint8, device=device)  # (N, C, S, S)
        sizes: list[tuple[int, int]] = []
        targets: list[int] = []

        def load(index: int) -> tuple[tuple[int, int], Tensor] | str:
            try:
                picture = open_picture(pictures, index)
            except PictureError as error:
                return str(error)
            return (picture.height, picture.width), prepare(picture)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, len(pictures), _CHUNK):
                indices = range(start, min(start + _CHUNK, len(pictures)))
                chunk = []
                for index, loaded in zip(indices, pool.map(load, indices)):
                    if isinstance(loaded, str):
                        self.unreadable.add(index, loaded)
                        continue
                    sizes.append(loaded[0])
                    chunk.append(loaded[1])
                    targets.append(pictures.targets[index])
                if chunk:
                    self.images[len(sizes) - len(chunk) : len(sizes)] = torch.stack(chunk).to(device)
        self.images = self.images[: len(sizes)]
        self.sizes = torch.tensor(sizes, device=device)  # (N, 2) height and width before they were squared
        self.targets = torch.tensor(targets, device=device)

    def __len__(self) -> int:
        return len(self.targets)


def _squeeze(side: int) -> Callable[[Image.Image], Tensor]:
    """Whole pictures into a square; crops are drawn in the shape that they had."""

    def squeeze(picture: Image.Image) -> Tensor:
        square = picture if picture.size == (side, side) else picture.resize((side, side), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(square)).permute(2, 0, 1)  # (S, S, C) -> (C, S, S)

    return squeeze


def resident_for_training(pictures: Pictures, *, side: int, device: torch.device) -> ResidentPictures:
    """Whole pictures, to crop from."""
    return ResidentPictures(pictures, side=side, prepare=_squeeze(side), device=device)


def resident_for_evaluation(pictures: Pictures, *, config: ModelConfig, device: torch.device) -> ResidentPictures:
    """The evaluation crop of each picture."""
    crop = evaluation_transform(config, as_bytes=True)
    return ResidentPictures(pictures, side=config.input_side, prepare=crop, device=device)


class ResidentBatches:
    """Training batches made on the device."""

    def __init__(
        self,
        pictures: ResidentPictures,
        *,
        config: ModelConfig,
        augmentation: Augmentation,
        order: Order,
        resolution: int,
        compiled: bool = False,
    ) -> None:
        if augmentation.rand_augment:
            raise ValueError(
                "RandAugment works on single pictures and cannot run in the resident mode; "
                "set augment.rand_augment=null (colour jitter and erasing stay), or data.mode=loader."
            )
        self.pictures, self.config, self.augmentation, self.order = pictures, config, augmentation, order
        self.resolution, self.unreadable = resolution, pictures.unreadable
        device = pictures.images.device
        self.generator = torch.Generator(device)
        self.mean, self.std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (config.mean, config.std))
        self._render = torch.compile(_render, dynamic=False) if compiled else _render

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """This process's micro-batches of each step."""
        for step in range(first, last):
            yield [self._make(step, number, indices) for number, indices in self.order.micro_batches(step)]

    def _make(self, step: int, number: int, indices: list[int]) -> Batch:
        self.generator.manual_seed(mix_seed(Draw.BATCH, self.order.seed, step, number))
        chosen = torch.tensor(indices).to(self.pictures.images.device, non_blocking=True)
        images, sizes = self.pictures.images[chosen], self.pictures.sizes[chosen]
        return Batch(self.augment(images, sizes), self.pictures.targets[chosen])

    def augment(self, images: Tensor, sizes: Tensor) -> Tensor:
        """Crop, flip, colour, normalise, erase: (B, C, S, S) bytes -> (B, C, r, r)."""
        wanted, generator, side = self.augmentation, self.generator, images.shape[-1]
        boxes = gpu_augment.sample_crops(sizes, scale=wanted.crop_scale, ratio=wanted.crop_ratio, generator=generator)
        boxes = boxes * (side / sizes.repeat(1, 2))  # pixels of the picture -> pixels of the square
        flip = torch.rand(len(images), generator=generator, device=generator.device) < wanted.flip
        colour = None if wanted.colour is None else gpu_augment.sample_colour(len(images), wanted.colour, generator)
        x: Tensor = self._render(images, boxes, flip, colour, self.mean, self.std, self.resolution)
        if wanted.erasing:
            boxes = gpu_augment.sample_erasing(len(x), x.shape[-1], probability=wanted.erasing, generator=generator)
            x = gpu_augment.erase(x, boxes, generator)
        return x


def _render(
    images: Tensor,
    boxes: Tensor,
    flip: Tensor,
    colour: tuple[Tensor, Tensor] | None,
    mean: Tensor,
    std: Tensor,
    resolution: int,
) -> Tensor:
    """Everything about pixels, once the draws are made, so that it can be compiled: (B, C, S, S) -> (B, C, r, r)."""
    x = gpu_augment.crop_and_resize(images, boxes, flip, resolution=resolution)
    if colour is not None:
        x = gpu_augment.change_colour(x, *colour)
    return (x - mean) / std


def resident_evaluation_batches(pictures: ResidentPictures, *, config: ModelConfig, batch: int) -> Iterator[Batch]:
    """Every picture once, in order, as evaluation sees it."""
    if not len(pictures):
        return
    for pixels, targets in zip(pictures.images.split(batch), pictures.targets.split(batch)):
        yield Batch(normalise(pixels, config), targets)
