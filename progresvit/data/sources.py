"""Where the images of a training step come from: worker processes, worker processes and a GPU, or the device's memory.

A source hands over the batches of any step. The order of the images (sampler.py) and all draws follow from the seed and
the step, so a resumed run sees the same batches. What a task does to its images is one function (augment/), which makes
a micro-batch at a time:

    augment(images, sizes, targets, seed) -> batch

Letters: B images of a micro-batch, C channels, r side of the training images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from PIL.Image import Image
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.augment import gpu_augment
from progresvit.data.augment.classification import Augmentation, AugmentImages, Batch, training_transform
from progresvit.data.augment.rand_augment import RandAugment
from progresvit.data.crop import Box
from progresvit.data.dataset import ImageDataset
from progresvit.data.decode import ImageError
from progresvit.data.gpu_decode import GpuDecoder, plan_for
from progresvit.data.in_memory import InMemoryImages
from progresvit.data.loading import Unreadable, load_in_workers
from progresvit.data.prefetch import Prefetcher
from progresvit.data.prepare import Plan, Prepared, prepare, request_of
from progresvit.data.sampler import Draw, EpochSampler, mix_seed, seed_all
from progresvit.data.worker_pool import WorkerPool


class BatchSource(Protocol):
    """Training batches that can start at any step."""

    sampler: EpochSampler

    def steps(self, first: int, last: int) -> Iterator[Sequence[Any]]:
        """This process's micro-batches of each step."""
        ...


class InMemorySource:
    """Images that are stored on the device and augmented there.

    Args:
        stored: The images.
        sampler: The order of the images.
        augment: Makes a batch of images, their original sizes, their targets, and a seed.
    """

    def __init__(
        self, stored: InMemoryImages, sampler: EpochSampler, augment: Callable[[Tensor, Tensor, Tensor, int], Any]
    ) -> None:
        self.stored, self.sampler, self.augment, self.unreadable = stored, sampler, augment, stored.unreadable

    def steps(self, first: int, last: int) -> Iterator[list[Any]]:
        """This process's micro-batches of each step."""
        for step in range(first, last):
            yield [self._make(step, number, indices) for number, indices in self.sampler.micro_batches(step)]

    def _make(self, step: int, number: int, indices: list[int]) -> Any:
        stored, places = self.stored, torch.tensor(indices).to(self.stored.images.device, non_blocking=True)
        seed = mix_seed(Draw.BATCH, self.sampler.seed, step, number)
        return self.augment(stored.images[places], stored.sizes[places], stored.targets[places], seed)


