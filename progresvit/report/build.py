"""A results folder to the files of its page: what they should hold, and how far they do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from progresvit.analysis.style import render
from progresvit.io.yaml_files import read_yaml
from progresvit.report.blocks import Block, Picture, make_blocks
from progresvit.report.claims import CLAIMS_FILE, claims_table
from progresvit.report.facts import make_facts
from progresvit.report.page import changed_places, fill_page, find_places, new_page
from progresvit.results.read import read_results
from progresvit.results.study import STUDY_FILE, read_study

LAYOUT_FILE = "report.yaml"
DATA_KEY = "progresvit-data"
"""Of the text in a picture's file that says, as a hash, what it was drawn from."""


class Layout(BaseModel):
    """Where the page and its figures lie, seen from the results folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    page: Path = Path("results.md")
    figures: Path = Path("figures")


@dataclass(frozen=True, kw_only=True)
class Report:
    """A page as it should be."""

    page: Path
    text: str
    figures: Path
    pictures: list[Picture]
    """Those of the blocks that the page shows."""
    unused: list[str]
    """Blocks that the page does not show."""

    def outdated(self) -> list[str]:
        """What differs on the disk, in words; nothing if all is as it should be."""
        found = []
        if not self.page.is_file():
            found.append(f"{self.page} is not there")
        elif (old := _read(self.page)) != self.text:
            found += changed_places(old, self.text, str(self.page)) or [f"{self.page}"]
        for picture in self.pictures:
            path = self.figures / picture.name
            if not path.is_file():
                found.append(f"{path} is not there")
            elif drawn_from(path) != picture.data:
                found.append(f"{path} is of other results")
        return found

    def files(self) -> list[tuple[Path, bytes]]:
        """The page and all figures, drawn now."""
        drawn = [
            (self.figures / one.name, render(one.draw(), ".png", metadata={DATA_KEY: one.data}))
            for one in self.pictures
        ]
        return [*drawn, (self.page, self.text.encode())]


def build_report(folder: Path) -> Report:
    """Read everything, and make the page's text."""
    results = read_results(folder)
    if not (folder / STUDY_FILE).is_file():
        raise ValueError(f"{folder} has no {STUDY_FILE}, which says what is compared; copy the study's file there.")
    study = read_study(folder / STUDY_FILE)
    layout = read_layout(folder)
    page, figures = (Path(os.path.normpath(folder / path)) for path in (layout.page, layout.figures))
    facts = make_facts(results, study)
    claims = claims_table(folder / CLAIMS_FILE, facts) if (folder / CLAIMS_FILE).is_file() else None
    blocks = make_blocks(results, study, claims)
    to_figures = Path(os.path.relpath(figures, page.parent)).as_posix()
    texts = {name: block.to_markdown(to_figures) for name, block in blocks.items()}
    old = _read(page) if page.is_file() else new_page(study.title, _headings(blocks))
    text = fill_page(old, texts, facts, str(page))
    shown = list(dict.fromkeys(place.name for place in find_places(text, str(page)) if place.kind == "results"))
    return Report(
        page=page,
        text=text,
        figures=figures,
        pictures=[picture for name in shown for picture in blocks[name].pictures],
        unused=[name for name in blocks if name not in shown],
    )


def read_layout(folder: Path) -> Layout:
    """report.yaml, or what holds without one."""
    path = folder / LAYOUT_FILE
    if not path.is_file():
        return Layout()
    try:
        return Layout.model_validate(read_yaml(path) or {})
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        said = "is no key" if problem["type"] == "extra_forbidden" else f"is wrong ({problem['msg']})"
        subject = place or "what it holds"
        raise ValueError(f"{path}: {subject} {said}; it may say page: and figures:, each a path.") from error


def drawn_from(path: Path) -> str | None:
    """The hash of the data that a picture's file was drawn from; None if it does not say."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            found = image.info.get(DATA_KEY)
    except UnidentifiedImageError:
        return None
    return found if isinstance(found, str) else None


def _headings(blocks: dict[str, Block]) -> list[tuple[str, str]]:
    return [(name, block.heading) for name, block in blocks.items()]


def _read(path: Path) -> str:
    """As it is, line ends included."""
    return path.read_bytes().decode("utf-8")
