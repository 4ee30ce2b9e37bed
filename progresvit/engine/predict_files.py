"""Predictions for many image files, as one parquet table. An interrupted run can be resumed (result_table.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from progresvit.data.dataset import ImageDataset
from progresvit.engine.engine import Engine
from progresvit.engine.prediction import Prediction
from progresvit.engine.result_table import Progress, ResultTable, image_batches, listing_hash

PART = 2048
"""Images per part."""

CANDIDATE = pa.struct(
    [
        pa.field("index", pa.int32(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("probability", pa.float32(), nullable=False),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("picture", pa.string(), nullable=False),  # the name of the image; tables of all versions have it
        pa.field("index", pa.int32(), nullable=False),
        pa.field("class_id", pa.string()),
        pa.field("label", pa.string()),
        pa.field("probability", pa.float32(), nullable=False),
        pa.field("exit_round", pa.int8(), nullable=False),
        pa.field("entropy", pa.float32(), nullable=False),
        pa.field("gmacs", pa.float32(), nullable=False),
        pa.field("abstained", pa.bool_(), nullable=False),
        pa.field("out_of_distribution", pa.bool_(), nullable=False),
        pa.field("ood_score", pa.float32()),
        pa.field("top", pa.list_(CANDIDATE), nullable=False),
        pa.field("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class Summary:
    """Totals of a run."""

    images: int
    errors: int
    abstained: int
    out_of_distribution: int
    """These are among the abstained."""
    exits: tuple[int, ...]
    """Number of images that exited after each round."""
    gmacs: float
    """Average over the images that were classified; NaN if there are none."""


def classify_files(
    engine: Engine,
    dataset: ImageDataset,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write the predictions for all images, in their order, to a parquet table. An interrupted run is continued.

    Args:
        engine: Makes the predictions.
        dataset: The images.
        out: The table.
        overwrite: Replace an existing table, and the parts of another run.
        progress: Called with the number of images that are done and their total.
    """
    identity = {"pictures": listing_hash(dataset), "part": PART, **engine.identity()}
    result = ResultTable(out, SCHEMA, total=len(dataset), part=PART, identity=identity, overwrite=overwrite)
    missing = result.missing()
    first = missing[0].start if missing else len(dataset)
    names = (entry.name for entry in dataset.entries[first:])
    answers = predictions(engine, dataset, first)
    result.fill(missing, (row(name, answer, engine) for answer, name in zip(answers, names)), progress)
    result.finish(map(_with_ood_columns, result.parts()))
    table = pq.read_table(out, columns=["exit_round", "gmacs", "abstained", "out_of_distribution"])
    return _summary(zip(*(column.to_pylist() for column in table.columns)), len(engine.gmacs))


def predictions(
    engine: Engine, dataset: ImageDataset, first: int = 0, *, deadline: float | None = None
) -> Iterator[Prediction]:
    """Predictions from the image ``first`` on, in order; files are read as they are needed."""
    batches = image_batches(dataset, range(first, len(dataset)), engine.batch)
    return engine.stream(batches, deadline=deadline)


def row(name: str, prediction: Prediction, engine: Engine) -> dict[str, Any]:
    """A prediction in plain data."""
    ids = engine.config.class_ids
    class_id = ids[prediction.index] if ids is not None and prediction.index >= 0 else None
    return {"picture": name, "class_id": class_id, **asdict(prediction)}


def summarise(answers: Iterable[Prediction], rounds: int) -> Summary:
    """Totals of predictions by a model of so many rounds."""
    facts = ((answer.exit_round, answer.gmacs, answer.abstained, answer.out_of_distribution) for answer in answers)
    return _summary(facts, rounds)


def _with_ood_columns(part: pa.Table) -> pa.Table:
    """A part of version 0.1.0, which had no out-of-distribution score, gets the columns for it."""
    if "ood_score" in part.column_names:
        return part
    place, rows = part.column_names.index("abstained") + 1, part.num_rows
    part = part.add_column(place, SCHEMA.field("out_of_distribution"), pa.array([False] * rows, pa.bool_()))
    return part.add_column(place + 1, SCHEMA.field("ood_score"), pa.nulls(rows, pa.float32()))


def _summary(facts: Iterable[tuple[int, float, bool, bool]], rounds: int) -> Summary:
    """From exit round (0: it could not be opened), GMACs, abstained and out-of-distribution of each image."""
    known = list(facts)
    classified = [fact for fact in known if fact[0]]
    return Summary(
        images=len(known),
        errors=len(known) - len(classified),
        abstained=sum(fact[2] for fact in classified),
        out_of_distribution=sum(fact[3] for fact in classified),
        exits=tuple(sum(fact[0] == s + 1 for fact in classified) for s in range(rounds)),
        gmacs=sum(fact[1] for fact in classified) / len(classified) if classified else float("nan"),
    )
