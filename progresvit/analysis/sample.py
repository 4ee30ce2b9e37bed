"""Labelled images that an analysis looks at, decoded once and kept in memory.

Letters: N images, B images of a batch, C channels, H side of the images.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from progresvit.analysis.hooks import evaluation_mode
from progresvit.analysis.registry import IMAGES
from progresvit.config import BaseConfig
from progresvit.data.dataset import ImageDataset, some_of
from progresvit.data.evaluation_batches import numbered_batches
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.evaluation.classes import class_numbers
from progresvit.evaluation.source import DataSource
from progresvit.io.parse import did_you_mean
from progresvit.io.resumable import Progress
from progresvit.model.backbone import Backbone
from progresvit.model.interface import RoundModel

T = TypeVar("T")

LEAST_PER_CLASS = 5
"""Fewest images of a class, as far as it has them: some analyses compare images of the same class."""
BATCH = 50
"""Images that a model runs at a time."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Images after the evaluation crop, and their classes."""

    pixels: Tensor
    """(N, C, H, H) bytes, on the CPU."""
    labels: Tensor
    """(N,) class numbers of the model; of the data for a model without a head."""
    ids: tuple[str, ...]
    """Names of the files."""
    class_names: Mapping[int, str]
    """What figures call the classes of the sample."""
    class_ids: Mapping[int, str]
    """Folder names of the classes of the sample."""
    unreadable: tuple[str, ...] = ()
    """A line for each image that could not be read; they are not among the images."""
    drawn: tuple[int, int] | None = None
    """Images of the split and of the dataset, if the split was drawn from a dataset without splits."""

    def __len__(self) -> int:
        return len(self.ids)

    def batches(self, config: BaseConfig, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """Which images, and their normalised pixels on the device: (B, C, H, H)."""
        for first in range(0, len(self), BATCH):
            rows = slice(first, min(first + BATCH, len(self)))
            yield rows, normalise(self.pixels[rows].to(device), config)

    def run(
        self,
        model: RoundModel | Backbone,
        compute: Callable[[slice, Tensor], T],
        progress: Progress | None = None,
    ) -> list[T]:
        """What ``compute`` returns for each batch of images on the device of the model.

        Args:
            model: It is in evaluation mode, and there are no gradients.
            compute: Takes the rows of a batch and its normalised pixels, (B, C, H, H).
            progress: Called after each batch.
        """
        results, device = [], next(model.parameters()).device
        with evaluation_mode(model), torch.inference_mode():
            for rows, images in self.batches(model.config, device):
                results.append(compute(rows, images))
                if progress:
                    progress(rows.stop, len(self))
        return results

    def find_class(self, name: str) -> int:
        """The number of a class by the name or the folder name; an error that gives the nearest one."""
        return find_class(name, self.class_names, self.class_ids)

    def of_classes(self, numbers: Sequence[int]) -> Sample:
        """The images of some classes."""
        rows = torch.isin(self.labels, torch.tensor(numbers)).nonzero()[:, 0]
        return replace(
            self, pixels=self.pixels[rows], labels=self.labels[rows], ids=tuple(self.ids[row] for row in rows.tolist())
        )


def find_class(name: str, names: Mapping[int, str], ids: Mapping[int, str]) -> int:
    """The number of a class by its name or folder name; upper and lower case differ only if a name fits exactly."""
    words = [(word, number) for words_of in (names, ids) for number, word in words_of.items()]
    exact = {number for word, number in words if word == name}
    numbers = exact or {number for word, number in words if word.casefold() == name.casefold()}
    if len(numbers) > 1:
        folders = " or ".join(repr(ids[number]) for number in sorted(numbers))
        raise ValueError(f"{len(numbers)} classes have the name {name!r}; give a folder name: {folders}.")
    if not numbers:
        every_word = list(dict.fromkeys(word for word, _ in words))
        near = difflib.get_close_matches(name, every_word, cutoff=0.5)
        hint = (
            did_you_mean(name, every_word)
            if near or len(every_word) < 20
            else f"they are of {some_of(list(names.values()))}."
        )
        raise ValueError(f"the images are of no class {name!r}; {hint}")
    return numbers.pop()


def load_sample(
    config: BaseConfig,
    source: DataSource,
    *,
    images: int = IMAGES,
    classes: Sequence[str] | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> Sample:
    """Read images evenly from the classes of a source, the same ones each time.

    A class has at least five of them, as far as it has five; of a dataset with more classes than that leaves space for,
    some classes are drawn.

    Args:
        config: The configuration of the model, for the crop and the classes.
        source: Labelled images.
        images: Number of images; all of the source if it has fewer.
        classes: Take images of these classes only, by name or folder name.
        workers: Processes that decode images.
        progress: Called after each batch.
    """
    if config.task != "classification":
        raise ValueError("this analysis looks at classes of images, and the model segments images; give a classifier.")
    if images < 1:
        raise ValueError(f"an analysis takes at least one image, not {images}.")
    dataset = source.find()
    numbers = class_numbers(dataset.class_ids, config) if config.num_classes else list(range(len(dataset.class_ids)))
    ids = dict(zip(numbers, dataset.class_ids))
    names = ids
    if config.labels is not None and config.num_classes:
        names = {number: config.labels[number] for number in numbers}
    of_classes = None if classes is None else {find_class(name, names, ids) for name in classes}
    places = [place for place, number in enumerate(numbers) if of_classes is None or number in of_classes]
    subset = dataset.subset(_choose(dataset, places, images, every_class=of_classes is not None))
    groups = [list(range(first, min(first + BATCH, len(subset)))) for first in range(0, len(subset), BATCH)]
    transform, parts, rows, unreadable = NamedTransform(config, source.corruption), [], list[int](), dict[int, str]()
    cpu = torch.device("cpu")
    for batch in numbered_batches(subset, groups, transform=transform, workers=workers, device=cpu):
        rows += batch.numbers
        unreadable |= batch.unreadable
        parts += [] if batch.pixels is None else [batch.pixels]
        if progress:
            progress(len(rows) + len(unreadable), len(subset))
    lines = tuple(f"{subset.entries[row].name}: {why}" for row, why in sorted(unreadable.items()))
    if not parts:
        raise ValueError(f"none of {len(subset)} images of {source.data} can be read; the first: {lines[0]}.")
    labels = [numbers[subset.targets[row]] for row in rows]
    return Sample(
        pixels=torch.cat(parts),
        labels=torch.tensor(labels),
        ids=tuple(subset.entries[row].name for row in rows),
        class_names={number: names[number] for number in sorted(set(labels))},
        class_ids={number: ids[number] for number in sorted(set(labels))},
        unreadable=lines,
        drawn=None if dataset.drawn_from is None else (len(dataset), dataset.drawn_from),
    )


def _choose(dataset: ImageDataset, places: Sequence[int], images: int, *, every_class: bool) -> list[int]:
    """Indices of the images, in the order of the dataset; classes take turns."""
    rng = random.Random(0)
    by_class: dict[int, list[int]] = {place: [] for place in places}
    for index, target in enumerate(dataset.targets):
        if target in by_class:
            by_class[target].append(index)
    for indices in by_class.values():
        rng.shuffle(indices)
    order = list(by_class)
    rng.shuffle(order)
    count = len(order) if every_class else max(2, images // LEAST_PER_CLASS)
    while count < len(order) and sum(len(by_class[place]) for place in order[:count]) < images:
        count += 1
    classes = order[:count]
    deepest = max((len(by_class[place]) for place in classes), default=0)
    turns = [by_class[place][turn] for turn in range(deepest) for place in classes if turn < len(by_class[place])]
    return sorted(turns[:images])
