"""An HTML page that needs no other file: parts with a figure, a gallery and tables. Figures and tables are beside it as
PNG and CSV.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from progresvit.table import Table

INDEX = "index.html"
SHORT = 30
"""Rows of the longest table that the page shows; longer ones are in the CSV only."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A small image of a gallery and the lines below it."""

    image: bytes
    """PNG; empty for lines alone."""
    lines: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of the page."""

    name: str
    """Name of its files, without suffix."""
    title: str
    text: str
    """What it shows."""
    image: bytes = b""
    """PNG; empty if there is no figure."""
    cards: Sequence[Card] = ()
    """The page shows them instead of the figure."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """By the name of their file without its suffix."""
    shown: Sequence[Table] | None = None
    """Tables of the page; by default all with at most ``SHORT`` rows. They are folded if there is a figure."""
    remarks: Sequence[str] = ()
    """Further paragraphs."""
    skipped: str | None = None
    """Why there is neither a figure nor a table."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """All parts."""

    title: str
    about: Sequence[str]
    """Lines about the model and the images."""
    parts: Sequence[Part]

    def files(self) -> Iterator[tuple[str, str | bytes]]:
        """Names and contents: the page, then the figure and the tables of each part."""
        yield INDEX, self.to_html()
        for part in self.parts:
            if part.image:
                yield f"{part.name}.png", part.image
            yield from ((f"{name}.csv", table.to_csv()) for name, table in part.tables.items())

    def skipped(self) -> Iterator[tuple[str, str]]:
        """Name and reason of what was skipped."""
        for part in self.parts:
            if part.skipped is not None:
                yield part.name, part.skipped

    def to_html(self) -> str:
        """The page."""
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
    "td,th{padding:.15em .6em;text-align:right;border-bottom:1px solid #ddd}td{white-space:nowrap}.note{color:#555}"
    "td.left,th.left{text-align:left}details{overflow-x:auto}"
    ".cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:1em .8em}"
    ".card{font-size:.78em;line-height:1.3;overflow-wrap:anywhere}.card img{width:auto;max-width:96px;display:block}"
)


def _part_html(part: Part) -> str:
    head = f'<h2 id="{part.name}">{html.escape(part.title)}</h2>\n<p>{html.escape(part.text)}</p>\n'
    if part.skipped is not None:
        return f'{head}<p class="note">Skipped: {html.escape(part.skipped)}</p>\n'
    remarks = "".join(f'<p class="note">{html.escape(line)}</p>\n' for line in part.remarks)
    figure = f'<img alt="{html.escape(part.title)}" src="{_data(part.image)}">\n' if part.image else ""
    if part.cards:
        figure = f'<div class="cards">\n{"".join(map(_card_html, part.cards))}</div>\n'
    shown = [table for table in part.tables.values() if len(table.rows) <= SHORT] if part.shown is None else part.shown
    tables = "".join(_table_html(table, is_open=not figure) for table in shown)
    names = [*([f"{part.name}.png"] if part.cards and part.image else []), *(f"{name}.csv" for name in part.tables)]
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in names)
    return f"{head}{remarks}{figure}{tables}<p>{links}</p>\n"


def _card_html(card: Card) -> str:
    image = f'<img alt="" src="{_data(card.image)}">' if card.image else ""
    return f'<div class="card">{image}{"<br>".join(map(html.escape, card.lines))}</div>\n'


def _data(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _table_html(table: Table, *, is_open: bool) -> str:
    heads, cells = table.cells()
    left = table.left()
    lines = [_line_html("th", heads, left), *(_line_html("td", line, left) for line in cells)]
    summary = f"<summary>{html.escape(table.title)}</summary>"
    return f"<details{' open' if is_open else ''}>{summary}\n<table>\n{''.join(lines)}</table></details>\n"


def _line_html(tag: str, cells: Sequence[str], left: Sequence[bool]) -> str:
    looks = [' class="left"' if is_left else "" for is_left in left]
    return "<tr>" + "".join(f"<{tag}{look}>{html.escape(cell)}</{tag}>" for cell, look in zip(cells, looks)) + "</tr>\n"
