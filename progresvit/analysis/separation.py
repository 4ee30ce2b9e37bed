"""How far classes are apart: the distance of the class means from their mean, in distances of images from their class.

Both distances are root mean squares. Few images make class means noisy, which would look like separation; the expected
squared length of this noise is subtracted.

The interval is a bootstrap of the images within their classes. The images are drawn around class means that are moved
together until their spread is the unbiased estimate: around the noisy means themselves, the noise would count twice.

Letters: K classes, n images of a class, d channels, P points at which the separation is measured, R bootstrap draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from progresvit.metrics.arrays import Floats
from progresvit.metrics.interval import Interval

DRAWS = 200
"""Draws of the bootstrap."""
INTERVAL = (0.025, 0.975)
"""Quantiles of the draws."""
NOTHING = 1e-12
"""A spread below this share of the squared length of the tokens is rounding error."""


def separation(groups: Sequence[Floats], *, draws: int = DRAWS, seed: int = 0) -> tuple[Floats, Floats]:
    """Separation of classes at every point: K times (n, P, d) -> (P,), and of bootstrap draws, (R, P).

    All points share the drawn images, so that differences between points are paired. Draws in which every class has
    only copies of one image are dropped.
    """
    rng = np.random.default_rng(seed)
    picked = [rng.multinomial(len(group), np.full(len(group), 1 / len(group)), size=draws) for group in groups]
    usable = np.any([times.max(axis=1) < times.shape[1] for times in picked], axis=0)  # (R,)
    picked = [times[usable] for times in picked]  # K times (R, n): how often an image is drawn
    points = range(groups[0].shape[1])
    at_points = [_separation_at([group[:, point] for group in groups], picked) for point in points]
    return np.array([value for value, _ in at_points]), np.stack([drawn for _, drawn in at_points], axis=1)


def _separation_at(groups: Sequence[Floats], picked: Sequence[NDArray[np.int64]]) -> tuple[float, Floats]:
    """Separation at one point, and of the draws: K times (n, d) and (R, n) -> a number and (R,)."""
    counts = np.array([len(group) for group in groups])
    means = np.stack([group.mean(axis=0) for group in groups])  # (K, d)
    variances = np.array([group.var(axis=0, ddof=1).sum() for group in groups])  # (K,)
    if variances.mean() <= NOTHING * (means**2).sum(axis=1).mean():  # the class token before the first block
        return 0.0, np.zeros(len(picked[0]))
    between = _between(means, variances, counts)
    centre = means.mean(axis=0)
    shrunk = np.sqrt(between / max(means.var(axis=0).sum(), np.finfo(float).tiny))
    drawn_means, drawn_variances = [], []
    for group, mean, times in zip(groups, means, picked):
        n = len(group)
        noise = (group - mean) * np.sqrt(n / (n - 1))  # (n, d), of the unbiased variance
        shift = times @ noise / n  # (R, n) and (n, d) -> (R, d)
        squares = times @ (noise**2).sum(axis=1) - n * (shift**2).sum(axis=1)  # (R,)
        drawn_means.append(centre + shrunk * (mean - centre) + shift)
        drawn_variances.append(squares / (n - 1))
    drawn = np.stack(drawn_means, axis=1), np.stack(drawn_variances, axis=1)  # (R, K, d) and (R, K)
    return float(np.sqrt(between / variances.mean())), np.sqrt(_between(*drawn, counts) / drawn[1].mean(axis=1))


def _between(means: Floats, variances: Floats, counts: NDArray[np.int64]) -> Floats:
    """Mean squared distance of the class means from their mean, less the noise of the means: (..., K, d) -> (...)."""
    noise = (1 - 1 / len(counts)) * (variances / counts).mean(axis=-1)
    spread: Floats = np.maximum(0, means.var(axis=-2).sum(axis=-1) - noise)
    return spread


def estimate(value: float, draws: Floats) -> Interval:
    """A value with the 95 % interval of its draws: (R,)."""
    lowest, highest = np.quantile(draws, INTERVAL).tolist()
    return Interval(mean=float(value), lowest=lowest, highest=highest)
