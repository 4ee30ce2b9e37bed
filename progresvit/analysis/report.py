"""One HTML report with every figure of a model; figures and tables are beside it as PNG and CSV.

A figure that the model or the machine cannot give (gates without PSG, a second round, a GPU) is left out with a note.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from progresvit import __version__
from progresvit.analysis.diagnostics import DIAGNOSTICS, Diagnostic, Given
from progresvit.analysis.sample import Progress
from progresvit.analysis.style import render
from progresvit.engine.speed import hardware
from progresvit.evaluation.table import Table

INDEX = "index.html"
FILES = (
    INDEX,
    *(f"{name}.png" for name in DIAGNOSTICS),
    *(f"{name}.csv" for name in DIAGNOSTICS),
    *(f"{name}-{key}.csv" for name, diagnostic in DIAGNOSTICS.items() for key in diagnostic.summaries),
)
"""All files that a report may have."""
SHORT = 30
"""Rows of the longest table that the page shows; longer ones are in the CSV only."""

BeginProgress = Callable[[str], Progress]
"""Starts a progress bar with a label."""


@dataclass(frozen=True)
class Part:
    """A diagnostic of the report and what came out."""

    name: str
    diagnostic: Diagnostic
    tables: Mapping[str, Table] = field(default_factory=dict)
    """By the name of their file without its suffix."""
    image: bytes = b""
    """PNG."""
    note: str | None = None
    """Why it was skipped."""


@dataclass(frozen=True)
class Report:
    """All parts."""

    title: str
    about: Sequence[str]
    """Lines about the model and the images."""
    parts: Sequence[Part]

    def files(self) -> Iterator[tuple[str, str | bytes]]:
        """Names and contents: the page, then the figure and the table of each part."""
        yield INDEX, self.to_html()
        for part in self.parts:
            if part.note is None:
                yield f"{part.name}.png", part.image
                yield from ((f"{name}.csv", table.to_csv()) for name, table in part.tables.items())

    def notes(self) -> Iterator[tuple[str, str]]:
        """Name and reason of what was skipped."""
        for part in self.parts:
            if part.note is not None:
                yield part.name, part.note

    def to_html(self) -> str:
        """A page that needs no other file."""
        about = "".join(f"<p>{html.escape(line)}</p>\n" for line in self.about)
        body = "".join(_part_html(part) for part in self.parts)
        title = html.escape(self.title)
        return (
            f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n'
            f"<style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n{about}{body}</body>\n</html>\n"
        )


STYLE = (
    "body{font-family:sans-serif;max-width:760px;margin:2em auto;padding:0 1em;line-height:1.45;color:#222}"
    "img{width:100%;max-width:700px}table{border-collapse:collapse;font-size:.85em}"
    "td,th{padding:.15em .6em;text-align:right;border-bottom:1px solid #ddd}.note{color:#555}"
    "details{overflow-x:auto}"
)


def _part_html(part: Part) -> str:
    diagnostic = part.diagnostic
    head = f'<h2 id="{part.name}">{html.escape(diagnostic.title)}</h2>\n<p>{html.escape(diagnostic.text)}</p>\n'
    if part.note is not None:
        return f'{head}<p class="note">Skipped: {html.escape(part.note)}</p>\n'
    image = base64.b64encode(part.image).decode()
    figure = f'<img alt="{html.escape(diagnostic.title)}" src="data:image/png;base64,{image}">\n'
    tables = "".join(_table_html(table) for table in part.tables.values() if len(table.rows) <= SHORT)
    links = ", ".join(f'<a href="{name}.csv">{name}.csv</a>' for name in part.tables)
    return f"{head}{figure}{tables}<p>{links}</p>\n"


def _table_html(table: Table) -> str:
    heads, cells = table.cells()
    lines = [_line_html("th", heads), *(_line_html("td", line) for line in cells)]
    return f"<details><summary>{html.escape(table.title)}</summary>\n<table>\n{''.join(lines)}</table></details>\n"


def _line_html(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"


def make_report(given: Given, *, data: str, progress: BeginProgress | None = None) -> Report:
    """Run all diagnostics with their default options.

    Args:
        given: The model and the images.
        data: Where the images are from.
        progress: Starts a progress bar for each diagnostic.
    """
    parts = []
    for number, (name, diagnostic) in enumerate(DIAGNOSTICS.items(), start=1):
        update = progress(f"{name} ({number} of {len(DIAGNOSTICS)})") if progress else _ignore
        parts.append(_run(name, diagnostic, given, update))
    device, sample = next(given.model.parameters()).device, given.sample
    about = (
        f"{len(sample)} images of {len(sample.class_names)} classes from {data}.",
        f"{hardware(str(device))}, progresvit {__version__}, {datetime.now(UTC):%Y-%m-%d}.",
    )
    return Report(title=f"Inside {given.name}", about=about, parts=parts)


def _run(name: str, diagnostic: Diagnostic, given: Given, progress: Progress) -> Part:
    try:
        found = diagnostic.run(given, progress)
    except (ValueError, RuntimeError, MemoryError) as error:  # out of memory, for example; the rest is kept
        return Part(name, diagnostic, note=str(error))
    summaries = {f"{name}-{key}": summary(found) for key, summary in diagnostic.summaries.items()}
    tables = {name: diagnostic.table(found), **summaries}
    return Part(name, diagnostic, tables=tables, image=render(diagnostic.figure(found), ".png"))


def _ignore(done: int, total: int) -> None: ...
