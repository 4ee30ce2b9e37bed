"""Which images exit after which round, and what the later rounds repair and break.

Every round runs on every image, so that the answer of the round after which an image exits can be compared with the
answers of the rounds that it skipped. An uncertain image may be refined without being repaired.

Letters: N images, B images of a batch, K classes, S rounds, s a round counted from 0, C channels, H side of the images,
h side of a thumbnail.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from progresvit.analysis.model_checks import check_rounds
from progresvit.analysis.sample import Sample
from progresvit.config import BaseConfig
from progresvit.io.parse import count_of
from progresvit.io.resumable import Progress
from progresvit.metrics.arrays import Bools, Ints
from progresvit.metrics.interval import Interval, share_interval
from progresvit.model.interface import RoundModel
from progresvit.plots import COLOURS, add_grid, blank_figure, draw_share, shorten
from progresvit.routing import near_lossless, top10_entropy
from progresvit.routing.decide import Threshold, as_thresholds, exit_rounds
from progresvit.table import Column, Row, Table, interval_cells, interval_columns, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

NAME = "exits"
THUMBNAIL = 96
"""Largest side of an image in the figure, in pixels: a figure shows thumbnails of a dataset, not its images."""
MARGIN = 0.1
"""Around a thumbnail, as a share of its side: in a .png it is not enlarged beyond ``THUMBNAIL`` either."""
GALLERY = 8
"""Images of the lowest entropy that are shown, and of the highest."""
MOST_CLASSES = 20
"""Classes that are shown; beyond this number, only the classes that exit most and least."""
LEAST_IMAGES = 2
"""Fewest images of a class that is shown, if there are more than ``MOST_CLASSES``."""
OUTCOMES = {
    "repaired": (False, True),
    "broken": (True, False),
    "stays right": (True, True),
    "stays wrong": (False, False),
}
"""Whether the earlier and the later round are correct."""
SHARE_COLUMNS = interval_columns("share", "share (%)", percent)


@dataclass(frozen=True, kw_only=True)
class Exits:
    """The answers of every round, and the round after which each image exits."""

    sample: Sample
    predictions: Ints
    """(N, S), -1 where logits are not finite."""
    entropy: NDArray[np.float32]
    """Top-10 entropy, (N, S)."""
    threshold: tuple[float, ...]
    """One for each round but the last."""
    near_lossless: bool
    """Whether the threshold was chosen on these images."""
    exit_round: Ints
    """Counted from 0, (N,)."""
    class_names: Mapping[int, str]
    """Names of the classes of the sample and of the predicted classes."""

    @property
    def labels(self) -> Ints:
        """(N,)"""
        labels: Ints = self.sample.labels.numpy()
        return labels

    @property
    def correct(self) -> Bools:
        """(N, S)"""
        correct: Bools = self.predictions == self.labels[:, None]
        return correct

    @property
    def rounds(self) -> int:
        return int(self.predictions.shape[1])


@dataclass(frozen=True, kw_only=True)
class ClassExits:
    """Images of a class, or of all, and the share of them that exits after round 1."""

    number: int
    name: str
    images: int
    exits: int

    @property
    def share(self) -> Interval:
        return share_interval(self.exits, self.images)


@dataclass(frozen=True, kw_only=True)
class Repairs:
    """A round compared with a later one, on the images that continue after it or on the images that exit."""

    continues: bool
    earlier: int
    """Rounds are counted from 0."""
    later: int
    images: int
    counts: Mapping[str, int]
    """By outcome, in the order of ``OUTCOMES``."""


def exits(
    model: RoundModel, sample: Sample, threshold: Threshold | None = None, progress: Progress | None = None
) -> Exits:
    """Every round on every image, and the round after which each exits.

    Args:
        model: A classifier whose rounds build on each other.
        sample: The images.
        threshold: Top-10 entropy: one number for all rounds, or one for each round but the last. None chooses the
            near-lossless threshold of these images.
        progress: Called after each batch.
    """
    check_rounds(model, NAME, f"{NAME} compares images that exit after a round with those that continue")
    rounds = len(model.config.rounds)
    if threshold is not None:
        as_thresholds([threshold], rounds)  # refused before any round runs

    def every_round(rows: slice, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = [output.logits.float() for output in model(images)]  # S times (B, K)
        entropies = torch.stack([top10_entropy(values) for values in logits], dim=1)  # (B, S)
        return entropies.cpu(), torch.stack([values.argmax(dim=-1) for values in logits], dim=1).cpu()

    entropies, answers = zip(*sample.run(model, every_round, progress))
    entropy = torch.cat(entropies).numpy()
    predictions: Ints = np.where(np.isfinite(entropy), torch.cat(answers).numpy(), -1)
    limit = threshold
    if limit is None:
        correct = predictions == sample.labels.numpy()[:, None]
        limit = near_lossless(entropy, correct, model.gmacs()).threshold
    return Exits(
        sample=sample,
        predictions=predictions,
        entropy=entropy,
        threshold=tuple(as_thresholds([limit], rounds)[0].tolist()),
        near_lossless=threshold is None,
        exit_round=exit_rounds(entropy, limit),
        class_names=_class_names(model.config, sample, predictions),
    )


def exits_table(result: Exits) -> Table:
    """A row for each image. Rounds are counted from 1; entropies are in nats."""
    numbers = range(1, result.rounds + 1)
    columns = [Column("image", "image", left=True), Column("class", "class", left=True), Column("exit_round", "exit")]
    columns += [Column(f"entropy_round{n}", f"entropy {n} (nats)", lambda value: f"{value:.3f}") for n in numbers]
    columns += [Column(f"prediction_round{n}", f"prediction {n}", left=True) for n in numbers]
    columns += [Column(f"correct_round{n}", f"correct {n}") for n in numbers]
    rows: list[Row] = []
    for image, name in enumerate(result.sample.ids):
        row: Row = {"image": name, "class": result.class_names[int(result.labels[image])]}
        row["exit_round"] = int(result.exit_round[image]) + 1
        for s, n in enumerate(numbers):
            row[f"entropy_round{n}"] = float(result.entropy[image, s])
            row[f"prediction_round{n}"] = result.class_names[int(result.predictions[image, s])]
            row[f"correct_round{n}"] = bool(result.correct[image, s])
        rows.append(row)
    return Table(f"Exits of {count_of(len(rows), 'image')}", columns, rows)


def exit_shares(result: Exits) -> list[ClassExits]:
    """The share of every class of the sample that exits; the class with the highest share comes first."""
    classes = []
    for number, name in result.sample.class_names.items():
        rounds = result.exit_round[result.labels == number]
        classes.append(ClassExits(number=number, name=name, images=len(rounds), exits=int((rounds == 0).sum())))
    return sorted(classes, key=lambda shares: (-shares.share.mean, shares.name))


def exit_share_table(result: Exits) -> Table:
    """A row for each class, the one that exits most first."""
    columns = [
        Column("class", "class", left=True),
        Column("class_id", "folder", left=True),
        Column("images", "images"),
        Column("exits", "exit after round 1"),
        *SHARE_COLUMNS,
    ]
    rows = [
        {
            "class": shares.name,
            "class_id": result.sample.class_ids[shares.number],
            "images": shares.images,
            "exits": shares.exits,
            **interval_cells("share", shares.share),
        }
        for shares in exit_shares(result)
    ]
    return Table("Exits after round 1, by class", columns, rows)


def repairs(result: Exits) -> list[Repairs]:
    """Compares a round with the next for images that continue, and with the last for images that exit."""
    last, groups = result.rounds - 1, []
    for continues in (True, False):
        for s in range(last):
            rows = result.exit_round > s if continues else result.exit_round == s
            later = s + 1 if continues else last
            pairs = list(zip(result.correct[rows, s].tolist(), result.correct[rows, later].tolist()))
            counts = {outcome: pairs.count(pair) for outcome, pair in OUTCOMES.items()}
            groups.append(Repairs(continues=continues, earlier=s, later=later, images=len(pairs), counts=counts))
    return groups


def repair_table(result: Exits) -> Table:
    """A row for each outcome of each group of images."""
    columns = [
        Column("images", "images that", left=True),
        Column("from_round", "from round"),
        Column("to_round", "to round"),
        Column("outcome", "outcome", left=True),
        Column("count", "images"),
        Column("of", "of"),
        *SHARE_COLUMNS,
    ]
    rows = [
        {
            "images": "continue" if group.continues else "exit",
            "from_round": group.earlier + 1,
            "to_round": group.later + 1,
            "outcome": outcome,
            "count": count,
            "of": group.images,
            **interval_cells("share", share_interval(count, group.images) if group.images else None),
        }
        for group in repairs(result)
        for outcome, count in group.counts.items()
    ]
    return Table("What the later rounds repair and break", columns, rows)


def exits_figure(result: Exits) -> Figure:
    """Images that exit first and last, the exits of the classes, and what the later rounds repair and break."""
    certain, uncertain = gallery(result)
    classes, groups = _shown_classes(exit_shares(result)), repairs(result)
    heights = [1.4, 1.4 if len(uncertain) else 0.01, max(2.6, 0.9 + 0.18 * max(len(classes), 5 * len(groups) + 1))]
    limits = ", ".join(f"{limit:.3g}" for limit in dict.fromkeys(result.threshold))
    source = " (near-lossless on these images)" if result.near_lossless else ""
    conditions = f"threshold {limits} nats{source}"
    figure = blank_figure(height=0.6 + sum(heights), title=_finding(result), conditions=conditions)
    low, high, below = figure.subfigures(3, 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_gallery(low, result, certain, "lowest")
    _draw_gallery(high, result, uncertain, "highest")
    left, right = below.subplots(1, 2)
    _draw_shares(left, classes, share=float((result.exit_round == 0).mean()))
    _draw_repairs(right, groups)
    below.supxlabel("Bars: 95 % intervals. In brackets: images. ✗ and a dashed frame: a wrong answer.", fontsize=8.5)
    return figure


def _finding(result: Exits) -> str:
    """The share that exits after round 1, and what round 2 does with the others."""
    early, first = float((result.exit_round == 0).mean()), repairs(result)[0]
    title = f"{100 * early:.0f} % of {len(result.labels):,} images exit after round 1"
    if not first.images:
        return title
    repaired, broken = (100 * first.counts[outcome] / first.images for outcome in ("repaired", "broken"))
    return f"{title}; round 2 repairs {repaired:.0f} % of the others and breaks {broken:.0f} %"


def gallery(result: Exits) -> tuple[Ints, Ints]:
    """Rows of the images of the lowest entropy in round 1, ascending, and of the highest, descending."""
    order: Ints = np.argsort(result.entropy[:, 0], kind="stable")
    return order[: min(GALLERY, math.ceil(len(order) / 2))], order[::-1][: min(GALLERY, len(order) // 2)]


def thumbnail(pixels: Tensor) -> NDArray[np.uint8]:
    """An image of at most ``THUMBNAIL`` pixels: bytes (C, H, H) -> (h, h) if it is grey, else (h, h, C)."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy().squeeze())  # (C, H, H) -> (H, H, C), or (H, H)
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)  # leaves smaller ones as they are
    return np.asarray(image)


