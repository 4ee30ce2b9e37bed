"""Noise replacement: round 1's last block output x becomes (1 - a) x + a e, with noise e of its mean and deviation.

The noise is normal and independent for each token and channel. It has the mean and the standard deviation of all values
of x of the same image. The final norm, the projector and the later rounds run as usual, on the unchanged image. All
strengths use the same noise.

Letters: B images of a batch, N tokens of round 1, d channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from progresvit.analysis.hooks import evaluation_mode, recorded_calls, replaced_output
from progresvit.analysis.interventions import (
    EFFECT_COLUMNS,
    Effect,
    Interventions,
    Outcome,
    check_strengths,
    draw_effects,
    effect_title,
)
from progresvit.analysis.model_checks import need_backbone
from progresvit.analysis.sample import Sample
from progresvit.io.resumable import Progress
from progresvit.model.interface import RoundModel
from progresvit.plots import BELOW, COLOURS, new_panels
from progresvit.table import Column, Row, Table, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "noise-replacement"
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
QUANTILES = (10, 25, 50, 75, 90)
"""Percentiles of the confidence that are shown."""


@dataclass(frozen=True)
class Replaced:
    """A strength and its effect."""

    strength: float
    untouched: Outcome
    effect: Effect

    @property
    def quantiles(self) -> NDArray[np.float64] | None:
        """Percentiles of the correct-class confidence of the images that the untouched model has right, if any."""
        confidence = self.effect.outcome.confidence[self.untouched.correct]
        return np.percentile(confidence, QUANTILES) if len(confidence) else None


def noise_replacement(
    model: RoundModel,
    sample: Sample,
    strengths: Sequence[float] = STRENGTHS,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Replaced, ...]:
    """The accuracy of the last round if noise replaces what round 1's last block returns.

    Args:
        model: A classifier with the ViT of this library whose rounds build on each other.
        sample: The images.
        strengths: Shares of the noise, from 0 (nothing changes) to 1.
        seed: Seed of the noise.
        progress: Called after each batch.
    """
    check_strengths(strengths, NAME)
    runs = Interventions(model, sample, name=NAME, runs=len(strengths) + 1, progress=progress)
    block, untouched = last_block(model, sample), runs.untouched()
    effects = []
    for strength in strengths:
        tokens = runs.first_round(during=replaced_output(block, noise(strength, seed=seed)))
        outcome = runs.later_rounds(tokens.__getitem__)
        effects.append(Replaced(strength, untouched, Effect.of(outcome, untouched)))
    return tuple(effects)


def last_block(model: RoundModel, sample: Sample) -> nn.Module:
    """The last block that round 1 runs."""
    backbone = need_backbone(model, "noise replacements")
    device = next(model.parameters()).device
    _, images = next(iter(sample.batches(model.config, device)))
    with evaluation_mode(model), torch.inference_mode(), recorded_calls(backbone.blocks) as calls:
        model.run_round(0, images[:1])
    return calls[-1].block


def noise(strength: float, *, seed: int) -> Callable[[Tensor], Tensor]:
    """Replaces activations by noise of their mean and deviation, batch after batch: (B, N, d) -> (B, N, d)."""
    generator = torch.Generator().manual_seed(seed)

    def replace(x: Tensor) -> Tensor:
        normal = torch.randn(x.shape, generator=generator).to(x)
        mean, deviation = x.mean(dim=(1, 2), keepdim=True), x.std(dim=(1, 2), keepdim=True)  # (B, 1, 1)
        return (1 - strength) * x + strength * (mean + deviation * normal)

    return replace


def noise_replacement_table(effects: Sequence[Replaced]) -> Table:
    """A row for each strength. Percentiles of the confidence are of the images that the untouched model has right."""
    keys = [f"confidence_p{quantile}" for quantile in QUANTILES]
    names = [f"confidence, percentile {quantile}" for quantile in QUANTILES]
    columns = [
        Column("strength", "α"),
        *EFFECT_COLUMNS,
        *(Column(key, name, percent) for key, name in zip(keys, names)),
    ]
    rows = []
    for replaced in effects:
        quantiles = [None] * len(keys) if replaced.quantiles is None else replaced.quantiles.tolist()
        rows.append({"strength": replaced.strength, **replaced.effect.row(), **dict(zip(keys, quantiles))})
    return Table("Round 1's last block output replaced by noise", columns, rows)


def noise_replacement_figure(effects: Sequence[Replaced]) -> Figure:
    """Accuracy, and the distribution of the correct-class confidence, against the strength."""
    return draw_noise_replacement(noise_replacement_table(effects).rows)


def draw_noise_replacement(rows: Sequence[Row]) -> Figure:
    """The figure of the rows of a table."""
    x, ys = "α: share of noise (%)", ("top-1 of the last round (%)", "correct-class confidence (%)")
    title = effect_title("Replacing {:.0f} % of round 1's output by noise", rows)
    figure, (accuracy, confidence) = new_panels(title=title, xs=[x, x], y=ys, height=4.6)
    draw_effects(accuracy, rows)
    if rows[0][f"confidence_p{QUANTILES[0]}"] is not None:
        shares = [100 * row["strength"] for row in rows]
        low, quarter, median, three_quarters, high = (
            [100 * row[f"confidence_p{quantile}"] for row in rows] for quantile in QUANTILES
        )
        look: dict[str, Any] = {"color": COLOURS[2], "linewidth": 0}
        confidence.plot(shares, median, color=COLOURS[2], marker="s", label="median of images right without noise")
        confidence.fill_between(shares, quarter, three_quarters, alpha=0.4, label="25 to 75 % of them", **look)
        confidence.fill_between(shares, low, high, alpha=0.2, label="10 to 90 %", **look)
        confidence.set_ylim(-2, 102)
    figure.legend(ncols=2, fontsize=9, **BELOW)
    return figure
