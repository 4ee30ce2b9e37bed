"""How similar the tokens are to those at the end: cosine of every block output to the last block output of all.

Compared are the tokens of the same image: the class token, and every patch token with the one at its place. A grid of
another size is first resized to that of the last round, bilinear as in the model's projector. Rounds of different width
are compared in the channels that all of them have: a channel of a narrow round is the same channel in a wide one.

Tokens are compared after the model's final norm, as the head and the next round of a ProgResViT read them. In the
residual stream itself, a few channels hold most of the squared length of the class token in some blocks (bundled
models), and the cosine would be theirs.

Letters: B images of a batch, N images, C image channels, H side of the images, T tokens (the class token and the
patches), g side of the patch grid, d channels that are compared, P points: what the first block of each round receives
and what each block returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from progresvit.analysis.hooks import evaluation_mode, need_backbone, recorded_calls, recorded_outputs
from progresvit.analysis.sample import Progress, Sample
from progresvit.metrics.arrays import Floats
from progresvit.metrics.interval import Interval, mean_interval
from progresvit.model import slicing
from progresvit.model.backbone import Backbone
from progresvit.model.interface import RoundModel
from progresvit.plots import COLOURS, MARKERS, new_figure
from progresvit.table import Column, Row, Table, decimals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS = ("class", "patch")
"""The two curves."""
QUANTILES = (0.1, 0.9)
"""Quantiles of the images; the band around a curve."""
MOST_TICKS = 24
"""Block numbers below a figure."""


class BlockPoint(NamedTuple):
    """A place in the model: a block of a round, both counted from 1. Block 0 is what the first block receives.

    Blocks are counted anew in every round, also where a round continues with the next blocks (early exits).
    """

    round: int
    block: int


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Cosine to the last block output of the last round, of every image at every point."""

    points: tuple[BlockPoint, ...]
    """In the order in which a model runs."""
    cosines: Floats
    """(2, P, N): of the class token, and the mean over the patches."""
    handover: bool
    """Whether a round builds on the one before; if not, rounds are alternatives."""

    def change(self, place: int, tokens: int) -> Interval | None:
        """From the block output before, on the same images; None for what the first block of a round receives.

        The block before the first one of a round is the last one of the round before. If there is none, the change is
        from what the block receives.
        """
        point = self.points[place]
        if point.block == 0:
            return None
        before = place - 2 if point.block == 1 and point.round > 1 and self.handover else place - 1
        return mean_interval(self.cosines[tokens, place] - self.cosines[tokens, before])


def similarity(model: RoundModel, sample: Sample, progress: Progress | None = None) -> Similarity:
    """Cosine of every block output in every round to the last block output of the last round.

    Args:
        model: A model with the ViT of this library: ProgResViT or a baseline, with or without a head.
        sample: The images.
        progress: Called after each batch.
    """
    backbone = need_backbone(model, "similarities of block outputs")
    device, parts, points = next(backbone.parameters()).device, [], tuple[BlockPoint, ...]()
    with evaluation_mode(backbone), torch.inference_mode():
        for rows, images in sample.batches(backbone.config, device):
            rounds = round_tokens(backbone, images)
            points = points_of(rounds)
            parts.append(_cosines([x for round_ in rounds for x in round_]).double().cpu().numpy())  # (2, P, B)
            if progress:
                progress(rows.stop, len(sample))
    cosines = np.concatenate(parts, axis=2)  # (2, P, B) -> (2, P, N)
    return Similarity(points=points, cosines=cosines, handover=backbone.config.routable)


def round_tokens(model: Backbone, images: Tensor) -> list[list[Tensor]]:
    """What the first block of each round receives and what each block returns, after the final norm.

    (B, C, H, H) -> (B, T, d) at each point, cut to the channels that all rounds have.
    """
    rounds, previous = [], None
    for s in range(len(model.config.rounds)):
        with recorded_calls(model.blocks) as calls, recorded_outputs(model.blocks) as outputs:
            tokens = model.run_round(s, images, previous).tokens
        previous = tokens if model.config.routable else None
        rounds.append([slicing.layer_norm(x, model.norm).float() for x in (calls[0].x, *outputs)])
    d = min(round_[0].shape[-1] for round_ in rounds)
    return [[x[..., :d] for x in round_] for round_ in rounds]


