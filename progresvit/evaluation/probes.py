"""Evaluation of a model's features, without its head: by nearest neighbours, and by a linear probe.

k-NN: class tokens of every round are extracted once, of the labelled images (the bank) and of the images to classify,
each into a folder of parts next to the records, so a run that was stopped continues. The logarithms of the votes take
the place of logits in the records. Linear probe: classifiers are trained on the class tokens of the last blocks for the
labelled images (``linear_training``), and the best one of each round predicts.

Letters: N images, S rounds, L learning rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from progresvit.config import BaseConfig
from progresvit.data.dataset import ImageDataset, some_of
from progresvit.data.transforms import NamedTransform
from progresvit.distributed import Processes
from progresvit.evaluation.linear_probe import (
    BATCH,
    BLOCKS,
    CROP,
    LEARNING_RATES,
    LinearProbe,
    check_learning_rates,
)
from progresvit.evaluation.linear_training import (
    held_out_accuracy,
    hold_out_tenth,
    largest_batch,
    train_probe,
    training_batches,
)
from progresvit.evaluation.parts import Parts, image_batches
from progresvit.evaluation.record_files import read_records, write_records
from progresvit.evaluation.records import Records
from progresvit.evaluation.run import finish_records, run_predictor
from progresvit.evaluation.source import DataSource, EvalOptions, check_run, finished, header_names_hash, source_header
from progresvit.io.part_formats import SafetensorsCheckpoints
from progresvit.io.resumable import Progress, ResumableTable
from progresvit.metrics.knn import check_knn
from progresvit.model.interface import RoundModel
from progresvit.model.precision import matrix_products
from progresvit.predict.features import KNN, Features, Linear, class_tokens
from progresvit.predict.head import record_columns


def evaluate_knn(
    model: RoundModel,
    source: DataSource,
    out: Path,
    *,
    name: str,
    processes: Processes,
    k: int = 20,
    temperature: float = 0.07,
    crop: float | None = None,
    bank_split: str = "train",
    options: EvalOptions | None = None,
    progress: Progress | None = None,
) -> Records:
    """Write the records of weighted k-NN votes on a model's class tokens, and return them.

    The data gives the classes; the model needs no head. Labels and predictions are indices of
    ``header.probe["classes"]``. GMACs count the model and not the search.

    Args:
        model: It is moved to the device of the processes and set to evaluation mode.
        source: The images to classify; a corruption applies to them and not to the bank.
        out: The file to write.
        name: The model's name in the header.
        processes: Processes that share the extraction, and their device.
        k: Number of neighbours.
        temperature: Temperature of the weights exp(similarity / temperature).
        crop: Share of the shorter side that the evaluation crop keeps; None: the model's.
        bank_split: Split of the same data with the labelled images.
        options: Precision, batch size and so on.
        progress: Called after each batch.
    """
    options, device = options or EvalOptions(), processes.device
    check_features(model, source)
    check_run(out, options, device)
    splits = find_labelled(source, bank_split)
    check_knn(len(splits.bank), k=k, temperature=temperature)
    config = model.config if crop is None else model.config.replace(crop=crop)
    model = model.to(device).eval()
    dtype, total = options.dtype, len(splits.bank) + len(splits.images)
    features = Features(model, dtype=dtype)
    extract = partial(_extract_features, features, model, config=config, options=options, processes=processes)
    clean, bank_out = replace(source, split=bank_split, corruption=None), out.with_name(out.name + ".bank")
    products = matrix_products(options.precision)
    with products, Parts(bank_out, splits.bank) as bank, Parts(out, splits.images) as queries:
        extract(clean, bank, name=name, progress=_after(0, total, progress))
        extract(source, queries, name=name, progress=_after(len(splits.bank), total, progress))
        if processes.first:
            header = source_header(
                model, source, splits.images, name=name, options=options, device=device, config=config
            )
            about = {"task": "knn", "k": k, "temperature": temperature, **splits.describe(bank_split)}
            header = finished(replace(header, probe=about), bank.skipped() + queries.skipped())
            knn = KNN(
                _read_features(bank, model),
                torch.tensor(splits.bank.targets)[torch.from_numpy(bank.column("index"))],
                classes=len(splits.bank.class_ids),
                k=k,
                temperature=temperature,
                make=partial(record_columns, keep_logits=options.keep_logits),
            )
            order = queries.column("index")
            labels = np.array(splits.images.targets, np.int64)[order]
            tokens = (of_round.to(device) for of_round in _read_features(queries, model))
            columns = knn.columns(tokens, torch.from_numpy(labels).to(device))
            ids = np.array([splits.images.entries[index].name for index in order], dtype=np.str_)
            arrays = {column: values.cpu().numpy() for column, values in columns.items()}
            hashes = queries.column("image_hash")
            write_records(Records(header=header, ids=ids, image_hash=hashes, labels=labels, **arrays), out)
            bank.remove()
            queries.remove()
        processes.wait()
    return read_records(out)


def _after(before: int, total: int, progress: Progress | None) -> Progress | None:
    """Progress over several datasets, of which ``before`` images are done."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _extract_features(
    predictor: Features,
    model: RoundModel,
    source: DataSource,
    parts: Parts,
    *,
    config: BaseConfig,
    name: str,
    options: EvalOptions,
    processes: Processes,
    progress: Progress | None,
) -> None:
    """Make the parts with the class tokens of all images: a column ``round1``, ``round2``, … for each round."""
    header = source_header(
        model, source, parts.dataset, name=name, options=options, device=processes.device, config=config
    )
    header = replace(header, probe={"task": "features"})  # another number of neighbours continues with the same parts
    transform = NamedTransform(config, source.corruption)
    options = replace(options, keep_logits=False)
    load = image_batches(parts, transform, None, options=options, processes=processes, progress=progress)
    run_predictor(parts, header, predictor, load, options=options, processes=processes, progress=progress)


