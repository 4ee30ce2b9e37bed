"""Paths of classes through the model: the mean class token of each class after every block of every round.

The figure shows the paths in the plane of their first two principal components, and how far the classes are apart in
the space of all channels (``separation.py``).

Class tokens are taken after the model's final norm, in the channels that all rounds have (``block_points.py``). In the
residual stream itself, the first component is a few large channels that grow alike for all classes.

Letters: B images of a batch, N images, K classes, n images of a class, d channels, P points (the input of the first
block of each round, and every block output), R bootstrap draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from progresvit.analysis.block_points import (
    BLOCK_AXIS,
    BlockPoint,
    mark_rounds,
    measure_points,
    places_by_round,
    positions,
)
from progresvit.analysis.model_checks import need_backbone
from progresvit.analysis.sample import Sample
from progresvit.analysis.separation import INTERVAL, estimate, separation
from progresvit.io.resumable import Progress
from progresvit.metrics.arrays import Floats
from progresvit.metrics.interval import Interval
from progresvit.model.interface import RoundModel
from progresvit.plots import BELOW, COLOURS, MARKERS, add_grid, blank_figure, in_lines
from progresvit.table import Column, Row, Table, decimals, interval_cells, interval_columns

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLASSES = 5
"""Number of classes by default."""
LONGEST_NAME = 22
"""Letters of a class in the legend."""


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """Paths of class means, and the separation of the classes along them."""

    points: tuple[BlockPoint, ...]
    """In the order in which a model runs."""
    classes: tuple[str, ...]
    paths: Floats
    """First two principal components of each class mean, (K, P, 2)."""
    explained: tuple[float, float]
    """Shares of the variance of all class means that the two components have."""
    separations: Floats
    """Distance between classes, in distances within them: (P,)."""
    draws: Floats
    """Separations of bootstrap draws, (R, P)."""
    handover: bool
    """Whether a round builds on the one before; if not, rounds are alternatives."""

    def separation(self, place: int) -> Interval:
        """Separation at a point, with its interval."""
        return estimate(self.separations[place], self.draws[:, place])

    @property
    def ends(self) -> tuple[int, ...]:
        """Places of the last block output of each round."""
        return tuple(places[-1] for places in places_by_round(self.points))

    def gain(self, s: int) -> Interval:
        """Change of the separation from the end of the round before to the end of round s, counted from 0."""
        before, end = self.ends[s - 1], self.ends[s]
        return estimate(self.separations[end] - self.separations[before], self.draws[:, end] - self.draws[:, before])


def trajectories(
    model: RoundModel, sample: Sample, classes: Sequence[str] | None = None, progress: Progress | None = None
) -> Trajectories:
    """Paths of some classes across all blocks of all rounds.

    Args:
        model: A model with the ViT of this library: ProgResViT or a baseline, with or without a head.
        sample: The images, at least two of each class.
        classes: Names or folder names, at least two; by default the five classes with the most images.
        progress: Called after each batch.
    """
    backbone = need_backbone(model, "trajectories of classes")
    numbers = _class_numbers(sample, classes)
    images_of = sample.of_classes(numbers)
    points, batches = measure_points(
        backbone,
        images_of,
        lambda tokens: torch.stack([x[:, 0] for x in tokens], dim=1),  # P times (B, T, d) -> (B, P, d)
        progress,
    )
    tokens, labels = np.concatenate(batches), images_of.labels.numpy()
    groups = [tokens[labels == number] for number in numbers]  # K times (n, P, d)
    paths, explained = principal_plane(np.stack([group.mean(axis=0) for group in groups]))
    separations, draws = separation(groups)
    return Trajectories(
        points=points,
        classes=tuple(sample.class_names[number] for number in numbers),
        paths=paths,
        explained=explained,
        separations=separations,
        draws=draws,
        handover=backbone.config.routable,
    )


def _class_numbers(sample: Sample, classes: Sequence[str] | None) -> list[int]:
    """Numbers of the classes to compare; each has at least two images."""
    counts = Counter(sample.labels.tolist())
    numbers = _most_frequent(counts) if classes is None else list(dict.fromkeys(map(sample.find_class, classes)))
    if len(numbers) < 2:
        remedy = "give images of more classes" if classes is None else "name another class"
        raise ValueError(f"trajectories compare at least two classes, not {len(numbers)}; {remedy}.")
    few = min(numbers, key=lambda number: counts[number])
    if counts[few] < 2:
        raise ValueError(
            f"too few images per class: {sample.class_names[few]!r} has {counts[few]}; give more images (images=…), or "
            "other classes."
        )
    return numbers


def _most_frequent(counts: Counter[int]) -> list[int]:
    """The classes with the most images, in their order; of equally frequent ones, some at equal distances."""
    if len(counts) <= CLASSES:
        return sorted(counts)
    fewest = sorted(counts.values(), reverse=True)[CLASSES - 1]
    frequent = [number for number in counts if counts[number] > fewest]
    equal = sorted(number for number in counts if counts[number] == fewest)
    places = np.linspace(0, len(equal) - 1, CLASSES - len(frequent)).round().astype(int)
    return sorted([*frequent, *(equal[place] for place in places)])


def principal_plane(means: Floats) -> tuple[Floats, tuple[float, float]]:
    """First two principal components of all points of all paths, and their shares of the variance.

    (K, P, d) -> (K, P, 2). The largest loading of a component is positive.
    """
    points = means.reshape(-1, means.shape[-1])  # (K, P, d) -> (K * P, d)
    centred = points - points.mean(axis=0)
    _, lengths, axes = np.linalg.svd(centred, full_matrices=False)  # axes are rows, (K * P or d, d)
    axes = axes[:2] * np.sign(axes[[0, 1], np.abs(axes[:2]).argmax(axis=1)])[:, None]
    first, second, *_ = (lengths**2 / (lengths**2).sum()).tolist()
    return (centred @ axes.T).reshape(*means.shape[:2], 2), (first, second)  # (K * P, 2) -> (K, P, 2)


def trajectories_table(result: Trajectories) -> Table:
    """A row for each class and point; the separation is between all classes.

    Rows of the end of a later round hold the change of the separation from the end of the round before.
    """
    columns = [
        Column("class", "class", left=True),
        Column("round", "round"),
        Column("block", "block"),
        Column("pc1", "PC1", decimals),
        Column("pc2", "PC2", decimals),
        *interval_columns("separation", "separation", decimals),
        *interval_columns("separation_change", "change from the round before", decimals),
    ]
    at_points = [_separation_row(result, place) for place in range(len(result.points))]
    rows = [
        {"class": name, "round": point.round, "block": point.block, "pc1": float(pc1), "pc2": float(pc2), **at_point}
        for name, path in zip(result.classes, result.paths)
        for point, (pc1, pc2), at_point in zip(result.points, path, at_points)
    ]
    return Table("Mean class tokens of classes; block 0 is the input of block 1", columns, rows)


def _separation_row(result: Trajectories, place: int) -> Row:
    s = result.points[place].round - 1
    gain = result.gain(s) if s and place in result.ends else None
    return interval_cells("separation", result.separation(place)) | interval_cells("separation_change", gain)


def trajectories_figure(result: Trajectories) -> Figure:
    """Above, the paths in the plane of two components; below, the separation of the classes against the block."""
    rows = -(-(len(result.classes) + 4) // 3)  # of the legend
    figure = blank_figure(height=6.4 + 0.2 * rows)
    plane, below = figure.subplots(2, 1, height_ratios=(5, 3))
    for axes in (plane, below):
        add_grid(axes)
    _draw_paths(plane, result)
    _draw_separation(below, result)
    figure.legend(handles=_legend(result), ncols=3, fontsize=8.5, columnspacing=1, handlelength=1.8, **BELOW)
    return figure


def _draw_paths(axes: Axes, result: Trajectories) -> None:
    """A line for each class: thin in the earlier rounds, thick in the last one, dashed from a round to the next."""
    rounds = list(places_by_round(result.points))
    for number, path in enumerate(result.paths):
        colour, marker = class_style(number)
        for s, places in enumerate(rounds):
            last = s == len(rounds) - 1
            xs, ys = path[places].T
            axes.plot(xs, ys, color=colour, linewidth=1.8 if last else 0.9, marker=".", markersize=4)
            face = colour if last else "white"
            axes.plot(xs[-1], ys[-1], marker=marker, color=colour, markerfacecolor=face, markersize=8, zorder=4)
            if s and result.handover:
                axes.plot(*path[[places[0] - 1, places[0]]].T, color=colour, linewidth=0.9, linestyle="--", alpha=0.7)
        axes.plot(*path[0], marker="*", linestyle="", color="black", markersize=10, zorder=5)
    axes.set_title(in_lines(_finding(result)), fontsize=11)
    first, second = (f"{100 * share:.0f} % of the variance" for share in result.explained)
    axes.set_xlabel(f"PC1 ({first})", fontsize=11)
    axes.set_ylabel(f"PC2 ({second})", fontsize=11)


def _draw_separation(axes: Axes, result: Trajectories) -> None:
    xs, low, high = positions(result.points), *np.quantile(result.draws, INTERVAL, axis=0)
    for places in places_by_round(result.points):
        axes.plot(xs[places], result.separations[places], color="black", marker="o", markersize=4)
        axes.fill_between(xs[places], low[places], high[places], color="0.7", linewidth=0)
    axes.set_title(_gain_title(result))
    mark_rounds(axes, result.points)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(BLOCK_AXIS, fontsize=11)
    axes.set_ylabel("separation:\nbetween / within", fontsize=11)


def _finding(result: Trajectories) -> str:
    """Whether the last round separates the classes further than the one before."""
    rounds, classes = len(result.ends), len(result.classes)
    if rounds == 1:
        return f"Class means of {classes} classes end with a separation of {result.separations[-1]:.2f}"
    gain = result.gain(rounds - 1)
    does = "further than" if gain.lowest > 0 else "less than" if gain.highest < 0 else "not clearly further than"
    before, after = (result.separations[end] for end in result.ends[-2:])
    return f"Round {rounds} separates {classes} classes {does} round {rounds - 1}: {before:.2f} → {after:.2f}"


def _gain_title(result: Trajectories) -> str:
    """Title with the change from the end of the round before the last to the end of the last."""
    rounds = len(result.ends)
    if rounds == 1:
        return "Separation of the classes"
    gain = result.gain(rounds - 1)
    change = f"{gain.mean:+.2f} ({gain.lowest:+.2f} to {gain.highest:+.2f})".replace("-", "−")
    return f"Separation, ends of rounds {rounds} − {rounds - 1}: {change}"


def class_style(number: int) -> tuple[str, str]:
    """Colour and marker of a class: 49 pairs."""
    return COLOURS[number % len(COLOURS)], MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]


def _legend(result: Trajectories) -> list[Artist]:
    """The classes, then what the symbols mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = []
    for number, name in enumerate(result.classes):
        colour, marker = class_style(number)
        label = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
        handles.append(Line2D([], [], color=colour, marker=marker, label=label))
    rounds = len(result.ends)
    grey: dict[str, Any] = {"color": "0.3", "marker": "o", "markersize": 7}
    handles.append(Line2D([], [], marker="*", linestyle="", color="black", markersize=9, label="start of round 1"))
    if rounds > 1:
        earlier = "round 1, open: its end" if rounds == 2 else "earlier ones, open: ends"
        handles.append(Line2D([], [], linewidth=0.9, markerfacecolor="white", label=earlier, **grey))
    handles.append(Line2D([], [], linewidth=1.8, label=f"round {rounds}, filled: its end", **grey))
    if rounds > 1 and result.handover:
        handles.append(Line2D([], [], color="0.3", linestyle="--", linewidth=0.9, label="to the next round"))
    return [*handles, Patch(color="0.7", label="95 % interval")]
