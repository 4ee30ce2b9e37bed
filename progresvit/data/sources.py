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
from torch.utils.data import DataLoader, Dataset

from progresvit.config import BaseConfig
from progresvit.data.augment import gpu_augment
from progresvit.data.augment.classification import Augmentation, AugmentImages, Batch, training_transform
from progresvit.data.augment.rand_augment import RandAugment
from progresvit.data.dataset import ImageDataset
from progresvit.data.decode import ImageError
from progresvit.data.gpu_decode import GpuDecoder, plan_for
from progresvit.data.in_memory import InMemoryImages
from progresvit.data.loading import Unreadable, ignore_interrupts
from progresvit.data.prefetch import Prefetcher
from progresvit.data.prepare import Box, Plan, Prepared, Request, prepare, request_of
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
        self._items = _Items(len(dataset), load, sampler.seed)

    def steps(self, first: int, last: int) -> Iterator[list[Any]]:
        """This process's micro-batches of each step."""
        loader = DataLoader(
            self._items,
            batch_sampler=self._requests(first, last),
            collate_fn=_collate,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=ignore_interrupts,
        )
        places = ((step, number) for step in range(first, last) for number, _ in self.sampler.micro_batches(step))
        batches: list[Any] = []
        for loaded, (step, number) in zip(loader, places):
            batches.append(self._make(loaded, mix_seed(Draw.BATCH, self.sampler.seed, step, number)))
            if len(batches) == self.sampler.accumulate:
                yield batches
                batches = []

    def _requests(self, first: int, last: int) -> Iterator[list[tuple[int, int]]]:
        """Epoch and index of each image, by micro-batch."""
        for step in range(first, last):
            for _, indices in self.sampler.micro_batches(step):
                yield [(step // self.sampler.steps_per_epoch, index) for index in indices]

    def _make(self, loaded: tuple[tuple[Tensor, ...], list[tuple[int, str]]] | str, seed: int) -> Any:
        if isinstance(loaded, str):
            raise ValueError(loaded)
        tensors, unreadable = loaded
        for index, reason in unreadable:
            self.unreadable.add(index, reason)
        return self.augment(*(tensor.to(self.device, non_blocking=True) for tensor in tensors), seed)


class _Items(Dataset[Any]):
    """The loaded images, requested by (epoch, index). An unreadable one is replaced by the next one of the dataset."""

    def __init__(self, count: int, load: Callable[[int, int], tuple[Tensor, ...]], seed: int) -> None:
        self.count, self.load, self.seed = count, load, seed

    def __getitem__(self, item: tuple[int, int]) -> tuple[tuple[Tensor, ...], list[tuple[int, str]]] | str:
        """The tensors of an image, and what was unreadable; or the text of an error for the main process to raise,
        since an exception of a worker brings the worker's traceback in its message.
        """
        epoch, index = item
        seed = seed_all(Draw.IMAGE, self.seed, epoch, index)
        unreadable: list[tuple[int, str]] = []
        for turn in range(self.count):
            candidate = (index + turn) % self.count
            try:
                return self.load(candidate, seed), unreadable
            except ImageError as error:
                unreadable.append((candidate, str(error)))
            except ValueError as error:
                return str(error)
        return f"none of the {self.count} images can be read: {unreadable[0][1]}."


def _collate(items: list[Any]) -> tuple[tuple[Tensor, ...], list[tuple[int, str]]] | str:
    """A tensor for each column of the items, and all that was unreadable; or the first error."""
    for item in items:
        if isinstance(item, str):
            return item
    tensors = tuple(torch.stack(column) for column in zip(*(item[0] for item in items)))
    return tensors, [entry for item in items for entry in item[1]]


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
    return WorkerSource(dataset, sampler, load=load, augment=_as_batch, workers=workers, device=device)


def _load_augmented(
    dataset: ImageDataset, transform: Callable[[Image], Tensor], index: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The transform draws from the global random sources."""
    return transform(dataset.read_image(index)), torch.tensor(dataset.targets[index])


def _as_batch(images: Tensor, targets: Tensor, seed: int) -> Batch:
    """The workers have augmented the images."""
    return Batch(images, targets)


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
        augmentation: Random changes.
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
        augmentation: Augmentation,
        workers: int,
        device: torch.device,
        ahead: int = 2,
    ) -> None:
        self.dataset, self.sampler, self.plan, self.augmentation = dataset, sampler, plan, augmentation
        self.workers, self.device, self.ahead = max(1, workers), device, ahead
        self.augment = AugmentImages(plan.config, augmentation, device=device)
        self.unreadable = Unreadable(dataset)
        self._decoder = GpuDecoder(plan, device)

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """This process's micro-batches of each step."""
        steps = self._steps(first, last)
        if not self.ahead:
            yield from steps
            return
        with Prefetcher(steps, lambda step: step, self.ahead) as coming:
            while isinstance(step := coming.get(None), list):
                yield step

    def _steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        def requests() -> Iterator[list[Request]]:
            for step in range(first, last):
                for _, indices in self.sampler.micro_batches(step):
                    yield [request_of(self.dataset, index) for index in indices]

        with WorkerPool(self.plan, self.workers) as pool:
            groups = pool.prepared(requests())
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
        options, count = self.augmentation, len(group)
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
            crops = self._decoder.render(images, boxes_of, side=self.plan.config.input_side, clip=True, flip=flip)
            if not crops.errors:
                return crops.pixels, [self.dataset.targets[index] for index in used]
            for position, reason in crops.errors.items():
                self.unreadable.add(used[position], reason)
                used[position] = (used[position] + 1) % len(self.dataset)
                images[position] = prepare(request_of(self.dataset, used[position]), self.plan)