def _read_features(parts: Parts, model: RoundModel) -> Iterator[Tensor]:
    """The class tokens of all readable images, round by round: S times (N, d)."""
    for s in range(1, len(model.config.rounds) + 1):
        yield torch.from_numpy(parts.column(f"round{s}"))


def evaluate_linear(
    model: RoundModel,
    source: DataSource,
    out: Path,
    *,
    name: str,
    processes: Processes,
    epochs: int = 100,
    learning_rates: Sequence[float] = LEARNING_RATES,
    blocks: int = BLOCKS,
    crop: float = CROP,
    bank_split: str = "train",
    in_memory: bool = False,
    seed: int = 0,
    options: EvalOptions | None = None,
    progress: Progress | None = None,
) -> Records:
    """Train linear classifiers on a model's class tokens, write the records of the best of each round, return them.

    The data gives the classes; the model needs no head. Labels and predictions are indices of
    ``header.probe["classes"]``; ``header.probe_result`` holds the accuracies on held-out images and the learning rates
    that were chosen. GMACs count the model and not the classifiers. By default features and crop are those of DINO's
    probe of a ViT-S (Caron et al. 2021).

    Args:
        model: It is moved to the device of the processes and set to evaluation mode. It is not changed.
        source: The images to classify; a corruption applies to them and not to the training images.
        out: The file to write.
        name: The model's name in the header.
        processes: Processes that share each batch and the images, and their device.
        epochs: Passes over the training images, with random crops and flips.
        learning_rates: Learning rates to try, for a batch of 256.
        blocks: A classifier reads the class tokens after this many last blocks of its round, side by side.
        crop: Share of the shorter side that the evaluation crop keeps, instead of the model's.
        bank_split: Split of the same data with the training images.
        in_memory: Decode the training images once and keep them on the device.
        seed: Seed of the first weights, the order and the crops.
        options: Precision, batch size and so on. A batch has at most all training images, and is rounded down to a
            multiple of the number of processes.
        progress: Called after each batch.
    """
    options, device = options or EvalOptions(batch=BATCH), processes.device
    check_features(model, source)
    check_learning_rates(learning_rates)
    for setting, value in (("epochs", epochs), ("blocks", blocks)):
        if value < 1:
            raise ValueError(f"{setting} must be at least 1, got {value}.")
    if blocks > 1 and not hasattr(model, "class_tokens"):
        raise ValueError(f"{type(model).__name__} gives class tokens of its last block only; pass blocks=1.")
    config = model.config.replace(crop=crop)
    check_run(out, options, device)
    splits = find_labelled(source, bank_split)
    train, held_out = hold_out_tenth(splits.bank, bank_split)
    batch = largest_batch(options.batch, len(train), processes)
    about = {
        "task": "linear", "epochs": epochs, "batch": batch, "learning_rates": list(learning_rates), "seed": seed,
        "in_memory": in_memory, "held_out": len(held_out), **splits.describe(bank_split),
    }  # fmt: skip
    if blocks > 1:  # headers had no such key before
        about["blocks"] = blocks
    if in_memory and processes.count > 1:  # crops are drawn by each process
        about["processes"] = processes.count
    header = source_header(model, source, splits.images, name=name, options=options, device=device, config=config)
    header = replace(header, probe=about)
    model = model.to(device).eval()
    with torch.no_grad():
        tokens = class_tokens(
            model,
            torch.zeros(1, config.in_channels, config.input_side, config.input_side, device=device),
            blocks=blocks,
        )
    work: dict[str, Any] = {"blocks": blocks, "options": options, "processes": processes}
    checkpoints = ResumableTable(out, SafetensorsCheckpoints(), total=epochs, size=1, ending=".probe")
    with matrix_products(options.precision), checkpoints, Parts(out, splits.images) as parts:
        if processes.first:
            checkpoints.claim(header.identity(), overwrite=options.overwrite)
        processes.wait()  # until the checkpoints of another run are removed
        with checkpoints.kept_if_begun(first=processes.first):
            batches = training_batches(train, config, batch, in_memory, seed, options, processes)
            per_epoch = batches.sampler.steps_per_epoch
            probe = LinearProbe(
                [of_round.shape[1] for of_round in tokens],
                len(splits.bank.class_ids),
                learning_rates=learning_rates,
                steps=epochs * per_epoch,
                batch=batches.sampler.batch,
                seed=seed,
            ).to(device)
            train_probe(model, probe, batches, checkpoints, progress=progress, **work)
        accuracy, unreadable = held_out_accuracy(model, probe, held_out, config, **work)  # (S, L)
        best = accuracy.argmax(dim=1).tolist()  # (S, L) -> (S,), the first of equally good ones
        result = {"held_out_top1": accuracy.tolist(), "learning_rates": [learning_rates[number] for number in best]}
        lines = (*batches.unreadable.lines(), *unreadable)
        header = replace(header, probe_result=result, unreadable=lines)
        make = partial(record_columns, keep_logits=options.keep_logits)
        linear = Linear(model, probe, best, blocks=blocks, dtype=options.dtype, make=make)
        transform = NamedTransform(config, source.corruption)
        targets = splits.images.targets
        load = image_batches(parts, transform, targets, options=options, processes=processes, progress=progress)
        run_predictor(parts, header, linear, load, options=options, processes=processes, progress=progress)
        finish_records(parts, header, targets, processes)
        if processes.first:
            checkpoints.remove()
        processes.wait()
    return read_records(out)


