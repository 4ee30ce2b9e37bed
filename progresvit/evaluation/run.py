"""Evaluation: a predictor on every image once, every round, into records.

Processes share the parts of the dataset. Each finished part is a file in ``NAME.parts`` beside the records, and the
batches of a part in progress are kept there every few seconds, so a run that was stopped continues with the images that
are missing. When all parts are there they become one file.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from progresvit.config import BaseConfig
from progresvit.data.dataset import UNLABELLED, some_of
from progresvit.data.segmentation import SegmentationDataset, find_segmentation
from progresvit.data.segmentation.windows import WindowOptions, describe_windows
from progresvit.data.transforms import NamedTransform
from progresvit.distributed import Processes
from progresvit.evaluation.classes import relabel
from progresvit.evaluation.header import Header
from progresvit.evaluation.parts import LoadParts, PartBatch, Parts, image_batches, mask_batches
from progresvit.evaluation.record_files import read_records, read_segmentation_records, write_records
from progresvit.evaluation.records import Records
from progresvit.evaluation.segmentation_records import SegmentationRecords, confusion_cells, matrices_of_cells
from progresvit.evaluation.source import (
    DataSource,
    EvalOptions,
    check_classifies,
    check_run,
    finished,
    make_header,
    source_header,
)
from progresvit.io.part_formats import Columns
from progresvit.io.resumable import Progress
from progresvit.model.interface import RoundModel
from progresvit.model.precision import matrix_products
from progresvit.model.registry import DEFAULT_KIND
from progresvit.predict.head import Head, Predictor, record_columns
from progresvit.predict.segment import Segmenter

MASK_CHUNK = 32
"""Images per part in segmentation: an image takes longer than in classification, and datasets are smaller."""

WINDOWS = 32
"""Windows that run at a time unless another number is asked for."""


def evaluate(
    model: RoundModel,
    source: DataSource,
    out: Path,
    *,
    name: str,
    processes: Processes,
    options: EvalOptions | None = None,
    progress: Progress | None = None,
) -> Records:
    """Write the records of a model on a dataset, and return them.

    Args:
        model: It is moved to the device of the processes and set to evaluation mode.
        source: The images.
        out: The file to write.
        name: The model's name in the header.
        processes: Processes that share the work, and their device.
        options: Precision, batch size and so on.
        progress: Called after each batch.
    """
    options = options or EvalOptions()
    check_classifies(model)
    if model.config.num_classes == 0:
        raise ValueError(
            "the model has no classes to choose from; evaluate its features with task='knn' or task='linear' of "
            "progresvit evaluate (evaluate_knn, evaluate_linear), or give it a head with reset_classifier and train it."
        )
    check_run(out, options, processes.device)
    images = source.find()
    header = source_header(model, source, images, name=name, options=options, device=processes.device)
    labels = [UNLABELLED] * len(images) if source.unlabelled else relabel(images, model.config)
    model = model.to(processes.device).eval()
    make = partial(record_columns, classes=header.classes, keep_logits=options.keep_logits)
    head = Head(model, dtype=options.dtype, make=make)
    transform = NamedTransform(model.config, source.corruption)
    targets = None if source.unlabelled else labels
    with matrix_products(options.precision), Parts(out, images) as parts:
        load = image_batches(parts, transform, targets, options=options, processes=processes, progress=progress)
        run_predictor(parts, header, head, load, options=options, processes=processes, progress=progress)
        finish_records(parts, header, labels, processes)
    return read_records(out)


def evaluate_segmentation(
    model: RoundModel,
    *,
    data: str,
    split: str,
    out: Path,
    name: str,
    processes: Processes,
    labels: str | None = None,
    ignore: Iterable[int] = (255,),
    windows: WindowOptions | None = None,
    options: EvalOptions | None = None,
    progress: Progress | None = None,
) -> SegmentationRecords:
    """Write the records of a segmentation model on images with masks, and return them.

    Args:
        model: It is moved to the device of the processes and set to evaluation mode.
        data: Folder or tars in a layout of ``data/segmentation/dataset.py``.
        split: Name of the split.
        out: The file to write.
        name: The model's name in the header.
        processes: Processes that share the work, and their device.
        labels: Label file or built-in list. By default the data's own, else the model's classes for the mask values
            0, 1, 2, ….
        ignore: Raw values of the masks that count nowhere.
        windows: How images are divided into windows; by default at one scale, next to each other.
        options: Precision, number of windows that run at a time (``batch``) and so on.
        progress: Called after each batch.
    """
    windows, options = windows or WindowOptions(), options or EvalOptions(batch=WINDOWS)
    config, device = model.config, processes.device
    if config.task != "segmentation":
        raise ValueError("the model classifies images, so evaluate makes its records; give a segmentation model.")
    check_run(out, options, device)
    names = config.class_ids or config.labels
    dataset = find_segmentation(data, split, labels=labels, ignore=ignore, default_names=names)
    _check_classes(dataset, config, data)
    header = make_header(
        model,
        dataset,
        name=name,
        options=options,
        device=device,
        preprocessing=describe_windows(config, windows),
        data=data,
        split=split,
        masks={"values": list(dataset.values), "ignored": list(dataset.ignored)},
    )
    predictor = Segmenter(model.to(device).eval(), device, dtype=options.dtype, batch=options.batch)
    with matrix_products(options.precision), Parts(out, dataset, size=MASK_CHUNK) as parts:
        load = mask_batches(parts, config, windows, options)
        run_predictor(parts, header, predictor, load, options=options, processes=processes, progress=progress)
        finish_records(parts, header, None, processes)
    return read_segmentation_records(out)


def _check_classes(dataset: SegmentationDataset, config: BaseConfig, data: str) -> None:
    """Refuse data with other classes than the model's, or in another order."""
    names, own = dataset.class_ids, config.class_ids or config.labels
    if names == own or (own is None and len(names) == config.num_classes):
        return
    classes = f"the model's classes are {some_of(own)}" if own else f"the model has {config.num_classes} classes"
    order = ", in another order" if own and sorted(names) == sorted(own) else ""
    raise ValueError(
        f"the {len(names)} classes of {data} are {some_of(names)}, and {classes}{order}; name the label file of the "
        "model's classes (labels=…) and the mask values that it leaves out (ignore=…), or evaluate on other data."
    )


