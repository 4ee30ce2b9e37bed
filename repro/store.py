"""The long table of a study: every number of every measurement, one row each, in one file.

    python repro/store.py RESULTS                    # the JSON files of measurements into RESULTS/results.parquet
    python repro/store.py RESULTS --remove full-42   # so that it can be measured again
    python repro/store.py RESULTS --csv > all.csv    # the rows with a value, for a spreadsheet or a diff

A measurement writes a JSON file (``formats.py``); this script moves it into the table. Pages read both. A JSON file
replaces the rows of the same name. The columns:

- ``name``, ``metric``, ``point``: the measurement, a number of it such as ``settings[].point.top1``, and which entry of
  each list it belongs to: ``1 drop-0.5``
- ``value``, ``low``, ``high``: a number, with the ends of its interval if it has one
- ``flags``, ``halves``, ``singles``, ``counts``, ``numbers``: a value for each image, or a curve
  (counts of a segmentation model are its errors, ``missed`` and ``wrong``: see ``_count_errors``)
- ``text``: everything else, as JSON
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from progresvit.io.files import replace_file
from repro.formats import Measurement, Results, SegmentationResult, check_measurement, read_measurement

TABLE = "results.parquet"
LISTS = {
    "flags": pa.list_(pa.bool_()),
    "halves": pa.list_(pa.float16()),
    "singles": pa.list_(pa.float32()),
    "counts": pa.list_(pa.int32()),
    "numbers": pa.list_(pa.float64()),
}
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("name", "metric", "point")]
    + [(name, pa.float64()) for name in ("value", "low", "high")]
    + list(LISTS.items())
    + [("text", pa.string())]
)
COLUMNS = {"?": "flags", "e": "halves", "f": "singles", "i": "counts"}
"""Columns of arrays by the type of their numbers, as numpy calls it."""
WHOLE = ("recipe", "probe", "machine", "data", "commands", "labels", "tables", "figures")
"""Fields that are one text: what a measurement was made from."""
LABELS = ("name", "setting", "router", "fitted_on", "rule", "drop", "run", "corruption", "severity")
"""Fields that name the entry of a list, so far as it has them."""
SPLITS = ("val", "test")
"""Fields of a segmentation model that hold pixels of each image."""
SPREAD = ("mean", "lowest", "highest")

Row = dict[str, Any]


def to_rows(result: Measurement) -> list[Row]:
    """The rows of a measurement."""
    values = result.model_dump()
    if isinstance(result, SegmentationResult):
        values |= {split: _count_errors(values[split]) for split in SPLITS}
    return [{"name": result.name, **row} for row in _rows(values, "", ())]


def _rows(value: Any, metric: str, point: tuple[str, ...]) -> Iterator[Row]:
    """Lists are ``[]`` in the metric, and the point says which entry of each list it is."""
    whole = metric in WHOLE
    place = {"metric": metric, "point": "/".join(point)}
    if isinstance(value, np.ndarray):
        yield place | {COLUMNS[value.dtype.char]: value}
    elif isinstance(value, dict) and tuple(value) == SPREAD:
        yield place | dict(zip(("value", "low", "high"), value.values()))
    elif isinstance(value, dict) and value and not whole:
        for key, part in value.items():
            yield from _rows(part, f"{metric}.{key}" if metric else key, point)
    elif isinstance(value, list | tuple) and value and not whole:
        if all(isinstance(part, int | float) for part in value):
            yield place | {"numbers": value}
            return
        for number, part in enumerate(value):
            names = [str(part[key]) for key in LABELS if part.get(key) is not None] if isinstance(part, dict) else []
            entry = " ".join([str(number), *names]).replace("/", "_")
            yield from _rows(part, f"{metric}[]", (*point, entry))
    elif isinstance(value, int | float):
        yield place | {"value": float(value)}
    else:
        yield place | {"text": json.dumps(value, ensure_ascii=False)}


def _count_errors(images: dict[str, Any]) -> dict[str, Any]:
    """A split with its errors in place of ``intersection`` and ``predicted``: small numbers, which take less space.

    ``missed`` pixels of a class are predicted as another, ``wrong`` ones the reverse; numbers of a class are together.
    An image has equally many of both, so the last class of ``wrong`` is left out.
    """
    kept = {key: value for key, value in images.items() if key not in ("intersection", "predicted")}
    labelled, *parts = (
        np.reshape(part, (-1, images["images"], len(images["labelled"]) // images["images"])).swapaxes(1, 2)
        for part in (images["labelled"], images["intersection"], images["predicted"])
    )  # (rounds, K, N) each
    intersection, predicted = parts
    missed, wrong = labelled - intersection, (predicted - intersection)[:, :-1]
    return kept | {"missed": [part.ravel() for part in missed], "wrong": [part.ravel() for part in wrong]}


def _count_pixels(images: dict[str, Any]) -> dict[str, Any]:
    """Invert ``_count_errors``. Tables of earlier versions hold the pixels themselves."""
    if "missed" not in images:
        return images
    kept = {key: value for key, value in images.items() if key not in ("missed", "wrong")}
    labelled = np.reshape(images["labelled"], (images["images"], -1)).T  # (K, N)
    shape = len(images["missed"]), -1, images["images"]  # (rounds, K, N) each; without the last class
    missed, wrong = (np.reshape(images[key], shape) for key in ("missed", "wrong"))
    last = missed.sum(axis=1, keepdims=True) - wrong.sum(axis=1, keepdims=True)
    intersection = labelled - missed
    predicted = intersection + np.concatenate([wrong, last], axis=1)
    pixels = {"intersection": intersection, "predicted": predicted}
    return kept | {key: [part.T.ravel() for part in counts] for key, counts in pixels.items()}


def from_rows(rows: Sequence[Row]) -> Measurement:
    """The measurement of its rows."""
    values: dict[Any, Any] = {}
    for row in rows:
        entries = (int(entry.partition(" ")[0]) for entry in row["point"].split("/"))
        keys: list[str | int] = []
        for part in row["metric"].split("."):
            keys += [part.replace("[]", ""), *(next(entries) for _ in range(part.count("[]")))]
        at = values
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = _value_of(row)
    values = _with_lists(values)
    values |= {split: _count_pixels(values[split]) for split in SPLITS if split in values}
    return check_measurement(values, origin=f"{TABLE}, {rows[0]['name']}")


def _value_of(row: Row) -> Any:
    """What a measurement holds in place of a row."""
    if row["value"] is not None:
        if row["low"] is None:
            return _number(row["value"])
        return dict(zip(SPREAD, (row["value"], row["low"], row["high"])))
    if row["text"] is not None:
        return json.loads(row["text"])
    column = next(column for column in LISTS if row[column] is not None)
    return [_number(value) for value in row[column].tolist()] if column == "numbers" else row[column]


def _number(value: float) -> float:
    """A whole number as an integer; a field of floats takes it too."""
    return int(value) if value.is_integer() else value


def _with_lists(value: Any) -> Any:
    """Dictionaries by number as lists."""
    if not isinstance(value, dict) or not value:
        return value
    if isinstance(next(iter(value)), int):
        return [_with_lists(value[number]) for number in range(len(value))]
    return {key: _with_lists(part) for key, part in value.items()}


def write_table(folder: Path, measurements: Iterable[Measurement]) -> None:
    """Replace the table of a folder."""
    rows = [row for result in sorted(measurements, key=lambda one: one.name) for row in to_rows(result)]
    columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in SCHEMA]
    buffer = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns, schema=SCHEMA),
        buffer,
        compression="brotli",
        compression_level=11,
        use_dictionary=["name", "metric", "point", "text"],
        use_byte_stream_split=["value", *(f"{name}.list.element" for name in LISTS if name != "flags")],
        write_statistics=False,
        row_group_size=10**7,
        data_page_size=2**27,
    )
    replace_file(folder / TABLE, buffer.getvalue().to_pybytes())


def read_table(folder: Path) -> dict[str, Measurement]:
    """The measurements of the table of a folder by name; none without a table."""
    if not (folder / TABLE).is_file():
        return {}
    table = pq.read_table(folder / TABLE)
    if table.schema.names != SCHEMA.names:
        raise ValueError(f"{folder / TABLE} has other columns than repro/store.py writes; measure the study again.")
    columns = {name: table[name].combine_chunks() for name in SCHEMA.names}
    lists = {name: columns.pop(name) for name in LISTS}
    plain = [dict(zip(columns, values)) for values in zip(*(column.to_pylist() for column in columns.values()))]
    by_name: dict[str, list[Row]] = {}
    for number, row in enumerate(plain):
        for name, column in lists.items():
            row[name] = column[number].values.to_numpy(zero_copy_only=False) if column[number].is_valid else None
        by_name.setdefault(row["name"], []).append(row)
    return {name: from_rows(rows) for name, rows in by_name.items()}


def measured_names(folder: Path) -> set[str]:
    """Names of the measurements of a folder, which are not read."""
    names = {path.stem for path in folder.glob("*.json")}
    table = folder / TABLE
    return names | set(pq.read_table(table, columns=["name"])["name"].unique().to_pylist() if table.is_file() else ())


def read_all(folder: Path) -> dict[str, Measurement]:
    """The measurements of a folder by name; a JSON file replaces the rows of its name."""
    loose = {path.stem: read_measurement(path) for path in folder.glob("*.json")}
    measured = read_table(folder) | loose
    return {name: measured[name] for name in sorted(measured)}


def read_results(folder: Path) -> Results:
    """The measurements of a folder by kind."""
    measured = read_all(folder)
    if not measured:
        raise ValueError(f"{folder} holds no results ({TABLE} or JSON files); give the results folder of a study.")
    return Results.of(measured.values(), folder)


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results folder of a study")
    parser.add_argument("--remove", metavar="NAME", help="remove a measurement")
    parser.add_argument("--csv", action="store_true", help="print the rows that have a value, and change nothing")
    options = parser.parse_args(arguments)
    try:
        measured = read_all(options.results)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if options.csv:
        names = ("name", "metric", "point", "value", "low", "high")
        rows = [row for result in measured.values() for row in to_rows(result) if "value" in row]
        writer = csv.DictWriter(sys.stdout, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        return
    if options.remove is not None and measured.pop(options.remove, None) is None:
        sys.exit(f"error: {options.results} has no measurement {options.remove}.")
    write_table(options.results, measured.values())
    for path in options.results.glob("*.json"):
        path.unlink()
    print(f"wrote {options.results / TABLE}: {len(measured)} measurements")


if __name__ == "__main__":
    main()
