"""Batches of images with masks: crops for training, from memory or from worker processes, and whole images for
evaluation.

Letters: B images, C channels, N images of the dataset, H and W height and width of an image, h and w of a view, S side
of the stored images, r side of the crops and of the windows, V windows of an image.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from progresvit.config import BaseConfig
from progresvit.data.decode import ImageError
from progresvit.data.loader import Unreadable, ignore_interrupts, worker_steps
from progresvit.data.sampler import Draw, EpochSampler, mix_seed
from progresvit.data.segmentation import SegmentationDataset
from progresvit.data.segmentation_augment import SegmentationAugmentation, augment
from progresvit.data.transforms import normalise
from progresvit.data.windows import ImageWindows, View, WindowOptions, views_of


class SegmentationBatch(NamedTuple):
    """Crops ready for the model, and their labels."""

    images: Tensor
    """(B, C, r, r), normalised."""
    masks: Tensor
    """(B, r, r) int64, IGNORE where a pixel has no label."""


class EvaluationImage(NamedTuple):
    """A whole image at the sizes that its windows are cut from."""

    pixels: tuple[Tensor, ...]
    """One for each scale, (C, h, w) bytes."""
    views: tuple[View, ...]
    size: tuple[int, int]
    """Height and width of the image."""
    mask: Tensor | None
    """(H, W) bytes, IGNORE where a pixel has no label; None without labels."""

    def cut(self, config: BaseConfig, device: torch.device) -> ImageWindows:
        """The windows of all views, normalised."""
        of_size = {tuple(pixels.shape[-2:]): pixels for pixels in self.pixels}
        windows = [view.cut(of_size[view.height, view.width].to(device)) for view in self.views]
        return ImageWindows(normalise(torch.cat(windows), config), self.views, self.size)

    def to(self, device: torch.device) -> EvaluationImage:
        """The same on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        return self._replace(pixels=tuple(pixels.to(device) for pixels in self.pixels), mask=mask)


def size_problem(height: int, width: int, config: BaseConfig, options: WindowOptions | None = None) -> str | None:
    """Why an image of this size cannot be used, or None if it can; with options, when it is resized for windows."""
    patch = getattr(config, "patch_size", 1)
    if min(height, width) < patch:
        return f"smaller than a patch of {patch} pixels ({width} x {height})"
    views = () if options is None else views_of(height, width, config.input_side, options)
    if any(view.height * view.width > (Image.MAX_IMAGE_PIXELS or math.inf) for view in views):
        return f"too long and thin to be resized safely ({width} x {height})"
    return None


def check_size(height: int, width: int, config: BaseConfig, name: str, options: WindowOptions | None = None) -> None:
    """Refuse an image of a size that cannot be used."""
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


class InMemoryPairs:
    """Images and masks as bytes on the device, squeezed to squares; unreadable images are left out."""

    def __init__(self, dataset: SegmentationDataset, *, config: BaseConfig, side: int, device: torch.device) -> None:
        self.unreadable = Unreadable(dataset)

        def load(index: int) -> tuple[tuple[int, int], Tensor, Tensor] | str:
            try:
                image, mask = dataset.read_pair(index)
            except ImageError as error:
                return str(error)
            height, width = mask.shape
            check_size(height, width, config, dataset.entries[index].name)
            square = image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BICUBIC)
            labels = Image.fromarray(mask).resize((side, side), Image.Resampling.NEAREST)
            pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)  # (S, S, C) -> (C, S, S)
            return (height, width), pixels, torch.from_numpy(np.array(labels))

        images, masks, sizes = [], [], []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for index, loaded in enumerate(pool.map(load, range(len(dataset)))):
                if isinstance(loaded, str):
                    self.unreadable.add(index, loaded)
                    continue
                sizes.append(loaded[0])
                images.append(loaded[1].to(device))
                masks.append(loaded[2].to(device))
        self.images, self.masks = torch.stack(images), torch.stack(masks)  # (N, C, S, S), (N, S, S)
        self.sizes = torch.tensor(sizes, device=device)  # (N, 2) original height and width

    def __len__(self) -> int:
        return len(self.sizes)


class InMemoryCrops:
    """Training batches that are made on the device."""

    def __init__(
        self, stored: InMemoryPairs, *, config: BaseConfig, wanted: SegmentationAugmentation, sampler: EpochSampler
    ) -> None:
        self.stored, self.wanted, self.sampler = stored, wanted, sampler
        self.unreadable, self.side = stored.unreadable, config.input_side
        device = stored.images.device
        self.generator = torch.Generator(device)
        self.mean, self.std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (config.mean, config.std))

    def steps(self, first: int, last: int) -> Iterator[list[SegmentationBatch]]:
        """The micro-batches of this process, step by step."""
        for step in range(first, last):
            yield [self._make(step, number, indices) for number, indices in self.sampler.micro_batches(step)]

    def _make(self, step: int, number: int, indices: list[int]) -> SegmentationBatch:
        self.generator.manual_seed(mix_seed(Draw.BATCH, self.sampler.seed, step, number))
        chosen = torch.tensor(indices).to(self.stored.images.device, non_blocking=True)
        images, masks = augment(
            *(self.stored.images[chosen], self.stored.masks[chosen], self.stored.sizes[chosen]),
            side=self.side,
            wanted=self.wanted,
            mean=self.mean,
            std=self.std,
            generator=self.generator,
        )
        return SegmentationBatch(images, masks)


