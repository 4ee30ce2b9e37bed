"""Evaluation by a linear probe: classifiers are trained on a frozen model's class tokens, and become records.

The learning rate of each round is the one with the highest accuracy on a tenth of the labelled images, drawn by the
hash of their names, on which no classifier is trained. A checkpoint after each epoch is in ``NAME.probe`` next to the
records; the images of a step follow from its number, so a run that was stopped continues exactly.

Letters: B images, S rounds, L learning rates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.distributed import Processes
from progresvit.evaluation.features import check_features, class_tokens, find_labelled
from progresvit.evaluation.header import Header
from progresvit.evaluation.linear_probe import (
    BATCH,
    LEARNING_RATES,
    LinearProbe,
    check_learning_rates,
    count_correct,
)
from progresvit.evaluation.parts import Parts
from progresvit.evaluation.record_files import read_records, write_records
from progresvit.evaluation.records import Records
from progresvit.evaluation.run import (
    DataSource,
    EvalOptions,
    ProgressCallback,
    check_run,
    fill_parts,
    gather_records,
    record_columns,
    source_header,
)
from progresvit.io.part_formats import Checkpoint, SafetensorsCheckpoints
from progresvit.io.resumable import ResumableTable
from progresvit.model.interface import RoundModel

ONE_IN = 10
"""The share of the labelled images of each class on which the learning rate is chosen: one in ten, at least one."""


def evaluate_linear(
    model: RoundModel,
    source: DataSource,
    out: Path,
    *,
    name: str,
    processes: Processes,
    epochs: int = 100,
    learning_rates: Sequence[float] = LEARNING_RATES,
    bank_split: str = "train",
    in_memory: bool = False,
    seed: int = 0,
    options: EvalOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Records:
    """Train linear classifiers on a model's class tokens, write the records of the best of each round, return them.

    The classes are those of the data; the model needs no head. Labels and predictions are indices of
    ``header.probe["classes"]``; ``header.probe_result`` holds the accuracies on held-out images and the learning rates
    that were chosen. GMACs are those of the model; the classifiers are not counted.

    Args:
        model: It is moved to the device of the processes and set to evaluation mode. It is not changed.
        source: The images to classify; a corruption applies to them and not to the training images.
        out: The file to write.
        name: The model's name in the header.
        processes: A single process, and its device.
        epochs: Passes over the training images, with random crops and flips.
        learning_rates: Learning rates to try, for a batch of 256.
        bank_split: Split of the same data with the training images.
        in_memory: Decode the training images once and keep them on the device.
        seed: Of the first weights, the order and the crops.
        options: Precision, batch size (at most all training images) and so on.
        progress: Called after each batch.
    """
    options, device = options or EvalOptions(batch=BATCH), processes.device
    check_features(model, source)
    _check_settings(epochs, learning_rates, processes)
    check_run(out, options, device)
    splits = find_labelled(source, bank_split)
    train, held_out = hold_out_tenth(splits.bank, bank_split)
    batch = min(options.batch, len(train))
    about = {
        "task": "linear", "epochs": epochs, "batch": batch, "learning_rates": list(learning_rates), "seed": seed,
        "in_memory": in_memory, "held_out": len(held_out), **splits.describe(bank_split),
    }  # fmt: skip
    header = source_header(model, source, splits.images, name=name, options=options, device=device)
    header = replace(header, probe=about)
    model = model.to(device).eval()
    checkpoints = ResumableTable(out, SafetensorsCheckpoints(), total=epochs, size=1, ending=".probe")
    with checkpoints, Parts(out, splits.images) as parts:
        checkpoints.claim(header.identity(), overwrite=options.overwrite)
        with checkpoints.kept_if_begun(first=True):
            batches = _training_batches(train, model.config, batch, in_memory, seed, options, device)
            per_epoch = batches.sampler.steps_per_epoch
            probe = LinearProbe(
                _widths(model, device),
                len(splits.bank.class_ids),
                learning_rates=learning_rates,
                steps=epochs * per_epoch,
                batch=batches.sampler.batch,
                seed=seed,
            ).to(device)
            _train(model, probe, batches, checkpoints, options.precision, progress)
        accuracy, unreadable = _held_out_accuracy(model, probe, held_out, options, device)  # (S, L)
        best = accuracy.argmax(dim=1).tolist()  # (S, L) -> (S,), the first of equally good ones
        result = {"held_out_top1": accuracy.tolist(), "learning_rates": [learning_rates[number] for number in best]}
        _predict(model, probe, best, source, parts, header, options, processes, progress)
        records = gather_records(parts, replace(header, probe_result=result), splits.images.targets)
        lines = (*batches.unreadable.lines(), *unreadable.lines(), *records.header.unreadable)
        write_records(replace(records, header=replace(records.header, unreadable=lines)), out)
        parts.remove()
        checkpoints.remove()
    return read_records(out)


def _check_settings(epochs: int, learning_rates: Sequence[float], processes: Processes) -> None:
    check_learning_rates(learning_rates)
    if epochs < 1:
        raise ValueError(f"a linear probe takes at least one epoch, not {epochs}.")
    if processes.count > 1:
        raise ValueError("the linear probe is trained by a single process; run it without torchrun.")


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
            "splits (--task knn needs only one)."
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
"""The state of the training after each epoch; that of the last complete one is kept."""


def _save_epoch(checkpoints: Checkpoints, epoch: int, probe: LinearProbe, unreadable: Unreadable) -> None:
    """Write the state after an epoch, counted from 0, and remove the states of the epochs before."""
    metadata = {"unreadable": json.dumps(sorted(unreadable.reasons.items()))}
    checkpoints.write(epoch, checkpoints.format.encode([Checkpoint(probe.tensors(), metadata)], 1))
    for before in range(epoch):
        checkpoints.path(before).unlink(missing_ok=True)


def _load_epoch(checkpoints: Checkpoints, probe: LinearProbe, unreadable: Unreadable, steps_per_epoch: int) -> None:
    """Continue from the last complete epoch, if there is one."""
    if done := checkpoints.done():
        checkpoint = checkpoints.format.read(checkpoints.path(done[-1]))
        probe.restore(checkpoint.tensors, (done[-1] + 1) * steps_per_epoch)
        for index, reason in json.loads(checkpoint.metadata["unreadable"]):
            unreadable.add(index, reason)


def _training_batches(
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


@torch.no_grad()
def _widths(model: RoundModel, device: torch.device) -> list[int]:
    """Channels of the class token of each round."""
    side = model.config.input_side
    image = torch.zeros(1, model.config.in_channels, side, side, device=device)
    return [tokens.shape[1] for tokens in class_tokens(model, image, "fp32")]


def _train(
    model: RoundModel,
    probe: LinearProbe,
    batches: InMemorySource | WorkerSource,
    checkpoints: Checkpoints,
    precision: str,
    progress: ProgressCallback | None,
) -> None:
    """The steps that are left, with a checkpoint after each epoch."""
    per_epoch, size = batches.sampler.steps_per_epoch, batches.sampler.batch
    _load_epoch(checkpoints, probe, batches.unreadable, per_epoch)
    for micro_batches in batches.steps(probe.step, probe.steps):
        for images, targets in micro_batches:
            with torch.no_grad():
                tokens = class_tokens(model, images, precision)
            probe.train_step(tokens, targets)
        if progress:
            progress(probe.step * size, probe.steps * size)
        if probe.step % per_epoch == 0:
            _save_epoch(checkpoints, probe.step // per_epoch - 1, probe, batches.unreadable)


@torch.no_grad()
def _held_out_accuracy(
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
        right = right + count_correct(probe, class_tokens(model, images, options.precision), targets).cpu()
        count += len(targets)
    return right.double() / count, unreadable


def _predict(
    model: RoundModel,
    probe: LinearProbe,
    best: Sequence[int],
    source: DataSource,
    parts: Parts,
    header: Header,
    options: EvalOptions,
    processes: Processes,
    progress: ProgressCallback | None,
) -> None:
    """Write the columns of the records of all images, by the best classifier of each round."""

    def columns_of(indices: Sequence[int], pixels: Tensor) -> dict[str, Tensor]:
        rounds = probe(class_tokens(model, normalise(pixels, model.config), options.precision))
        targets = torch.tensor([parts.dataset.targets[index] for index in indices], device=pixels.device)
        logits = [of_round[number] for of_round, number in zip(rounds, best)]  # (L, B, K) -> (B, K)
        return record_columns(logits, None, targets, keep_logits=options.keep_logits)

    transform = NamedTransform(model.config, source.corruption)
    fill_parts(parts, header, transform, columns_of, options=options, processes=processes, progress=progress)
