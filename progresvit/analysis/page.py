"""An HTML page that needs no other file: parts with a figure, a gallery and tables. Figures and tables are beside it as
PNG and CSV.

The page has the style of the server's page and loads nothing. Its policy runs the script of the gallery and no other.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from progresvit.io.parse import printable
from progresvit.plots import STYLE
from progresvit.table import Table

INDEX = "index.html"
SHORT = 30
"""Rows of the longest table that the page shows; longer ones are in the CSV only."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A small image of a gallery and the lines beside it."""

    image: bytes
    """JPEG; empty for lines alone."""
    title: str
    lines: Sequence[str]
    marked: int | None = None
    """The line that is emphasised."""
    note: str
    """A last, quiet line."""
    filters: Mapping[str, str]
    """The value of this card in each filter of the gallery, by the label of the filter."""


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
    """The page shows them instead of the figure, in this order."""
    order: str = ""
    """The name of this order, such as ``most confident``."""
    reverse: str = ""
    """The name of the reverse order."""
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
    numbers: Mapping[str, str] = field(default_factory=dict)
    """The most important numbers, by their name."""

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
        parts = {end: Path(__file__).with_suffix(end).read_text(encoding="utf-8") for end in (".html", ".css", ".js")}
        style, script = STYLE.read_text(encoding="utf-8") + parts[".css"], parts[".js"]
        return Template(parts[".html"]).substitute(
            title=_text(self.title),
            about="".join(f"<p>{_text(line)}</p>\n" for line in self.about),
            numbers="".join(
                f"<div><dt>{_text(n)}</dt><dd>{_text(value)}</dd></div>" for n, value in self.numbers.items()
            ),
            links="".join(f'<a href="#{part.name}">{_text(part.title)}</a>' for part in self.parts),
            parts="".join(f'<section class="panel">\n{_part_html(part)}</section>\n' for part in self.parts),
            style=style,
            style_hash=_hash(style),
            script=script,
            script_hash=_hash(script),
        )


def _text(text: str) -> str:
    """Text of a page: names in it are neither HTML nor control characters."""
    return html.escape(printable(text))


def _hash(content: str) -> str:
    """How a content security policy names an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _part_html(part: Part) -> str:
    head = f'<h2 id="{part.name}">{_text(part.title)}</h2>\n<p>{_text(part.text)}</p>\n'
    if part.skipped is not None:
        return f'{head}<p class="quiet">Skipped: {_text(part.skipped)}</p>\n'
    remarks = "".join(f'<p class="quiet">{_text(line)}</p>\n' for line in part.remarks)
    figure = f'<img class="figure" alt="{_text(part.title)}" src="{_data("png", part.image)}">\n' if part.image else ""
    if part.cards:
        figure = _gallery_html(part)
    shown = [table for table in part.tables.values() if len(table.rows) <= SHORT] if part.shown is None else part.shown
    tables = "".join(_table_html(table, is_open=not figure) for table in shown)
    names = [*([f"{part.name}.png"] if part.cards and part.image else []), *(f"{name}.csv" for name in part.tables)]
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in names)
    return f'{head}{remarks}{figure}{tables}<p class="files">{links}</p>\n'


def _gallery_html(part: Part) -> str:
    """Filters, which the script shows, and the cards. A card names its values by their numbers in the filters."""
    names = part.cards[0].filters
    values = {name: sorted({card.filters[name] for card in part.cards}, key=str.casefold) for name in names}
    selects = "".join(
        f"<label>{_text(name)}<select data-filter>"
        + "".join(
            f'<option value="{number}" data-text="{_text(text)}"></option>'
            for number, text in [("", "all"), *enumerate(options)]
        )
        + "</select></label>\n"
        for name, options in values.items()
    )
    orders = f'<option>{_text(part.order)}</option><option value="reverse">{_text(part.reverse)}</option>'
    cards = "".join(
        _card_html(card, [values[name].index(text) for name, text in card.filters.items()]) for card in part.cards
    )
    return (
        f'<div class="gallery">\n<div class="filters" hidden>\n{selects}'
        f"<label>order<select data-order>{orders}</select></label>\n"
        '<div class="chips"><button type="button">show all</button></div>\n</div>\n'
        '<p class="count quiet" role="status"></p>\n'
        f'<ol class="cards" aria-label="{_text(part.title)}">\n{cards}</ol>\n</div>\n'
    )


def _card_html(card: Card, numbers: Sequence[int]) -> str:
    values = "".join(f' data-f{f}="{number}"' for f, number in enumerate(numbers))
    image = f'<img alt="" src="{_data("jpeg", card.image)}">' if card.image else ""
    tags = ["em" if number == card.marked else "span" for number in range(len(card.lines))]
    lines = "".join(f"<{tag}>{_text(line)}</{tag}>" for tag, line in zip(tags, card.lines))
    text = f'<b>{_text(card.title)}</b>{lines}<span class="quiet">{_text(card.note)}</span>'
    return f'<li class="card"{values}>{image}<div>{text}</div></li>\n'


def _data(kind: str, image: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def _table_html(table: Table, *, is_open: bool) -> str:
    heads, cells = table.cells()
    left = table.left()
    lines = [_line_html("th", heads, left), *(_line_html("td", line, left) for line in cells)]
    summary = f"<summary>{_text(table.title)}</summary>"
    rows = f'<div class="scroll" tabindex="0">\n<table>\n{"".join(lines)}</table></div>'
    return f"<details{' open' if is_open else ''}>{summary}\n{rows}</details>\n"


def _line_html(tag: str, cells: Sequence[str], left: Sequence[bool]) -> str:
    looks = [' class="left"' if is_left else "" for is_left in left]
    return "<tr>" + "".join(f"<{tag}{look}>{_text(cell)}</{tag}>" for cell, look in zip(cells, looks)) + "</tr>\n"
