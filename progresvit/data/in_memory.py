"""Datasets that fit into memory: decoded once in parallel, stored as bytes on the device, augmented there in batches.

Letters: B images of a batch, C channels, N images of the dataset, S side of the stored images, r resolution of a batch.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data import gpu_augment
from progresvit.data.crop import preprocessing_hash
from progresvit.data.dataset import ImageDataset, dataset_hash
from progresvit.data.decode import ImageError
from progresvit.data.loader import Batch, Unreadable, open_image
from progresvit.data.rand_augment import RandAugment
from progresvit.data.sampler import Draw, EpochSampler, mix_seed
from progresvit.data.transforms import Augmentation, evaluation_transform, normalise

_CHUNK = 1024  # images that are copied to the device at a time


class InMemoryImages:
    """Square images as bytes on the device; unreadable ones are left out.

    Args:
        dataset: The images.
        side: Side of the stored images.
        prepare: Makes the stored image of a decoded one.
        device: Where they are stored.
        cache: File with the stored images: read if it is there, written otherwise.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        side: int,
        prepare: Callable[[Image.Image], Tensor],
        device: torch.device,
        cache: Path | None = None,
    ) -> None:
        self.unreadable = Unreadable(dataset)
        if cache is not None and cache.is_file():
            self._read(cache, device)
            return
        self._decode(dataset, side, prepare, device)
        if cache is not None:
            self._write(cache)

    def _decode(
        self, dataset: ImageDataset, side: int, prepare: Callable[[Image.Image], Tensor], device: torch.device
    ) -> None:
        self.images = torch.empty((len(dataset), 3, side, side), dtype=torch.uint8, device=device)  # (N, C, S, S)
        sizes: list[tuple[int, int]] = []
        targets: list[int] = []

        def load(index: int) -> tuple[tuple[int, int], Tensor] | str:
            try:
                image = open_image(dataset, index)
                return (image.height, image.width), prepare(image)
            except ImageError as error:
                return str(error)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, len(dataset), _CHUNK):
                indices = range(start, min(start + _CHUNK, len(dataset)))
                chunk = []
                for index, loaded in zip(indices, pool.map(load, indices)):
                    if isinstance(loaded, str):
                        self.unreadable.add(index, loaded)
                        continue
                    sizes.append(loaded[0])
                    chunk.append(loaded[1])
                    targets.append(dataset.targets[index])
                if chunk:
                    self.images[len(sizes) - len(chunk) : len(sizes)] = torch.stack(chunk).to(device)
        self.images = self.images[: len(sizes)]
        self.sizes = torch.tensor(sizes, device=device)  # (N, 2) original height and width
        self.targets = torch.tensor(targets, device=device)

    def __len__(self) -> int:
        return len(self.targets)

    def _read(self, cache: Path, device: torch.device) -> None:
        try:
            stored = load_file(cache, device=str(device))
            self.images, self.sizes, self.targets = (stored[name] for name in ("images", "sizes", "targets"))
            with safe_open(cache, framework="pt") as file:
                unreadable = json.loads(file.metadata()["unreadable"])
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{cache} is damaged ({error}); delete it, and the images are decoded again.") from error
        for index, reason in unreadable:
            self.unreadable.add(index, reason)

    def _write(self, cache: Path) -> None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"images": self.images, "sizes": self.sizes, "targets": self.targets}
        staged = cache.with_name(f".{cache.name}.{uuid.uuid4().hex[:8]}")  # several processes may write the same
        try:
            save_file(tensors, staged, metadata={"unreadable": json.dumps(list(self.unreadable.found.items()))})
            staged.replace(cache)
        finally:
            staged.unlink(missing_ok=True)


def cache_file(folder: str | Path, dataset: ImageDataset, about: str) -> Path:
    """The cache of these images in a folder; another name for changed files, classes, order or preparation."""
    name = dataset_hash(dataset, about, remedy="remove data.in_memory_cache")
    return Path(folder).expanduser() / f"{name}.safetensors"


def squeeze(image: Image.Image, side: int) -> Tensor:
    """A whole image, resized to a square: -> (C, S, S) bytes. Crops are drawn in its original shape."""
    square = image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)  # (S, S, C) -> (C, S, S)


def in_memory_for_training(
    dataset: ImageDataset, *, side: int, device: torch.device, cache: str | None = None
) -> InMemoryImages:
    """Whole images, from which crops are drawn; ``cache`` is a folder that keeps them for the next run."""
    file = None if cache is None else cache_file(cache, dataset, str(side))
    return InMemoryImages(dataset, side=side, prepare=partial(squeeze, side=side), device=device, cache=file)


