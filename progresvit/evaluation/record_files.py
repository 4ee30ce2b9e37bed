"""What records of classification and of segmentation models share: their files and the ids of their rows.

Letters: N images.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from progresvit.io.files import replace_file, writing

KEY = b"progresvit"
SEGMENTATION_KEY = b"progresvit_segmentation"
"""Metadata of the file, by the kind of model."""


def read_table(path: str | Path) -> pa.Table:
    """The table of a file of records."""
    if Path(path).is_dir():
        raise ValueError(
            f"{path} is a folder and not a file of records; make one of a model or an export with: progresvit evaluate "
            "MODEL --data D --out records.parquet"
        )
    if not Path(path).is_file():
        raise ValueError(
            f"there are no records at {path}; make some with: progresvit evaluate MODEL --data D --out {path}"
        )
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a complete Parquet file ({error}); give a file of progresvit evaluate."
        ) from error


def write_table(table: pa.Table, path: Path) -> None:
    """Write the file in one step: a reader finds no file or a whole one."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, buffer.getvalue())


def check_rows(ids: NDArray[np.str_], *, rounds: int, expected: int) -> None:
    """Refuse empty records, repeated ids, and another number of rounds than the model has."""
    if not len(ids):
        raise ValueError("there are no records: the dataset is empty, or none of its images could be read.")
    if rounds != expected:
        raise ValueError(f"records of {rounds} rounds for a model of {expected}.")
    names, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        twice = names[counts > 1]
        raise ValueError(f"{len(twice)} ids occur more than once, such as {twice[0]}; each image must be there once.")


def split_by_id(ids: NDArray[Any], share: float, seed: int) -> NDArray[np.bool_]:
    """Which images are in the first of two parts, by their ids and the seed and not by their order: (N,)."""
    if not 0 < share < 1:
        raise ValueError(f"the share of a split is between 0 and 1, not {share:g}.")
    digests = [hashlib.sha256(f"{seed}\n{name}".encode()).digest()[:8] for name in ids.tolist()]
    first: NDArray[np.bool_] = np.frombuffer(b"".join(digests), ">u8") < share * 2**64
    if first.all() or not first.any():
        raise ValueError(f"{len(ids)} images are too few to split; evaluate on more.")
    return first
