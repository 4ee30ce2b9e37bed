"""How similar the tokens are to those at the end: cosine of every block output to the last block output of all.

Each token is compared with the token at the same place in the same image, the class token and the patch tokens
separately (``block_points.py``: after the final norm, in common channels). A grid of another size is first resized to
the grid of the last round, bilinear as in the model's projector.

Letters: B images of a batch, N images, T tokens (the class token and the patches), g side of the patch grid, d channels
that are compared, P points: what the first block of each round receives and what each block returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

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
from progresvit.io.resumable import Progress
from progresvit.metrics.arrays import Floats
from progresvit.metrics.interval import Interval, mean_interval
from progresvit.model.interface import RoundModel
from progresvit.plots import BELOW, COLOURS, MARKERS, new_figure
from progresvit.table import Column, Row, Table, decimals, interval_cells, interval_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = ("class", "patch")
"""The two curves."""
QUANTILES = (0.1, 0.9)
"""Quantiles of the images; the band around a curve."""


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
        """Change from the block output before, on the same images; None at the input of the first block of a round.

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
    points, batches = measure_points(backbone, sample, _cosines, progress)
    cosines = np.concatenate(batches, axis=2)  # (2, P, B) -> (2, P, N)
    return Similarity(points=points, cosines=cosines, handover=backbone.config.routable)


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
        *interval_columns("change", "change from the block before", "{:+.3f}".format),
    ]
    rows = [
        {"round": point.round, "block": point.block, "tokens": TOKENS[tokens], **_row(result, place, tokens)}
        for place, point in enumerate(result.points)
        for tokens in range(len(TOKENS))
    ]
    return Table("Cosine similarity to the last block output; block 0 is the input of block 1", columns, rows)


def _row(result: Similarity, place: int, tokens: int) -> Row:
    cosines = result.cosines[tokens, place]
    mean, (q10, q90) = mean_interval(cosines), np.quantile(cosines, QUANTILES).tolist()
    return {
        "similarity": mean.mean,
        "low": mean.lowest,
        "high": mean.highest,
        "q10": q10,
        "q90": q90,
        **interval_cells("change", result.change(place, tokens)),
    }


def similarity_figure(result: Similarity) -> Figure:
    """Mean cosine against the block, with a band that holds 80 % of the images. Dotted: from a round to the next."""
    return draw_similarity(similarity_table(result).rows, handover=result.handover)


def draw_similarity(rows: Sequence[Row], *, handover: bool) -> Figure:
    """The figure of the rows of a table.

    Args:
        rows: The rows of :func:`similarity_table`.
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
    figure.legend(ncols=3, fontsize=10, **BELOW)
    return figure


def _finding(rows: Sequence[Row], handover: bool) -> str:
    """The change of the similarity where the last round begins, or within the round if nothing is handed on."""
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
