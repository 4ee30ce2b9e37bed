"""All channel multipliers of PSG: every block, round and branch, and the gates of the transitions.

The gates do not depend on the image: they are constants of the model, and no images are needed.

Letters: S rounds, D blocks, d active channels of a round, W channels of the whole backbone, g a multiplier, s a round
counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from progresvit.config import HEAD_WIDTH
from progresvit.metrics.arrays import Float32s
from progresvit.model.interface import RoundModel
from progresvit.model.vit import ProgResViT
from progresvit.plots import blank_figure
from progresvit.table import Column, Table, decimals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

BRANCHES = ("attention", "MLP", "output")
"""What the three multipliers of a block scale: the updates of attention and MLP, and the output of the block."""
STREAMS = ("image", "previous")
"""What the two multipliers of a transition scale: the new tokens of the image, and the tokens of the round before."""
COLOURS = "RdBu_r"
"""Diverging colour map, white in the middle; colour-blind readers see its two sides."""
LIMIT = 99.5
"""Percentile of |g - 1| at the ends of the colour scale."""
ROUNDING = 1e-6
"""Largest rounding error of a multiplier near 1 in float32."""


@dataclass(frozen=True, kw_only=True)
class RoundMultipliers:
    """The multipliers of a round, on its active channels."""

    blocks: Float32s
    """(D, 3, d): attention, MLP, output. Attention and MLP include PSG's scale vectors."""
    fusion: Float32s | None
    """(2, d): image, previous round. None in the first round, which has no transition."""
    resolution: int
    """Pixels of the round."""
    width: int
    """Channels of the whole backbone. The round runs the first d of them; the others are inactive."""

    @property
    def channels(self) -> int:
        """Active channels d."""
        return int(self.blocks.shape[-1])


def round_gates(model: RoundModel) -> tuple[RoundMultipliers, ...]:
    """The multipliers of every round, first to last.

    Args:
        model: A ProgResViT with PSG, conditioned on the round or static.
    """
    if not isinstance(model, ProgResViT) or model.psg is None:
        why = "psg is off" if isinstance(model, ProgResViT) else f"kind {model.config.kind!r}"
        raise ValueError(
            f"gates are PSG's channel multipliers, and this model has none ({why}); give a model with PSG, such as "
            "imagenet-tiny."
        )
    rounds = []
    with torch.no_grad():
        for s, round_ in enumerate(model.config.rounds):
            fusion, blocks = model.gates(s)
            rounds.append(
                RoundMultipliers(
                    blocks=np.stack([_vectors(gates) for gates in blocks]),  # D x (3, d) -> (D, 3, d)
                    fusion=_vectors(fusion) if s else None,
                    resolution=round_.resolution,
                    width=model.config.width,
                )
            )
    return tuple(rounds)


def _vectors(gates: Sequence[Tensor | float]) -> Float32s:
    """k vectors (d,) -> (k, d)."""
    stacked: Float32s = torch.stack([torch.as_tensor(vector) for vector in gates]).float().cpu().numpy()
    return stacked


def difference_to_next(earlier: Float32s, later: Float32s) -> NDArray[np.float64]:
    """Multipliers of a round minus the multipliers of the round before, on the channels of both.

    Rounds never become narrower, so these are the channels of the earlier one: (..., d) and (..., d') -> (..., d).
    Differences that are rounding errors of float32 are 0: static gates are equal in all rounds.
    """
    later = later[..., : earlier.shape[-1]]  # (..., d') -> (..., d)
    equal = np.isclose(later, earlier, rtol=ROUNDING, atol=ROUNDING)
    return np.where(equal, 0, later.astype(np.float64) - earlier)


def rms(values: NDArray[Any]) -> NDArray[np.float64]:
    """Root mean square over the channels: (..., d) -> (...)."""
    mean: NDArray[np.float64] = np.square(values, dtype=np.float64).mean(axis=-1)
    return np.sqrt(mean)


