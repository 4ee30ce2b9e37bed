"""One HTML page with every figure of a model (``page.py``); figures and tables are beside it as PNG and CSV.

A figure that the model or the machine cannot give (gates without PSG, a second round, a GPU) is left out with a note.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from progresvit import __version__
from progresvit.analysis.page import INDEX, Page, Part
from progresvit.analysis.registry import DIAGNOSTICS, Diagnostic, Subject
from progresvit.data.transforms import normalise
from progresvit.engine.measurement import hardware
from progresvit.io.resumable import BeginProgress, Progress
from progresvit.plots import render

FILES = (
    INDEX,
    *(f"{name}.png" for name in DIAGNOSTICS),
    *(f"{name}.csv" for name in DIAGNOSTICS),
    *(f"{name}-{ending}.csv" for name, diagnostic in DIAGNOSTICS.items() for ending in diagnostic.summaries),
)
"""All files that a report may have."""


def make_report(subject: Subject, *, data: str, progress: BeginProgress | None = None) -> Page:
    """Run all diagnostics with their default options; the image of single-image figures is the first of the sample.

    Args:
        subject: The model and the sample of images.
        data: Where the images are from.
        progress: Starts a progress bar for each diagnostic.
    """
    model, sample = subject.model, subject.sample
    assert model is not None
    assert sample is not None
    subject = replace(subject, image=normalise(sample.pixels[:1], model.config))
    parts = []
    for number, (name, diagnostic) in enumerate(DIAGNOSTICS.items(), start=1):
        update = progress(f"{name} ({number} of {len(DIAGNOSTICS)})") if progress else lambda done, total: None
        parts.append(_run(diagnostic, subject, update))
    device = next(model.parameters()).device
    about = (
        f"{len(sample)} images of {len(sample.class_names)} classes from {data}.",
        f"{hardware(str(device))}, progresvit {__version__}, {datetime.now(UTC):%Y-%m-%d}.",
    )
    return Page(title=f"Inside {subject.name}", about=about, parts=parts)


def _run(diagnostic: Diagnostic, subject: Subject, progress: Progress) -> Part:
    name, title, text = diagnostic.name, diagnostic.title, diagnostic.text
    try:
        numbers = diagnostic.run(subject, progress)
    except (ValueError, RuntimeError, MemoryError) as error:  # out of memory, for example; the rest is kept
        return Part(name=name, title=title, text=text, skipped=str(error))
    image = render(diagnostic.figure(numbers), ".png")
    return Part(name=name, title=title, text=text, tables=diagnostic.tables(numbers), image=image)
