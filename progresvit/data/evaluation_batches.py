"""Batches of images after the evaluation crop: decoded by worker processes, or on a GPU, or kept in memory.

Letters: B images, C channels, r side of the model's input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.augment.classification import Batch
from progresvit.data.dataset import ImageDataset
from progresvit.data.decode import ImageError
from progresvit.data.gpu_decode import GpuDecoder, plan_for
from progresvit.data.in_memory import InMemoryImages
from progresvit.data.loading import Unreadable, load_in_workers
from progresvit.data.prepare import Plan, request_of
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.data.worker_pool import WorkerPool


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

    With decode="gpu", or "auto" and a suitable GPU, the GPU decodes and crops, which differs by rounding. Corrupted
    images are always made by the worker processes.
    """
    plan = plan_for(transform.config, device, decode)
    if plan.jpeg and transform.corruption is None:
        yield from _gpu_batches(dataset, groups, plan=plan, workers=workers, device=device)
        return
    load, is_gpu = partial(_load_cropped, dataset, transform), device.type == "cuda"
    for numbers, pixels, unreadable in load_in_workers(load, groups, collate=_collate, workers=workers, pinned=is_gpu):
        yield Numbered(numbers, None if pixels is None else pixels.to(device, non_blocking=True), unreadable)


def _load_cropped(dataset: ImageDataset, transform: NamedTransform, index: int) -> tuple[int, Tensor | str]:
    """The index of an image with its pixels, or with the reason why it cannot be read."""
    try:
        return index, transform(dataset.read_image(index), dataset.entries[index].name)
    except ImageError as error:
        return index, str(error)


def _collate(items: Sequence[tuple[int, Tensor | str]]) -> Numbered:
    images = {index: image for index, image in items if not isinstance(image, str)}
    pixels = torch.stack(list(images.values())) if images else None  # (B, C, r, r)
    return Numbered(list(images), pixels, {index: reason for index, reason in items if isinstance(reason, str)})


def _gpu_batches(
    dataset: ImageDataset, groups: Sequence[list[int]], *, plan: Plan, workers: int, device: torch.device
) -> Iterator[Numbered]:
    """Each group of indices as a batch, decoded and cropped on the GPU."""
    decoder = GpuDecoder(plan, device)
    with WorkerPool(plan, max(1, workers)) as pool:
        prepared = pool.prepared([request_of(dataset, index) for index in group] for group in groups)
        for group in groups:
            parts: list[Tensor] = []
            errors: dict[int, str] = {}
            done = 0
            while done < len(group):
                images = next(prepared)
                crops = decoder.crop(images)
                parts.append(crops.pixels)
                errors.update({group[done + position]: reason for position, reason in crops.errors.items()})
                done += len(images)
            numbers = [index for index in group if index not in errors]
            yield Numbered(numbers, torch.cat(parts) if numbers else None, errors)


def evaluation_batches(
    dataset: ImageDataset,
    *,
    config: BaseConfig,
    batch: int,
    workers: int,
    device: torch.device,
    unreadable: Unreadable,
    decode: str = "cpu",
    indices: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Every readable image once, in order, after the evaluation crop; ``decode`` as for :func:`numbered_batches`.

    ``indices`` are the images of this process; None: all.
    """
    indices = range(len(dataset)) if indices is None else indices
    groups = [list(indices[first : first + batch]) for first in range(0, len(indices), batch)]
    batches = numbered_batches(
        dataset, groups, transform=NamedTransform(config), workers=workers, device=device, decode=decode
    )
    for numbers, pixels, reasons in batches:
        for index, reason in reasons.items():
            unreadable.add(index, reason)
        if pixels is not None:
            targets = torch.tensor([dataset.targets[index] for index in numbers])
            yield Batch(normalise(pixels, config), targets.to(device))


def in_memory_evaluation_batches(stored: InMemoryImages, *, config: BaseConfig, batch: int) -> Iterator[Batch]:
    """Every image once, in order, after the evaluation crop."""
    if not len(stored):
        return
    for pixels, targets in zip(stored.images.split(batch), stored.targets.split(batch)):
        yield Batch(normalise(pixels, config), targets)