def _class_names(config: BaseConfig, sample: Sample, predictions: Ints) -> dict[int, str]:
    """Names of all classes that occur; a class that neither the model nor the sample names gets its number."""
    names = {number: f"class {number}" for number in np.unique(predictions).tolist()}
    if config.labels is not None:
        names = {number: config.labels[number] for number in names if number >= 0}
    return {**names, **sample.class_names, -1: "none (not finite)"}


def _shown_classes(classes: Sequence[ClassExits]) -> list[ClassExits | None]:
    """All classes, or the classes that exit most, a gap (None), and the classes that exit least."""
    if len(classes) <= MOST_CLASSES:
        return list(classes)
    larger = [shares for shares in classes if shares.images >= LEAST_IMAGES] or list(classes)
    half = MOST_CLASSES // 2
    return list(larger) if len(larger) <= MOST_CLASSES else [*larger[:half], None, *larger[-half:]]


def _draw_gallery(part: SubFigure, result: Exits, images: Ints, which: str) -> None:
    if not len(images):
        return
    early = int((result.exit_round[images] == 0).sum())
    title = f"{which} entropy in round 1: {early} of {len(images)} exit after round 1"
    part.suptitle(title, fontsize=10, x=0.01, ha="left")
    panels = part.subplots(1, GALLERY, squeeze=False)[0]
    for panel in panels[len(images) :]:
        panel.set_axis_off()
    for panel, image in zip(panels, images.tolist()):
        s = result.exit_round[image]
        answer, name = (result.class_names[int(n)] for n in (result.predictions[image, s], result.labels[image]))
        lines = textwrap.wrap(answer, 12, max_lines=2, placeholder="…")
        small = thumbnail(result.sample.pixels[image])
        panel.imshow(small, cmap="gray", vmin=0, vmax=255)
        low, high = -MARGIN * len(small), (1 + MARGIN) * len(small)
        panel.set(xticks=[], yticks=[], xlim=(low, high), ylim=(high, low))
        if not result.correct[image, s]:
            lines = [f"✗ {shorten(answer, 10)}", f"is {shorten(name, 9)}"]
            for spine in panel.spines.values():
                spine.set(color=COLOURS[1], linewidth=2.5, linestyle=(0, (2, 1)), capstyle="butt")
        panel.set_xlabel("\n".join([f"{result.entropy[image, 0]:.3f} nats", *lines]), fontsize=8, labelpad=3)