def run_predictor(
    parts: Parts,
    header: Header,
    predictor: Predictor,
    load: LoadParts,
    *,
    options: EvalOptions,
    processes: Processes,
    progress: Progress | None = None,
) -> None:
    """Run a predictor on the images that are missing; all processes share them, and all are done when this returns.

    Args:
        parts: The parts of a dataset.
        header: It identifies the run.
        predictor: Makes the columns of a batch.
        load: Gives the images of parts in batches.
        options: Batch size and so on.
        processes: Processes that share the work, and their device.
        progress: Called after each batch.
    """
    identity = {**header.identity(), "chunk": parts.size, "keep_logits": options.keep_logits and header.masks is None}
    identity["pictures"] = identity.pop("images")  # as version 0.1.0 wrote it, so that its parts are continued
    if identity["config"].get("kind") == DEFAULT_KIND:
        identity["config"] = {key: value for key, value in identity["config"].items() if key != "kind"}
    mine, done = parts.share(identity, processes, overwrite=options.overwrite)
    parts.fill(_finished_batches(parts, predictor, load(mine), done, processes, progress), first=processes.first)
    processes.wait()


@torch.inference_mode()
def _finished_batches(
    parts: Parts,
    predictor: Predictor,
    batches: Iterable[PartBatch],
    done: int,
    processes: Processes,
    progress: Progress | None,
) -> Iterator[tuple[int, Columns]]:
    """The number of a part and the columns of a batch as it is finished; ``done`` images are from an earlier run."""
    total = len(parts.dataset)
    if progress:
        progress(done, total)
    for batch in batches:
        columns = predictor.columns(batch.images, batch.targets) if batch.indices else {}
        if batch.hashes is not None:
            columns["image_hash"] = batch.hashes
        if "confusion" in columns:
            columns |= confusion_cells(batch.indices, columns.pop("confusion").cpu().numpy())
        done += (len(batch.indices) + len(batch.unreadable)) * processes.count  # the others are as fast as this one
        if progress:
            progress(min(done, total), total)
        parts.skip(batch.unreadable)
        yield batch.part, Columns({"index": np.array(batch.indices, np.int64), **columns}, batch.unreadable)


def finish_records(parts: Parts, header: Header, labels: Sequence[int] | None, processes: Processes) -> None:
    """Write the records from their parts, in the first process; ``labels`` has the labels of the whole dataset."""
    if processes.first:
        columns, unreadable = parts.collect()
        order = columns.pop("index")
        header = finished(header, (*header.unreadable, *unreadable))
        ids = np.array([parts.dataset.entries[index].name for index in order], dtype=np.str_)
        records: Records | SegmentationRecords
        if header.masks is None:
            records = Records(header=header, ids=ids, labels=np.array(labels, np.int64)[order], **columns)
        else:
            records = SegmentationRecords(
                header=header,
                ids=ids,
                image_hash=columns.get("image_hash"),
                windows=columns["windows"],
                scores=columns["scores"],
                confusion=matrices_of_cells(
                    columns, order, rounds=header.rounds, classes=int(header.config["num_classes"])
                ),
            )
        write_records(records, parts.out)
        parts.remove()
    processes.wait()
