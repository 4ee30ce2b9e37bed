"""PSG's multipliers against the block: mean and spread in every round, and how far they depend on the round.

On the channels that two consecutive rounds run, a multiplier deviates from 1 by a part that both rounds share (their
mean deviation m, the static part) and a part that depends on the round (half of their difference d, up in one round and
down in the other): (g1 - 1)² + (g2 - 1)² = 2 m² + d² / 2 for each channel. The static share of the squared deviation is
sum(2 m²) / sum(2 m² + d² / 2): 1 if the gates of both rounds are equal.

Letters: D blocks, d difference of the multipliers of two rounds, g a multiplier, m mean deviation of two rounds from 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from progresvit.analysis.gates import BRANCHES, difference_to_next, rms, round_gates
from progresvit.metrics.arrays import Floats
from progresvit.model.interface import RoundModel
from progresvit.plots import BELOW, COLOURS, MARKERS, add_grid, blank_figure, curve_style
from progresvit.table import Column, Row, Table, decimals, rough_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


@dataclass(frozen=True, kw_only=True)
class RoundChange:
    """The multipliers of two consecutive rounds, on the channels of both. Each (D, 3): block, branch."""

    rms_difference: Floats
    """RMS of the difference d over the channels."""
    rms_static: Floats
    """RMS of the mean deviation m."""

    def static_share(self, block: int | None = None) -> tuple[float | None, ...]:
        """The static share of each branch, of all blocks or of one (from 0); None if every multiplier is 1."""
        blocks = slice(None) if block is None else slice(block, block + 1)
        static = np.square(self.rms_static[blocks]).sum(axis=0)  # (D, 3) -> (3,)
        changing = np.square(self.rms_difference[blocks] / 2).sum(axis=0)  # (D, 3) -> (3,)
        return tuple(float(s / (s + c)) if s + c else None for s, c in zip(static, changing))


@dataclass(frozen=True, kw_only=True)
class RoundDepth:
    """The multipliers of a round over its active channels. Each (D, 3): block, branch."""

    mean: Floats
    std: Floats
    rms_from_one: Floats
    """RMS of g - 1."""
    to_next: RoundChange | None
    """None in the last round."""


def gate_depth(model: RoundModel) -> tuple[RoundDepth, ...]:
    """Mean, spread and change of the multipliers in every block of every round.

    Args:
        model: A ProgResViT with PSG.
    """
    rounds = round_gates(model)
    depths = []
    for round_, later in zip_longest(rounds, rounds[1:]):
        g, change = round_.blocks.astype(np.float64), None
        if later is not None:
            difference = difference_to_next(round_.blocks, later.blocks)  # (D, 3, channels of both)
            change = RoundChange(rms_difference=rms(difference), rms_static=rms(g + difference / 2 - 1))
        depths.append(RoundDepth(mean=g.mean(axis=-1), std=g.std(axis=-1), rms_from_one=rms(g - 1), to_next=change))
    return tuple(depths)


def static_share(depths: Sequence[RoundDepth]) -> tuple[dict[str, float | None], ...]:
    """The static share of each branch over all blocks, for each transition; None if every multiplier is 1.

    With a share near 1, PSG scales the channels almost alike in both rounds. With 0.5, half of the squared deviation
    from 1 depends on the round.

    Args:
        depths: What :func:`gate_depth` returns.
    """
    transitions = [round_.to_next for round_ in depths if round_.to_next is not None]
    return tuple(dict(zip(BRANCHES, transition.static_share())) for transition in transitions)


def gate_depth_table(depths: Sequence[RoundDepth]) -> Table:
    """A row for each round, block and branch. Numbers that compare with the next round are empty in the last."""
    columns = [
        Column("round", "round"),
        Column("block", "block"),
        Column("branch", "branch", left=True),
        Column("mean", "mean", decimals),
        Column("std", "std", decimals),
        Column("rms_from_one", "RMS from 1", decimals),
        Column("rms_difference_to_next_round", "RMS difference to next round", decimals),
        Column("rms_static", "RMS static part", decimals),
        Column("static_share", "static share (%)", rough_percent),
    ]
    rows = [
        {"round": number, "block": block + 1, "branch": branch, **_numbers(round_, block, place)}
        for number, round_ in enumerate(depths, start=1)
        for block in range(len(round_.mean))
        for place, branch in enumerate(BRANCHES)
    ]
    return Table("PSG's multipliers against the block", columns, rows)


def _numbers(round_: RoundDepth, block: int, place: int) -> Row:
    at, transition = (block, place), round_.to_next
    return {
        "mean": float(round_.mean[at]),
        "std": float(round_.std[at]),
        "rms_from_one": float(round_.rms_from_one[at]),
        "rms_difference_to_next_round": None if transition is None else float(transition.rms_difference[at]),
        "rms_static": None if transition is None else float(transition.rms_static[at]),
        "static_share": None if transition is None else transition.static_share(block)[place],
    }


def gate_depth_figure(depths: Sequence[RoundDepth]) -> Figure:
    """Above, mean and spread of every round; below, the change between rounds beside the static part.

    A model of one round has the upper row alone.

    Args:
        depths: What :func:`gate_depth` returns.
    """
    compared = len(depths) > 1
    figure = blank_figure(height=5.8 + 0.2 * (len(depths) - 1) if compared else 3.2, title=_finding(depths))
    halves = figure.subfigures(2 if compared else 1, 1, squeeze=False)[:, 0]
    _draw_means(halves[0], depths)
    if compared:
        _draw_changes(halves[1], depths)
    return figure


def _finding(depths: Sequence[RoundDepth]) -> str:
    """How much of the deviation from 1 rounds share; of a model of one round, the range of the means."""
    shares = [share for shares in static_share(depths) for share in shares.values() if share is not None]
    if not shares:
        means = np.concatenate([round_.mean for round_ in depths])
        return f"Mean multipliers of PSG are from {means.min():.2f} to {means.max():.2f}"
    which = "both rounds" if len(depths) == 2 else "consecutive rounds"
    reach = " to ".join(dict.fromkeys(f"{100 * share:.0f}" for share in (min(shares), max(shares))))
    return f"{reach} % of the gates' squared deviation from 1 is common to {which}"


def _draw_means(half: SubFigure, depths: Sequence[RoundDepth]) -> None:
    """Lines of the means, bands of one standard deviation to either side."""
    panels = half.subplots(1, len(BRANCHES))
    for place, (panel, branch) in enumerate(zip(panels, BRANCHES)):
        panel.axhline(1, color="0.4", linewidth=1)
        for number, round_ in enumerate(depths):
            mean, std = round_.mean[:, place], round_.std[:, place]
            blocks = np.arange(1, len(mean) + 1)
            marks = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4}
            panel.plot(blocks, mean, label=f"round {number + 1}", **marks, **curve_style(number))
            panel.fill_between(blocks, mean - std, mean + std, color=COLOURS[number % len(COLOURS)], alpha=0.2)
        _finish(panel, branch, len(depths[0].mean))
    panels[0].set_ylabel("mean multiplier", fontsize=10)
    _legend(half, panels[0], band="± standard deviation over channels")


def _draw_changes(half: SubFigure, depths: Sequence[RoundDepth]) -> None:
    """RMS of the difference and of the static part, on a logarithmic scale."""
    panels = half.subplots(1, len(BRANCHES), sharey=True)
    shares = static_share(depths)
    for place, (panel, branch) in enumerate(zip(panels, BRANCHES)):
        for number, round_ in enumerate(depths[:-1]):
            assert round_.to_next is not None
            name = f"rounds {number + 1} and {number + 2}: " if len(depths) > 2 else ""
            blocks = np.arange(1, len(round_.mean) + 1)
            lines = {"difference d": round_.to_next.rms_difference, "static part m": round_.to_next.rms_static}
            for kind, (what, values) in enumerate(lines.items()):
                colour = COLOURS[(2 + 2 * number + kind) % len(COLOURS)]
                style = {"color": colour, "linestyle": "-" if kind == 0 else "--", "markersize": 4, "clip_on": False}
                marker = MARKERS[(2 + 2 * number + kind) % len(MARKERS)]
                panel.plot(blocks, values[:, place], label=f"{name}{what}", marker=marker, **style)
        branch_shares = [share[branch] for share in shares]
        digits = 1 if len(branch_shares) == 1 else 0  # the title stays in its panel
        text = ", ".join("–" if share is None else f"{100 * share:.{digits}f}" for share in branch_shares)
        _finish(panel, f"{branch}\nstatic share {text} %", len(depths[0].mean))
    _scale(panels[0], np.concatenate([line.get_ydata() for panel in panels for line in panel.lines]))
    panels[0].set_ylabel("RMS over channels", fontsize=10)
    caption = "d: difference of the rounds, m: mean deviation from 1; static share: Σ m² / Σ (m² + d²/4)"
    _legend(half, panels[0], caption)


def _scale(panel: Axes, values: Floats) -> None:
    """Logarithmic, in whole decades; if some values are 0, linear up to the decade of the smallest other one."""
    positive = values[values > 0] if values.any() else np.array([2e-3])
    low, high = 10 ** np.floor(np.log10(positive.min())), 10 ** np.ceil(np.log10(positive.max()))
    if values.all():
        panel.set_yscale("log")
    else:
        panel.set_yscale("symlog", linthresh=low)
    panel.set_ylim(low if values.all() else 0, high)
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("")


def _finish(panel: Axes, title: str, blocks: int) -> None:
    panel.set_title(title, fontsize=9)
    panel.set_xlabel("block", fontsize=9)
    panel.set_xticks(range(blocks, 0, -math.ceil(blocks / 6)))  # the last block has a tick
    add_grid(panel)
    panel.tick_params(labelsize=8)


def _legend(half: SubFigure, panel: Axes, caption: str | None = None, band: str | None = None) -> None:
    """A legend below the panels."""
    from matplotlib.patches import Patch

    handles, names = panel.get_legend_handles_labels()
    if band is not None:
        handles, names = [*handles, Patch(color="0.6", alpha=0.5, linewidth=0)], [*names, band]
    half.legend(handles, names, ncols=2 if caption else 4, fontsize=9, title=caption, **BELOW)
    half.legends[-1].get_title().set_fontsize(8.5)
