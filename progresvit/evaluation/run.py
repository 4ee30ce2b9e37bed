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
from progresvit.data.segmentation.windows import WindowOptions, describe_windows, windows_hash
from progresvit.data.transforms import NamedTransform
from progresvit.distributed import Processes
from progresvit.evaluation.batches import LoadParts, PartBatch, ProgressCallback, image_batches, mask_batches
from progresvit.evaluation.classes import relabel
from progresvit.evaluation.header import Header
from progresvit.evaluation.parts import FinishedBatch, Parts
from progresvit.evaluation.record_files import read_records, read_segmentation_records, write_records
from progresvit.evaluation.records import Records
from progresvit.evaluation.segmentation_records import SegmentationRecords, confusion_cells, confusion_rows
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
from progresvit.model.interface import RoundModel
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
    progress: ProgressCallback | None = None,
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
    with Parts(out, images) as parts:
        run_images(
            parts,
            header,
            Head(model, dtype=options.dtype, make=make),
            NamedTransform(model.config, source.corruption),
            None if source.unlabelled else labels,
            options=options,
            processes=processes,
            progress=progress,
        )
        if processes.first:
            write_records(gather_records(parts, header, labels), out)
            parts.remove()
        processes.wait()
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
    progress: ProgressCallback | None = None,
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
        preprocessing_sha256=windows_hash(config, windows),
        data=data,
        split=split,
        masks={"values": list(dataset.values), "ignored": list(dataset.ignored)},
    )
    predictor = Segmenter(model.to(device).eval(), device, dtype=options.dtype, batch=options.batch)
    with Parts(out, dataset, size=MASK_CHUNK) as parts:
        load = mask_batches(parts, config, windows, options)
        run_predictor(parts, header, predictor, load, options=options, processes=processes, progress=progress)
        if processes.first:
            write_records(_gather_masks(parts, header), out)
            parts.remove()
        processes.wait()
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


def run_images(
    parts: Parts,
    header: Header,
    predictor: Predictor,
    transform: NamedTransform,
    labels: Sequence[int] | None,
    *,
    options: EvalOptions,
    processes: Processes,
    progress: ProgressCallback | None = None,
) -> None:
    """Run a predictor of normalised images on the images that are missing; see :func:`run_predictor`.

    Args:
        parts: The parts of a dataset.
        header: It identifies the run.
        predictor: Makes the columns of a batch.
        transform: Makes the pixels of an image.
        labels: Labels of the whole dataset; None without labels.
        options: Batch size and so on.
        processes: Processes that share the work, and their device.
        progress: Called after each batch.
    """
    load = image_batches(parts, transform, labels, options=options, processes=processes, progress=progress)
    run_predictor(parts, header, predictor, load, options=options, processes=processes, progress=progress)


def run_predictor(
    parts: Parts,
    header: Header,
    predictor: Predictor,
    load: LoadParts,
    *,
    options: EvalOptions,
    processes: Processes,
    progress: ProgressCallback | None = None,
) -> None:
    """Make the parts that are missing; all processes share them, and all are done when this returns."""
    keep_logits = options.keep_logits and header.masks is None
    mine, done = parts.share_run(header, processes, keep_logits=keep_logits, overwrite=options.overwrite)
    counter = ProgressCounter(progress, len(parts.dataset), done, processes.count)
    parts.fill(_columns_of_batches(predictor, load(mine), counter), first=processes.first)
    processes.wait()


@torch.inference_mode()
def _columns_of_batches(
    predictor: Predictor, batches: Iterable[PartBatch], counter: ProgressCounter
) -> Iterator[FinishedBatch]:
    """The columns and unreadable images of each batch as it is finished."""
    for batch in batches:
        columns = predictor.columns(batch.images, batch.targets) if batch.indices else {}
        if "confusion" in columns:
            columns |= confusion_cells(batch.indices, columns.pop("confusion").cpu().numpy())
        counter.add(len(batch.indices) + len(batch.unreadable))
        yield batch.part, Columns({"index": np.array(batch.indices, np.int64), **columns}, batch.unreadable)


class ProgressCounter:
    """Counts images for the callback, assuming that the other processes are as fast as this one."""

    def __init__(self, callback: ProgressCallback | None, total: int, done: int, processes: int) -> None:
        self.callback, self.total, self.done, self.processes = callback, total, done, processes
        self.add(0)

    def add(self, images: int) -> None:
        """Count images of this process."""
        self.done = min(self.done + images * self.processes, self.total)
        if self.callback:
            self.callback(self.done, self.total)


def gather_records(parts: Parts, header: Header, labels: Sequence[int]) -> Records:
    """The records of all parts; ``labels`` has the labels of the whole dataset."""
    columns, unreadable = parts.collect()
    order = columns.pop("index")
    return Records(
        header=finished(header, unreadable),
        ids=np.array([parts.dataset.entries[index].name for index in order], dtype=np.str_),
        labels=np.array(labels, np.int64)[order],
        **columns,
    )


def _gather_masks(parts: Parts, header: Header) -> SegmentationRecords:
    """The records of all parts."""
    columns, unreadable = parts.collect()
    order = columns["index"]
    row_of = np.empty(len(parts.dataset), np.int64)
    row_of[order] = np.arange(len(order))
    shape = (len(order), int(header.config["num_classes"]) ** 2)
    confusion = []
    for s in range(header.rounds):
        of_round = columns["cell_round"] == s
        rows = row_of[columns["cell_image"][of_round]]
        confusion.append(confusion_rows(rows, columns["cell"][of_round], columns["cell_count"][of_round], shape=shape))
    return SegmentationRecords(
        header=finished(header, unreadable),
        ids=np.array([parts.dataset.entries[index].name for index in order], dtype=np.str_),
        windows=columns["windows"],
        scores=columns["scores"],
        confusion=tuple(confusion),
    )
