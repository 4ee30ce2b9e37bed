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
from progresvit.distributed import Processes
from progresvit.evaluation.linear_probe import LinearProbe, count_correct
from progresvit.evaluation.source import EvalOptions
from progresvit.io.parse import count_of
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
    processes: Processes,
) -> InMemorySource | WorkerSource:
    """Random crops and flips of the training images; processes share each batch."""
    device, shared = processes.device, {"seed": seed, "processes": processes.count, "rank": processes.rank}
    if in_memory:
        stored = in_memory_for_training(train, side=config.input_side, device=device)
        sampler = EpochSampler(count=len(stored), batch=largest_batch(batch, len(stored), processes), **shared)
        return InMemorySource(stored, sampler, AugmentImages(config, Augmentation(), device=device))
    sampler = EpochSampler(count=len(train), batch=batch, **shared)
    return classification_from_workers(
        train, sampler, config=config, augmentation=Augmentation(), workers=options.workers, device=device
    )


def largest_batch(batch: int, images: int, processes: Processes) -> int:
    """The largest batch that processes can share, up to the given one and the number of images."""
    shared = min(batch, images) // processes.count * processes.count
    if shared == 0:
        raise ValueError(
            f"{processes.count} processes share each batch, so batch must be at least {processes.count}, and as many "
            f"training images are needed; got batch={batch} and {count_of(images, 'image')}."
        )
    return shared


def train_probe(
    model: RoundModel,
    probe: LinearProbe,
    batches: InMemorySource | WorkerSource,
    checkpoints: Checkpoints,
    *,
    blocks: int,
    options: EvalOptions,
    processes: Processes,
    progress: Progress | None,
) -> None:
    """The steps that are left, with a checkpoint after each epoch."""
    mean = processes.mean if processes.count > 1 else None
    per_epoch, size, unreadable = batches.sampler.steps_per_epoch, batches.sampler.batch, batches.unreadable
    if done := processes.gather(checkpoints.done())[0]:  # as the first process sees it: all begin at the same step
        checkpoint = checkpoints.format.read(checkpoints.path(done[-1]))
        probe.restore(checkpoint.tensors, (done[-1] + 1) * per_epoch)
        for index, reason in json.loads(checkpoint.metadata["unreadable"]):
            unreadable.add(index, reason)
    for micro_batches in batches.steps(probe.step, probe.steps):
        for images, targets in micro_batches:
            with torch.no_grad():
                tokens = class_tokens(model, images, options.dtype, blocks=blocks)
            probe.train_step(tokens, targets, mean)
        if progress:
            progress(probe.step * size, probe.steps * size)
        if probe.step % per_epoch == 0:
            epoch = probe.step // per_epoch - 1  # from 0
            gather_unreadable(unreadable, processes)
            if not processes.first:
                continue
            metadata = {"unreadable": json.dumps(sorted(unreadable.reasons.items()))}
            checkpoints.write(epoch, checkpoints.format.encode([Checkpoint(probe.tensors(), metadata)], 1))
            for before in range(epoch):
                checkpoints.path(before).unlink(missing_ok=True)
    processes.wait()  # until the last checkpoint is written


def gather_unreadable(unreadable: Unreadable, processes: Processes) -> None:
    """Note the images that other processes could not read."""
    for reasons in processes.gather(unreadable.reasons):
        for index, reason in reasons.items():
            unreadable.add(index, reason)


@torch.no_grad()
def held_out_accuracy(
    model: RoundModel,
    probe: LinearProbe,
    held_out: ImageDataset,
    config: BaseConfig,
    *,
    blocks: int,
    options: EvalOptions,
    processes: Processes,
) -> tuple[Tensor, list[str]]:
    """Top-1 of each classifier on the held-out images, (S, L), and a line for each image that could not be read.

    Processes share the images. ``config`` prepares them.
    """
    unreadable = Unreadable(held_out)
    unreadable.limit *= ONE_IN  # as many as one in a hundred of all labelled images
    right, count = torch.zeros(()), 0
    for images, targets in evaluation_batches(
        held_out,
        config=config,
        batch=options.batch,
        workers=options.workers,
        device=processes.device,
        unreadable=unreadable,
        decode=options.decode,
        indices=range(processes.rank, len(held_out), processes.count),
    ):
        tokens = class_tokens(model, images, options.dtype, blocks=blocks)
        right = right + count_correct(probe, tokens, targets).cpu()
        count += len(targets)
    gather_unreadable(unreadable, processes)
    counts = processes.gather((right, count))
    total = torch.stack([right for right, _ in counts if right.ndim]).sum(dim=0)
    return total.double() / sum(count for _, count in counts), unreadable.lines()