def _draw_shares(axes: Axes, classes: Sequence[ClassExits | None], *, share: float) -> None:
    names = ["…" if shares is None else f"{shorten(shares.name, 21)} ({shares.images})" for shares in classes]
    for place, shares in enumerate(classes):
        if shares is not None:
            draw_share(axes, place, shares.share, marker="o", color=COLOURS[0])
    axes.axvline(100 * share, color="0.5", linestyle="--", linewidth=1)
    _finish(axes, range(len(classes)), names, slots=len(classes), x="share of the class (%)")
    axes.set_title(f"exit after round 1: {100 * share:.0f} % (dashed)", fontsize=10)


def _draw_repairs(axes: Axes, groups: Sequence[Repairs]) -> None:
    styles = dict(zip(OUTCOMES, (("^", COLOURS[2]), ("v", COLOURS[1]), ("o", "0.35"), ("X", "0.35"))))
    names: dict[int, str] = {}
    for number, group in enumerate(groups):
        first = number * (len(OUTCOMES) + 1)  # a line for the images of the group, then the outcomes
        images = f"{group.images} images" if number == 0 else f"{group.images}"
        does = f"continue to round {group.later + 1}:"
        if not group.continues:
            does = f"exit after round {group.earlier + 1}; with round {group.later + 1}:"
        _write(axes, 0, first, f"{images} {does}", offset=-62, fontsize=9)
        for place, (outcome, count) in enumerate(group.counts.items(), start=first + 1):
            names[place] = outcome
            _write(axes, 1, place, str(count), offset=5, fontsize=8)
            if group.images:
                marker, colour = styles[outcome]
                draw_share(axes, place, share_interval(count, group.images), marker=marker, color=colour)
    slots = len(groups) * (len(OUTCOMES) + 1)
    _finish(axes, list(names), list(names.values()), slots=slots, x="share of these images (%)")
    axes.set_title("what later rounds change", fontsize=10)
    axes.spines["left"].set_visible(False)  # the lines of the groups cross it


def _write(axes: Axes, side: float, place: int, words: str, *, offset: float, fontsize: float) -> None:
    """Text at an offset, in points, from the left (side 0) or the right edge (side 1) of the panel."""
    look: dict[str, Any] = {"fontsize": fontsize, "va": "center", "ha": "left", "annotation_clip": False}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # hides the grid
    units = ("axes fraction", "data")
    axes.annotate(words, (side, place), xycoords=units, xytext=(offset, 0), textcoords="offset points", **look)


def _finish(axes: Axes, places: Sequence[int], names: Sequence[str], *, slots: int, x: str) -> None:
    axes.set_yticks(list(places), list(names), fontsize=8)
    axes.set(xlim=(-4, 104), ylim=(slots - 0.4, -0.6))
    axes.set_xlabel(x, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    add_grid(axes, "x")
