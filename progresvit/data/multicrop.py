"""Multi-crop (DINO): two large and several small crops of each image, each augmented on its own, on the device.

Both modes of loading bring whole images, resized to a square; crops are drawn in their original shape and rendered for
the whole batch at once. The draws follow from the seed and the step.

Letters: B images, C channels, S side of the stored images, V crops of an image, r side of the crops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from PIL.Image import Image
from pydantic import Field, field_validator
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data import gpu_augment
from progresvit.data.dataset import ImageDataset
from progresvit.data.in_memory import InMemoryImages, squeeze
from progresvit.data.loader import Augmented, Unreadable, worker_steps
from progresvit.data.sampler import Draw, EpochSampler, mix_seed
from progresvit.io.parse import Section

GLOBAL_CROPS = 2
RATIO = (3 / 4, 4 / 3)
"""Aspect of the crops."""
SIGMA = (0.1, 2.0)
"""Deviation of the blur, in pixels."""

Scale = tuple[float, float]


class MultiCropOptions(Section):
    """Which crops are drawn and how they are augmented; the defaults are DINO's."""

    global_scale: Scale = (0.4, 1.0)
    """Share of the image's area that each of the two global crops keeps."""
    local_crops: int = Field(8, ge=0)
    """Local crops of each image."""
    local_scale: Scale = (0.05, 0.4)
    """Share of the image's area that a local crop keeps."""
    local_side: int = Field(96, ge=1)
    """Side of the local crops in the last round, in pixels. Earlier rounds see them smaller, as they see the image."""
    flip: float = Field(0.5, ge=0, le=1)
    colour: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    """Strength of brightness, contrast, saturation and hue jitter."""
    colour_probability: float = Field(0.8, ge=0, le=1)
    grey: float = Field(0.2, ge=0, le=1)
    """Probability of a grey image."""
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    """Probability of a blur: first global crop, second global crop, local crops."""
    solarise: float = Field(0.2, ge=0, le=1)
    """Probability of inverting the bright pixels of the second global crop."""

    @field_validator("global_scale", "local_scale")
    @classmethod
    def _shares(cls, value: Scale) -> Scale:
        if not 0 < value[0] <= value[1] <= 1:
            raise ValueError(f"a range from small to large is needed, above 0 and at most 1, not {list(value)}")
        return value

    @field_validator("colour")
    @classmethod
    def _hue(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if min(value) < 0 or value[3] > 0.5:
            raise ValueError(f"strengths are 0 or more, and that of the hue at most 0.5, not {list(value)}")
        return value

    @field_validator("blur")
    @classmethod
    def _probabilities(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= probability <= 1 for probability in value):
            raise ValueError(f"probabilities are from 0 to 1, not {list(value)}")
        return value


class WholeImages(NamedTuple):
    """Images of a micro-batch before they are cropped."""

    number: int
    """Of the micro-batch, counted over all processes."""
    images: Tensor
    """(B, C, S, S) bytes: whole images, resized to a square."""
    sizes: Tensor
    """(B, 2) original height and width."""


class MultiCropBatch(NamedTuple):
    """Normalised crops."""

    global_crops: Tensor
    """(2, B, C, r, r)"""
    local_crops: Tensor
    """(V, B, C, r', r')"""


class WholeImageSource(Protocol):
    """Brings the images of each step."""

    sampler: EpochSampler

    def steps(self, first: int, last: int) -> Iterator[Sequence[WholeImages]]:
        """This process's micro-batches of each step."""
        ...


class MultiCropBatches:
    """Training batches of crops, made on the device.

    Args:
        source: Whole images, on the device.
        config: The model's config, for the normalisation and the side of the global crops.
        options: Which crops are drawn.
        device: Where the images are.
        compiled: Compile the work on pixels.
    """

    def __init__(
        self,
        source: WholeImageSource,
        *,
        config: BaseConfig,
        options: MultiCropOptions,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self.source, self.sampler, self.options, self.side = source, source.sampler, options, config.input_side
        self.generator = torch.Generator(device)
        self.mean, self.std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (config.mean, config.std))
        self._distort = torch.compile(_distort, dynamic=False) if compiled else _distort

    def steps(self, first: int, last: int) -> Iterator[list[MultiCropBatch]]:
        """The micro-batches of this process, step by step."""
        for step, loaded in zip(range(first, last), self.source.steps(first, last)):
            yield [self._make(step, whole) for whole in loaded]

    def _make(self, step: int, whole: WholeImages) -> MultiCropBatch:
        self.generator.manual_seed(mix_seed(Draw.BATCH, self.sampler.seed, step, whole.number))
        return self.crop(whole.images, whole.sizes)

    def crop(self, images: Tensor, sizes: Tensor) -> MultiCropBatch:
        """All crops of a batch: (B, C, S, S) bytes, (B, 2) -> (2, B, C, r, r) and (V, B, C, r', r')."""
        wanted, pixels = self.options, images.float()
        first, second, local = wanted.blur
        solarise = (0.0, wanted.solarise)
        return MultiCropBatch(
            self._views(pixels, sizes, wanted.global_scale, self.side, blur=(first, second), solarise=solarise),
            self._views(
                pixels,
                sizes,
                wanted.local_scale,
                wanted.local_side,
                blur=(local,) * wanted.local_crops,
                solarise=(0.0,) * wanted.local_crops,
            ),
        )

    def _views(
        self,
        pixels: Tensor,
        sizes: Tensor,
        scale: Scale,
        side: int,
        *,
        blur: Sequence[float],
        solarise: Sequence[float],
    ) -> Tensor:
        """One crop of every image for each entry of ``blur`` and ``solarise``: -> (V, B, C, r, r)."""
        count, views, generator = len(pixels), len(blur), self.generator
        if not views:
            return pixels.new_zeros(0, count, pixels.shape[1], side, side)
        crops = torch.cat([self._crop(pixels, sizes, scale, side) for _ in range(views)])  # (V * B, C, r, r)

        def chosen(probabilities: Sequence[float]) -> Tensor:
            each = torch.tensor(probabilities, device=generator.device).repeat_interleave(count)
            return torch.rand(len(crops), generator=generator, device=generator.device) < each  # (V * B,)

        factors, order = gpu_augment.sample_colour(len(crops), self.options.colour, generator)
        sigma = torch.rand(len(crops), generator=generator, device=generator.device)
        crops = self._distort(
            crops,
            chosen((self.options.colour_probability,) * views),
            factors,
            order,
            chosen((self.options.grey,) * views),
            (SIGMA[0] + sigma * (SIGMA[1] - SIGMA[0])) * chosen(blur),
            chosen(solarise),
            self.mean,
            self.std,
        )
        rendered: Tensor = crops.unflatten(0, (views, count))  # (V * B, C, r, r) -> (V, B, C, r, r)
        return rendered

    def _crop(self, pixels: Tensor, sizes: Tensor, scale: Scale, side: int) -> Tensor:
        """A random crop of every image, flipped at random: (B, C, S, S) -> (B, C, r, r) in 0..1."""
        boxes = gpu_augment.sample_crops(sizes, scale=scale, ratio=RATIO, generator=self.generator)
        boxes = boxes * (pixels.shape[-1] / sizes.repeat(1, 2))  # pixels of the original -> pixels of the square
        flip = torch.rand(len(pixels), generator=self.generator, device=self.generator.device) < self.options.flip
        return gpu_augment.crop_and_resize(pixels, boxes, flip, resolution=side)


def _distort(
    crops: Tensor,
    coloured: Tensor,
    factors: Tensor,
    order: Tensor,
    grey: Tensor,
    sigma: Tensor,
    solarised: Tensor,
    mean: Tensor,
    std: Tensor,
) -> Tensor:
    """All work on pixels after the crop, without random draws, so that it can be compiled: (B, C, r, r) -> same."""
    x = torch.where(_each(coloured), gpu_augment.change_colour(crops, factors, order), crops)
    x = torch.where(_each(grey), gpu_augment.grey(x), x)  # (B, 1, r, r) is expanded
    x = gpu_augment.blur(x, sigma)
    x = gpu_augment.solarise(x, solarised)
    return (x - mean) / std


def _each(values: Tensor) -> Tensor:
    """One number per image: (B,) -> (B, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)


class InMemoryWholeImages:
    """From a dataset that is stored on the device."""

    def __init__(self, stored: InMemoryImages, sampler: EpochSampler) -> None:
        self.stored, self.sampler, self.unreadable = stored, sampler, stored.unreadable

    def steps(self, first: int, last: int) -> Iterator[list[WholeImages]]:
        """The micro-batches of this process, step by step."""
        for step in range(first, last):
            yield [self._take(number, indices) for number, indices in self.sampler.micro_batches(step)]

    def _take(self, number: int, indices: list[int]) -> WholeImages:
        chosen = torch.tensor(indices).to(self.stored.images.device, non_blocking=True)
        return WholeImages(number, self.stored.images[chosen], self.stored.sizes[chosen])


class LoaderWholeImages:
    """From worker processes, which decode and resize."""

    def __init__(
        self, dataset: ImageDataset, sampler: EpochSampler, *, side: int, workers: int, device: torch.device
    ) -> None:
        self.sampler, self.workers, self.device = sampler, workers, device
        self.unreadable = Unreadable(dataset)
        self._dataset = Augmented(dataset, partial(_load, side=side), sampler.seed)

    def steps(self, first: int, last: int) -> Iterator[list[WholeImages]]:
        """The micro-batches of this process, step by step."""
        loaded = worker_steps(
            self._dataset, self.sampler, first, last, collate=_collate, workers=self.workers, device=self.device
        )
        for step, batches in zip(range(first, last), loaded):
            numbers = (number for number, _ in self.sampler.micro_batches(step))
            yield [self._send(number, *batch) for number, batch in zip(numbers, batches)]

    def _send(self, number: int, images: Tensor, sizes: Tensor, unreadable: list[tuple[int, str]]) -> WholeImages:
        for index, reason in unreadable:
            self.unreadable.add(index, reason)
        return WholeImages(number, images.to(self.device, non_blocking=True), sizes.to(self.device, non_blocking=True))


def _load(image: Image, side: int) -> tuple[Tensor, tuple[int, int]]:
    """The image as a square, and its original height and width."""
    return squeeze(image, side), (image.height, image.width)


def _collate(
    items: list[tuple[tuple[Tensor, tuple[int, int]], int, list[tuple[int, str]]]],
) -> tuple[Tensor, Tensor, list[tuple[int, str]]]:
    images, sizes = zip(*(item[0] for item in items))
    return torch.stack(images), torch.tensor(sizes), [entry for item in items for entry in item[2]]
