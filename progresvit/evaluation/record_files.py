"""Files of records: one Parquet file with a row per image, a few columns per round, and a header in its metadata.

Letters: N images, S rounds, K classes, M numbers of an image.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from progresvit.data.dataset import UNLABELLED
from progresvit.evaluation.header import read_header
from progresvit.evaluation.records import Records
from progresvit.evaluation.segmentation_records import SegmentationRecords, confusion_rows
from progresvit.io.files import replace_file, writing
from progresvit.routing.scores import STATISTICS

if TYPE_CHECKING:
    from scipy import sparse

FORMAT = 1
KEY = b"progresvit"
SEGMENTATION_KEY = b"progresvit_segmentation"
"""Metadata of the file, by the kind of model."""


def write_records(records: Records | SegmentationRecords, path: Path) -> None:
    """Write the file in one step: a reader finds no file or a complete one."""
    records.check()
    table = _segmentation_table(records) if isinstance(records, SegmentationRecords) else _classification_table(records)
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
        of_masks = SEGMENTATION_KEY in (table.schema.metadata or {})
        records = _read_segmentation(table) if of_masks else _read_classification(table)
        records.check()
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no records of this library (it lacks {error}); evaluate again.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return records


def _classification_table(records: Records) -> pa.Table:
    columns: dict[str, Any] = {"id": pa.array(records.ids.tolist(), pa.string())}
    columns["label"] = pa.array(records.labels, pa.int32(), mask=records.labels == UNLABELLED)
    for s in range(records.rounds):
        name = f"round{s + 1}"
        columns[f"{name}_top5_labels"] = _fixed_lists(records.top5_labels[:, s].astype(np.int32))
        columns[f"{name}_top5_probabilities"] = _fixed_lists(records.top5_probabilities[:, s])
        columns[f"{name}_top10_entropy"] = pa.array(records.top10_entropy[:, s])
        columns[f"{name}_entropy"] = pa.array(records.entropy[:, s])
        columns[f"{name}_statistics"] = _fixed_lists(records.statistics[:, s])
        if records.log_probability is not None:
            columns[f"{name}_log_probability"] = pa.array(records.log_probability[:, s])
        if records.logits is not None:
            columns[f"{name}_logits"] = _fixed_lists(records.logits[:, s])
    about = {"format": FORMAT, "rounds": records.rounds, "statistics": STATISTICS, "header": records.header.to_dict()}
    return pa.table(columns).replace_schema_metadata({KEY: json.dumps(about).encode()})


def _read_classification(table: pa.Table) -> Records:
    about = json.loads((table.schema.metadata or {})[KEY])
    if about["format"] != FORMAT or tuple(about["statistics"]) != STATISTICS:
        raise ValueError("these records are of another version of the library; evaluate again.")
    table = table.combine_chunks()

    def rounds_of(name: str) -> NDArray[Any]:
        columns = [table[f"round{s + 1}_{name}"] for s in range(about["rounds"])]
        return np.stack([_to_array(column) for column in columns], axis=1)

    return Records(
        header=read_header(about["header"]),
        ids=np.array(table["id"].to_pylist(), dtype=np.str_),
        labels=table["label"].fill_null(UNLABELLED).to_numpy().astype(np.int64),
        top5_labels=rounds_of("top5_labels").astype(np.int64),
        top5_probabilities=rounds_of("top5_probabilities"),
        top10_entropy=rounds_of("top10_entropy"),
        entropy=rounds_of("entropy"),
        statistics=rounds_of("statistics"),
        log_probability=rounds_of("log_probability") if "round1_log_probability" in table.column_names else None,
        logits=rounds_of("logits") if "round1_logits" in table.column_names else None,
    )


def _fixed_lists(values: NDArray[Any]) -> pa.Array:
    """(N, M) -> N lists of M numbers."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).ravel()), values.shape[1])


def _to_array(column: pa.ChunkedArray) -> NDArray[Any]:
    """N numbers -> (N,), N lists of M numbers -> (N, M)."""
    if not pa.types.is_fixed_size_list(column.type):
        values: NDArray[Any] = column.to_numpy()
        return values
    flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return (np.concatenate(flat) if flat else np.zeros(0)).reshape(-1, column.type.list_size)


def _segmentation_table(records: SegmentationRecords) -> pa.Table:
    columns: dict[str, Any] = {
        "id": pa.array(records.ids.tolist(), pa.string()),
        "windows": pa.array(records.windows, pa.int32()),
    }
    for s, matrix in enumerate(records.confusion):
        columns[f"round{s + 1}_score"] = pa.array(records.scores[:, s], pa.float32())
        columns[f"round{s + 1}_cells"] = _ragged_lists(matrix.indptr, matrix.indices, pa.int32())
        columns[f"round{s + 1}_counts"] = _ragged_lists(matrix.indptr, matrix.data, pa.int64())
    about = {"format": FORMAT, "rounds": records.rounds, "header": records.header.to_dict()}
    return pa.table(columns).replace_schema_metadata({SEGMENTATION_KEY: json.dumps(about).encode()})


def _read_segmentation(table: pa.Table) -> SegmentationRecords:
    about = json.loads(table.schema.metadata[SEGMENTATION_KEY])
    if about["format"] != FORMAT:
        raise ValueError("these records are of another version of the library; evaluate again.")
    header = read_header(about["header"])
    names = [f"round{s + 1}" for s in range(about["rounds"])]
    shape = (len(table), int(header.config["num_classes"]) ** 2)
    return SegmentationRecords(
        header=header,
        ids=np.array(table["id"].to_pylist(), dtype=np.str_),
        windows=table["windows"].to_numpy().astype(np.int64),
        scores=np.stack([table[f"{name}_score"].to_numpy() for name in names], axis=1),
        confusion=tuple(_matrix(table[f"{name}_cells"], table[f"{name}_counts"], shape) for name in names),
    )


def _ragged_lists(starts: Sequence[int], values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Lists of numbers; each begins at its start and ends at the next one's."""
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(values, kind))


def _matrix(cells: pa.ChunkedArray, counts: pa.ChunkedArray, shape: tuple[int, int]) -> sparse.csr_array:
    """A round's matrix from the columns of a file."""
    import pyarrow.compute as pc  # slow to import, and records of classification models do without

    lengths = pc.list_value_length(cells).to_numpy()
    rows = np.repeat(np.arange(shape[0]), lengths)
    return confusion_rows(rows, pc.list_flatten(cells).to_numpy(), pc.list_flatten(counts).to_numpy(), shape=shape)
