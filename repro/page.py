"""Builds the results pages: ``python repro/page.py [RESULTS] [--check]``.

Without RESULTS, it builds docs/results.md, docs/results/*.md and docs/inside.md from repro/results, by the templates in
repro/pages. With RESULTS, it builds one page of all tables and plots in that folder, by the template study.md.j2 or by
a results.md.j2 of its own.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from progresvit.io.files import replace_file
from progresvit.plots import render
from repro import hours, tables
from repro.blocks import Page, Plot
from repro.imagenet_tables import ImageNet
from repro.inside_tables import Inside
from repro.own_images_table import own_images_table

HERE = Path(__file__).parent
PAGES = HERE / "pages"
"""Templates of the documentation, in folders as the pages in docs/; ``GENERIC`` is the template of other studies."""
TEMPLATE, GENERIC = "results.md.j2", "study.md.j2"
DATA_KEY = "progresvit-data"
"""Text in a PNG file: hash of the results that it shows."""


@dataclass(frozen=True)
class Built:
    """Pages as they should be, and what is on the disk."""

    folder: Path
    """Folder of the pages; plots are in figures/results below it."""
    texts: dict[Path, str]
    """The pages by their path in the folder."""
    plots: dict[str, Plot]

    @property
    def figures(self) -> Path:
        return self.folder / "figures" / "results"

    def outdated(self) -> list[str]:
        """The files that differ from the results, are missing, or are no page any more."""
        paths = [self.folder / path for path in self.texts if not self._is_written(path)]
        paths += [self.figures / name for name, plot in self.plots.items() if not self._is_drawn(name, plot)]
        pages = (path.relative_to(self.folder) for path in (self.folder / "results").glob("*.md"))
        return [*map(str, paths), *(str(self.folder / path) for path in pages if path not in self.texts)]

    def write(self) -> None:
        """Write the pages, and draw the plots that show other results than before."""
        self.figures.mkdir(parents=True, exist_ok=True)
        for name, plot in self.plots.items():
            if not self._is_drawn(name, plot):
                replace_file(self.figures / name, render(plot.draw(), ".png", metadata={DATA_KEY: plot.data}))
        for path, text in self.texts.items():
            (self.folder / path).parent.mkdir(exist_ok=True)
            replace_file(self.folder / path, text)

    def _is_written(self, path: Path) -> bool:
        return (self.folder / path).is_file() and (self.folder / path).read_bytes().decode() == self.texts[path]

    def _is_drawn(self, name: str, plot: Plot) -> bool:
        return drawn_from(self.figures / name) == plot.data


def build(results: Path, folder: Path, templates: Mapping[Path, Path]) -> Built:
    """The pages of a results folder.

    Args:
        results: The results folder of a study.
        folder: Where the pages and plots are written.
        templates: The template of each page, by the path of the page in the folder.
    """
    plots: dict[str, Plot] = {}

    @cache
    def sub_study(name: str) -> dict[str, Any]:
        return Page(results / name, plots, prefix=f"{name}-").values()

    roots = {path: PAGES if template.is_relative_to(PAGES) else template.parent for path, template in templates.items()}
    environment = make_environment([*dict.fromkeys(roots.values()), PAGES])
    values = Page(results, plots).values() | {"sub_study": sub_study}
    values |= {"imagenet": cache(ImageNet), "inside": Inside(), "own_images": own_images_table}
    values |= {"effort": hours.effort, "measured": hours.MEASURED, "measured_dino": hours.MEASURED_DINO}
    values["claims"] = lambda: yaml.safe_load(environment.get_template("claims.yaml.j2").render(values))
    texts = {}
    for path, template in templates.items():
        text = environment.get_template(template.relative_to(roots[path]).as_posix()).render(values)
        texts[path] = text.replace('src="figures/', f'src="{"../" * (len(path.parts) - 1)}figures/')
    return Built(folder, texts, plots)


def pages_of_docs() -> dict[Path, Path]:
    """The template of each page in docs/."""
    templates = {path.relative_to(PAGES).with_suffix(""): path for path in sorted(PAGES.rglob("*.md.j2"))}
    return {path: template for path, template in templates.items() if template.name != GENERIC}


def make_environment(folders: Sequence[Path]) -> jinja2.Environment:
    """The environment of the templates in some folders, with filters that write numbers."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = {"percent": tables.percent, "gmacs": tables.gmacs, "each": tables.each, "interval": tables.interval}
    environment.filters |= filters | {"share_interval": tables.share_interval, "signed": tables.signed}
    return environment


def drawn_from(path: Path) -> str | None:
    """Hash of the results that a plot shows; None if the plot does not exist."""
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
    options = parser.parse_args(arguments)
    results = options.results or HERE / "results"
    own = results / TEMPLATE
    try:
        if results.resolve() == (HERE / "results").resolve():
            built = build(results, HERE.parent / "docs", pages_of_docs())
        else:
            template = own if own.is_file() else PAGES / GENERIC
            built = build(results, results, {Path("results.md"): template})
    except (jinja2.TemplateError, ValueError, OSError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{frame.filename}, line {frame.lineno}: " for frame in frames if frame.filename.endswith(".j2")]
        print(f"error: {''.join(places[-1:])}{error}", file=sys.stderr)
        sys.exit(2)
    pages = f"{len(built.texts)} pages" if len(built.texts) > 1 else str(built.folder / next(iter(built.texts)))
    if not options.check:
        built.write()
        print(f"wrote {pages}, with {len(built.plots)} plots")
    elif outdated := built.outdated():
        print(*(f"outdated: {path}" for path in outdated), f"rebuild with: python repro/page.py {results}", sep="\n")
        sys.exit(1)
    else:
        print(f"{pages}, with {len(built.plots)} plots, agree with {results}")


if __name__ == "__main__":
    main()