def points_of(rounds: Sequence[Sequence[Tensor]]) -> tuple[BlockPoint, ...]:
    """The points of :func:`round_tokens`."""
    return tuple(BlockPoint(s, block) for s, round_ in enumerate(rounds, start=1) for block in range(len(round_)))


def _cosines(tokens: Sequence[Tensor]) -> Tensor:
    """Cosine of the tokens at each point to the tokens of the last point: P times (B, T, d) -> (2, P, B)."""
    last = tokens[-1]
    g = math.isqrt(last.shape[1] - 1)
    class_token = [F.cosine_similarity(x[:, 0], last[:, 0], dim=-1) for x in tokens]  # (B, d) -> (B,)
    patches = [
        F.cosine_similarity(resized_patches(x, g), last[:, 1:], dim=-1).mean(dim=1)  # (B, g * g, d) -> (B,)
        for x in tokens
    ]
    return torch.stack([torch.stack(class_token), torch.stack(patches)])


def resized_patches(x: Tensor, g: int) -> Tensor:
    """The patch tokens on a grid of side g: (B, T, d) -> (B, g * g, d)."""
    patches = x[:, 1:]
    side = math.isqrt(patches.shape[1])
    if side == g:
        return patches
    grid = patches.mT.unflatten(2, (side, side))  # (B, T - 1, d) -> (B, d, side, side)
    grid = F.interpolate(grid, size=(g, g), mode="bilinear", align_corners=False)  # -> (B, d, g, g)
    return grid.flatten(2).mT  # (B, d, g, g) -> (B, g * g, d)


def similarity_table(result: Similarity) -> Table:
    """A row for each point and kind of token: the mean over the images with its 95 % interval, and quantiles."""
    columns = [
        Column("round", "round"),
        Column("block", "block"),
        Column("tokens", "tokens", left=True),
        Column("similarity", "cosine", decimals),
        Column("low", "95 % from", decimals),
        Column("high", "to", decimals),
        Column("q10", "10 % of images below", decimals),
        Column("q90", "90 % below", decimals),
        Column("change", "change from the block before", _signed),
        Column("change_low", "95 % from", _signed),
        Column("change_high", "to", _signed),
    ]
    rows = [
        {"round": point.round, "block": point.block, "tokens": TOKENS[tokens], **_row(result, place, tokens)}
        for place, point in enumerate(result.points)
        for tokens in range(len(TOKENS))
    ]
    return Table("Cosine similarity to the last block output; block 0 is the input of block 1", columns, rows)


def _row(result: Similarity, place: int, tokens: int) -> Row:
    cosines, change = result.cosines[tokens, place], result.change(place, tokens)
    mean, (q10, q90) = mean_interval(cosines), np.quantile(cosines, QUANTILES).tolist()
    return {
        "similarity": mean.mean,
        "low": mean.lowest,
        "high": mean.highest,
        "q10": q10,
        "q90": q90,
        "change": None if change is None else change.mean,
        "change_low": None if change is None else change.lowest,
        "change_high": None if change is None else change.highest,
    }


def _signed(value: float) -> str:
    return f"{value:+.3f}"


def similarity_figure(result: Similarity) -> Figure:
    """Mean cosine against the block, with a band that holds 80 % of the images. Dotted: from a round to the next."""
    return draw_similarity(similarity_table(result).rows, handover=result.handover)


