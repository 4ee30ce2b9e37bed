"""Builds a page of results: ``python repro/page.py [RESULTS] [--check]``.

Without RESULTS, it builds docs/results.md from repro/results by the template results.md.j2, and docs/inside.md from
repro/inside.json by inside.md.j2. With RESULTS, it builds a page of all tables and plots in that folder, by the
template study.md.j2 or by a results.md.j2 of its own.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from progresvit.io.files import replace_file
from progresvit.plots import render
from repro import tables
from repro.blocks import Page, Plot
from repro.imagenet_tables import ImageNet
from repro.inside_tables import Inside
from repro.outcomes import verdict_of

HERE = Path(__file__).parent
TEMPLATE, GENERIC, INSIDE = "results.md.j2", "study.md.j2", "inside.md.j2"
DATA_KEY = "progresvit-data"
"""Text in a PNG file: hash of the results that it shows."""


@dataclass(frozen=True)
class Built:
    """A page as it should be, and what is on the disk."""

    path: Path
    text: str
    plots: dict[str, Plot]

    @property
    def folder(self) -> Path:
        """Of the plots."""
        return self.path.parent / "figures" / self.path.stem

    def outdated(self) -> list[str]:
        """The files that differ from the results or are missing."""
        same = self.path.is_file() and self.path.read_bytes().decode() == self.text
        wrong = [name for name, plot in self.plots.items() if drawn_from(self.folder / name) != plot.data]
        return [*([] if same else [str(self.path)]), *(str(self.folder / name) for name in wrong)]

    def write(self) -> None:
        """The page and all plots."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, plot in self.plots.items():
            replace_file(self.folder / name, render(plot.draw(), ".png", metadata={DATA_KEY: plot.data}))
        replace_file(self.path, self.text)


def build(folder: Path, template: Path, out: Path) -> Built:
    """The page of a results folder."""
    figures, plots = f"figures/{out.stem}", dict[str, Plot]()

    @cache
    def sub_study(name: str) -> dict[str, Any]:
        return Page(folder / name, figures, plots, prefix=f"{name}-").values()

    def has_study(name: str) -> bool:
        return any((folder / name).glob("*.json"))

    environment = make_environment(template)
    values = Page(folder, figures, plots).values() | {"sub_study": sub_study, "has_study": has_study}
    values |= {"imagenet": cache(ImageNet), "inside": cache(Inside)}
    values["claims"] = lambda: yaml.safe_load(environment.get_template("claims.yaml.j2").render(values))
    return Built(out, environment.get_template(template.name).render(values), plots)


def build_inside(template: Path, out: Path) -> Built:
    """The page about what is inside the models; ``progresvit analyze`` drew its figures."""
    values = {"inside": Inside(), "verdict_of": verdict_of}
    return Built(out, make_environment(template).get_template(template.name).render(values), {})


def make_environment(template: Path) -> jinja2.Environment:
    """For the templates of a folder, with the ways to write numbers."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    words = {"percent": tables.percent, "gmacs": tables.gmacs, "each": tables.each, "interval": tables.interval}
    environment.filters |= words | {"share_interval": tables.share_interval, "signed": tables.signed}
    return environment


def drawn_from(path: Path) -> str | None:
    """Hash of the results that a plot shows; None if there is no such plot."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.info.get(DATA_KEY)
    except (FileNotFoundError, UnidentifiedImageError):
        return None


def main(arguments: list[str] | None = None) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="a results folder; by default repro/results")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if anything is outdated")
    given = parser.parse_args(arguments)
    folder = given.results or HERE / "results"
    docs, own = HERE.parent / "docs", folder / TEMPLATE
    try:
        if folder.resolve() == (HERE / "results").resolve():
            pages = [
                build(folder, HERE / TEMPLATE, docs / "results.md"),
                build_inside(HERE / INSIDE, docs / "inside.md"),
            ]
        else:
            pages = [build(folder, own if own.is_file() else HERE / GENERIC, folder / "results.md")]
    except (jinja2.TemplateError, ValueError, OSError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{one.filename}, line {one.lineno}: " for one in frames if one.filename.endswith(".j2")]
        print(f"error: {''.join(places[-1:])}{error}", file=sys.stderr)
        sys.exit(2)
    names, plots = " and ".join(str(page.path) for page in pages), sum(len(page.plots) for page in pages)
    if not given.check:
        for page in pages:
            page.write()
        print(f"wrote {names}, with {plots} plots")
    elif outdated := [path for page in pages for path in page.outdated()]:
        print(*(f"outdated: {path}" for path in outdated), f"rebuild with: python repro/page.py {folder}", sep="\n")
        sys.exit(1)
    else:
        print(f"{names}, with {plots} plots, are those of {folder}")


if __name__ == "__main__":
    main()
