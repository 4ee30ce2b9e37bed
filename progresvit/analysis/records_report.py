"""One HTML page about records (``page.py``): accuracy, classes, confusions, exits and a gallery of errors."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

from progresvit import __version__
from progresvit.analysis.class_figures import (
    class_accuracy_figure,
    class_exit_figure,
    selection_note,
    shown_classes,
)
from progresvit.analysis.confusion import confusion_figure
from progresvit.analysis.error_gallery import Gallery, gallery_figure
from progresvit.analysis.page import INDEX, Page, Part
from progresvit.evaluation.answers import RoutedAnswers
from progresvit.evaluation.class_report import (
    accuracy_table,
    class_accuracy_table,
    class_summary,
    confusion_table,
    error_table,
    exit_table,
)
from progresvit.io.parse import count_of
from progresvit.plots import render
from progresvit.table import decimals, threshold

FILES = (
    INDEX,
    "accuracy.csv",
    *(f"{name}{suffix}" for name in ("classes", "confusion", "exits", "errors") for suffix in (".png", ".csv")),
)
"""All files that a report may have."""
PAIRS = 15
"""Pairs of classes on the page."""
NAMES = 12
"""Classes without images that the page names."""


def make_records_report(gallery: Gallery, *, data_given: bool) -> Page:
    """The page.

    Args:
        gallery: The answers and their most confident errors.
        data_given: Whether thumbnails were looked for.
    """
    answers = gallery.answers
    parts = [_accuracy(answers), _classes(answers), _confusion(answers), _exits(answers), _errors(gallery, data_given)]
    title = f"Report of {answers.records.header.model}"
    return Page(title=title, about=_about(answers), numbers=_numbers(answers), parts=parts)


def _numbers(answers: RoutedAnswers) -> dict[str, str]:
    """Top-1 of all answers of a name, and what routing saves."""
    numbers = {f"{name} top-1": f"{100 * top1.mean:.1f} %" for name, top1 in answers.accuracies()}
    if answers.threshold is not None:
        gmacs = answers.records.gmacs()
        spent = float(np.mean(np.asarray(gmacs)[answers.exit_round]))
        numbers |= {"GMACs per image": decimals(spent), "saved": f"{100 * (1 - spent / gmacs[-1]):.1f} %"}
    return numbers | {"errors": f"{len(answers.errors):,}"}


def _about(answers: RoutedAnswers) -> list[str]:
    records, header = answers.records, answers.records.header
    split = f", split {header.split}" if header.split else ""
    changes = [f"corrupted by {header.corruption}"] if header.corruption else []
    changes += [f"answers among {len(header.classes)} classes only"] if header.classes is not None else []
    changes += [f"{header.probe['task']} in place of the head"] if header.probe is not None else []
    details = "".join(f"; {change}" for change in changes)
    images, classes = count_of(len(records), "image", ","), count_of(len(answers.by_class), "class")
    lines = [f"{images} of {classes} from {header.data}{split}{details}."]
    if answers.threshold is not None:
        source = "near-lossless, chosen on these images" if answers.near_lossless else "given"
        lines.append(f"Routed at the threshold {threshold(answers.threshold)} ({source}).")
    if answers.without_images:
        names = [answers.class_names[number] for number in answers.without_images]
        more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
        lines.append(
            f"{len(names)} of the model's classes have no image here and no accuracy: {', '.join(names[:NAMES])}{more}."
        )
    for count, what in (
        (len(header.unreadable), "could not be read"),
        (records.broken, f"{'has' if records.broken == 1 else 'have'} logits that are not finite"),
    ):
        if count:
            lines.append(f"{count_of(count, 'image')} {what}.")
    run = f"{header.precision} on {header.device}, evaluated {header.date[:10] or 'on an unknown day'}"
    return [*lines, f"{run}; page by progresvit {__version__}, {datetime.now(UTC):%Y-%m-%d}."]


def _accuracy(answers: RoutedAnswers) -> Part:
    return Part(
        name="accuracy",
        title="Top-1",
        text="Of each round alone and routed, with 95 % intervals over images (Wilson): the fewer images, the wider.",
        tables={"accuracy": accuracy_table(answers)},
    )


def _classes(answers: RoutedAnswers) -> Part:
    note = selection_note(len(answers.by_class))
    shown = [result for result in shown_classes(answers.by_class, lambda result: result.top1) if result is not None]
    title = f"{len(shown)} of {len(answers.by_class)} classes, lowest {answers.name} top-1 first"
    return Part(
        name="classes",
        title="Classes",
        text="Top-1 of each class with 95 % intervals. Classes whose intervals overlap may not differ, and a class "
        "with one image says next to nothing.",
        image=render(class_accuracy_figure(answers), ".png"),
        tables={"classes": class_accuracy_table(answers)},
        shown=[class_summary(answers, shown, title)],
        remarks=[note] if note else [],
    )


def _confusion(answers: RoutedAnswers) -> Part:
    return Part(
        name="confusion",
        title="Confusion matrix",
        text="Rows are classes and columns answers; colours are shares of the class, numbers are images. The column "
        "other, if there is one, holds answers that are none of the classes shown.",
        image=render(confusion_figure(answers), ".png"),
        tables={"confusion": confusion_table(answers)},
        shown=[confusion_table(answers, PAIRS)] if answers.confusions else [],
    )


def _exits(answers: RoutedAnswers) -> Part:
    title, text = "Exits by class", "The share of each class that exits after each round. Late exits cost more."
    if answers.threshold is None:
        alone = "the model has one round" if answers.records.rounds == 1 else "its rounds are alternatives"
        return Part(name="exits", title=title, text=text, skipped=f"{alone}, so no image exits early.")
    note = selection_note(len(answers.by_class))
    return Part(
        name="exits",
        title=title,
        text=text,
        image=render(class_exit_figure(answers), ".png"),
        tables={"exits": exit_table(answers)},
        remarks=[note] if note else [],
    )


def _errors(gallery: Gallery, data_given: bool) -> Part:
    answers, header = gallery.answers, gallery.answers.records.header
    remarks = [] if len(answers.errors) else ["No answer is wrong."]
    if gallery.rows and not data_given:
        remarks.append(f"For thumbnails, pass the evaluated images: {header.data}.")
    if len(gallery.rows) < len(answers.errors):
        remarks.append(f"The {len(gallery.rows):,} most confident of {len(answers.errors):,} wrong answers.")
    if gallery.missing:
        remarks.append(f"Without an image: {'; '.join(gallery.missing)}.")
    return Part(
        name="errors",
        title="Errors",
        text="Wrong answers, the highest probability first: the class, then what each round said. Some labels may be "
        "wrong.",
        image=render(gallery_figure(gallery), ".png") if gallery.thumbnails else b"",
        cards=gallery.cards(),
        order="most confident",
        reverse="least confident",
        tables={"errors": error_table(answers, len(gallery.rows))} if gallery.rows else {},
        shown=(),
        remarks=remarks,
    )
