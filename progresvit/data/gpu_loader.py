"""Batches from files that are decoded, cropped and augmented on a GPU. Processes read the files ahead.

Sets may be larger than memory. The order of the images is the sampler's, and every draw follows from the seed, the step
and the micro-batch, so a resumed run sees the same batches. The augmentations have the distributions of timm's
transforms for single images (loader.py), but other draws.

Letters: B images of a micro-batch, C channels, r side of the training images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data import gpu_augment
from progresvit.data.dataset import ImageDataset
from progresvit.data.gpu_decode import GpuDecoder, plan_for
from progresvit.data.loader import Batch, Numbered, Unreadable
from progresvit.data.prefetch import Prefetcher
from progresvit.data.prepare import Box, Plan, Prepared, Request, prepare, request_of
from progresvit.data.rand_augment import RandAugment
from progresvit.data.sampler import Draw, EpochSampler, mix_seed
from progresvit.data.transforms import Augmentation
from progresvit.data.worker_pool import WorkerPool


def plan_training(
    config: BaseConfig, augmentation: Augmentation, device: torch.device, mode: str = "auto"
) -> Plan | None:
    """The plan for training images that the GPU decodes and augments; None if worker processes do all of it.

    With the mode gpu, what is missing is an error; with auto it decides for the worker processes.
    """
    if mode == "cpu":
        return None
    try:
        if augmentation.rand_augment is not None:
            RandAugment.parse(augmentation.rand_augment, config.mean)
        plan = plan_for(config, device, "gpu", shrink=False)
    except ValueError:
        if mode == "gpu":
            raise
        return None
    return plan


class GpuLoaderBatches:
    """Training batches that a GPU makes of files.

    Args:
        dataset: The images.
        plan: That of :func:`plan_training`.
        augmentation: Random changes.
        sampler: The order of the images.
        resolution: r.
        workers: Processes that read files, and decode what the GPU does not decode.
        device: The GPU.
        ahead: Steps that a thread makes ahead; with 0 each is made when it is asked for, as CUDA graphs that are
            recorded meanwhile need it.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        *,
        plan: Plan,
        augmentation: Augmentation,
        sampler: EpochSampler,
        resolution: int,
        workers: int,
        device: torch.device,
        ahead: int = 2,
    ) -> None:
        self.dataset, self.plan, self.augmentation, self.sampler = dataset, plan, augmentation, sampler
        self.resolution, self.workers, self.device, self.ahead = resolution, max(1, workers), device, ahead
        self.unreadable = Unreadable(dataset)
        self.rand_augment = None
        if augmentation.rand_augment is not None:
            self.rand_augment = RandAugment.parse(augmentation.rand_augment, plan.config.mean)
        mean, std = plan.config.mean, plan.config.std
        self.mean, self.std = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (mean, std))
        self.generator = torch.Generator(device)
        self._decoder = GpuDecoder(plan, device)

    def steps(self, first: int, last: int) -> Iterator[list[Batch]]:
        """The micro-batches of this process, step by step."""
        made = self._steps(first, last)
        if not self.ahead:
            yield from made
            return
        with Prefetcher(made, lambda step: step, self.ahead) as coming:
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
            chosen = indices[len(targets) :]
            pixels, labels = self._crop(next(groups), chosen, mix_seed(Draw.IMAGE, seed, len(targets)))
            parts.append(pixels)
            targets += labels
        images = self._augment(torch.cat(parts), seed)  # (B, C, r, r)
        return Batch(images, torch.tensor(targets).to(self.device, non_blocking=True))

    def _crop(self, group: Sequence[Prepared], indices: Sequence[int], seed: int) -> tuple[Tensor, list[int]]:
        """Random crops of a group, as bytes; an unreadable image is replaced by the next one of the dataset."""
        wanted, count = self.augmentation, len(group)
        generator = torch.Generator().manual_seed(seed)
        flip = (torch.rand(count, generator=generator) < wanted.flip).tolist()
        draws = generator.get_state()

        def boxes_of(sizes: Mapping[int, tuple[int, int]]) -> list[Box]:
            generator.set_state(draws)  # the draws of an image do not depend on the others
            shapes = torch.tensor([sizes.get(position, (1, 1))[::-1] for position in range(count)])  # height, width
            boxes = gpu_augment.sample_crops(
                shapes, scale=wanted.crop_scale, ratio=wanted.crop_ratio, generator=generator
            ).tolist()
            return [
                (left, top, left + width, top + height) for top, left, height, width in map(boxes.__getitem__, sizes)
            ]

        chosen, images = list(indices[:count]), list(group)
        while True:
            made = self._decoder.render(images, boxes_of, side=self.resolution, clip=True, flip=flip)
            if not made.errors:
                return made.pixels, [self.dataset.targets[index] for index in chosen]
            for position, reason in made.errors.items():
                self.unreadable.add(chosen[position], reason)
                chosen[position] = (chosen[position] + 1) % len(self.dataset)
                images[position] = prepare(request_of(self.dataset, chosen[position]), self.plan)

    def _augment(self, images: Tensor, seed: int) -> Tensor:
        """RandAugment or colour, normalise, erase: (B, C, r, r) bytes -> (B, C, r, r)."""
        wanted, generator = self.augmentation, self.generator.manual_seed(seed)
        if self.rand_augment is not None:
            images = self.rand_augment(images, seed)
        x = images / 255
        if self.rand_augment is None and wanted.colour is not None:
            x = gpu_augment.change_colour(x, *gpu_augment.sample_colour(len(x), wanted.colour, generator))
        x = (x - self.mean) / self.std
        if wanted.erasing:
            boxes = gpu_augment.sample_erasing(len(x), x.shape[-1], probability=wanted.erasing, generator=generator)
            x = gpu_augment.erase(x, boxes, generator)
        return x


def gpu_numbered_batches(
    dataset: ImageDataset, groups: Sequence[list[int]], *, plan: Plan, workers: int, device: torch.device
) -> Iterator[Numbered]:
    """Each group of indices as a batch: the evaluation crop of each image, made on the GPU."""
    decoder = GpuDecoder(plan, device)
    with WorkerPool(plan, max(1, workers)) as pool:
        prepared = pool.prepared([request_of(dataset, index) for index in group] for group in groups)
        for group in groups:
            parts: list[Tensor] = []
            errors: dict[int, str] = {}
            done = 0
            while done < len(group):
                images = next(prepared)
                made = decoder.crop(images)
                parts.append(made.pixels)
                errors.update({group[done + position]: reason for position, reason in made.errors.items()})
                done += len(images)
            numbers = [index for index in group if index not in errors]
            yield Numbered(numbers, torch.cat(parts) if numbers else None, errors)
