"""Evaluation of a segmentation model: every round on every image, once, into records.

It is resumed and shared by processes as the evaluation of a classification model is (``run.py``). Windows of several
images run together. Images are grouped within a part, so the records do not depend on the number of processes.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from progresvit.config import BaseConfig
from progresvit.data.dataset import some_of
from progresvit.data.loading import Unreadable
from progresvit.data.segmentation import IGNORE, SegmentationDataset, find_segmentation
from progresvit.data.segmentation.images import EvaluationImage, evaluation_images
from progresvit.data.segmentation.windows import WindowOptions, describe_windows, windows_hash
from progresvit.distributed import Processes
from progresvit.evaluation.header import Header
from progresvit.evaluation.parts import FinishedBatch, Parts
from progresvit.evaluation.record_files import read_segmentation_records, write_records
from progresvit.evaluation.run import EvalOptions, ProgressCallback, ProgressCounter, check_run, finished, make_header
from progresvit.evaluation.segmentation_records import SegmentationRecords, confusion_rows
from progresvit.io.part_formats import Columns
from progresvit.metrics.miou import confusion_matrix
from progresvit.model.interface import RoundModel
from progresvit.model.precision import autocast
from progresvit.predict.segment import RoundMap, segment_rounds

CHUNK = 32
"""Images per part: an image takes longer than in classification, and datasets are smaller."""

BATCH = 32
"""Windows that run at a time unless another number is asked for."""

Indexed = tuple[int, EvaluationImage]


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
        labels: Label file or built-in list. By default that of the data, else the model's classes for the mask values
            0, 1, 2, ….
        ignore: Raw values of the masks that count nowhere.
        windows: How images are divided into windows; by default at one scale, next to each other.
        options: Precision, number of windows that run at a time (``batch``) and so on.
        progress: Called after each batch.
    """
    windows, options = windows or WindowOptions(), options or EvalOptions(batch=BATCH)
    config, device = model.config, processes.device
    if config.task != "segmentation":
        raise ValueError("the model classifies images, so evaluate makes its records; give a segmentation model.")
    check_run(out, options, device)
    dataset = find_segmentation(data, split, labels=labels, ignore=ignore, default_names=_class_names(config))
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
    model = model.to(device).eval()
    with Parts(out, dataset, size=CHUNK) as parts:
        mine, done = parts.share_run(header, processes, keep_logits=False, overwrite=options.overwrite)
        counter = ProgressCounter(progress, len(dataset), done, processes.count)
        parts.fill(_run(model, dataset, parts, mine, windows, options, device, counter), first=processes.first)
        processes.wait()
        if processes.first:
            write_records(_gather(parts, header), out)
            parts.remove()
        processes.wait()
    return read_segmentation_records(out)


def _class_names(config: BaseConfig) -> tuple[str, ...] | None:
    return config.class_ids or config.labels


def _check_classes(dataset: SegmentationDataset, config: BaseConfig, data: str) -> None:
    """Refuse data with other classes than the model's, or in another order."""
    names, known = dataset.class_ids, _class_names(config)
    if names == known or (known is None and len(names) == config.num_classes):
        return
    wanted = f"those of the model are {some_of(known)}" if known else f"the model has {config.num_classes} classes"
    order = ", in another order" if known and sorted(names) == sorted(known) else ""
    raise ValueError(
        f"the {len(names)} classes of {data} are {some_of(names)}, and {wanted}{order}; name the label file of the "
        "model's classes (--labels) and the mask values that it leaves out (--ignore), or evaluate on other data."
    )


