"""A table: rows of plain data, and how people read them. CSV and JSON hold the data, Markdown and screen the look."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from progresvit.io.parse import dump_json

Row = dict[str, Any]


def text(value: Any) -> str:
    """As it is."""
    return str(value)


def decimals(value: float) -> str:
    """Three of them, as the paper gives GMACs."""
    return _fixed(value, 3)


def percent(value: float) -> str:
    """A share as percent, three decimals: one image of 50,000 is 0.002."""
    return _fixed(100 * value, 3)


def rough_percent(value: float) -> str:
    """A share as percent, one decimal."""
    return _fixed(100 * value, 1)


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * value:+.3f}"


def threshold(value: float | Sequence[float]) -> str:
    """One number, or one per round."""
    return " / ".join(f"{one:.6g}" for one in (value if isinstance(value, Sequence) else [value]))


def _fixed(value: float, digits: int) -> str:
    """Rounded, and never -0.0."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


@dataclass(frozen=True)
class Column:
    """One column: the key in the rows, the head that people read, and how a value is written."""

    key: str
    head: str
    show: Callable[[Any], str] = text
    left: bool = False
    """Words, which Markdown sets to the left; numbers go to the right."""


@dataclass(frozen=True)
class Table:
    """Rows under a title."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Heads and cells for people; a column that is empty throughout is left out, an empty cell is a dash."""
        used = self._used()
        cells = [
            ["–" if row[column.key] in (None, "") else column.show(row[column.key]) for column in used]
            for row in self.rows
        ]
        return [column.head for column in used], cells

    def to_markdown(self) -> str:
        """With its title on top."""
        heads, cells = self.cells()
        rulers = ["---" if column.left else "---:" for column in self._used()]
        lines = [[cell.replace("|", "\\|") for cell in line] for line in (heads, rulers, *cells)]
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def _used(self) -> list[Column]:
        return [column for column in self.columns if any(row[column.key] not in (None, "") for row in self.rows)]

    def to_csv(self) -> str:
        """Plain numbers; shares are shares."""
        stream = io.StringIO()
        writer = csv.DictWriter(stream, [column.key for column in self.columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return stream.getvalue()

    def to_json(self) -> str:
        """The same as objects."""
        return dump_json({"title": self.title, "rows": self.rows}) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {".csv": Table.to_csv, ".json": Table.to_json, ".md": Table.to_markdown}
PLOTS = (".png", ".svg", ".pdf")


def check_outputs(paths: Sequence[Path], *, plots: bool = True) -> None:
    """Refuse a suffix that nothing is written as, before any work is done."""
    known = (*FORMATS, *(PLOTS if plots else ()))
    for path in paths:
        if path.suffix not in known:
            raise ValueError(f"{path}: the suffix says what is written; use {', '.join(known)}.")
