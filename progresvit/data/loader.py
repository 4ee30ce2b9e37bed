"""Batches from worker processes, which decode and augment images one by one.

The draws of an image follow from the seed, the epoch and its index. Letters: B images, C channels, r the resolution of
the training images (the rounds' resolutions are made on the device).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from progresvit.config import BaseConfig
from progresvit.data.dataset import ImageDataset
from progresvit.data.decode import ImageError, decode
from progresvit.data.sampler import Draw, EpochSampler, seed_all
from progresvit.data.transforms import Augmentation, NamedTransform, normalise, training_transform


class Batch(NamedTuple):
    """Images ready for the model, and their classes."""

    images: Tensor
    """(B, C, r, r), normalised."""
    targets: Tensor
    """(B,)"""


def open_image(dataset: ImageDataset, index: int) -> Image:
    """Read and decode an image; every problem with the file is an :class:`ImageError`."""
    try:
        content = dataset.read(index)
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror or error})") from error
    return decode(content, reduce=True)


class Unreadable:
    """Images that could not be decoded, each listed once; more than one is an error if it exceeds one in a hundred."""

    limit = 0.01

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset
        self.found: dict[int, str] = {}

    def add(self, index: int, reason: str) -> None:
        """Add an image; an error if there are too many."""
        self.found[index] = reason
        if len(self.found) > max(1, self.limit * len(self.dataset)):  # one bad file does not stop a small dataset
            raise ValueError(
                f"{len(self.found)} of {len(self.dataset)} images cannot be read, more than "
                f"{self.limit:.0%}: {'; '.join(self.lines()[:5])}. Repair or remove them."
            )

    def lines(self) -> list[str]:
        """One line per image: its name and the reason."""
        return [f"{self.dataset.entries[index].name}: {reason}" for index, reason in sorted(self.found.items())]


class Augmented(Dataset[tuple[Any, int, list[tuple[int, str]]]]):
    """Items are requested by (epoch, index). An unreadable image is replaced by the next one of the dataset."""

    def __init__(self, dataset: ImageDataset, transform: Callable[[Image], Any], seed: int) -> None:
        self.dataset, self.transform, self.seed = dataset, transform, seed

    def __getitem__(self, item: tuple[int, int]) -> tuple[Any, int, list[tuple[int, str]]]:
        epoch, index = item
        seed_all(Draw.IMAGE, self.seed, epoch, index)
        unreadable: list[tuple[int, str]] = []
        for turn in range(len(self.dataset)):
            candidate = (index + turn) % len(self.dataset)
            try:
                image = open_image(self.dataset, candidate)
            except ImageError as error:
                unreadable.append((candidate, str(error)))
                continue
            return self.transform(image), self.dataset.targets[candidate], unreadable
        raise ValueError(f"none of the {len(self.dataset)} images can be read: {unreadable[0][1]}.")


class _Steps(Sampler[list[tuple[int, int]]]):
    def __init__(self, sampler: EpochSampler, first: int, last: int) -> None:
        self.sampler, self.first, self.last = sampler, first, last

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first, self.last):
            epoch = step // self.sampler.steps_per_epoch
            for _, indices in self.sampler.micro_batches(step):
                yield [(epoch, index) for index in indices]


def worker_steps(
    dataset: Dataset[Any],
    sampler: EpochSampler,
    first: int,
    last: int,
    *,
    collate: Callable[[list[Any]], Any],
    workers: int,
    device: torch.device,
) -> Iterator[list[Any]]:
    """What ``collate`` makes of the micro-batches of this process, step by step; items are (epoch, index)."""
    loader = DataLoader(
        dataset,
        batch_sampler=_Steps(sampler, first, last),
        collate_fn=collate,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_interrupts,
    )
    step: list[Any] = []
    for loaded in loader:
        step.append(loaded)
        if len(step) == sampler.accumulate:
            yield step
            step = []


def _collate(items: list[tuple[Tensor, int, list[tuple[int, str]]]]) -> tuple[Tensor, Tensor, list[tuple[int, str]]]:
    images, targets, unreadable = zip(*items)
    return torch.stack(images), torch.tensor(targets), [entry for entries in unreadable for entry in entries]


class LoaderBatches:
    """Training batches from worker processes."""

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        config: BaseConfig,
        augmentation: Augmentation,
        sampler: EpochSampler,
        resolution: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self.sampler, self.workers, self.device = sampler, workers, device
        self.unreadable = Unreadable(dataset)
        self._dataset = Augmented(dataset, training_transform(config, augmentation, resolution), sampler.seed)

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """The micro-batches of this process, step by step."""
        steps = worker_steps(
            self._dataset, self.sampler, first, last, collate=_collate, workers=self.workers, device=self.device
        )
        for step in steps:
            yield [self._make(*loaded) for loaded in step]

    def _make(self, images: Tensor, targets: Tensor, unreadable: list[tuple[int, str]]) -> Batch:
        for index, reason in unreadable:
            self.unreadable.add(index, reason)
        return Batch(images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True))


def ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the parent ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Plain(Dataset[tuple[int, Tensor | str]]):
    def __init__(self, dataset: ImageDataset, transform: NamedTransform) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        try:
            return index, self.transform(open_image(self.dataset, index), self.dataset.entries[index].name)
        except ImageError as error:
            return index, str(error)


class Numbered(NamedTuple):
    """A batch of images with their indices in the dataset."""

    numbers: list[int]
    """Indices of the readable images."""
    pixels: Tensor | None
    """(B, C, r, r) bytes; None if no image is readable."""
    unreadable: dict[int, str]
    """Why the others cannot be read, by index."""


def numbered_batches(
    dataset: ImageDataset,
    groups: Sequence[list[int]],
    *,
    transform: NamedTransform,
    workers: int,
    device: torch.device,
    decode: str = "cpu",
) -> Iterator[Numbered]:
    """Each group of indices as a batch, with its pixels on the device.

    With ``decode`` gpu, or auto and a GPU that can, the GPU decodes and crops, which differs by rounding. Corrupted
    images are always made by the worker processes.
    """
    from progresvit.data.gpu_decode import plan_for

    plan = plan_for(transform.config, device, decode)
    if plan.jpeg and transform.corruption is None:
        from progresvit.data.gpu_loader import gpu_numbered_batches

        yield from gpu_numbered_batches(dataset, groups, plan=plan, workers=workers, device=device)
        return
    loader = DataLoader(
        _Plain(dataset, transform),
        batch_sampler=groups,
        num_workers=workers,
        collate_fn=_collate_numbered,  # in the worker: one tensor is sent, not one per image
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_interrupts,
    )
    for numbers, pixels, unreadable in loader:
        yield Numbered(numbers, None if pixels is None else pixels.to(device, non_blocking=True), unreadable)


def _collate_numbered(items: Sequence[tuple[int, Tensor | str]]) -> Numbered:
    good = [(index, image) for index, image in items if not isinstance(image, str)]
    pixels = torch.stack([image for _, image in good]) if good else None
    return Numbered([index for index, _ in good], pixels, {index: why for index, why in items if isinstance(why, str)})


def evaluation_batches(
    dataset: ImageDataset,
    *,
    config: BaseConfig,
    batch: int,
    workers: int,
    device: torch.device,
    unreadable: Unreadable,
    decode: str = "cpu",
) -> Iterator[Batch]:
    """Every readable image once, in order, after the evaluation crop; ``decode`` as for :func:`numbered_batches`."""
    groups = [list(range(first, min(first + batch, len(dataset)))) for first in range(0, len(dataset), batch)]
    batches = numbered_batches(
        dataset, groups, transform=NamedTransform(config), workers=workers, device=device, decode=decode
    )
    for numbers, pixels, bad in batches:
        for index, reason in bad.items():
            unreadable.add(index, reason)
        if pixels is not None:
            targets = torch.tensor([dataset.targets[index] for index in numbers])
            yield Batch(normalise(pixels, config), targets.to(device))
