"""Tokens at every block of every round, comparable with each other, and an x axis of the blocks.

Tokens are compared after the model's final norm, as the head and the next round of a ProgResViT read them. In the
residual stream itself, a few large channels dominate in some blocks (bundled models). Rounds of different width are
compared in the channels that all of them have: a channel of a narrow round is the same channel in a wide one.

Letters: B images of a batch, C image channels, H side of the images, T tokens (the class token and the patches), d
channels that are compared, P points: what the first block of each round receives and what each block returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from progresvit.analysis.hooks import recorded_calls
from progresvit.analysis.sample import Sample
from progresvit.io.resumable import Progress
from progresvit.metrics.arrays import Floats
from progresvit.model import slicing
from progresvit.model.backbone import Backbone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK_AXIS = "blocks run in the round (0: input of its first block)"
"""Label of the x axis that :func:`mark_rounds` draws."""
MOST_TICKS = 24
"""Block numbers below a figure."""


class BlockPoint(NamedTuple):
    """A place in the model: a block of a round, both counted from 1. Block 0 is what the first block receives.

    Blocks are counted anew in every round, also where a round continues with the next blocks (early exits).
    """

    round: int
    block: int


def measure_points(
    model: Backbone, sample: Sample, measure: Callable[[list[Tensor]], Tensor], progress: Progress | None = None
) -> tuple[tuple[BlockPoint, ...], list[Floats]]:
    """The points of the model, and what ``measure`` gives for each batch.

    Args:
        model: It runs all rounds.
        sample: The images.
        measure: Takes the tokens at each point in the order in which the model runs: P times (B, T, d).
        progress: Called after each batch.
    """

    def measure_batch(rows: slice, images: Tensor) -> tuple[tuple[BlockPoint, ...], Floats]:
        rounds = round_tokens(model, images)
        points = (BlockPoint(s, block) for s, tokens in enumerate(rounds, start=1) for block in range(len(tokens)))
        return tuple(points), measure([x for tokens in rounds for x in tokens]).double().cpu().numpy()

    batches = sample.run(model, measure_batch, progress)
    return batches[0][0], [values for _, values in batches]


def round_tokens(model: Backbone, images: Tensor) -> list[list[Tensor]]:
    """What the first block of each round receives and what each block returns, after the final norm.

    (B, C, H, H) -> (B, T, d) at each point, cut to the channels that all rounds have.
    """
    rounds, previous = [], None
    for s in range(len(model.config.rounds)):
        with recorded_calls(model.blocks) as calls:
            tokens = model.run_round(s, images, previous).tokens
        previous = tokens if model.config.routable else None
        at_points = (calls[0].x, *(call.tokens for call in calls))
        rounds.append([slicing.layer_norm(x, model.norm).float() for x in at_points])
    d = min(tokens[0].shape[-1] for tokens in rounds)
    return [[x[..., :d] for x in tokens] for tokens in rounds]


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
    for step in range(1, last + 2):  # every step-th block has a number
        numbered = [place for place, point in enumerate(points) if point.block % step == 0]
        if len(numbered) <= MOST_TICKS:
            break
    axes.set_xticks(xs[numbered], [str(points[place].block) for place in numbered], fontsize=9)
    axes.set_xlim(xs[0] - 0.5, xs[-1] + 0.5)
    rounds = [xs[places] for places in places_by_round(points)]
    for number, (first, *_, end) in enumerate(rounds, start=1):
        if number % 2 == 0:
            axes.axvspan(first - 0.5, end + 0.5, color="0.93", zorder=0, linewidth=0)
        name = f"round {number}" if len(rounds) <= 6 else str(number)
        axes.text((first + end) / 2, 1.0, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_title(axes.get_title(), fontsize=11, pad=18)
