"""Tables of results as files: Parquet, CSV or JSON lines, by suffix. They are written and read in pieces.

CSV has empty cells for missing values, and lists as JSON. A line of JSON lines is the row without missing numbers.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.csv import ConvertOptions, CSVWriter, ParseOptions, open_csv

SUFFIXES = (".parquet", ".csv", ".jsonl")


def write_table(path: Path, schema: pa.Schema, suffix: str, parts: Iterable[pa.Table]) -> None:
    """Write a new file in the format of a suffix, one part of the table at a time."""
    if suffix == ".csv":
        plain = pa.schema([_csv_field(field) for field in schema])
        with CSVWriter(path, plain) as writer:
            for part in parts:
                writer.write_table(_csv_table(part, plain))
    elif suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            for part in parts:
                file.writelines(f"{json_line(row)}\n" for row in part.to_pylist())
    else:
        with pq.ParquetWriter(path, schema) as parquet:
            for part in parts:
                parquet.write_table(part)


def read_pieces(path: Path, schema: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
    """The columns of a schema, which are plain values, in pieces of about ``rows`` rows."""
    if path.suffix == ".csv":
        types = ConvertOptions(
            include_columns=schema.names,
            column_types={field.name: field.type for field in schema},
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        with open_csv(path, parse_options=ParseOptions(newlines_in_values=True), convert_options=types) as reader:
            yield from reader
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            while lines := list(islice(file, rows)):
                values = [json.loads(line) for line in lines]
                columns = [pa.array([row.get(field.name) for row in values], field.type) for field in schema]
                yield pa.record_batch(columns, names=schema.names)
    else:
        with pq.ParquetFile(path) as table:
            yield from table.iter_batches(rows, columns=schema.names)


def column_names(path: Path) -> list[str]:
    """The columns of a table. For JSON lines, the columns of the first row, which may lack some."""
    if path.suffix == ".parquet":
        return list(pq.read_schema(path).names)
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file), []) if path.suffix == ".csv" else list(json.loads(file.readline() or "{}"))


def has_columns(path: Path, columns: list[str]) -> bool:
    """Whether a file that a run has written has these columns; JSON lines need not have all of them."""
    return path.suffix == ".jsonl" or column_names(path) == columns


def json_line(row: dict[str, Any]) -> str:
    """A row without NaN, which JSON cannot hold, and without an empty ``top``."""
    missing = {key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    kept = {key: value for key, value in row.items() if key not in missing and (key != "top" or value)}
    return json.dumps(kept, allow_nan=False)


def _csv_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, pa.string()) if pa.types.is_nested(field.type) else pa.field(field.name, field.type)


def _csv_table(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    import pyarrow.compute as pc  # slow to import, and an answer in the terminal does not need it

    columns = []
    for field in schema:
        column = rows[field.name]
        if pa.types.is_nested(column.type):
            column = pa.array([json.dumps(value) if value else None for value in column.to_pylist()], pa.string())
        elif pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)
        columns.append(column)
    return pa.table(columns, schema=schema)
