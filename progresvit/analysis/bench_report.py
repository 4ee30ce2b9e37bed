"""The rows of the inference benchmark as people read them: a table, and ratios to the yardsticks."""

from __future__ import annotations

from collections.abc import Sequence

from progresvit.engine.bench_case import Row
from progresvit.evaluation.table import Column, Table, decimals, rough_percent

YARDSTICKS = ("eager", "compiled", "deit")


def _count(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _threshold(value: Sequence[float | str]) -> str:
    return " / ".join(f"{float(one):.4g}" for one in value)


UNSTEADY = 0.2
"""Repeats that differ by a larger share than this say little."""

COLUMNS = (
    Column("name", "what"),
    Column("precision", "precision"),
    Column("batch", "batch"),
    Column("images_per_s", "images/s", _count),
    Column("milliseconds", "ms a batch", _count),
    Column("spread", "spread, %", rough_percent),
    Column("threshold", "τ", _threshold),
    Column("share_continuing", "going on, %", rough_percent),
    Column("top1", "top-1, %", rough_percent),
    Column("gmacs", "GMACs", decimals),
    Column("tflops", "TFLOP/s", _count),
    Column("p50_ms", "p50, ms", _count),
    Column("p95_ms", "p95, ms", _count),
    Column("p99_ms", "p99, ms", _count),
    Column("peak_gib", "peak GiB", decimals),
    Column("note", "note"),
    Column("error", "failed"),
)


def bench_title(model: str, rows: Sequence[Row], *, random: bool) -> str:
    """Whose numbers these are."""
    first = next((row for row in rows if row["error"] is None), None)
    where = "" if first is None else f" on {first['hardware']}, torch {first['torch']}"
    return f"{model}{' (random weights)' if random else ''}{where}; GMACs an image as executed"


def bench_table(title: str, rows: Sequence[Row]) -> Table:
    """What people read of the rows."""
    return Table(title, COLUMNS, [{column.key: row[column.key] for column in COLUMNS} for row in rows])


def full_table(title: str, rows: Sequence[Row]) -> Table:
    """The same for JSON: everything that is known."""
    return Table(title, COLUMNS, rows)


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Each kind of engine beside each yardstick of the same batch and measure; where a yardstick is routed, at the
    nearest share of images going on, else at the first that was measured."""
    found: list[Row] = []
    good = [row for row in rows if row["error"] is None and not row["case"]["memory"]]
    for yardstick in good:
        if yardstick["subject"] not in YARDSTICKS or yardstick["case"]["round"] is not None:
            continue
        chosen: dict[tuple[str, str], Row] = {}
        for row in good:
            if row["subject"] == "engine" and all(row[key] == yardstick[key] for key in ("batch", "measure")):
                kind = (row["name"], row["precision"])
                if kind not in chosen or _distance(row, yardstick) < _distance(chosen[kind], yardstick):
                    chosen[kind] = row
        found += [_ratio(row, yardstick) for row in chosen.values()]
    return found


def ratio_lines(rows: Sequence[Row]) -> list[str]:
    """The ratios in words."""
    return [
        f"{row['engine']} is {row['ratio']:.2f} times as fast as {row['yardstick']} (batch {row['batch']}, "
        f"{'p50 latency' if row['measure'] == 'latency' else row['measure']})"
        f"{'; unsteady: the repeats differ by more than a fifth' if row['unsteady'] else ''}"
        for row in ratios(rows)
    ]


def _distance(row: Row, yardstick: Row) -> float:
    if yardstick["share_continuing"] is None or row["share_continuing"] is None:
        return 0.0
    return abs(float(row["share_continuing"] - yardstick["share_continuing"]))


def _ratio(row: Row, yardstick: Row) -> Row:
    if row["measure"] == "latency":
        ratio = yardstick["p50_ms"] / row["p50_ms"]
    else:
        ratio = row["images_per_s"] / yardstick["images_per_s"]
    names = {what: f"{one['name']} {one['precision']}" for what, one in (("engine", row), ("yardstick", yardstick))}
    unsteady = any((one["spread"] or 0) > UNSTEADY for one in (row, yardstick))
    return {**names, "batch": row["batch"], "measure": row["measure"], "ratio": ratio, "unsteady": unsteady}