def gates_table(rounds: Sequence[RoundMultipliers]) -> Table:
    """Every multiplier. Rounds, blocks and channels are counted from 1; gates of a transition have no block."""
    columns = [
        Column("round", "round"),
        Column("branch", "branch", left=True),
        Column("block", "block"),
        Column("channel", "channel"),
        Column("multiplier", "multiplier", decimals),
    ]
    rows = []
    for number, round_ in enumerate(rounds, start=1):
        vectors: list[tuple[str, int | None, Float32s]] = [
            (f"fusion {stream}", None, vector)
            for stream, vector in zip(STREAMS, () if round_.fusion is None else round_.fusion)
        ]
        vectors += [
            (branch, block + 1, round_.blocks[block, place])
            for place, branch in enumerate(BRANCHES)
            for block in range(len(round_.blocks))
        ]
        rows += [
            {"round": number, "branch": branch, "block": block, "channel": channel, "multiplier": float(value)}
            for branch, block, vector in vectors
            for channel, value in enumerate(vector, start=1)
        ]
    return Table("Multipliers of PSG", columns, rows)


def gates_figure(rounds: Sequence[RoundMultipliers]) -> Figure:
    """Heat maps of all multipliers in one diverging colour scale with white at 1; inactive channels are grey.

    A row of panels for each round, a panel for each branch, a line for each block. The two lines above a later round
    are the gates of its transition. The colour scale ends at the 99.5th percentile of |g - 1| over all multipliers. It
    is linear near 1 and logarithmic farther out (asinh), so that small deviations are visible beside large ones.
    Channels are in the order of the heads, 64 for each. A .pdf or .svg holds all of them; a panel of a .png is 280
    pixels wide and omits some channels of a wider model.

    Args:
        rounds: What :func:`round_gates` returns.
    """
    side = min(2.6, max(1.0, 0.115 * len(rounds[0].blocks)))  # of a panel, in inches
    strips = [[] if round_.fusion is None else [0.34] for round_ in rounds]
    heights = [height for strip in strips for height in (*strip, side)]
    figure = blank_figure(height=1.6 + sum(heights) + 0.68 * len(heights), title=_farthest(rounds))
    grid = figure.add_gridspec(len(heights), len(BRANCHES), height_ratios=heights)
    norm, line = deviation_norm(rounds), 0
    for number, round_ in enumerate(rounds, start=1):
        if round_.fusion is not None:
            strip = figure.add_subplot(grid[line, :])
            _draw(strip, round_.fusion, round_, norm, strip=True)
            strip.set_yticks([1, 2], STREAMS, fontsize=8)
            strip.set_xlabel("channel", fontsize=9, labelpad=1)
            strip.set_title(f"transition from round {number - 1} to {number}: fusion gates", fontsize=9)
            line += 1
        for place, branch in enumerate(BRANCHES):
            panel = figure.add_subplot(grid[line, place])
            _draw(panel, round_.blocks[:, place], round_, norm)
            panel.set_title(f"round {number}: {branch}", fontsize=9)
            _label(panel, blocks=len(round_.blocks), first=place == 0)
        line += 1
    _draw_scale(figure, norm)
    return figure


def _farthest(rounds: Sequence[RoundMultipliers]) -> str:
    """The block and branch whose mean multipliers deviate most from 1, with the means of all rounds."""
    means = np.stack([round_.blocks.mean(axis=-1, dtype=np.float64) for round_ in rounds])  # (S, D, 3)
    _, block, branch = np.unravel_index(np.abs(means - 1).argmax(), means.shape)
    values = ", ".join(f"{mean:.2f} in round {s}" for s, mean in enumerate(means[:, block, branch], start=1))
    return f"Of all blocks, gates are farthest from 1 in block {block + 1}, {BRANCHES[branch]}: on average {values}"