class _Crops(Dataset[Any]):
    """Items are requested by (epoch, index). An unreadable image is replaced by the next one of the dataset."""

    def __init__(
        self, dataset: SegmentationDataset, config: BaseConfig, wanted: SegmentationAugmentation, seed: int
    ) -> None:
        self.dataset, self.config, self.wanted, self.seed = dataset, config, wanted, seed
        self.mean, self.std = (torch.tensor(v).view(1, -1, 1, 1) for v in (config.mean, config.std))

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, Tensor, list[tuple[int, str]]] | str:
        """A crop, its labels and the unreadable images; a text if a mask is wrong, for an error in the main process."""
        epoch, index = item
        generator = torch.Generator().manual_seed(mix_seed(Draw.IMAGE, self.seed, epoch, index))
        unreadable: list[tuple[int, str]] = []
        for turn in range(len(self.dataset)):
            candidate = (index + turn) % len(self.dataset)
            try:
                image, mask = self.dataset.read_pair(candidate)
                height, width = mask.shape
                check_size(height, width, self.config, self.dataset.entries[candidate].name)
            except ImageError as error:
                unreadable.append((candidate, str(error)))
                continue
            except ValueError as error:
                return str(error)
            images, masks = augment(
                torch.from_numpy(np.array(image)).permute(2, 0, 1)[None],  # (H, W, C) -> (1, C, H, W)
                torch.from_numpy(mask)[None],
                torch.tensor([(height, width)]),
                side=self.config.input_side,
                wanted=self.wanted,
                mean=self.mean,
                std=self.std,
                generator=generator,
            )
            return images[0], masks[0], unreadable
        return f"none of the {len(self.dataset)} images can be read: {unreadable[0][1]}."


def _collate(items: list[Any]) -> Any:
    wrong = next((item for item in items if isinstance(item, str)), None)
    if wrong is not None:
        return wrong
    images, masks, unreadable = zip(*items)
    return torch.stack(images), torch.stack(masks), [entry for entries in unreadable for entry in entries]


class LoaderCrops:
    """Training batches from worker processes."""

    def __init__(
        self,
        dataset: SegmentationDataset,
        *,
        config: BaseConfig,
        wanted: SegmentationAugmentation,
        sampler: EpochSampler,
        workers: int,
        device: torch.device,
    ) -> None:
        self.sampler, self.workers, self.device = sampler, workers, device
        self.unreadable = Unreadable(dataset)
        self._dataset = _Crops(dataset, config, wanted, sampler.seed)

    def steps(self, first: int, last: int) -> Iterator[list[SegmentationBatch]]:
        """The micro-batches of this process, step by step."""
        steps = worker_steps(
            self._dataset, self.sampler, first, last, collate=_collate, workers=self.workers, device=self.device
        )
        for step in steps:
            yield [self._make(loaded) for loaded in step]

    def _make(self, loaded: tuple[Tensor, Tensor, list[tuple[int, str]]] | str) -> SegmentationBatch:
        if isinstance(loaded, str):
            raise ValueError(loaded)
        images, masks, unreadable = loaded
        for index, reason in unreadable:
            self.unreadable.add(index, reason)
        return SegmentationBatch(images.to(self.device, non_blocking=True), masks.to(self.device, non_blocking=True))


class _Whole(Dataset[Any]):
    def __init__(self, dataset: SegmentationDataset, config: BaseConfig, options: WindowOptions) -> None:
        self.dataset, self.config, self.options = dataset, config, options

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[EvaluationImage | None, str]:
        """An image; or None and the reason, which begins with ``error:`` if a mask is wrong."""
        try:
            image, mask = self.dataset.read_pair(index)
            name = self.dataset.entries[index].name
            return evaluation_image(image, mask, self.config, self.options, name), ""
        except ImageError as error:
            return None, str(error)
        except ValueError as error:
            return None, f"error:{error}"


def _unchanged(item: Any) -> Any:
    """Without it the loader would make lists of tuples."""
    return item


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
    loader = DataLoader(
        _Whole(dataset, config, options),
        sampler=indices,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=workers,
        worker_init_fn=ignore_interrupts,
    )
    for index, (image, reason) in zip(indices, loader):
        if image is not None:
            yield index, image
        elif reason.startswith("error:"):
            raise ValueError(reason.removeprefix("error:"))
        else:
            unreadable.add(index, reason)
