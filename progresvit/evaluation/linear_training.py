"""The training of a linear probe on images, with a checkpoint after each epoch.

The learning rate of each round is the one with the highest accuracy on a tenth of the labelled images, drawn by the
hash of their names, on which no classifier is trained. A checkpoint is in ``NAME.probe`` next to the records; the
images of a step follow from its number, so a run that was stopped continues exactly.

Letters: B images, S rounds, L learning rates.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.augment.classification import Augmentation, AugmentImages
from progresvit.data.dataset import ImageDataset, some_of
from progresvit.data.evaluation_batches import evaluation_batches
from progresvit.data.in_memory import in_memory_for_training
from progresvit.data.loading import Unreadable
from progresvit.data.sampler import EpochSampler
from progresvit.data.sources import InMemorySource, WorkerSource, classification_from_workers
from progresvit.data.split import hold_out
from progresvit.evaluation.linear_probe import LinearProbe, count_correct
from progresvit.evaluation.source import EvalOptions
from progresvit.io.part_formats import Checkpoint
from progresvit.io.resumable import Progress, ResumableTable
from progresvit.model.interface import RoundModel
from progresvit.predict.features import class_tokens

ONE_IN = 10
"""The share of the labelled images of each class on which the learning rate is chosen: one in ten, at least one."""


def hold_out_tenth(images: ImageDataset, split: str) -> tuple[ImageDataset, ImageDataset]:
    """Images to train on, and a tenth of each class to choose the learning rate on; both have every class."""
    names: dict[int, list[str]] = {}
    for entry, target in zip(images.entries, images.targets):
        names.setdefault(target, []).append(entry.name)
    single = [images.class_ids[target] for target, of_class in names.items() if len(of_class) == 1]
    if single:
        raise ValueError(
            f"only one image of the split {split} shows the class {some_of(single)}; the linear probe trains on images "
            "of each class and chooses the learning rate on others, so add images, or remove the class from both "
            "splits (task='knn' needs only one)."
        )
    held = set[str]()
    for target, of_class in names.items():
        held |= hold_out(of_class, class_id=images.class_ids[target], one_in=ONE_IN)
    is_held = [entry.name in held for entry in images.entries]
    return (
        images.subset(index for index, flag in enumerate(is_held) if not flag),
        images.subset(index for index, flag in enumerate(is_held) if flag),
    )


Checkpoints = ResumableTable[Checkpoint]
"""The state of the training after each epoch; only the last complete one is kept."""


def training_batches(
    train: ImageDataset,
    config: BaseConfig,
    batch: int,
    in_memory: bool,
    seed: int,
    options: EvalOptions,
    device: torch.device,
) -> InMemorySource | WorkerSource:
    """Random crops and flips of the training images."""
    if in_memory:
        stored = in_memory_for_training(train, side=config.input_side, device=device)
        sampler = EpochSampler(count=len(stored), batch=min(batch, len(stored)), seed=seed)
        return InMemorySource(stored, sampler, AugmentImages(config, Augmentation(), device=device))
    sampler = EpochSampler(count=len(train), batch=batch, seed=seed)
    return classification_from_workers(
        train, sampler, config=config, augmentation=Augmentation(), workers=options.workers, device=device
    )


def train_probe(
    model: RoundModel,
    probe: LinearProbe,
    batches: InMemorySource | WorkerSource,
    checkpoints: Checkpoints,
    options: EvalOptions,
    progress: Progress | None,
) -> None:
    """The steps that are left, with a checkpoint after each epoch."""
    per_epoch, size, unreadable = batches.sampler.steps_per_epoch, batches.sampler.batch, batches.unreadable
    if done := checkpoints.done():
        checkpoint = checkpoints.format.read(checkpoints.path(done[-1]))
        probe.restore(checkpoint.tensors, (done[-1] + 1) * per_epoch)
        for index, reason in json.loads(checkpoint.metadata["unreadable"]):
            unreadable.add(index, reason)
    for micro_batches in batches.steps(probe.step, probe.steps):
        for images, targets in micro_batches:
            with torch.no_grad():
                tokens = class_tokens(model, images, options.dtype)
            probe.train_step(tokens, targets)
        if progress:
            progress(probe.step * size, probe.steps * size)
        if probe.step % per_epoch == 0:
            epoch = probe.step // per_epoch - 1  # from 0
            metadata = {"unreadable": json.dumps(sorted(unreadable.reasons.items()))}
            checkpoints.write(epoch, checkpoints.format.encode([Checkpoint(probe.tensors(), metadata)], 1))
            for before in range(epoch):
                checkpoints.path(before).unlink(missing_ok=True)


@torch.no_grad()
def held_out_accuracy(
    model: RoundModel, probe: LinearProbe, held_out: ImageDataset, options: EvalOptions, device: torch.device
) -> tuple[Tensor, Unreadable]:
    """Top-1 of each classifier on the held-out images, (S, L), and the images that could not be read."""
    unreadable = Unreadable(held_out)
    unreadable.limit *= ONE_IN  # as many as one in a hundred of all labelled images
    right, count = torch.zeros(()), 0
    for images, targets in evaluation_batches(
        held_out,
        config=model.config,
        batch=options.batch,
        workers=options.workers,
        device=device,
        unreadable=unreadable,
        decode=options.decode,
    ):
        right = right + count_correct(probe, class_tokens(model, images, options.dtype), targets).cpu()
        count += len(targets)
    return right.double() / count, unreadable
