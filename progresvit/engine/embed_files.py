"""Features of many image files, as one parquet table, and for each image the most similar other images.

An interrupted run can be resumed (io/resumable.py). Neighbours are computed when all features are there.

Letters: M images with features, d channels, k neighbours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from progresvit.data.crop import describe_preprocessing
from progresvit.data.dataset import ImageDataset
from progresvit.engine.embedding import EmbeddingEngine
from progresvit.engine.files import has_columns, input_batches, listing_hash, valid_text, write_table
from progresvit.io.part_formats import Cells, ParquetRows
from progresvit.io.resumable import BeginProgress, Progress, ResumableTable
from progresvit.metrics.knn import QUERY_BLOCK, nearest

PART = 2048
"""Images per part."""
FEATURES_KEY = b"progresvit_features"
"""In the metadata of the schema: how the features were made, as JSON."""

NEIGHBOUR_FIELDS = (pa.field("neighbours", pa.list_(pa.string())), pa.field("similarities", pa.list_(pa.float32())))


@dataclass(frozen=True)
class EmbeddedFiles:
    """Totals of a run."""

    images: int
    errors: int
    """Number of images that could not be read."""


def embed_files(
    engine: EmbeddingEngine,
    dataset: ImageDataset,
    out: Path,
    *,
    neighbours: int | None = None,
    overwrite: bool = False,
    progress: BeginProgress | None = None,
) -> EmbeddedFiles:
    """Write the features of all images, in their order, to a parquet table. An interrupted run is continued.

    The columns are ``image`` (the name), ``features`` and ``error``, and with neighbours ``neighbours`` (names of the
    most similar images, the most similar first) and ``similarities`` (cosine).

    Args:
        engine: Makes the features.
        dataset: The images.
        out: The table.
        neighbours: Number of similar images to list for each image, among the images that have features.
        overwrite: Replace an existing table, and the parts of another run.
        progress: Called at the beginning of a step; what it returns is called with the number of images that are done
            and their total.
    """
    total = len(dataset)
    if neighbours is not None and neighbours < 1:
        raise ValueError(f"neighbours must be at least 1, got {neighbours}.")
    if neighbours is not None and neighbours >= total:
        raise ValueError(
            f"{neighbours} neighbours need {neighbours + 1} images or more, and there are {total}; ask for fewer."
        )
    identity = {"images": listing_hash(dataset), "part": PART, **engine.identity()}
    schema = _schema(engine)
    columns = [field.name for field in (*schema, *(NEIGHBOUR_FIELDS if neighbours is not None else ()))]
    with ResumableTable(out, ParquetRows(schema), total=total, size=PART, step=engine.batch) as table:
        if table.begin(identity, overwrite=overwrite, is_complete=lambda path: has_columns(path, columns)):
            remaining = table.remaining()
            if remaining:
                rows = _rows(engine, dataset, [*remaining.values()])
                table.fill_in_order(remaining, rows, progress and progress("embedding"))
            parts = table.parts()
            if neighbours is not None:
                names, features = _read_features(table, engine.width)
                most_similar = find_neighbours(features, neighbours, engine.device, progress and progress("neighbours"))
                parts = _with_neighbours(parts, names, *most_similar)
                schema = pa.schema([*schema, *NEIGHBOUR_FIELDS], metadata=schema.metadata)
            table.finish(lambda staged: write_table(staged, schema, out.suffix, parts))
    errors = pq.read_table(out, columns=["error"])["error"]
    return EmbeddedFiles(images=total, errors=total - errors.null_count)


def find_neighbours(
    features: NDArray[np.float32], k: int, device: torch.device, progress: Progress | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices of the k most similar other images, or of all others if they are fewer, and their cosine similarities.

    They are in descending order: (M, d) -> (M, k) twice. Needs memory for blocks of similarities, never for all M * M.
    """
    images = len(features)
    k = max(0, min(k, images - 1))
    indices, similarities = np.empty((images, k), np.int64), np.empty((images, k), np.float32)
    bank = torch.from_numpy(features)
    for first in range(0, images if k else 0, QUERY_BLOCK):
        rows = slice(first, min(first + QUERY_BLOCK, images))
        highest, neighbours = nearest(bank[rows].to(device), bank, k + 1)  # (n, k + 1) twice
        is_other = neighbours != torch.arange(rows.start, rows.stop, device=device)[:, None]
        is_other[:, -1] &= ~is_other.all(dim=1)  # an image with many duplicates may not be among its own nearest
        indices[rows] = neighbours[is_other].view(-1, k).cpu().numpy()  # (n, k + 1) -> (n, k)
        similarities[rows] = highest[is_other].view(-1, k).cpu().numpy()
        if progress is not None:
            progress(rows.stop, images)
    return indices, similarities


def _schema(engine: EmbeddingEngine) -> pa.Schema:
    about = {
        "weights": engine.identity()["weights"],
        "round": engine.round,
        "pool": engine.pool,
        "precision": engine.precision,
        "preprocessing": describe_preprocessing(engine.config),
    }
    fields = [
        pa.field("image", pa.string(), nullable=False),
        pa.field("features", pa.list_(pa.float32(), engine.width)),
        pa.field("error", pa.string()),
    ]
    return pa.schema(fields, metadata={FEATURES_KEY: json.dumps(about).encode()})


def _rows(engine: EmbeddingEngine, dataset: ImageDataset, missing: list[range]) -> Iterator[Cells]:
    """The rows of the missing parts; no batch has images of two parts, so that a resumed run has the same batches."""
    batches = (batch for items in missing for batch in input_batches(dataset, items, engine.batch))
    names = (dataset.entries[index].name for items in missing for index in items)
    for embedding, name in zip(engine.stream(batches), names):
        error = None if embedding.error is None else valid_text(embedding.error)
        yield {"image": valid_text(name), "features": embedding.features, "error": error}


def _read_features(table: ResumableTable[Any], width: int) -> tuple[pa.Array, NDArray[np.float32]]:
    """Names and features of the images that have features: (M,) and (M, d)."""
    names, features, done = [], np.empty((table.total, width), np.float32), 0
    for part in table.parts():
        part = part.filter(part["error"].is_null())
        block = features[done : done + part.num_rows]
        block[:] = part["features"].combine_chunks().flatten().to_numpy().reshape(block.shape)
        names.append(part["image"].combine_chunks())
        done += part.num_rows
    return pa.concat_arrays(names), features[:done]


def _with_neighbours(
    parts: Iterator[pa.Table], names: pa.Array, indices: NDArray[np.int64], similarities: NDArray[np.float32]
) -> Iterator[pa.Table]:
    """The parts with two more columns, which are null for images without features."""
    done, k = 0, indices.shape[1]
    for part in parts:
        is_known = part["error"].is_null().to_numpy()
        rows = slice(done, done + int(is_known.sum()))
        done = rows.stop
        values = (names.take(pa.array(indices[rows].ravel())), pa.array(similarities[rows].ravel()))
        ends = pa.array(np.cumsum([0, *is_known * k]), pa.int32())
        for field, flat in zip(NEIGHBOUR_FIELDS, values):
            part = part.append_column(field, pa.ListArray.from_arrays(ends, flat, mask=pa.array(~is_known)))
        yield part
