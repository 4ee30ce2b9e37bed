"""The confusion matrix of answers: which classes are taken for which others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from progresvit.evaluation.answers import RoutedAnswers
from progresvit.plots import WIDTH, blank_figure, in_lines, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CLASSES = 24
"""Classes of the matrix; beyond this number, only the classes of the most frequent confusions are shown."""
NAME = 22
"""Characters of a name beside an axis."""
OTHER = "other"
FLAT = 6
"""With more columns, their names are upright."""
LETTER = 0.065
"""Inches of a character of a name."""
LINE = 0.2
"""Inches of a line of the title."""


def confusion_figure(answers: RoutedAnswers) -> Figure:
    """Images by class (rows) and answer (columns): shares of the class as colours, counts as numbers."""
    from matplotlib.patches import Rectangle

    classes = matrix_classes(answers)
    counts = confusion_counts(answers, classes)
    images = np.array([(answers.records.labels == number).sum() for number in classes])
    names = [shorten(answers.class_names[number], NAME) for number in classes]
    columns = [*names, OTHER][: counts.shape[1]]
    rows = [f"{name} ({count})" for name, count in zip(names, images)]
    upright = len(columns) > FLAT
    left, below = LETTER * max(map(len, rows)), LETTER * max(map(len, columns)) * (1 if upright else 0.5)
    cell = min(0.45, (WIDTH - 1.5 - left) / len(columns))
    title = in_lines(_title(answers, len(classes)))
    height = max(3.2, 0.9 + LINE * len(title.splitlines()) + cell * len(classes) + below)
    figure = blank_figure(height=height, title=title)
    axes = figure.subplots()
    shares = 100 * counts / images[:, None]
    drawn = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="equal")
    for row, column in zip(*np.nonzero(counts)):
        dark = shares[row, column] > 55
        size = 8 if len(columns) <= 12 else 6 if counts.max() < 1000 else 4.5
        text = str(counts[row, column])
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color="white" if dark else "black")
    for place in range(len(classes)):  # correct answers
        axes.add_patch(Rectangle((place - 0.5, place - 0.5), 1, 1, fill=False, edgecolor="0.6", linewidth=0.6))
    axes.set_xticks(range(len(columns)), columns, fontsize=8, rotation=90 if upright else 30)
    for label in () if upright else axes.get_xticklabels():
        label.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("answer", fontsize=10)
    axes.set_ylabel("class (images)", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(drawn, ax=axes, label="share of the class (%)", shrink=0.7, pad=0.02, aspect=25)
    return figure


def matrix_classes(answers: RoutedAnswers) -> list[int]:
    """Numbers of the classes of the matrix: all with images, or the classes of the most frequent confusions."""
    present = [result.number for result in answers.by_class]
    if len(present) <= MOST_CLASSES:
        return sorted(present)
    pairs = [number for pair in answers.confusions for number in (pair.label, pair.prediction)]
    ordered = dict.fromkeys(number for number in [*pairs, *present] if number in set(present))
    return list(ordered)[:MOST_CLASSES]


def confusion_counts(answers: RoutedAnswers, classes: list[int]) -> NDArray[np.int64]:
    """Images by class and answer; a last column counts answers outside of these classes, if there are any."""
    places = {number: place for place, number in enumerate(classes)}
    counts = np.zeros((len(classes), len(classes) + 1), np.int64)
    for label, prediction in zip(answers.records.labels.tolist(), answers.prediction.tolist()):
        if label in places:
            counts[places[label], places.get(prediction, len(classes))] += 1
    return counts if counts[:, -1].any() else counts[:, :-1]


def _title(answers: RoutedAnswers, shown: int) -> str:
    wrong, total, classes = len(answers.errors), len(answers.records), len(answers.by_class)
    part = f"; the {shown} most confused of {classes} classes" if shown < classes else ""
    if not wrong:
        return f"All {total:,} answers are right{part}"
    worst = answers.confusions[0]
    label, prediction = (shorten(answers.class_names[n], NAME) for n in (worst.label, worst.prediction))
    often = f"most often {label} as {prediction} ({worst.count} of {worst.images})"
    return f"{wrong:,} of {total:,} answers are wrong, {often}{part}"
