"""Distributions of PSG's multipliers over the channels at chosen blocks, with the rounds in one panel.

The separation of two consecutive rounds is the root mean square of the difference of their multipliers, channel by
channel, on the channels that both rounds run.

Letters: D blocks, d active channels of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from progresvit.analysis.gates import BRANCHES, difference_to_next, rms, round_gates
from progresvit.metrics.arrays import Float32s
from progresvit.model.interface import RoundModel
from progresvit.plots import BELOW, COLOURS, LINES, add_grid, blank_figure
from progresvit.table import Column, Table, decimals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PERCENTILES = (5, 25, 50, 75, 95)
BINS = 31
"""Bars of a histogram, over the range of all rounds."""
HATCHES = ("", "////", "....", "xxxx")
"""Fill of the rounds, which greyscale keeps."""


@dataclass(frozen=True, kw_only=True)
class GateDistribution:
    """The multipliers of one branch of a block."""

    block: int
    """Counted from 1."""
    branch: str
    """A name in ``BRANCHES``."""
    rounds: tuple[Float32s, ...]
    """(d,) for each round."""

    @property
    def separations(self) -> tuple[float, ...]:
        """RMS difference of each two consecutive rounds on their common channels; none in a model of one round."""
        return tuple(float(rms(difference_to_next(*both))) for both in pairwise(self.rounds))


def gate_distributions(model: RoundModel, blocks: Sequence[int] | None = None) -> tuple[GateDistribution, ...]:
    """The multipliers of every branch at some blocks, in the order of the blocks.

    Args:
        model: A ProgResViT with PSG.
        blocks: Counted from 1; None takes the first, the middle and the last.
    """
    rounds = round_gates(model)
    depth = len(rounds[0].blocks)
    if blocks is None:
        blocks = (1, (depth + 1) // 2, depth)
    wrong = [block for block in blocks if not 1 <= block <= depth]
    if wrong or not blocks:
        named = f"there is no block {wrong[0]}" if wrong else "no block is given"
        raise ValueError(f"{named}; this model has blocks 1 to {depth}.")
    return tuple(
        GateDistribution(block=block, branch=branch, rounds=tuple(round_.blocks[block - 1, place] for round_ in rounds))
        for block in sorted(set(blocks))
        for place, branch in enumerate(BRANCHES)
    )


def gate_distributions_table(distributions: Sequence[GateDistribution]) -> Table:
    """A row for each round, block and branch; the separation is from the next round."""
    shares = [Column(f"percentile_{share}", f"{share} %", decimals) for share in PERCENTILES]
    columns = [
        Column("round", "round"),
        Column("block", "block"),
        Column("branch", "branch", left=True),
        Column("channels", "channels"),
        Column("mean", "mean", decimals),
        Column("std", "std", decimals),
        *shares,
        Column("rms_difference_to_next_round", "RMS difference to next round", decimals),
    ]
    rows = []
    for number in range(len(distributions[0].rounds)):
        for panel in distributions:
            values, separations = panel.rounds[number].astype(np.float64), panel.separations
            percentiles = np.percentile(values, PERCENTILES).tolist()
            rows.append(
                {
                    "round": number + 1,
                    "block": panel.block,
                    "branch": panel.branch,
                    "channels": len(values),
                    "mean": float(values.mean()),
                    "std": float(values.std()),
                    **{column.key: value for column, value in zip(shares, percentiles)},
                    "rms_difference_to_next_round": separations[number] if number < len(separations) else None,
                }
            )
    return Table("Distributions of PSG's multipliers", columns, rows)


def gate_distributions_figure(distributions: Sequence[GateDistribution]) -> Figure:
    """A panel for each block and branch with a histogram for each round; the title gives the separations.

    Each panel has a range of its own, which includes 1.

    Args:
        distributions: What :func:`gate_distributions` returns.
    """
    lines = len(distributions) // len(BRANCHES)
    figure = blank_figure(height=1.4 + 1.55 * lines, title=_finding(distributions))
    panels = figure.subplots(lines, len(BRANCHES), squeeze=False)
    for panel, distribution in zip(panels.flat, distributions):
        _draw(panel, distribution)
        title = f"block {distribution.block}: {distribution.branch}"
        if separations := distribution.separations:
            title += f"\nΔ = {', '.join(f'{separation:.3f}' for separation in separations)}"
        panel.set_title(title, fontsize=9)
    for panel in panels[:, 0]:
        panel.set_ylabel("channels (%)", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("multiplier", fontsize=9)
    handles, names = panels[0, 0].get_legend_handles_labels()
    caption = "Panels differ in scale; the vertical line is at 1."
    if len(distributions[0].rounds) > 1:
        caption = f"Δ: RMS difference of consecutive rounds on their common channels.\n{caption}"
    legend = figure.legend(handles, names, ncols=4, fontsize=9, title=caption, **BELOW)
    legend.get_title().set(fontsize=8.5, multialignment="center")
    return figure


def _finding(distributions: Sequence[GateDistribution]) -> str:
    """Where the rounds differ most; of a model of one round, the range of the multipliers."""
    if len(distributions[0].rounds) == 1:
        every = np.concatenate([panel.rounds[0] for panel in distributions])
        return f"PSG's multipliers in these blocks are from {every.min():.2f} to {every.max():.2f}"
    most = max(distributions, key=lambda panel: max(panel.separations))
    largest = f"Δ\u00a0=\u00a0{max(most.separations):.3f}"
    return f"Largest difference of rounds here: {largest} in block {most.block}, {most.branch}"


def _draw(panel: Axes, distribution: GateDistribution) -> None:
    """Histograms of the rounds over each other, in bins that they share."""
    every = np.concatenate(distribution.rounds).astype(np.float64)
    low, high = float(every.min()), float(every.max())
    if high - low < 1e-6:  # constant multipliers
        low, high = low - 0.05, high + 0.05
    for number, values in enumerate(distribution.rounds):
        colour = COLOURS[number % len(COLOURS)]
        panel.hist(
            values,
            bins=np.linspace(low, high, BINS + 1).tolist(),
            weights=np.full(len(values), 100 / len(values)),
            histtype="stepfilled",
            facecolor=(colour, 0.3),
            edgecolor=colour,
            linestyle=LINES[number % len(LINES)],
            hatch=HATCHES[number % len(HATCHES)],
            linewidth=1.2,
            label=f"round {number + 1}",
        )
    panel.axvline(1, color="black", linewidth=1)
    add_grid(panel)
    panel.tick_params(labelsize=8)
    panel.locator_params(nbins=4)
