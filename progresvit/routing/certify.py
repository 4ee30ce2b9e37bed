"""A threshold with a guarantee: with probability 1 - delta over the draw of the calibration images, the share of images
that leaving early harms is at most epsilon.

Fixed-sequence testing: a grid of thresholds, fixed before the images are seen, is walked upwards. Each threshold is
tested with the exact binomial tail P(Bin(n, epsilon) <= k), where k of n images left early and were harmed; the walk
ends at the first that fails, and the last that passed is certified. No correction for many tests is needed, since the
first threshold that is not safe is passed with a probability of at most delta.

An image that leaves after a round is harmed if that round is wrong and the last one right (labelled: the harm bounds
the drop in accuracy) or if the two disagree (unlabelled: disagreement bounds the drop too, and needs no labels).
Letters: N images, S rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit.routing.arrays import HIGHEST
from progresvit.routing.frontier import Floats, as_scores, exit_counts, routed_counts

GRID = 2001
"""Thresholds in the grid of one round."""
COMBINATIONS = 4000
"""Threshold vectors of several rounds, about, among which the path is found."""


@dataclass(frozen=True, kw_only=True)
class CertifiedThreshold:
    """A threshold, or one per round but the last, and what was certified of it on which evidence."""

    threshold: float | tuple[float, ...]
    epsilon: float
    delta: float
    images: int
    """n: images that the test was made on."""
    harmed: int
    """k: of these, how many left early at the threshold and were harmed."""
    p_value: float
    tested: int
    """Thresholds of the grid or path."""
    design_images: int = 0
    """Images that only served to order the thresholds; they are not among the n."""

    @property
    def too_few(self) -> bool:
        """Whether so few images could not have certified any threshold, not even without a single harm."""
        return self.images < needed_images(self.epsilon, self.delta)


def needed_images(epsilon: float, delta: float) -> int:
    """The fewest images that can certify anything: without a single harm, (1 - epsilon) ** n must be delta at most."""
    _check(epsilon, delta)
    return math.ceil(math.log(delta) / math.log1p(-epsilon) - 1e-9)


def certified_threshold(
    entropy: Any, loss: Any, epsilon: float, delta: float, *, highest: float = HIGHEST, grid: int = GRID
) -> CertifiedThreshold:
    """The highest threshold that is certified for two rounds; 0, at which every image runs both, if none is.

    ``entropy`` is the score of round 1 and ``loss`` the harm if the image left there, one of each per image, as
    tensors, arrays or lists. ``highest`` ends the grid: ln 10 for entropies, 1 for a learned router's probabilities.
    """
    _check(epsilon, delta)
    if grid < 200:
        raise ValueError(f"the grid has at least 200 thresholds, not {grid}; a coarse one wastes what could be saved.")
    if not 0 < highest < math.inf:
        raise ValueError(f"the grid ends above 0: at ln 10 for entropies, at 1 for probabilities, not at {highest}.")
    scores, harms = np.asarray(_to_host(entropy), np.float64), _as_losses(loss)
    if scores.ndim != 1 or scores.shape != harms.shape:
        raise ValueError(f"entropies {scores.shape} and losses {harms.shape} are one of each per image.")
    if not len(scores):
        raise ValueError("there are no images to certify on; give at least one entropy and loss.")
    scores = as_scores(scores[:, None])[:, 0]
    thresholds = np.linspace(0.0, highest, grid)
    harmful = np.sort(scores[harms])
    harmed = np.searchsorted(harmful, thresholds, side="left")  # of strictly lower score
    return _walk(thresholds[:, None], harmed, len(scores), epsilon, delta)


def certified_thresholds(
    scores: Any,
    losses: Any,
    gmacs: Sequence[float],
    epsilon: float,
    delta: float,
    *,
    highest: float = HIGHEST,
    design_share: float = 0.3,
    seed: int = 0,
) -> CertifiedThreshold:
    """One threshold per round but the last, for any number of rounds; ``scores`` and ``losses`` are (N, S).

    With three rounds and more there is no natural order of the thresholds to walk along. A share of the images, drawn
    at random, is spent on one: the combinations that are cheapest for their harm there, by rising harm. The walk is
    then made on the other images.
    """
    values = as_scores(_to_host(scores))
    harms = _as_losses(losses)
    if harms.shape != values.shape:
        raise ValueError(
            f"scores of shape {values.shape} with losses of shape {harms.shape}; both are images x rounds."
        )
    if values.shape[1] == 1:
        raise ValueError("a model of one round has no threshold to certify.")
    if values.shape[1] == 2:
        return certified_threshold(values[:, 0], harms[:, 0], epsilon, delta, highest=highest)
    _check(epsilon, delta)
    if not 0 < design_share < 1:
        raise ValueError(f"the share of the images that orders the thresholds is between 0 and 1, not {design_share}.")
    order = np.random.default_rng(seed).permutation(len(values))
    design, test = np.split(order, [round(design_share * len(values))])
    if not len(design) or not len(test):
        raise ValueError(f"{len(values)} images are too few to set some aside for ordering the thresholds.")
    harms[:, -1] = False  # who runs every round is not harmed
    path = _order_on(values[design], harms[design], np.asarray(gmacs, np.float64), highest)
    harmed = routed_counts(values[test], harms[test], path).sum(axis=1)
    return _walk(path, harmed, len(test), epsilon, delta, design_images=len(design))


def _walk(
    path: Floats, harmed: NDArray[np.int64], images: int, epsilon: float, delta: float, design_images: int = 0
) -> CertifiedThreshold:
    from scipy.stats import binom  # slow to import, and training and engine import this room without certifying

    p_values = binom.cdf(harmed, images, epsilon)
    failed = np.flatnonzero(p_values > delta)
    passed = int(failed[0]) if len(failed) else len(path)
    last = max(passed - 1, 0)  # the path begins at 0, where nothing leaves and nothing is harmed
    row = path[last].tolist()
    return CertifiedThreshold(
        threshold=row[0] if len(row) == 1 else tuple(row),
        epsilon=epsilon,
        delta=delta,
        images=images,
        harmed=int(harmed[last]),
        p_value=float(p_values[last]),
        tested=len(path),
        design_images=design_images,
    )


def _order_on(scores: Floats, harms: NDArray[np.bool_], gmacs: Floats, highest: float) -> Floats:
    """A path of threshold vectors from no exits to cheap and harmful: (steps, S - 1).

    Of all combinations of levels, those that no other beats in both compute and harm; ahead of them, small steps up to
    the first, since what harms nobody here may harm somebody else. A round's levels are quantiles of its scores, so
    they lie as close as the scores do.
    """
    between = scores.shape[1] - 1
    count = max(2, int(COMBINATIONS ** (1 / between)))
    levels = [_levels(scores[:, s], count, highest) for s in range(between)]
    numbers = np.stack(np.meshgrid(*(range(len(one)) for one in levels), indexing="ij"), axis=-1).reshape(-1, between)
    rows = _take(levels, numbers)
    spent = exit_counts(scores, rows) @ gmacs
    harmed = routed_counts(scores, harms, rows).sum(axis=1)
    order = np.lexsort((spent, harmed))  # by harm, then by compute
    cheapest = np.minimum.accumulate(spent[order])
    better = order[np.append(True, cheapest[1:] < cheapest[:-1])]
    first = numbers[better[0]]
    steps = np.linspace(0, 1, max(first.max(), 1), endpoint=False)[:, None] * first
    return np.vstack([_take(levels, steps.astype(int)), rows[better]])


def _take(levels: list[Floats], numbers: NDArray[np.int64]) -> Floats:
    """The levels of those numbers, one column for each round: (steps, S - 1)."""
    return np.stack([one[numbers[:, s]] for s, one in enumerate(levels)], axis=1)


def _levels(scores: Floats, count: int, highest: float) -> Floats:
    known = scores[np.isfinite(scores)]
    quantiles = np.quantile(known, np.linspace(0, 1, count)) if len(known) else np.zeros(0)
    return np.unique([0.0, *np.minimum(quantiles, highest), highest])


def _check(epsilon: float, delta: float) -> None:
    if not 0 < epsilon < 1:
        raise ValueError(
            f"epsilon, the share that may be harmed, is between 0 and 1 (0.005 is half a point), not {epsilon}."
        )
    if not 0 < delta < 1:
        raise ValueError(f"delta, the risk that the guarantee fails, is between 0 and 1 (0.05 for 95 %), not {delta}.")


def _as_losses(values: Any) -> NDArray[np.bool_]:
    losses = np.asarray(_to_host(values))
    if not np.isin(losses, (0, 1)).all():
        raise ValueError("losses are true (harmed if it left) or false.")
    return losses.astype(bool)


def _to_host(values: Any) -> Any:
    """Tensors may lie on a GPU, or be of a type that numpy does not know."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return values.float().numpy() if values.is_floating_point() else values.numpy()
    return values
