"""Datasets that fit into memory: decoded once in parallel, and stored as bytes on the device.

Letters: C channels, N images of the dataset, S side of the stored images.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.crop import EvaluationCrop, preprocessing_hash
from progresvit.data.dataset import ImageDataset, dataset_hash
from progresvit.data.decode import ImageError
from progresvit.data.loading import Unreadable
from progresvit.io.files import replacing_file

_CHUNK = 1024  # images that are copied to the device at a time


class Loaded(NamedTuple):
    """An image as it is stored."""

    image: Tensor
    """(C, S, S) bytes."""
    size: Tensor
    """Original height and width, (2,)."""
    target: Tensor
    """The class, or the mask (S, S)."""


class InMemoryImages:
    """Square images as bytes on the device, their original sizes and targets; unreadable images are left out.

    Args:
        dataset: The images.
        load: Makes the stored form of the image of an index; called in threads.
        side: Side of the stored images.
        device: Where they are stored.
        cache: File with the stored images: read if it exists, written otherwise.
    """

    images: Tensor
    """(N, C, S, S)"""
    sizes: Tensor
    """Original height and width, (N, 2)."""
    targets: Tensor
    """Classes (N,), or masks (N, S, S)."""

    def __init__(
        self,
        dataset: ImageDataset,
        load: Callable[[int], Loaded],
        *,
        side: int,
        device: torch.device,
        cache: Path | None = None,
    ) -> None:
        self.unreadable = Unreadable(dataset)
        if cache is not None and cache.is_file():
            self._read(cache, device)
            return
        self._load(len(dataset), load, side, device)
        if cache is not None:
            self._write(cache)

    def _load(self, count: int, load: Callable[[int], Loaded], side: int, device: torch.device) -> None:
        def load_or_explain(index: int) -> Loaded | str:
            try:
                return load(index)
            except ImageError as error:
                return str(error)

        self.images = torch.empty((count, 3, side, side), dtype=torch.uint8, device=device)
        sizes, targets = [torch.empty(0, 2, dtype=torch.int64)], []
        stored = 0
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, count, _CHUNK):
                indices = range(start, min(start + _CHUNK, count))
                chunk: list[Loaded] = []
                for index, loaded in zip(indices, pool.map(load_or_explain, indices)):
                    if isinstance(loaded, str):
                        self.unreadable.add(index, loaded)
                    else:
                        chunk.append(loaded)
                if chunk:
                    images, sizes_of, targets_of = map(torch.stack, zip(*chunk))
                    self.images[stored : stored + len(chunk)] = images.to(device)
                    sizes.append(sizes_of)
                    targets.append(targets_of.to(device))
                    stored += len(chunk)
        self.images = self.images[:stored]
        self.sizes = torch.cat(sizes).to(device)
        self.targets = torch.cat(targets) if targets else torch.empty(0, dtype=torch.int64, device=device)

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
        with replacing_file(cache) as staged:  # several processes may write the same
            save_file(tensors, staged, metadata={"unreadable": json.dumps(list(self.unreadable.reasons.items()))})


def cache_file(folder: str | Path, dataset: ImageDataset, about: str) -> Path:
    """The cache of these images in a folder; another name for changed files, classes, order or preparation."""
    name = dataset_hash(dataset, about, remedy="remove data.in_memory_cache")
    return Path(folder).expanduser() / f"{name}.safetensors"


def squeeze(image: Image.Image, side: int) -> Tensor:
    """A whole image, resized to a square: -> (C, S, S) bytes. Crops are drawn in its original shape."""
    square = image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)  # (S, S, C) -> (C, S, S)


def load_whole(dataset: ImageDataset, side: int, index: int, seed: int = 0) -> Loaded:
    """The whole image, from which crops are drawn later; it is the same for every seed."""
    image = dataset.read_image(index)
    return Loaded(squeeze(image, side), torch.tensor((image.height, image.width)), torch.tensor(dataset.targets[index]))


def in_memory_for_training(
    dataset: ImageDataset, *, side: int, device: torch.device, cache: str | None = None
) -> InMemoryImages:
    """Whole images, from which crops are drawn; ``cache`` is a folder that keeps them for the next run."""
    file = None if cache is None else cache_file(cache, dataset, str(side))
    return InMemoryImages(dataset, partial(load_whole, dataset, side), side=side, device=device, cache=file)


def in_memory_for_evaluation(
    dataset: ImageDataset, *, config: BaseConfig, device: torch.device, cache: str | None = None
) -> InMemoryImages:
    """The evaluation crop of each image; ``cache`` is a folder that keeps them for the next run."""
    crop = EvaluationCrop.of(config)

    def load(index: int) -> Loaded:
        image = dataset.read_image(index)
        size, target = torch.tensor((image.height, image.width)), torch.tensor(dataset.targets[index])
        return Loaded(torch.from_numpy(crop(image)), size, target)

    file = None if cache is None else cache_file(cache, dataset, preprocessing_hash(config))
    return InMemoryImages(dataset, load, side=crop.side, device=device, cache=file)