class WorkerSource:
    """Images that worker processes load one by one.

    Classification and segmentation augment them there, as Pillow images and at their full size; multi-crop augments
    whole batches on the device. So both ends are functions:

    Args:
        dataset: The images.
        sampler: The order of the images.
        load: Called in a worker with an index and a seed; returns a tuple of tensors. After an :class:`ImageError` the
            next image of the dataset is loaded instead. The global random sources are seeded as well.
        augment: Makes a batch of these tensors, stacked and on the device, and a seed.
        workers: Number of processes; 0 loads in this process.
        device: Where the batches are needed.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        sampler: EpochSampler,
        *,
        load: Callable[[int, int], tuple[Tensor, ...]],
        augment: Callable[..., Any],
        workers: int,
        device: torch.device,
    ) -> None:
        self.sampler, self.augment, self.workers, self.device = sampler, augment, workers, device
        self.unreadable = Unreadable(dataset)
        self._load = partial(_load_readable, load, len(dataset), sampler.seed)

    def steps(self, first: int, last: int) -> Iterator[list[Any]]:
        """This process's micro-batches of each step."""
        sampler = self.sampler
        requests = (  # epoch and index of each image, by micro-batch
            [(step // sampler.steps_per_epoch, index) for index in indices]
            for step in range(first, last)
            for _, indices in sampler.micro_batches(step)
        )
        is_gpu = self.device.type == "cuda"
        loaded = load_in_workers(self._load, requests, collate=_collate, workers=self.workers, pinned=is_gpu)
        for step in range(first, last):
            yield [self._make(next(loaded), step, number) for number, _ in sampler.micro_batches(step)]

    def _make(self, loaded: _LoadedBatch | str, step: int, number: int) -> Any:
        if isinstance(loaded, str):
            raise ValueError(loaded)
        tensors, unreadable = loaded
        for index, reason in unreadable:
            self.unreadable.add(index, reason)
        seed = mix_seed(Draw.BATCH, self.sampler.seed, step, number)
        return self.augment(*(tensor.to(self.device, non_blocking=True) for tensor in tensors), seed)


_LoadedBatch = tuple[tuple[Tensor, ...], list[tuple[int, str]]]
"""The tensors of an image or of a batch, and the images that could not be read, with the reasons."""


def _load_readable(
    load: Callable[[int, int], tuple[Tensor, ...]], count: int, run_seed: int, item: tuple[int, int]
) -> _LoadedBatch | str:
    """The image of an epoch and an index, or the next readable one; or the text of an error for the main process."""
    epoch, index = item
    seed = seed_all(Draw.IMAGE, run_seed, epoch, index)
    unreadable: list[tuple[int, str]] = []
    for turn in range(count):
        candidate = (index + turn) % count
        try:
            return load(candidate, seed), unreadable
        except ImageError as error:
            unreadable.append((candidate, str(error)))
        except ValueError as error:
            return str(error)
    return f"none of the {count} images can be read: {unreadable[0][1]}."


def _collate(items: list[_LoadedBatch | str]) -> _LoadedBatch | str:
    """A tensor for each column of the items, and all that was unreadable; or the first error."""
    loaded: list[_LoadedBatch] = []
    for item in items:
        if isinstance(item, str):
            return item
        loaded.append(item)
    tensors = tuple(torch.stack(column) for column in zip(*(image for image, _ in loaded)))
    return tensors, [entry for _, unreadable in loaded for entry in unreadable]


def classification_from_workers(
    dataset: ImageDataset,
    sampler: EpochSampler,
    *,
    config: BaseConfig,
    augmentation: Augmentation,
    workers: int,
    device: torch.device,
) -> WorkerSource:
    """Labelled images that worker processes decode and augment with timm's transforms."""
    load = partial(_load_augmented, dataset, training_transform(config, augmentation))
    return WorkerSource(
        dataset,
        sampler,
        load=load,
        augment=lambda images, targets, seed: Batch(images, targets),  # the workers have augmented them
        workers=workers,
        device=device,
    )


def _load_augmented(
    dataset: ImageDataset, transform: Callable[[Image], Tensor], index: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The transform draws from the global random sources."""
    return transform(dataset.read_image(index)), torch.tensor(dataset.targets[index])


def plan_training(
    config: BaseConfig, augmentation: Augmentation, device: torch.device, mode: str = "auto"
) -> Plan | None:
    """The plan for training images that the GPU decodes and augments; None if worker processes do all of it.

    If something is missing for it, the mode gpu raises an error, and the mode auto leaves it to the worker processes.
    """
    if mode == "cpu":
        return None
    try:
        if augmentation.rand_augment is not None:
            RandAugment.parse(augmentation.rand_augment, config.mean)
        return plan_for(config, device, "gpu", shrink=False)
    except ValueError:
        if mode == "gpu":
            raise
        return None


class GpuSource:
    """Labelled files that processes read ahead, and a GPU decodes, crops and augments; sets may exceed the memory.

    For classification only: sections are cropped out of the decoded files in their original shape, before there is a
    batch of equal images. From then on it is :class:`AugmentImages`, as from memory.

    Args:
        dataset: The images.
        sampler: The order of the images.
        plan: The plan that :func:`plan_training` returned.
        augment: Random changes.
        workers: Processes that read files, and decode what the GPU does not decode.
        device: The GPU.
        ahead: Steps that a thread makes ahead; with 0 each is made when it is asked for, as CUDA graphs that are
            recorded meanwhile need it.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        sampler: EpochSampler,
        *,
        plan: Plan,
        augment: AugmentImages,
        workers: int,
        device: torch.device,
        ahead: int = 2,
    ) -> None:
        self.dataset, self.sampler, self.plan, self.augment = dataset, sampler, plan, augment
        self.workers, self.device, self.ahead = max(1, workers), device, ahead
        self.unreadable = Unreadable(dataset)
        self._decoder = GpuDecoder(plan, device)

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """This process's micro-batches of each step."""
        steps = self._steps(first, last)
        if not self.ahead:
            yield from steps
            return
        with Prefetcher(steps, self.ahead) as coming:
            yield from coming

    def _steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        requests = (
            [request_of(self.dataset, index) for index in indices]
            for step in range(first, last)
            for _, indices in self.sampler.micro_batches(step)
        )
        with WorkerPool(self.plan, self.workers) as pool:
            groups = pool.prepared(requests)
            for step in range(first, last):
                yield [
                    self._make(step, number, indices, groups) for number, indices in self.sampler.micro_batches(step)
                ]

    def _make(self, step: int, number: int, indices: list[int], groups: Iterator[list[Prepared]]) -> Batch:
        seed = mix_seed(Draw.BATCH, self.sampler.seed, step, number)
        parts: list[Tensor] = []
        targets: list[int] = []
        while len(targets) < len(indices):
            rest = indices[len(targets) :]
            pixels, labels = self._crop(next(groups), rest, mix_seed(Draw.IMAGE, seed, len(targets)))
            parts.append(pixels)
            targets += labels
        labels_on_device = torch.tensor(targets).to(self.device, non_blocking=True)
        return self.augment.change_cropped(torch.cat(parts), labels_on_device, seed)  # (B, C, r, r)

    def _crop(self, group: Sequence[Prepared], indices: Sequence[int], seed: int) -> tuple[Tensor, list[int]]:
        """Random crops of a group, as bytes; an unreadable image is replaced by the next one of the dataset."""
        options, count = self.augment.augmentation, len(group)
        generator = torch.Generator().manual_seed(seed)
        flip = (torch.rand(count, generator=generator) < options.flip).tolist()
        draws = generator.get_state()

        def boxes_of(sizes: Mapping[int, tuple[int, int]]) -> list[Box]:
            generator.set_state(draws)  # the draws of an image do not depend on the others
            shapes = torch.tensor([sizes.get(position, (1, 1))[::-1] for position in range(count)])  # height, width
            boxes = gpu_augment.sample_crops(
                shapes, scale=options.crop_scale, ratio=options.crop_ratio, generator=generator
            ).tolist()
            return [
                (left, top, left + width, top + height) for top, left, height, width in map(boxes.__getitem__, sizes)
            ]

        used, images = list(indices[:count]), list(group)
        while True:
            crops = self._decoder.render(images, boxes_of, side=self.augment.side, clip=True, flip=flip)
            if not crops.errors:
                return crops.pixels, [self.dataset.targets[index] for index in used]
            for position, reason in crops.errors.items():
                self.unreadable.add(used[position], reason)
                used[position] = (used[position] + 1) % len(self.dataset)
                images[position] = prepare(request_of(self.dataset, used[position]), self.plan)
