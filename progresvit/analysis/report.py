"""One HTML page with every figure of a model (``page.py``); figures and tables are beside it as PNG and CSV.

A figure that the model or the machine cannot give (gates without PSG, a second round, a GPU) is left out with a note.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from progresvit import __version__
from progresvit.analysis.diagnostics import DIAGNOSTICS, Diagnostic, Given
from progresvit.analysis.page import INDEX, Page, Part
from progresvit.analysis.sample import Progress
from progresvit.engine.speed import hardware
from progresvit.plots import render

FILES = (
    INDEX,
    *(f"{name}.png" for name in DIAGNOSTICS),
    *(f"{name}.csv" for name in DIAGNOSTICS),
    *(f"{name}-{key}.csv" for name, diagnostic in DIAGNOSTICS.items() for key in diagnostic.summaries),
)
"""All files that a report may have."""

BeginProgress = Callable[[str], Progress]
"""Starts a progress bar with a label."""


def make_report(given: Given, *, data: str, progress: BeginProgress | None = None) -> Page:
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
    return Page(title=f"Inside {given.name}", about=about, parts=parts)


def _run(name: str, diagnostic: Diagnostic, given: Given, progress: Progress) -> Part:
    title, text = diagnostic.title, diagnostic.text
    try:
        found = diagnostic.run(given, progress)
    except (ValueError, RuntimeError, MemoryError) as error:  # out of memory, for example; the rest is kept
        return Part(name=name, title=title, text=text, skipped=str(error))
    summaries = {f"{name}-{key}": summary(found) for key, summary in diagnostic.summaries.items()}
    tables = {name: diagnostic.table(found), **summaries}
    return Part(name=name, title=title, text=text, tables=tables, image=render(diagnostic.figure(found), ".png"))


def _ignore(done: int, total: int) -> None: ...
