"""Low-pass filter on the input of round 1 alone: what the last round loses if round 1 sees a blurred image.

The image is resized to the resolution r of round 1, as always, then to (1 - p) r and back to r, bicubic with antialias.
The later rounds see the image as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from progresvit.analysis.interventions import (
    EFFECT_COLUMNS,
    Effect,
    Interventions,
    check_strengths,
    draw_effects,
    effect_title,
)
from progresvit.analysis.sample import Sample
from progresvit.io.resumable import Progress
from progresvit.model.backbone import resize
from progresvit.model.interface import RoundModel
from progresvit.plots import BELOW, new_figure
from progresvit.table import Column, Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "low-pass"
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 0.9)
"""Shares of the side that are removed."""
MOST = 0.95
"""The largest share: some pixels are left at any resolution of a ViT."""


@dataclass(frozen=True)
class Blurred:
    """A strength, the resolution that is left, and the effect."""

    strength: float
    side: int
    effect: Effect


def low_pass(
    model: RoundModel, sample: Sample, strengths: Sequence[float] = STRENGTHS, progress: Progress | None = None
) -> tuple[Blurred, ...]:
    """The accuracy of the last round if the input of round 1 is blurred.

    Args:
        model: A classifier whose rounds build on each other.
        sample: The images.
        strengths: Shares p of the side that are removed, from 0 to 0.95; 0 changes nothing.
        progress: Called after each batch.
    """
    check_strengths(strengths, NAME, most=MOST)
    runs = Interventions(model, sample, name=NAME, runs=len(strengths) + 1, progress=progress)
    resolution = model.config.rounds[0].resolution
    untouched = runs.untouched()
    effects = []
    for strength in strengths:
        side = max(1, round((1 - strength) * resolution))
        tokens = runs.first_round(partial(low_passed, resolution=resolution, side=side))
        outcome = runs.later_rounds(tokens.__getitem__)
        effects.append(Blurred(strength, side, Effect.of(outcome, untouched)))
    return tuple(effects)


def low_passed(images: Tensor, *, resolution: int, side: int) -> Tensor:
    """Down to a side and up to the resolution again: (B, C, H, H) -> (B, C, r, r); unchanged if nothing is removed."""
    if side == resolution:
        return images
    images = resize(images, resolution)  # (B, C, H, H) -> (B, C, r, r)
    return resize(resize(images, side), resolution)


def low_pass_table(effects: Sequence[Blurred]) -> Table:
    """A row for each strength."""
    columns = [Column("strength", "p"), Column("side", "pixels left"), *EFFECT_COLUMNS]
    rows = [{"strength": blurred.strength, "side": blurred.side, **blurred.effect.row()} for blurred in effects]
    return Table("Low-pass filter on the input of round 1", columns, rows)


def low_pass_figure(effects: Sequence[Blurred]) -> Figure:
    """Accuracy of the last round against the strength, with the interval of its change."""
    return draw_low_pass(low_pass_table(effects).rows)


def draw_low_pass(rows: Sequence[Row]) -> Figure:
    """The figure of the rows of a table."""
    figure, axes = new_figure(
        title=effect_title("Blurring round 1's input by {:.0f} %", rows),
        x="p: share of the side removed (%)",
        y="top-1 of the last round (%)",
    )
    draw_effects(axes, rows)
    figure.legend(ncols=2, fontsize=10, **BELOW)
    return figure
