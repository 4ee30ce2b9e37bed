"""Records of a segmentation model: the confusion matrix of every image in every round, and the scores.

Counts of pixels add up exactly, so the mIoU of any part of the images, of any routed mixture of rounds and of several
processes follows from them. One Parquet file: a row per image, and a header as for classification.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from progresvit import compute
from progresvit.config import BaseConfig
from progresvit.evaluation.record_files import SEGMENTATION_KEY, check_rows, read_table, split_by_id, write_table
from progresvit.evaluation.records import Floats, Header, Ints, read_header
from progresvit.metrics.miou import ClassCounts
from progresvit.model.registry import parse_config

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class SegmentationRecords:
    """The table."""

    header: Header
    ids: NDArray[np.str_]
    """(N,)"""
    windows: Ints
    """Windows of each image, of all its views: (N,)."""
    scores: Floats
    """(N, S), infinite where logits are not finite."""
    confusion: tuple[sparse.csr_array, ...]
    """Pixels of each image by label and prediction, one matrix per round: (N, K * K) int64, cell label * K +
    prediction."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rounds(self) -> int:
        return int(self.scores.shape[1])

    @cached_property
    def config(self) -> BaseConfig:
        """The model's config; an error if this version does not know the kind of model."""
        return parse_config(self.header.config)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.header.config["num_classes"])

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; their numbers if they have none."""
        config = self.header.config
        return tuple(config.get("labels") or config.get("class_ids") or map(str, range(self.classes)))

    @property
    def broken(self) -> int:
        """Images with a NaN or an infinity among the logits of any round."""
        return int((~np.isfinite(self.scores)).any(axis=1).sum())

    @cached_property
    def counts(self) -> ClassCounts:
        """Pixels of each class, (N, S, K) each."""
        cells = np.arange(self.classes**2)
        label, prediction = np.divmod(cells, self.classes)
        correct = label == prediction

        def summed(chosen: Ints, column: Ints) -> Ints:
            """Pixels of the chosen cells, each added to the class of its column."""
            shape = (len(cells), self.classes)
            adding = sparse.csr_array((np.ones(len(chosen), np.int64), (chosen, column)), shape=shape)
            return np.stack([(matrix @ adding).toarray() for matrix in self.confusion], axis=1)  # S x (N, K)

        return ClassCounts(summed(cells[correct], label[correct]), summed(cells, label), summed(cells, prediction))

    @property
    def totals(self) -> ClassCounts:
        """Pixels of each class in all images, by round: (S, K) each."""
        return ClassCounts(*(part.sum(axis=0) for part in self.counts))

    @property
    def pixel_error(self) -> NDArray[np.float64]:
        """Share of an image's labelled pixels that are wrong, (N, S); 0 if it has no labelled pixels."""
        pixels = self.counts.labelled.sum(axis=-1)
        wrong = pixels - self.counts.intersection.sum(axis=-1)
        error: NDArray[np.float64] = wrong / np.maximum(pixels, 1)
        return error

    def gmacs(self, convention: compute.Convention = "paper") -> NDArray[np.float64]:
        """GMACs of each image if it exits after each round, of all its windows: (N, S)."""
        of_window = np.asarray(self.header.gmacs[convention], np.float64)
        spent: NDArray[np.float64] = of_window * self.windows[:, None]
        return spent

    def confusion_matrix(self, rounds: ArrayLike) -> Ints:
        """Pixels of all images by label and prediction, (K, K), in one round or in the exit round of each image.

        Args:
            rounds: A round counted from 0, or one for each image, (N,).
        """
        exits = np.broadcast_to(np.asarray(rounds), len(self))
        cells = sum(matrix[np.flatnonzero(exits == s)].sum(axis=0) for s, matrix in enumerate(self.confusion))
        return np.asarray(cells, np.int64).reshape(self.classes, self.classes)

    def take(self, rows: NDArray[Any]) -> SegmentationRecords:
        """Some of the images, by index or by boolean mask."""
        chosen = np.arange(len(self))[rows]
        return replace(
            self,
            ids=self.ids[chosen],
            windows=self.windows[chosen],
            scores=self.scores[chosen],
            confusion=tuple(matrix[chosen] for matrix in self.confusion),
        )

    def split(self, share: float, seed: int = 0) -> tuple[SegmentationRecords, SegmentationRecords]:
        """Two disjoint parts. Which part an image is in depends on its id and the seed, not on the order."""
        first = split_by_id(self.ids, share, seed)
        return self.take(first), self.take(~first)


def confusion_rows(
    images: ArrayLike, cells: ArrayLike, counts: ArrayLike, *, shape: tuple[int, int]
) -> sparse.csr_array:
    """A round's matrix, (N, K * K), from the row, the cell and the number of pixels of each entry."""
    numbers, rows, columns = (np.asarray(part, np.int64) for part in (counts, images, cells))
    matrix = sparse.coo_array((numbers, (rows, columns)), shape=shape).tocsr()
    matrix.sum_duplicates()  # and sorts
    return matrix


def check_segmentation_records(records: SegmentationRecords) -> SegmentationRecords:
    """The same records, or an error that says what is wrong with them."""
    check_rows(records.ids, rounds=records.rounds, expected=records.header.rounds)
    if not records.confusion[0].sum():
        raise ValueError(
            "no pixel of these images has a label; check the masks and the values that are ignored (--ignore)."
        )
    return records


def write_segmentation_records(records: SegmentationRecords, path: Path) -> None:
    """Write the file in one step: a reader finds no file or a whole one."""
    write_table(_to_table(check_segmentation_records(records)), path)


def is_segmentation(path: str | Path) -> bool:
    """Whether a file holds records of a segmentation model; false if there is no such file or it is damaged."""
    try:
        return SEGMENTATION_KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def read_segmentation_records(path: str | Path) -> SegmentationRecords:
    """Records that ``write_segmentation_records`` wrote."""
    table = read_table(path)
    if SEGMENTATION_KEY not in (table.schema.metadata or {}):
        raise ValueError(f"{path} holds no records of a segmentation model; evaluate one: progresvit evaluate MODEL …")
    try:
        return check_segmentation_records(_from_table(table))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no records of this library (it lacks {error}); evaluate again.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _to_table(records: SegmentationRecords) -> pa.Table:
    columns: dict[str, Any] = {
        "id": pa.array(records.ids.tolist(), pa.string()),
        "windows": pa.array(records.windows, pa.int32()),
    }
    for s, matrix in enumerate(records.confusion):
        columns[f"round{s + 1}_score"] = pa.array(records.scores[:, s], pa.float32())
        columns[f"round{s + 1}_cells"] = _lists(matrix.indptr, matrix.indices, pa.int32())
        columns[f"round{s + 1}_counts"] = _lists(matrix.indptr, matrix.data, pa.int64())
    about = {"format": FORMAT, "rounds": records.rounds, "header": records.header.to_dict()}
    return pa.table(columns).replace_schema_metadata({SEGMENTATION_KEY: json.dumps(about).encode()})


def _from_table(table: pa.Table) -> SegmentationRecords:
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


def _lists(starts: Sequence[int], values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Lists of numbers, of which each begins at a start and ends at the next."""
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(values, kind))


def _matrix(cells: pa.ChunkedArray, counts: pa.ChunkedArray, shape: tuple[int, int]) -> sparse.csr_array:
    """A round's matrix from the columns of a file."""
    lengths = pc.list_value_length(cells).to_numpy()
    rows = np.repeat(np.arange(shape[0]), lengths)
    return confusion_rows(rows, pc.list_flatten(cells).to_numpy(), pc.list_flatten(counts).to_numpy(), shape=shape)
