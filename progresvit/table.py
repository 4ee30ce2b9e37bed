"""Tables: rows of plain data, written as CSV and JSON, and formatted for Markdown, LaTeX and the terminal."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from progresvit.io.parse import dump_json
from progresvit.metrics.interval import Interval

Row = dict[str, Any]


def decimals(value: float) -> str:
    """Three decimals, as the paper gives GMACs."""
    return _fixed(value, 3)


def percent(value: float) -> str:
    """A share as percent, three decimals: one image of 50,000 is 0.002."""
    return _fixed(100 * value, 3)


def rough_percent(value: float) -> str:
    """A share as percent, one decimal."""
    return _fixed(100 * value, 1)


def interval(value: Interval) -> str:
    """A share and its 95 % interval as percent, one decimal: ``95.3 (90.6 to 97.7)``."""
    mean, lowest, highest = (_fixed(100 * end, 1) for end in (value.mean, value.lowest, value.highest))
    return f"{mean} ({lowest} to {highest})"


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * value:+.3f}"


def threshold(value: float | Sequence[float]) -> str:
    """One number, or one per round."""
    return " / ".join(f"{number:.6g}" for number in (value if isinstance(value, Sequence) else [value]))


def _fixed(value: float, digits: int) -> str:
    """Round a number; a rounded zero has no sign."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


@dataclass(frozen=True)
class Column:
    """One column: its key in the rows, its heading, and the format of its values."""

    key: str
    head: str
    show: Callable[[Any], str] = str
    left: bool = False
    """Align to the left in Markdown; by default to the right, as numbers are."""


def interval_columns(key: str, head: str, show: Callable[[float], str]) -> tuple[Column, Column, Column]:
    """The columns of an estimate and of the ends of its 95 % interval."""
    return Column(key, head, show), Column(f"{key}_low", "95 % from", show), Column(f"{key}_high", "to", show)


def interval_cells(key: str, value: Interval | None) -> Row:
    """The cells below :func:`interval_columns`; they are empty without an interval."""
    numbers = (None, None, None) if value is None else (value.mean, value.lowest, value.highest)
    return dict(zip((key, f"{key}_low", f"{key}_high"), numbers))


_FORMULA = r"^('*[=+\-@\t\r])"
"""The beginning of a text that a spreadsheet runs, behind any number of apostrophes."""


def escape_formula(value: Any) -> Any:
    """The value of a cell in CSV: text that a spreadsheet would run as a formula gets an apostrophe in front.

    Text with such a beginning behind apostrophes gets one more, so that removing one restores every text.
    """
    return re.sub(_FORMULA, r"'\1", value) if isinstance(value, str) else value


def escape_formulas(column: Any) -> Any:
    """:func:`escape_formula` for an Arrow column; columns of other types than text stay as they are."""
    return _replace_text(column, _FORMULA, r"'\1")


def restore_formulas(batch: Any) -> Any:
    """The Arrow record batch of a CSV file, with the text that it had before :func:`escape_formulas`."""
    for number, column in enumerate(batch.columns):
        batch = batch.set_column(number, batch.schema.field(number), _replace_text(column, f"^'{_FORMULA[1:]}", r"\1"))
    return batch


def _replace_text(column: Any, pattern: str, replacement: str) -> Any:
    import pyarrow as pa  # slow to import, and tables need it in CSV files of answers only
    import pyarrow.compute as pc

    is_text = pa.types.is_string(column.type)
    return pc.replace_substring_regex(column, pattern, replacement) if is_text else column


class _Lines(list[str]):
    """What a csv writer writes, with line feeds. Its own CRLF makes it quote a carriage return within a cell."""

    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")


@dataclass(frozen=True)
class Table:
    """Rows under a title."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Headings and formatted cells. Empty columns are omitted; an empty cell is a dash."""
        used = self._used()
        cells = [
            ["–" if row[column.key] in (None, "") else column.show(row[column.key]) for column in used]
            for row in self.rows
        ]
        return [column.head for column in used], cells

    def left(self) -> list[bool]:
        """Whether each column of :meth:`cells` is aligned to the left."""
        return [column.left for column in self._used()]

    def to_markdown(self) -> str:
        """A Markdown table below its title."""
        heads, cells = self.cells()
        rulers = ["---" if column.left else "---:" for column in self._used()]
        lines = [[cell.replace("|", "\\|") for cell in line] for line in (heads, rulers, *cells)]
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def to_latex(self) -> str:
        """A table environment with its title as caption; needs the package booktabs."""
        heads, cells = self.cells()
        lines = [" & ".join(map(_latex, line)) + r" \\" for line in (heads, *cells)]
        columns = "".join("l" if column.left else "r" for column in self._used())
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{_latex(self.title)}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                lines[0],
                r"\midrule",
                *lines[1:],
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def _used(self) -> list[Column]:
        return [column for column in self.columns if any(row[column.key] not in (None, "") for row in self.rows)]

    def to_csv(self) -> str:
        """The keys and unrounded values; shares are not converted to percent. Formulas: :func:`escape_formula`."""
        lines = _Lines()
        writer = csv.DictWriter(lines, [column.key for column in self.columns])
        writer.writeheader()
        writer.writerows({key: escape_formula(value) for key, value in row.items()} for row in self.rows)
        return "".join(lines)

    def to_json(self) -> str:
        """The title and one object per row."""
        return dump_json({"title": self.title, "rows": list(self.rows)}) + "\n"


_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "%_&#${}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": "--",
        "−": "$-$",
        "τ": r"$\tau$",
        "→": r"$\to$",
        "×": r"$\times$",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "±": r"$\pm$",
        "<": "$<$",
        ">": "$>$",
    }
)


def _latex(cell: str) -> str:
    return cell.translate(_LATEX)


FORMATS: dict[str, Callable[[Table], str]] = {
    ".csv": Table.to_csv,
    ".json": Table.to_json,
    ".md": Table.to_markdown,
    ".tex": Table.to_latex,
}
PLOTS = (".png", ".svg", ".pdf")


def check_outputs(paths: Sequence[Path], *, plots: bool = True) -> None:
    """Refuse unknown suffixes before any work is done."""
    suffixes = (*FORMATS, *(PLOTS if plots else ()))
    for path in paths:
        if path.suffix not in suffixes:
            raise ValueError(f"{path}: the suffix names the format; use {', '.join(suffixes)}.")