def _draw_scale(figure: Figure, norm: Normalize) -> None:
    """The colour scale and its caption, below all panels."""
    from matplotlib.cm import ScalarMappable

    bar = figure.colorbar(
        ScalarMappable(norm, COLOURS), ax=figure.axes, location="bottom", extend="both", aspect=45, shrink=0.9, pad=0.02
    )
    ticks = scale_ticks(norm)
    bar.set_ticks(ticks, labels=[f"{tick:.4g}".replace("-", "−") for tick in ticks], fontsize=8)
    bar.minorticks_off()
    bar.set_label(
        "multiplier g, white: 1\n"
        "The scale is linear up to the median of |g − 1| and logarithmic beyond.\n"
        f"It ends at the {LIMIT}th percentile; values beyond have the colours of the arrows.",
        fontsize=8.5,
    )


def deviation_norm(rounds: Sequence[RoundMultipliers]) -> Normalize:
    """One scale for all multipliers: 1 in the middle, linear up to the median of |g - 1|, logarithmic farther out."""
    from matplotlib.colors import FuncNorm

    arrays = [array for round_ in rounds for array in (round_.blocks, round_.fusion) if array is not None]
    deviation = np.concatenate([np.abs(array - 1).ravel() for array in arrays])
    middle, limit = (float(np.percentile(deviation, share)) for share in (50, LIMIT))
    limit = limit or float(deviation.max()) or 0.1  # gates that are all one
    linear = middle or limit

    def forward(g: Any) -> Any:
        return np.arcsinh((np.asarray(g) - 1) / linear)

    def inverse(y: Any) -> Any:
        return 1 + linear * np.sinh(y)

    return FuncNorm((forward, inverse), vmin=1 - limit, vmax=1 + limit)


def scale_ticks(norm: Normalize) -> list[float]:
    """1 and round deviations to either side, not too close to each other on the scale."""
    assert norm.vmax is not None
    limit, kept = norm.vmax - 1, list[float]()
    top = math.floor(math.log10(limit))
    steps = [unit * 10.0**power for power in range(top, top - 5, -1) for unit in (5, 2, 1)]
    for step in steps:
        distance = float(norm(1 + step)) - 0.5
        if step <= limit and distance > 0.07 and all(float(norm(1 + other)) - 0.5 - distance > 0.07 for other in kept):
            kept.append(step)
    return sorted({1.0, *(1 + step for step in kept), *(1 - step for step in kept)})


def _draw(panel: Axes, values: Float32s, round_: RoundMultipliers, norm: Normalize, *, strip: bool = False) -> None:
    """Lines of multipliers, (k, d); the remaining channels of the backbone are grey. A strip is as wide as the page."""
    lines, d = values.shape
    extent = (0.5, d + 0.5, lines + 0.5, 0.5)  # line and channel numbers are the coordinates
    panel.imshow(values, extent=extent, cmap=COLOURS, norm=norm, aspect="auto", interpolation="none")
    panel.set(xlim=(0.5, round_.width + 0.5), ylim=(lines + 0.5, 0.5), facecolor="0.82")
    step = HEAD_WIDTH * math.ceil(round_.width / HEAD_WIDTH / 4)
    panel.set_xticks([1, *range(step, round_.width + 1, step)])
    panel.tick_params(labelsize=8)
    inactive = 1 - d / round_.width
    if inactive > (0.1 if strip else 0):  # the text fits
        place = ((d + round_.width + 1) / 2, (lines + 1) / 2)
        angle = 0 if strip or inactive > 0.3 else 90
        panel.text(*place, "inactive", ha="center", va="center", fontsize=8, rotation=angle)


def _label(panel: Axes, *, blocks: int, first: bool) -> None:
    """The axes of a panel of blocks."""
    panel.set_yticks(range(blocks, 0, -math.ceil(blocks / 12)))  # the last block has a tick
    if first:
        panel.set_ylabel("block", fontsize=9)
    else:
        panel.tick_params(labelleft=False)
    panel.set_xlabel("channel", fontsize=9, labelpad=1)