def draw_similarity(rows: Sequence[Row], *, handover: bool) -> Figure:
    """The figure of the rows of a table.

    Args:
        rows: Of :func:`similarity_table`.
        handover: Whether a round builds on the one before.
    """
    points = [BlockPoint(row["round"], row["block"]) for row in rows if row["tokens"] == TOKENS[0]]
    figure, axes = new_figure(title="", x=BLOCK_AXIS, y="cosine similarity")
    axes.set_title(_finding(rows, handover))
    xs = positions(points)
    for number, (tokens, name) in enumerate(zip(TOKENS, ("class token", "patch tokens, mean"))):
        colour, line, marker = COLOURS[number], ("-", "--")[number], MARKERS[number]
        mean, low, high = (
            np.array([row[key] for row in rows if row["tokens"] == tokens]) for key in ("similarity", "q10", "q90")
        )
        for places in places_by_round(points):
            label = None if places[0] else name  # once, in the first round
            axes.plot(xs[places], mean[places], color=colour, linestyle=line, marker=marker, markersize=4, label=label)
            axes.fill_between(xs[places], low[places], high[places], color=colour, alpha=0.2, linewidth=0)
            if places[0] and handover:
                step = [places[0] - 1, places[0]]
                axes.plot(xs[step], mean[step], color=colour, linestyle=":")
    mark_rounds(axes, points)
    axes.fill_between([], [], [], color="0.6", alpha=0.5, linewidth=0, label="10 to 90 % of the images")
    figure.legend(loc="outside lower center", ncols=3, fontsize=10, frameon=False)
    return figure


def _finding(rows: Sequence[Row], handover: bool) -> str:
    """What becomes of the similarity where the last round begins; without such a transition, where it begins."""
    last = max(row["round"] for row in rows)
    of_tokens = []
    for tokens, name in zip(TOKENS, ("class token", "patch tokens")):
        own = [row for row in rows if row["tokens"] == tokens]
        before = [row["similarity"] for row in own if row["round"] == last - 1]
        in_last = [row["similarity"] for row in own if row["round"] == last]
        earlier, later = (before[-1], in_last[1]) if before and handover else (in_last[0], in_last[-1])
        of_tokens.append(f"{name} {earlier:.2f} → {later:.2f}".replace("-", "−"))
    where = "Cosine from the first to the last block"
    if last > 1 and handover:
        where = f"Cosine from the end of round {last - 1} to block 1 of round {last}"
    return f"{where}:\n{', '.join(of_tokens)}"


BLOCK_AXIS = "blocks run in the round (0: input of its first block)"
"""What :func:`mark_rounds` writes below."""


def places_by_round(points: Sequence[BlockPoint]) -> Iterator[list[int]]:
    """The places of the points of each round."""
    for _, group in groupby(range(len(points)), key=lambda place: points[place].round):
        yield list(group)


def positions(points: Sequence[BlockPoint]) -> Floats:
    """On the x axis of a figure, with a gap between rounds: (P,)."""
    rounds = np.array([point.round for point in points])
    return np.arange(len(points)) + 0.03 * len(points) * (rounds - 1)


def mark_rounds(axes: Axes, points: Sequence[BlockPoint]) -> None:
    """An x axis of points: every other round is shaded, rounds are named above and blocks are numbered below."""
    xs, last = positions(points), max(point.block for point in points)
    steps = (step for step in range(1, last + 2) if _ticks(points, step) <= MOST_TICKS)
    step = next(steps, last + 1)
    numbered = [place for place, point in enumerate(points) if point.block % step == 0]
    axes.set_xticks(xs[numbered], [str(points[place].block) for place in numbered], fontsize=9)
    axes.set_xlim(xs[0] - 0.5, xs[-1] + 0.5)
    rounds = [xs[places] for places in places_by_round(points)]
    for number, (first, *_, end) in enumerate(rounds, start=1):
        if number % 2 == 0:
            axes.axvspan(first - 0.5, end + 0.5, color="0.93", zorder=0, linewidth=0)
        name = f"round {number}" if len(rounds) <= 6 else str(number)
        axes.text((first + end) / 2, 1.0, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_title(axes.get_title(), fontsize=11, pad=18)


def _ticks(points: Sequence[BlockPoint], step: int) -> int:
    """Numbers below the axis if every ``step``-th block has one."""
    return sum(point.block % step == 0 for point in points)
