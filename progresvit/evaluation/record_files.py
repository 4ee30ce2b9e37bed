"""Files of records: one Parquet file with a row per image, a few columns per round, and a header in its metadata.

Letters: N images, S rounds, K classes, M numbers of an image.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from progresvit.data.dataset import UNLABELLED
from progresvit.evaluation.header import Header, read_header
from progresvit.evaluation.records import Records
from progresvit.evaluation.segmentation_records import SegmentationRecords, confusion_rows
from progresvit.io.files import replace_file, writing
from progresvit.routing.scores import STATISTICS

FORMAT = 1
KEY = b"progresvit"
SEGMENTATION_KEY = b"progresvit_segmentation"
"""Metadata of the file, by the kind of model."""

IMAGE, OLD_IMAGE = "image", "id"
"""The column with the names of the images, as in the tables of all commands, and its name in earlier versions."""
OPTIONAL = ("log_probability", "logits")
ROUND_COLUMNS = ("top5_labels", "top5_probabilities", "top10_entropy", "entropy", "statistics", *OPTIONAL)
"""Fields of :class:`Records` that have a column for each round; the optional ones may be missing."""


def write_records(records: Records | SegmentationRecords, path: Path) -> None:
    """Write the file in one step: a reader finds no file or a complete one."""
    records.check()
    about: dict[str, Any] = {"format": FORMAT, "rounds": records.rounds}
    columns = {IMAGE: pa.array(records.ids.tolist(), pa.string())}
    if records.image_hash is not None:
        columns["image_hash"] = pa.array(records.image_hash, pa.int64())
    if isinstance(records, SegmentationRecords):
        key = SEGMENTATION_KEY
        columns |= _segmentation_columns(records)
    else:
        key, about["statistics"] = KEY, STATISTICS
        columns |= _classification_columns(records)
    about["header"] = records.header.to_dict()
    table = pa.table(columns).replace_schema_metadata({key: json.dumps(about).encode()})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, buffer.getvalue())


write_segmentation_records = write_records


def is_segmentation(path: str | Path) -> bool:
    """Whether a file holds records of a segmentation model; false if there is no such file or it is damaged."""
    try:
        return SEGMENTATION_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def read_records(path: str | Path) -> Records:
    """Records of a classification model."""
    records = read_routed_records(path)
    if not isinstance(records, Records):
        raise ValueError(
            f"{path} holds records of a segmentation model; progresvit frontier and progresvit calibrate take them, "
            "and other commands take records of a classification model."
        )
    return records


def read_segmentation_records(path: str | Path) -> SegmentationRecords:
    """Records of a segmentation model."""
    records = read_routed_records(path)
    if not isinstance(records, SegmentationRecords):
        raise ValueError(f"{path} holds no records of a segmentation model; evaluate one: progresvit evaluate MODEL …")
    return records


def read_routed_records(path: str | Path) -> Records | SegmentationRecords:
    """Records of either kind."""
    if Path(path).is_dir():
        raise ValueError(
            f"{path} is a folder and not a file of records; make one with progresvit evaluate, of a model or an export."
        )
    if not Path(path).is_file():
        raise ValueError(f"there are no records at {path}; make them with progresvit evaluate.")
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a complete Parquet file ({error}); give a file of progresvit evaluate."
        ) from error
    try:
        metadata = table.schema.metadata or {}
        key = SEGMENTATION_KEY if SEGMENTATION_KEY in metadata else KEY
        about = json.loads(metadata[key])
        if about["format"] != FORMAT or (key == KEY and tuple(about["statistics"]) != STATISTICS):
            raise ValueError("these records are of another version of the library; evaluate again.")
        read = _read_segmentation if key == SEGMENTATION_KEY else _read_classification
        name = OLD_IMAGE if OLD_IMAGE in table.column_names else IMAGE
        ids = np.array(table[name].to_pylist(), dtype=np.str_)
        records = read(table.combine_chunks(), read_header(about["header"]), ids, about["rounds"])
        if "image_hash" in table.column_names:
            records = replace(records, image_hash=table["image_hash"].to_numpy())
        records.check()
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no records of this library (it lacks {error}); evaluate again.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return records


def _classification_columns(records: Records) -> dict[str, pa.Array]:
    columns = {"label": pa.array(records.labels, pa.int32(), mask=records.labels == UNLABELLED)}
    for s in range(records.rounds):
        for name in ROUND_COLUMNS:
            if (values := getattr(records, name)) is None:
                continue
            values = np.ascontiguousarray(values[:, s], np.int32 if name == "top5_labels" else None)  # (N,) or (N, M)
            column = pa.array(values.ravel())
            if values.ndim == 2:
                column = pa.FixedSizeListArray.from_arrays(column, values.shape[1])
            columns[f"round{s + 1}_{name}"] = column
    return columns


def _read_classification(table: pa.Table, header: Header, ids: NDArray[np.str_], rounds: int) -> Records:
    labels = table["label"].fill_null(UNLABELLED).to_numpy().astype(np.int64)
    columns = {
        name: np.stack([_to_array(table[f"round{s + 1}_{name}"]) for s in range(rounds)], axis=1)
        for name in ROUND_COLUMNS
        if name not in OPTIONAL or f"round1_{name}" in table.column_names
    }
    columns["top5_labels"] = columns["top5_labels"].astype(np.int64)
    return Records(header=header, ids=ids, labels=labels, **columns)


def _to_array(column: pa.ChunkedArray) -> NDArray[Any]:
    """N numbers -> (N,), N lists of M numbers -> (N, M)."""
    if not pa.types.is_fixed_size_list(column.type):
        values: NDArray[Any] = column.to_numpy()
        return values
    flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return (np.concatenate(flat) if flat else np.zeros(0)).reshape(-1, column.type.list_size)


def _segmentation_columns(records: SegmentationRecords) -> dict[str, pa.Array]:
    columns = {"windows": pa.array(records.windows, pa.int32())}
    for s, matrix in enumerate(records.confusion):
        starts = pa.array(matrix.indptr, pa.int32())  # of the list of each image
        columns[f"round{s + 1}_score"] = pa.array(records.scores[:, s], pa.float32())
        for name, values, kind in (("cells", matrix.indices, pa.int32()), ("counts", matrix.data, pa.int64())):
            columns[f"round{s + 1}_{name}"] = pa.ListArray.from_arrays(starts, pa.array(values, kind))
    return columns


def _read_segmentation(table: pa.Table, header: Header, ids: NDArray[np.str_], rounds: int) -> SegmentationRecords:
    import pyarrow.compute as pc  # slow to import, and records of classification models do without

    scores, confusion, classes = [], [], int(header.config["num_classes"])
    for s in range(1, rounds + 1):
        score, cells, counts = (table[f"round{s}_{name}"] for name in ("score", "cells", "counts"))
        images = np.repeat(np.arange(len(table)), pc.list_value_length(cells).to_numpy())
        flat = [pc.list_flatten(column).to_numpy() for column in (cells, counts)]
        outside = np.flatnonzero((flat[0] < 0) | (flat[0] >= classes**2))
        if len(outside):
            first = outside[0]
            raise ValueError(
                f"{len(outside)} numbers of pixels are for labels that are not among the {classes} classes, such as "
                f"{flat[0][first] // classes} of {ids[images[first]]}; evaluate again."
            )
        shape = (len(table), classes**2)
        scores.append(score.to_numpy())
        confusion.append(confusion_rows(images, *flat, shape=shape))
    return SegmentationRecords(
        header=header,
        ids=ids,
        windows=table["windows"].to_numpy().astype(np.int64),
        scores=np.stack(scores, axis=1),
        confusion=tuple(confusion),
    )