@torch.inference_mode()
def _run(
    model: RoundModel,
    dataset: SegmentationDataset,
    parts: Parts,
    numbers: Sequence[int],
    windows: WindowOptions,
    options: EvalOptions,
    device: torch.device,
    counter: ProgressCounter,
) -> Iterator[FinishedBatch]:
    """The columns and unreadable images of each group of images as it is finished."""
    owner = {index: number for number in numbers for index in parts.left(number)}
    unreadable = Unreadable(dataset)
    unreadable.limit = 1.0  # the parts count them
    images = evaluation_images(
        dataset, list(owner), config=model.config, options=windows, workers=options.workers, unreadable=unreadable
    )
    left = set(owner)

    def skipped(number: int, last: int) -> dict[int, str]:
        """The images of a part up to ``last`` that are left; they cannot be read."""
        indices = [index for index in parts.ranges[number] if index <= last and index in left]
        left.difference_update(indices)
        counter.add(len(indices))
        return {index: unreadable.reasons[index] for index in indices}

    def rest(number: int) -> Iterator[FinishedBatch]:
        """The last images of a part, if they cannot be read."""
        last = parts.ranges[number].stop - 1
        if last in left:
            yield number, Columns({"index": np.zeros(0, np.int64)}, skipped(number, last))

    for number, of_part in groupby(images, key=lambda indexed: owner[indexed[0]]):
        for group in _groups(of_part, options.batch):
            columns = _columns(model, group, options, device, counter)
            left.difference_update(index for index, _ in group)
            last = group[-1][0]
            yield number, Columns(columns, skipped(number, last))
        yield from rest(number)  # its last images have been tried when one of the next part is there
    for number in sorted({owner[index] for index in left}):  # no image of it can be read
        yield from rest(number)


def _groups(images: Iterable[Indexed], batch: int) -> Iterator[list[Indexed]]:
    """Images whose windows fill a batch; one with more windows is a group of its own."""
    group: list[Indexed] = []
    filled = 0
    for index, image in images:
        count = _count_windows(image)
        if group and filled + count > batch:
            yield group
            group, filled = [], 0
        group.append((index, image))
        filled += count
    if group:
        yield group


def _count_windows(image: EvaluationImage) -> int:
    return sum(view.count for view in image.views)


def _columns(
    model: RoundModel, group: Sequence[Indexed], options: EvalOptions, device: torch.device, counter: ProgressCounter
) -> dict[str, Any]:
    """What records keep of some images.

    Confusion matrices are sparse: image (its index in the dataset), round, cell and count of the cells that are not 0.
    """
    with autocast(device, options.precision):
        cut = [image.cut(model.config, device) for _, image in group]
        maps = segment_rounds(model, cut, batch=options.batch)
    cells = [
        _cells(index, s, round_map, image, model.config.num_classes, device)
        for (index, image), rounds in zip(group, maps)
        for s, round_map in enumerate(rounds)
    ]
    counter.add(len(group))
    image_of, round_of, cell, count = np.concatenate(cells, axis=1)
    scores = torch.stack([torch.stack([round_map.score for round_map in rounds]) for rounds in maps])  # (N, S)
    return {
        "index": np.array([index for index, _ in group], np.int64),
        "windows": np.array([_count_windows(image) for _, image in group], np.int64),
        "scores": scores.float().cpu().numpy(),
        "cell_image": image_of,
        "cell_round": round_of,
        "cell": cell,
        "cell_count": count,
    }


def _cells(
    index: int, s: int, round_map: RoundMap, image: EvaluationImage, classes: int, device: torch.device
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Image, round, cell and count, a column for each cell of the confusion matrix that is not 0."""
    assert image.mask is not None
    matrix = confusion_matrix(round_map.labels, image.mask.to(device), classes=classes, ignore=IGNORE).flatten().cpu()
    cell = matrix.nonzero()[:, 0]
    return np.stack([np.full(len(cell), index), np.full(len(cell), s), cell.numpy(), matrix[cell].numpy()])


def _gather(parts: Parts, header: Header) -> SegmentationRecords:
    """The records of all parts."""
    columns, unreadable = parts.collect()
    order = columns["index"]
    row_of = np.empty(len(parts.dataset), np.int64)
    row_of[order] = np.arange(len(order))
    shape = (len(order), int(header.config["num_classes"]) ** 2)
    confusion = []
    for s in range(header.rounds):
        chosen = columns["cell_round"] == s
        rows = row_of[columns["cell_image"][chosen]]
        confusion.append(confusion_rows(rows, columns["cell"][chosen], columns["cell_count"][chosen], shape=shape))
    return SegmentationRecords(
        header=finished(header, unreadable),
        ids=np.array([parts.dataset.entries[index].name for index in order], dtype=np.str_),
        windows=columns["windows"],
        scores=columns["scores"],
        confusion=tuple(confusion),
    )
