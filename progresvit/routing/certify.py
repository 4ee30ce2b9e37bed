"""A threshold with a guarantee: with probability 1 - delta over the draw of the calibration images, the share of images
that are harmed by an early exit, or the mean loss by early exits, is at most epsilon.

Fixed-sequence testing: the thresholds of a grid, fixed before the images are seen, are tested in ascending order.
Testing ends at the first threshold that fails, and the last that passed is certified. No correction for multiple tests
is needed, since the first unsafe threshold passes with a probability of at most delta.

The test depends on the losses. For losses of 0 and 1 it is the exact binomial tail P(Bin(n, epsilon) <= k), where k of
n images exited early and were harmed. For other losses from 0 to 1 it is the Hoeffding-Bentkus bound on the mean over
all n images, of which those that run every round have the loss 0 (Bates et al. 2021, "Distribution-free,
risk-controlling prediction sets"; Angelopoulos et al. 2021, "Learn then test").

An image that exits after a round is harmed if that round is wrong and the last one right (labelled: the harm bounds the
drop in accuracy) or if the two disagree (unlabelled: disagreement bounds the drop too, and needs no labels). In
segmentation its loss is the increase of its pixel error over the last round's, 0 where the error decreases.
Letters: N images, S rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from progresvit.metrics.arrays import Floats, Ints
from progresvit.metrics.binomial import binomial_tail
from progresvit.routing.decide import Threshold, as_scores
from progresvit.routing.scores import HIGHEST
from progresvit.routing.sums import exit_counts, routed_sums

Losses = NDArray[np.bool_ | np.float64]
"""Booleans or float64; it decides which test is used."""

MOST_RISK = 0.5
"""The largest delta: a guarantee holds at least as often as it fails."""
ROUNDING = 1e-6
"""Relative difference of p-values that scipy and ``binomial_tail`` may give."""
MOST_IMAGES = 10**12
"""Certificates of more images are refused: the time of their check grows with the root of the number."""
GRID = 2001
"""Thresholds in the grid of one round."""
COMBINATIONS = 4000
"""Approximate number of threshold vectors that are compared for several rounds."""


@dataclass(frozen=True, kw_only=True)
class CertifiedThreshold:
    """A threshold, its guarantee, and the evidence."""

    threshold: Threshold
    epsilon: float
    delta: float
    images: int
    """n: images of the test."""
    harmed: int
    """k: images of the test that exited early at the threshold and were harmed, that is, have a loss above 0."""
    mean_loss: float
    """Mean loss over the n images; for losses of 0 and 1 it is k / n."""
    p_value: float
    tested: int
    """Number of thresholds in the grid or path."""
    design_images: int = 0
    """Images that were used to order the thresholds; n does not include them."""
    choices: int = 1
    """Number of choices that the images made; the p-value is at most delta / choices."""

    @property
    def too_few(self) -> bool:
        """Whether there are too few images to certify any threshold, even with no harm at all."""
        return self.images < needed_images(self.epsilon, self.delta, self.choices)


def needed_images(epsilon: float, delta: float, choices: int = 1) -> int:
    """The fewest images that can certify anything: with no harm, (1 - epsilon) ** n must be at most delta / choices."""
    _check_guarantee(epsilon, delta, choices)
    return math.ceil(math.log(delta / choices) / math.log1p(-epsilon) - 1e-9)


def hoeffding_bentkus(mean_loss: ArrayLike, images: ArrayLike, epsilon: ArrayLike) -> Floats:
    """P-values of "the expected loss is above epsilon", for independent losses from 0 to 1; the arguments broadcast.

    The smaller of the bounds by Hoeffding, exp(-n h(R, epsilon)) with the relative entropy h of two Bernoulli
    variables, and by Bentkus, e P(Bin(n, epsilon) <= ceil(n R)). At R = 0 it is (1 - epsilon) ** n; it is 1 for R of
    epsilon or more.

    Args:
        mean_loss: R, the mean loss over the images.
        images: n, their number.
        epsilon: The bound that is tested, between 0 and 1.
    """
    from scipy.special import rel_entr  # slow to import, and training and the engine do not need it
    from scipy.stats import binom

    mean, count, bound = (np.asarray(value, np.float64) for value in (mean_loss, images, epsilon))
    if not ((mean >= 0) & (mean <= 1)).all():
        raise ValueError("a mean loss is between 0 and 1; divide losses by the largest that is possible.")
    if not ((bound > 0) & (bound < 1)).all() or not (count >= 1).all():
        raise ValueError("the bound epsilon is between 0 and 1, and there is at least one image.")
    low = np.minimum(mean, bound)
    hoeffding = np.exp(-count * (rel_entr(low, bound) + rel_entr(1 - low, 1 - bound)))
    bentkus = math.e * binom.cdf(np.ceil(count * mean - 1e-9), count, bound)  # 100 * 0.07 is a little more than 7
    return np.asarray(np.minimum(np.minimum(hoeffding, bentkus), 1.0))


def check_evidence(
    *,
    harmed: int,
    mean_loss: float | None,
    images: int,
    epsilon: float,
    delta: float,
    choices: int = 1,
    p_value: float | None = None,
) -> None:
    """Refuse the numbers of a certificate if they certify nothing, or give another p-value than they say.

    Args:
        harmed: k, of n images.
        mean_loss: For losses from 0 to 1, their mean; None for losses of 0 and 1.
        images: n.
        epsilon: The share of images that may be harmed, or the mean loss that is allowed.
        delta: The probability that the guarantee fails.
        choices: As in :func:`certified_threshold`.
        p_value: What is said; None if nothing is.
    """
    _check_guarantee(epsilon, delta, choices)
    if mean_loss is None:
        own = binomial_tail(harmed, images, epsilon) if 0 <= harmed <= images <= MOST_IMAGES else math.nan
    else:
        own = float(hoeffding_bentkus(mean_loss, images, epsilon))
    evidence = f"{harmed} harmed of {images} images at epsilon {epsilon:g} have a p-value of {own:.6g}"
    if p_value is not None and not math.isclose(own, p_value, rel_tol=ROUNDING, abs_tol=1e-12):
        raise ValueError(f"its numbers contradict each other: {evidence}, not {p_value:.6g}")
    if not own <= delta / choices * (1 + ROUNDING):
        over = "" if choices == 1 else f" / {choices} choices"
        raise ValueError(f"its numbers certify nothing: {evidence}, above delta = {delta:g}{over}")


def certified_threshold(
    entropy: Any,
    loss: Any,
    epsilon: float,
    delta: float,
    *,
    highest: float = HIGHEST,
    grid: int = GRID,
    fractional: bool | None = None,
    choices: int = 1,
) -> CertifiedThreshold:
    """The highest threshold that is certified for two rounds; 0, at which every image runs both, if none is.

    Args:
        entropy: The score of round 1, one per image: a tensor, array or list.
        loss: Whether an exit after round 1 harms the image, or its loss from 0 to 1; one per image.
        epsilon: The share of images that may be harmed, or the mean loss that is allowed.
        delta: The probability that the guarantee fails.
        highest: The end of the grid: ln 10 for entropies, ln K for entropies of patches, 1 for a learned router's
            probabilities.
        grid: Number of thresholds.
        fractional: Whether losses can lie between 0 and 1, even if none of these does; the test is then
            Hoeffding-Bentkus in any case. None derives it from these losses, on which a guarantee should not depend.
        choices: Number of scores, settings, seeds or models of which these images choose one. Each is certified at
            delta / choices, so that the guarantee holds for the chosen one, however it is chosen (Bonferroni).
    """
    _check_guarantee(epsilon, delta, choices)
    if grid < 200:
        raise ValueError(f"the grid has at least 200 thresholds, not {grid}; a coarse one wastes what could be saved.")
    if not 0 < highest < math.inf:
        raise ValueError(f"the grid ends above 0: at ln 10 for entropies, at 1 for probabilities, not at {highest}.")
    scores, losses = np.asarray(_to_host(entropy), np.float64), _as_losses(loss, fractional)
    if scores.ndim != 1 or scores.shape != losses.shape:
        raise ValueError(f"entropies {scores.shape} and losses {losses.shape} are one of each per image.")
    if not len(scores):
        raise ValueError("there are no images to certify on; give at least one entropy and loss.")
    scores = as_scores(np.column_stack([scores, scores]))  # (N,) -> (N, 2); the last round's are not used
    losses = np.pad(losses[:, None], ((0, 0), (0, 1)))  # (N,) -> (N, 2); the last round's are 0
    return _walk(np.linspace(0.0, highest, grid)[:, None], scores, losses, epsilon, delta, choices)


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
    fractional: bool | None = None,
    choices: int = 1,
) -> CertifiedThreshold:
    """One threshold per round but the last, for any number of rounds; ``scores`` and ``losses`` are (N, S).

    With three rounds or more the thresholds have no natural order to test them in. A random share of the images defines
    one: the combinations of lowest compute for their harm, by rising harm. The other images are used for the test.

    Args:
        scores: Entropies or router probabilities.
        losses: Whether an exit after each round harms the image, or its loss from 0 to 1.
        gmacs: Cumulative GMACs of the rounds.
        epsilon: The share of images that may be harmed, or the mean loss that is allowed.
        delta: The probability that the guarantee fails.
        highest: The highest threshold: ln 10 for entropies, ln K for entropies of patches, 1 for a learned router's
            probabilities.
        design_share: The share of the images that orders the thresholds.
        seed: Seed of the draw of these images.
        fractional: As in :func:`certified_threshold`.
        choices: As in :func:`certified_threshold`.
    """
    values = as_scores(_to_host(scores))
    harms = _as_losses(losses, fractional)
    if harms.shape != values.shape:
        raise ValueError(
            f"scores of shape {values.shape} with losses of shape {harms.shape}; both are images x rounds."
        )
    if values.shape[1] == 1:
        raise ValueError("a model of one round has no threshold to certify.")
    if values.shape[1] == 2:
        return certified_threshold(
            values[:, 0],
            harms[:, 0],
            epsilon,
            delta,
            highest=highest,
            fractional=harms.dtype != bool,
            choices=choices,
        )
    _check_guarantee(epsilon, delta, choices)
    if not 0 < design_share < 1:
        raise ValueError(f"the share of the images that orders the thresholds is between 0 and 1, not {design_share}.")
    order = np.random.default_rng(seed).permutation(len(values))
    design, test = np.split(order, [round(design_share * len(values))])
    if not len(design) or not len(test):
        raise ValueError(f"{len(values)} images are too few to set some aside for ordering the thresholds.")
    harms[:, -1] = False  # an image that runs every round is not harmed
    path = _order_on(values[design], harms[design], np.asarray(gmacs, np.float64), highest)
    return _walk(path, values[test], harms[test], epsilon, delta, choices, design_images=len(design))


def _walk(
    path: Floats,
    scores: Floats,
    losses: Losses,
    epsilon: float,
    delta: float,
    choices: int,
    design_images: int = 0,
) -> CertifiedThreshold:
    """Test the rows of the path in their order; ``losses`` of the last round are 0."""
    images = len(scores)
    harmed = routed_sums(scores, losses > 0, path)
    if losses.dtype == bool:
        from scipy.stats import binom  # slow to import, and training and the engine do not need it

        mean_loss, p_values = harmed / images, binom.cdf(harmed, images, epsilon)
    else:
        mean_loss = np.clip(routed_sums(scores, losses, path) / images, 0, 1)  # rounding may lead outside
        p_values = hoeffding_bentkus(mean_loss, images, epsilon)
    failed = np.flatnonzero(p_values > delta / choices)
    passed = int(failed[0]) if len(failed) else len(path)
    last = max(passed - 1, 0)  # the path begins at 0, where no image exits and none is harmed
    row = path[last].tolist()
    return CertifiedThreshold(
        threshold=row[0] if len(row) == 1 else tuple(row),
        epsilon=epsilon,
        delta=delta,
        images=images,
        harmed=int(harmed[last]),
        mean_loss=float(mean_loss[last]),
        p_value=float(p_values[last]),
        tested=len(path),
        design_images=design_images,
        choices=choices,
    )


def _order_on(scores: Floats, harms: Losses, gmacs: Floats, highest: float) -> Floats:
    """A path of threshold vectors from no exits to cheap and harmful: (steps, S - 1).

    It consists of the combinations of levels that no other combination beats in both compute and harm. Small steps
    lead up to the first of them, since a threshold without harm on these images may harm others. The levels of a round
    are quantiles of its scores, so they are as dense as the scores.
    """
    between = scores.shape[1] - 1
    count = max(2, int(COMBINATIONS ** (1 / between)))
    levels = [_levels(scores[:, s], count, highest) for s in range(between)]
    counts = [range(len(column)) for column in levels]
    numbers = np.stack(np.meshgrid(*counts, indexing="ij"), axis=-1).reshape(-1, between)
    rows = _take(levels, numbers)
    spent = exit_counts(scores, rows) @ gmacs
    harmed = routed_sums(scores, harms, rows)
    order = np.lexsort((spent, harmed))  # by harm, then by compute
    cheapest = np.minimum.accumulate(spent[order])
    better = order[np.append(True, cheapest[1:] < cheapest[:-1])]
    first = numbers[better[0]]
    steps = np.linspace(0, 1, max(first.max(), 1), endpoint=False)[:, None] * first
    return np.vstack([_take(levels, steps.astype(int)), rows[better]])


def _take(levels: list[Floats], numbers: Ints) -> Floats:
    """The levels with these numbers, one column for each round: (steps, S - 1)."""
    return np.stack([column[numbers[:, s]] for s, column in enumerate(levels)], axis=1)


def _levels(scores: Floats, count: int, highest: float) -> Floats:
    finite = scores[np.isfinite(scores)]
    quantiles = np.quantile(finite, np.linspace(0, 1, count)) if len(finite) else np.zeros(0)
    return np.unique([0.0, *np.minimum(quantiles, highest), highest])


def _check_guarantee(epsilon: float, delta: float, choices: int) -> None:
    if not 0 < epsilon < 1:
        raise ValueError(
            f"epsilon, the share that may be harmed, is between 0 and 1 (0.005 is half a point), not {epsilon}."
        )
    if not 0 < delta <= MOST_RISK:
        raise ValueError(
            f"delta, the risk that the guarantee fails, is above 0 and at most {MOST_RISK} (0.05 for 95 %), not "
            f"{delta}: a guarantee that fails more often than it holds says nothing."
        )
    if choices < 1:
        raise ValueError(
            f"choices must be at least 1, got {choices}; count the scores, settings and seeds that were tried."
        )


def _as_losses(values: Any, fractional: bool | None) -> Losses:
    """Copy losses: booleans, which have an exact test, if all are 0 or 1 and ``fractional`` is not true; or float64.

    Losses between 0 and 1 are an error if ``fractional`` is false.
    """
    losses = np.asarray(_to_host(values))
    if not fractional and np.isin(losses, (0, 1)).all():
        return losses.astype(bool)
    bad = ~np.isin(losses, (0, 1)) if fractional is False else ~((losses >= 0) & (losses <= 1))
    if bad.any():
        raise ValueError(
            "losses are true (harmed by the exit) or false, or numbers from 0 to 1, not "
            f"{losses[bad][0]}; count a gain as 0, and leave out images without a loss."
        )
    return losses.astype(np.float64)


def _to_host(values: Any) -> Any:
    """Convert tensors, which may be on a GPU or of a type that numpy does not have; other values stay as they are."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        return values.float().numpy() if values.is_floating_point() else values.numpy()
    return values
