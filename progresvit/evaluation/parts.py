"""The images of an evaluation that is still running: the missing ones in batches, and the finished ones in parts.

The parts are a resumable table beside the records. Processes share the parts that are missing. Each keeps the batches
of its part in progress every few seconds. Letters: B images, C channels, r side of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.corrupted_cache import CorruptedCache
from progresvit.data.dataset import ImageDataset
from progresvit.data.evaluation_batches import numbered_batches
from progresvit.data.image_hash import image_hash
from progresvit.data.loading import Unreadable
from progresvit.data.segmentation import SegmentationDataset
from progresvit.data.segmentation.images import EvaluationImage, evaluation_images
from progresvit.data.segmentation.windows import WindowOptions
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.distributed import Processes
from progresvit.evaluation.source import EvalOptions
from progresvit.io.part_formats import Columns, NpzColumns, merge_columns, read_column
from progresvit.io.resumable import Progress, ResumableTable

CHUNK = 512
"""Images per part, and so the largest batch."""


class Parts(ResumableTable[Columns]):
    """The parts of the records of a dataset, in a folder next to the file ``out``.

    Args:
        out: The file that the parts become.
        dataset: The images.
        size: Images per part; None: ``CHUNK``.
    """

    def __init__(self, out: Path, dataset: ImageDataset, *, size: int | None = None) -> None:
        super().__init__(out, NpzColumns(), total=len(dataset), size=size or CHUNK)
        self.dataset = dataset
        self.unreadable = Unreadable(dataset)

    def skip(self, reasons: Mapping[int, str]) -> None:
        """Note unreadable images. Too many are an error that removes the parts, since the user will change them."""
        try:
            for index, reason in reasons.items():
                self.unreadable.add(index, reason)
        except ValueError:
            self.remove()
            raise

    def collect(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The columns of all parts in order, and a line for each unreadable image."""
        columns = merge_columns(self.parts())
        self.skip(columns.skipped)
        return dict(columns.arrays), tuple(self.unreadable.lines())

    def skipped(self) -> tuple[str, ...]:
        """A line for each unreadable image of all parts."""
        for columns in self.parts():
            self.skip(columns.skipped)
        return tuple(self.unreadable.lines())

    def column(self, name: str) -> Any:
        """One column of all parts, in order, as an array; the other columns are not read."""
        return read_column(self.paths(), name, len(self.dataset))


class PartBatch(NamedTuple):
    """Some images of a part."""

    part: int
    """Number of the part."""
    indices: list[int]
    """Indices of the readable images."""
    images: Any
    targets: Any
    unreadable: Mapping[int, str]
    """Why other images cannot be read, by index."""
    hashes: Tensor | None
    """Hashes of the pixels (B,), by which copies are found; None if each copy is corrupted in another way."""


LoadParts = Callable[[Sequence[int]], Iterator[PartBatch]]
"""Gives the missing images of these parts, part by part."""


def image_batches(
    parts: Parts,
    transform: NamedTransform,
    labels: Sequence[int] | None,
    *,
    options: EvalOptions,
    processes: Processes,
    progress: Progress | None,
) -> LoadParts:
    """Normalised images (B, C, r, r) and their labels (B,).

    Corrupted images are read from the cache if there is one; the first process fills it before.

    Args:
        parts: The parts of a dataset.
        transform: Makes the pixels of an image.
        labels: Labels of the whole dataset; None without labels.
        options: Batch size and so on.
        processes: Processes that share the work, and their device.
        progress: Called while the cache is filled.
    """
    device = processes.device
    if options.cache is None or transform.corruption is None:
        load = partial(
            numbered_batches,
            parts.dataset,
            transform=transform,
            workers=options.workers,
            device=device,
            decode=options.decode,
        )
    else:
        cache = CorruptedCache(options.cache, parts.dataset, transform)
        if processes.first:
            cache.fill(workers=options.workers, progress=progress)
        processes.wait()
        load = partial(cache.batches, device=device)

    def batches(numbers: Sequence[int]) -> Iterator[PartBatch]:
        owners, groups = [], []
        for number in numbers:
            left = list(parts.left(number))
            for first in range(0, len(left), options.batch):
                groups.append(left[first : first + options.batch])
                owners.append(number)
        for number, (indices, pixels, unreadable) in zip(owners, load(groups)):
            images = None if pixels is None else normalise(pixels, transform.config)
            targets = None if labels is None else torch.tensor([labels[index] for index in indices], device=device)
            hashes = None if pixels is None or transform.corruption else image_hash(pixels)
            yield PartBatch(number, indices, images, targets, unreadable, hashes)

    return batches


def mask_batches(parts: Parts, config: BaseConfig, windows: WindowOptions, options: EvalOptions) -> LoadParts:
    """Whole images for windows, with their masks; images whose windows fill a batch run together.

    Images are grouped within a part, so the records do not depend on the number of processes.
    """

    def batches(numbers: Sequence[int]) -> Iterator[PartBatch]:
        owner = {index: number for number in numbers for index in parts.left(number)}
        unreadable = Unreadable(parts.dataset)
        unreadable.limit = 1.0  # the parts count them
        assert isinstance(parts.dataset, SegmentationDataset)
        images = evaluation_images(
            parts.dataset, list(owner), config=config, options=windows, workers=options.workers, unreadable=unreadable
        )
        for number, of_part in groupby(_with_gaps(images, owner), key=lambda indexed: owner[indexed[0]]):
            for group in _groups(of_part, options.batch):
                readable = {index: image for index, image in group if image is not None}
                masks = [image.mask for image in readable.values()]
                skipped = {index: unreadable.reasons[index] for index, image in group if image is None}
                hashes = [image_hash(image.pixels[0][None]) for image in readable.values()]  # (1,) each
                yield PartBatch(
                    number,
                    list(readable),
                    list(readable.values()),
                    masks,
                    skipped,
                    torch.cat(hashes) if hashes else None,
                )

    return batches


Indexed = tuple[int, EvaluationImage | None]
"""The index of an image, and None if it cannot be read."""


def _with_gaps(images: Iterable[tuple[int, EvaluationImage]], indices: Iterable[int]) -> Iterator[Indexed]:
    """All indices in order; those that ``images`` leaves out cannot be read."""
    waiting = iter(indices)
    for index, image in images:
        while (before := next(waiting)) != index:
            yield before, None
        yield index, image
    yield from ((index, None) for index in waiting)


def _groups(images: Iterable[Indexed], batch: int) -> Iterator[list[Indexed]]:
    """Images whose windows fill a batch; an image with more windows is a group of its own."""
    group: list[Indexed] = []
    filled = 0
    for index, image in images:
        count = 0 if image is None else sum(view.count for view in image.views)
        if group and filled + count > batch:
            yield group
            group, filled = [], 0
        group.append((index, image))
        filled += count
    if group:
        yield group