@dataclass(frozen=True)
class LabelledSplits:
    """Labelled images to learn from, and those to classify."""

    bank: ImageDataset
    images: ImageDataset
    """Their targets are classes of the bank."""

    def describe(self, bank_split: str) -> dict[str, Any]:
        """The entries of a header about the bank."""
        return {
            "split": bank_split,
            "images": len(self.bank),
            "names": header_names_hash(self.bank),
            "classes": list(self.bank.class_ids),
        }


def check_features(model: RoundModel, source: DataSource) -> None:
    """Refuse models without class tokens, and sources whose images have no classes."""
    if not hasattr(model, "features"):
        raise ValueError(
            f"k-NN and the linear probe need the features of a model, and {type(model).__name__} has no method "
            "'features'; leave out task=… to evaluate its head, or give another model."
        )
    if model.config.task != "classification":
        raise ValueError(
            "k-NN and the linear probe classify images by the class token, and the model segments images; leave "
            "out task=… to evaluate it, or give a classification model."
        )
    if source.unlabelled:
        raise ValueError(
            "k-NN and the linear probe need labelled images (<split>/<class>/<image>); leave out unlabelled=True."
        )
    if source.restrict_classes:
        raise ValueError(
            "k-NN and the linear probe choose among the classes of the data only; leave out restrict_classes=True."
        )


def find_labelled(source: DataSource, bank_split: str) -> LabelledSplits:
    """The images of the bank and of the source; each class needs images in the bank, and no image may be in both."""
    bank = replace(source, split=bank_split, limit=None).find()
    images = source.find()
    filled = Counter(bank.targets)
    numbers = {name: number for number, name in enumerate(bank.class_ids) if filled[number]}
    missing = sorted({images.class_ids[target] for target in images.targets} - set(numbers))
    if missing:
        raise ValueError(
            f"the split {source.split} has classes of which the bank, the split {bank_split}, has no images: "
            f"{some_of(missing)}; add images there, remove the classes here, or name another split with bank_split=…."
        )
    shared = {*bank.entries} & {*images.entries}
    if shared:
        raise ValueError(
            f"{len(shared)} images of the split {source.split} are in the bank, the split {bank_split}, too, such as "
            f"{min(entry.name for entry in shared)}; name another split with split=… or bank_split=…."
        )
    targets = tuple(numbers[images.class_ids[target]] for target in images.targets)
    return LabelledSplits(bank, replace(images, class_ids=bank.class_ids, targets=targets))
