"""Pictures decoded and augmented one by one in worker processes, each with draws that follow from seed, epoch, number.

Letters: B images, C channels, r the resolution of the training images (the device makes those of the rounds).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from progresvit.config import ModelConfig
from progresvit.data.dataset import Pictures
from progresvit.data.decode import PictureError, decode
from progresvit.data.preprocess import NamedTransform, normalise
from progresvit.data.sampler import Draw, Order, seed_all
from progresvit.data.transforms import Augmentation, training_transform


class Batch(NamedTuple):
    """Images ready for the model, and their classes."""

    images: Tensor
    """(B, C, r, r), normalised."""
    targets: Tensor
    """(B,)"""


def open_picture(pictures: Pictures, index: int) -> Image:
    """Read and decode; whatever goes wrong with the file is a :class:`PictureError`."""
    try:
        content = pictures.read(index)
    except OSError as error:
        raise PictureError(f"cannot be read ({error.strerror or error})") from error
    return decode(content)


class Unreadable:
    """Pictures that could not be decoded: listed once each, and an error when they are more than one in a hundred."""

    limit = 0.01

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures
        self.found: dict[int, str] = {}

    def add(self, index: int, reason: str) -> None:
        self.found[index] = reason
        if len(self.found) > self.limit * len(self.pictures):
            raise ValueError(
                f"{len(self.found)} of {len(self.pictures)} pictures cannot be read, more than "
                f"{self.limit:.0%}: {'; '.join(self.lines()[:5])}. Mend or remove them."
            )

    def lines(self) -> list[str]:
        """One line a picture: its name and what is wrong with it."""
        return [f"{self.pictures.entries[index].name}: {reason}" for index, reason in sorted(self.found.items())]


class _Augmented(Dataset[tuple[Tensor, int, list[tuple[int, str]]]]):
    """Items are asked for by (epoch, index). An unreadable picture is replaced by the next one of the set."""

    def __init__(self, pictures: Pictures, transform: Callable[[Image], Tensor], seed: int) -> None:
        self.pictures, self.transform, self.seed = pictures, transform, seed

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int, list[tuple[int, str]]]:
        epoch, index = item
        seed_all(Draw.PICTURE, self.seed, epoch, index)
        unreadable: list[tuple[int, str]] = []
        for turn in range(len(self.pictures)):
            candidate = (index + turn) % len(self.pictures)
            try:
                picture = open_picture(self.pictures, candidate)
            except PictureError as error:
                unreadable.append((candidate, str(error)))
                continue
            return self.transform(picture), self.pictures.targets[candidate], unreadable
        raise ValueError(f"none of the {len(self.pictures)} pictures can be read: {unreadable[0][1]}.")


class _Steps(Sampler[list[tuple[int, int]]]):
    def __init__(self, order: Order, first: int, last: int) -> None:
        self.order, self.first, self.last = order, first, last

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in range(self.first, self.last):
            epoch = step // self.order.steps_per_epoch
            for _, indices in self.order.micro_batches(step):
                yield [(epoch, index) for index in indices]


def _collate(items: list[tuple[Tensor, int, list[tuple[int, str]]]]) -> tuple[Tensor, Tensor, list[tuple[int, str]]]:
    images, targets, unreadable = zip(*items)
    return torch.stack(images), torch.tensor(targets), [entry for entries in unreadable for entry in entries]


class LoaderBatches:
    """Training batches from worker processes."""

    def __init__(
        self,
        pictures: Pictures,
        *,
        config: ModelConfig,
        augmentation: Augmentation,
        order: Order,
        resolution: int,
        workers: int,
        device: torch.device,
    ) -> None:
        self.order, self.workers, self.device = order, workers, device
        self.unreadable = Unreadable(pictures)
        self._dataset = _Augmented(pictures, training_transform(config, augmentation, resolution), order.seed)

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """This process's micro-batches of each step."""
        loader = DataLoader(
            self._dataset,
            batch_sampler=_Steps(self.order, first, last),
            collate_fn=_collate,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_leave_signals_to_the_parent,
        )
        step: list[Batch] = []
        for images, targets, unreadable in loader:
            for index, reason in unreadable:
                self.unreadable.add(index, reason)
            step.append(Batch(images.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)))
            if len(step) == self.order.accumulate:
                yield step
                step = []


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the parent decides when the workers end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Plain(Dataset[tuple[int, Tensor | str]]):
    def __init__(self, pictures: Pictures, transform: NamedTransform) -> None:
        self.pictures, self.transform = pictures, transform

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        try:
            picture = open_picture(self.pictures, index)
        except PictureError as error:
            return index, str(error)
        return index, self.transform(picture, self.pictures.entries[index].name)


class Numbered(NamedTuple):
    """A batch of pictures that are known by number."""

    numbers: list[int]
    """Of the readable ones."""
    pixels: Tensor | None
    """(B, C, r, r) bytes; None if none is readable."""
    unreadable: dict[int, str]
    """What is wrong with the others."""


def numbered_batches(
    pictures: Pictures, groups: Sequence[list[int]], *, transform: NamedTransform, workers: int, device: torch.device
) -> Iterator[Numbered]:
    """Each group of numbers as a batch, its pixels on the device."""
    loader = DataLoader(
        _Plain(pictures, transform),
        batch_sampler=groups,
        num_workers=workers,
        collate_fn=_collate_numbered,  # in the worker: one tensor travels, not one a picture
        pin_memory=device.type == "cuda",
        worker_init_fn=_leave_signals_to_the_parent,
    )
    for numbers, pixels, unreadable in loader:
        yield Numbered(numbers, None if pixels is None else pixels.to(device, non_blocking=True), unreadable)


def _collate_numbered(items: Sequence[tuple[int, Tensor | str]]) -> Numbered:
    good = [(index, image) for index, image in items if not isinstance(image, str)]
    pixels = torch.stack([image for _, image in good]) if good else None
    return Numbered([index for index, _ in good], pixels, {index: why for index, why in items if isinstance(why, str)})


def evaluation_batches(
    pictures: Pictures, *, config: ModelConfig, batch: int, workers: int, device: torch.device, unreadable: Unreadable
) -> Iterator[Batch]:
    """Every readable picture once, in order, as evaluation sees it."""
    groups = [list(range(first, min(first + batch, len(pictures)))) for first in range(0, len(pictures), batch)]
    transform = NamedTransform(config)
    for numbers, pixels, bad in numbered_batches(pictures, groups, transform=transform, workers=workers, device=device):
        for index, reason in bad.items():
            unreadable.add(index, reason)
        if pixels is not None:
            targets = torch.tensor([pictures.targets[index] for index in numbers])
            yield Batch(normalise(pixels, config), targets.to(device))
