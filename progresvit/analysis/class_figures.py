"""Figures of classes: top-1 with intervals, and the rounds after which the images of a class exit.

If there are many classes, the figure shows the classes whose interval is surely lowest and surely highest: a class
with one image has a wide interval and is at neither end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from progresvit.evaluation.answers import ClassResult, RoutedAnswers
from progresvit.metrics.interval import Interval, share_interval
from progresvit.plots import COLOURS, add_grid, blank_figure, draw_share, legend_below, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CLASSES = 40
"""Classes that are shown; of more of them, ``ENDS`` at each end."""
ENDS = 15
NAME = 26
"""Characters of a name beside an axis."""
SHADES = ("#0072B2", "#56B4E9", "#B5D9EF", "#E0E0E0")
"""Colours of the rounds after which images exit, dark for early rounds; distinguishable in greyscale."""

ShareOf = Callable[[ClassResult], Interval]


def class_accuracy_figure(answers: RoutedAnswers) -> Figure:
    """Top-1 of each class with 95 % intervals, of the answers and of round 1. The lowest is on top."""
    shown = shown_classes(answers.by_class, lambda result: result.top1)
    overall = dict(answers.accuracies())[answers.name]
    marks = {answers.name: ("o", COLOURS[0]), "round 1": ("s", COLOURS[1])}  # one mark if the answers are of round 1
    title = f"Top-1 is {_percent(overall)}; {_range(answers.by_class, lambda result: result.top1)}"
    figure, axes = _class_panel(shown, title, "top-1 of the class (%)")
    for place, result in enumerate(shown):
        if result is None:
            continue
        for number, (name, (marker, colour)) in enumerate(marks.items()):
            offset = (number - (len(marks) - 1) / 2) * 0.34
            draw_share(axes, place + offset, result.share(name), marker=marker, color=colour, markersize=4, linewidth=1)
    axes.axvline(100 * overall.mean, color="0.5", linestyle="--", linewidth=1)
    entries = {name: {"marker": marker, "color": colour} for name, (marker, colour) in marks.items()}
    legend_below(figure, {**entries, f"{answers.name}, all images": {"color": "0.5", "linestyle": "--"}})
    return figure


def class_exit_figure(answers: RoutedAnswers) -> Figure:
    """The share of each class that exits after each round, with 95 % intervals of round 1."""
    shown = shown_classes(answers.by_class, _first_exit)
    overall = share_interval(int((answers.exit_round == 0).sum()), len(answers.records))
    title = f"{_percent(overall)} of the images exit after round 1; {_range(answers.by_class, _first_exit)}"
    figure, axes = _class_panel(shown, title, "images of the class that exit (%)")
    last = answers.records.rounds - 1
    colours = [SHADES[min(s, len(SHADES) - 2)] for s in range(last)] + [SHADES[-1]]
    for place, result in enumerate(shown):
        if result is None:
            continue
        shares = 100 * np.array(result.exits) / result.images
        axes.barh(place, shares, left=np.cumsum(shares) - shares, color=colours, height=0.72, zorder=2)
        draw_share(axes, place, result.exit_share(0), color="black", linewidth=0.9, zorder=3)
    axes.axvline(100 * overall.mean, color="black", linestyle="--", linewidth=1, zorder=4)
    entries = {f"after round {s + 1}": {"color": colour, "linewidth": 7} for s, colour in enumerate(colours)}
    entries["95 % interval, round 1"] = {"color": "black", "linewidth": 0.9}
    legend_below(figure, {**entries, "all images, round 1": {"color": "black", "linestyle": "--", "linewidth": 1}})
    return figure


def shown_classes(classes: Sequence[ClassResult], share: ShareOf) -> list[ClassResult | None]:
    """All classes, lowest share first; of too many, those at the ends with a gap, None, between them."""
    order = sorted(classes, key=lambda result: (share(result).mean, -result.images, result.number))
    if len(order) <= MOST_CLASSES:
        return list(order)
    lowest = sorted(order, key=lambda result: share(result).highest)[:ENDS]
    rest = [result for result in order if result not in lowest]
    highest = sorted(rest, key=lambda result: -share(result).lowest)[:ENDS]
    return [*(result for result in order if result in lowest), None, *(result for result in order if result in highest)]


def selection_note(classes: int) -> str | None:
    """What a page says about figures that do not show all classes."""
    if classes <= MOST_CLASSES:
        return None
    return (
        f"Figures and tables show {2 * ENDS} of {classes} classes: the {ENDS} with the lowest upper end of the 95 % "
        f"interval and the {ENDS} with the highest lower end. All classes are in the CSV."
    )


def _class_panel(shown: Sequence[ClassResult | None], title: str, x: str) -> tuple[Figure, Axes]:
    """A row for each class."""
    figure = blank_figure(height=max(3.0, 1.75 + 0.25 * len(shown)), title=title)
    axes: Axes = figure.subplots()
    names = ["…" if result is None else f"{shorten(result.name, NAME)} ({result.images})" for result in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_ylabel("class (images)", fontsize=10)
    axes.set_xlabel(x, fontsize=10)
    axes.set(xlim=(-2, 102), ylim=(len(shown) - 0.3, -0.7))
    add_grid(axes, "x")
    return figure, axes


def _first_exit(result: ClassResult) -> Interval:
    return result.exit_share(0)


def _percent(share: Interval) -> str:
    return f"{100 * share.mean:.1f} % ({100 * share.lowest:.1f} to {100 * share.highest:.1f})"


def _range(classes: Sequence[ClassResult], share: ShareOf) -> str:
    """The lowest and the highest share, and which class has it."""
    shares = [share(result).mean for result in classes]
    if min(shares) == max(shares):
        return f"the same in {len(classes)} classes" if len(classes) > 1 else "there is one class"
    ends = []
    for end in (min(shares), max(shares)):
        names = [shorten(result.name, NAME) for result, value in zip(classes, shares) if value == end]
        ends.append(f"{100 * end:.0f} % ({names[0] if len(names) == 1 else f'{len(names)} classes'})")
    return f"classes from {ends[0]} to {ends[1]}"