def in_memory_for_evaluation(
    dataset: ImageDataset, *, config: BaseConfig, device: torch.device, cache: str | None = None
) -> InMemoryImages:
    """The evaluation crop of each image; ``cache`` is a folder that keeps them for the next run."""
    crop = evaluation_transform(config, as_bytes=True)
    file = None if cache is None else cache_file(cache, dataset, preprocessing_hash(config))
    return InMemoryImages(dataset, side=config.input_side, prepare=crop, device=device, cache=file)


class InMemoryBatches:
    """Training batches that are made on the device.

    The augmentations are those of the loader, drawn for a micro-batch at a time: the same distributions, other draws.
    As there, RandAugment replaces colour jitter.
    """

    def __init__(
        self,
        stored: InMemoryImages,
        *,
        config: BaseConfig,
        augmentation: Augmentation,
        sampler: EpochSampler,
        resolution: int,
        compiled: bool = False,
    ) -> None:
        self.stored, self.config, self.augmentation, self.sampler = stored, config, augmentation, sampler
        self.resolution, self.unreadable = resolution, stored.unreadable
        device = stored.images.device
        self.generator = torch.Generator(device)
        self.rand_augment = None
        if augmentation.rand_augment is not None:
            self.rand_augment = RandAugment.parse(augmentation.rand_augment, config.mean)
        self.mean, self.std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (config.mean, config.std))
        self._render = torch.compile(_render, dynamic=False) if compiled else _render
        self._crop = torch.compile(_crop, dynamic=False) if compiled else _crop
        self._normalise = torch.compile(_normalise, dynamic=False) if compiled else _normalise

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """The micro-batches of this process, step by step."""
        for step in range(first, last):
            yield [self._make(step, number, indices) for number, indices in self.sampler.micro_batches(step)]

    def _make(self, step: int, number: int, indices: list[int]) -> Batch:
        seed = mix_seed(Draw.BATCH, self.sampler.seed, step, number)
        chosen = torch.tensor(indices).to(self.stored.images.device, non_blocking=True)
        images, sizes = self.stored.images[chosen], self.stored.sizes[chosen]
        return Batch(self.augment(images, sizes, seed), self.stored.targets[chosen])

    def augment(self, images: Tensor, sizes: Tensor, seed: int) -> Tensor:
        """Crop, flip, RandAugment or colour, normalise, erase: (B, C, S, S) bytes -> (B, C, r, r)."""
        wanted, generator, side = self.augmentation, self.generator.manual_seed(seed), images.shape[-1]
        boxes = gpu_augment.sample_crops(sizes, scale=wanted.crop_scale, ratio=wanted.crop_ratio, generator=generator)
        boxes = boxes * (side / sizes.repeat(1, 2))  # pixels of the original -> pixels of the square
        flip = torch.rand(len(images), generator=generator, device=generator.device) < wanted.flip
        x: Tensor
        if self.rand_augment is None:
            colour = None if wanted.colour is None else gpu_augment.sample_colour(len(images), wanted.colour, generator)
            x = self._render(images, boxes, flip, colour, self.mean, self.std, self.resolution)
        else:  # groups of images whose sizes change from batch to batch: not compiled
            changed = self.rand_augment(self._crop(images, boxes, flip, self.resolution), seed)
            x = self._normalise(changed, self.mean, self.std)
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
    """All work on pixels, after the random draws, so that it can be compiled: (B, C, S, S) -> (B, C, r, r)."""
    x = gpu_augment.crop_and_resize(images, boxes, flip, resolution=resolution)
    if colour is not None:
        x = gpu_augment.change_colour(x, *colour)
    return (x - mean) / std


def _crop(images: Tensor, boxes: Tensor, flip: Tensor, resolution: int) -> Tensor:
    """The first part of the work on pixels, in front of RandAugment: (B, C, S, S) -> (B, C, r, r) bytes."""
    cropped = gpu_augment.crop_and_resize(images, boxes, flip, resolution=resolution)
    return (cropped * 255).round().to(torch.uint8)


def _normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The second part, after RandAugment: (B, C, r, r) bytes -> (B, C, r, r)."""
    return (images / 255 - mean) / std


def in_memory_evaluation_batches(stored: InMemoryImages, *, config: BaseConfig, batch: int) -> Iterator[Batch]:
    """Every image once, in order, after the evaluation crop."""
    if not len(stored):
        return
    for pixels, targets in zip(stored.images.split(batch), stored.targets.split(batch)):
        yield Batch(normalise(pixels, config), targets)
