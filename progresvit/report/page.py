"""A page of prose with marked places: what stands between two markers is made from the results.

``<!-- results: NAME -->`` … ``<!-- /results -->`` holds a block of tables and figures, and
``<!-- fact: NAME -->88.5<!-- /fact -->`` one figure within a sentence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from progresvit.report.facts import find_fact

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_OPEN = re.compile(r"<!-- (results|fact): (\S+) -->")
_CLOSE = re.compile(r"<!-- /(results|fact) -->")
_MEANT = re.compile(r"<!--\s*/?\s*(results?|facts?)\b\s*(:|-->)")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A marked stretch of a page."""

    kind: str
    """results or fact"""
    name: str
    line: int
    start: int
    """Of what stands between the markers."""
    end: int


def find_places(page: str, called: str) -> list[Place]:
    """All marked stretches in order; ``called`` is the page's name for errors."""
    places: list[Place] = []
    opened: tuple[str, str, int, int] | None = None
    for comment in _COMMENT.finditer(page):
        words, line = comment[0], page.count("\n", 0, comment.start()) + 1
        starts, ends = _OPEN.fullmatch(words), _CLOSE.fullmatch(words)
        where = f"{called}, line {line}"
        if starts:
            if opened is not None:
                raise _unclosed(called, opened)
            opened = (starts[1], starts[2], line, comment.end())
        elif ends:
            if opened is None or opened[0] != ends[1]:
                raise ValueError(f"{where}: {words} closes nothing; put <!-- {ends[1]}: NAME --> ahead of it.")
            kind, name, first, start = opened
            places.append(Place(kind=kind, name=name, line=first, start=start, end=comment.start()))
            opened = None
        elif _MEANT.match(words):
            raise ValueError(
                f"{where}: {words} is no marker; write <!-- results: NAME --> … <!-- /results --> or "
                "<!-- fact: NAME --> … <!-- /fact -->."
            )
    if opened is not None:
        raise _unclosed(called, opened)
    return places


def fill_page(page: str, blocks: Mapping[str, str], facts: Mapping[str, str], called: str) -> str:
    """The page with every marked stretch made anew."""
    pieces, done = [], 0
    for place in find_places(page, called):
        where = f"{called}, line {place.line}"
        if place.kind == "fact":
            content = find_fact(facts, place.name, where)
        else:
            content = f"\n\n{find_block(blocks, place.name, where)}\n\n"
        pieces += [page[done : place.start], content]
        done = place.end
    return "".join([*pieces, page[done:]])


def changed_places(old: str, new: str, called: str) -> list[str]:
    """Which stretches of two versions of a page differ, in words."""
    pairs = zip(find_places(old, called), find_places(new, called))
    return [
        f"{called}, line {before.line}: {before.kind} {before.name}"
        for before, after in pairs
        if old[before.start : before.end] != new[after.start : after.end]
    ]


def find_block(blocks: Mapping[str, str], name: str, where: str) -> str:
    """A block by name; an error names the nearest."""
    if name in blocks:
        return blocks[name]
    near = difflib.get_close_matches(name, blocks, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(blocks)}."
    raise ValueError(f"{where}: there is no block {name!r}; {hint}")


def new_page(title: str, headings: Sequence[tuple[str, str]]) -> str:
    """A page with all blocks, still empty: names and headings."""
    parts = [f"# {title}\n"]
    for name, heading in headings:
        parts.append(f"\n## {heading}\n\n<!-- results: {name} -->\n<!-- /results -->\n")
    return "".join(parts)


def _unclosed(called: str, opened: tuple[str, str, int, int]) -> ValueError:
    kind, name, line, _ = opened
    return ValueError(f"{called}, line {line}: <!-- {kind}: {name} --> is not closed; put <!-- /{kind} --> after it.")
