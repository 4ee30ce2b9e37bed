"""Means and shares with 95 % intervals. Letters: N values, one for each image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

LIKELY = 1.96
"""Standard errors to either side of a mean that hold 95 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean, or another estimate, and the ends of its 95 % interval."""

    mean: float
    lowest: float
    highest: float

    def as_percent(self) -> str:
        """A share and its interval: ``95.30% (90.60 to 97.70)``."""
        return f"{self.mean:.2%} ({100 * self.lowest:.2f} to {100 * self.highest:.2f})"


def paired_change(ours: ArrayLike, theirs: ArrayLike) -> Interval:
    """The change of a share from ``theirs`` to ``ours`` on the same images, true or false for each: (N,), (N,).

    Agresti and Min (2005): half an image is added to each of the four combinations before a normal interval is taken,
    so that a few images without any change do not count as certainty.
    """
    gained = np.asarray(ours, bool) & ~np.asarray(theirs, bool)
    lost = np.asarray(theirs, bool) & ~np.asarray(ours, bool)
    up, down, total = float(gained.sum()), float(lost.sum()), len(gained)
    centre = (up - down) / (total + 2)
    reach = LIKELY * ((up + down + 1 - (up - down) ** 2 / (total + 2)) ** 0.5) / (total + 2)
    return Interval(mean=(up - down) / total, lowest=max(-1.0, centre - reach), highest=min(1.0, centre + reach))


def mean_interval(values: ArrayLike, errors: float = LIKELY) -> Interval:
    """The mean of independent values with a normal interval: (N,). The interval of one value is infinite.

    For few values, ``errors`` is the quantile of Student's distribution, in standard errors.

    For the difference of two models or conditions, give the differences on the same images: images that both have right
    or both have wrong do not widen the interval.
    """
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    reach = errors * float(array.std(ddof=1)) / len(array) ** 0.5 if len(array) > 1 else float("inf")
    return Interval(mean=mean, lowest=mean - reach, highest=mean + reach)


def share_interval(successes: int, total: int) -> Interval:
    """The share of successes with Wilson's interval, which stays between 0 and 1 and holds for few images too.

    Without images, the share is NaN and the interval 0 to 1.
    """
    if not 0 <= successes <= total:
        raise ValueError(f"a share counts from 0 to {total} of {total} images, not {successes}.")
    if total == 0:
        return Interval(mean=float("nan"), lowest=0.0, highest=1.0)
    share, weight = successes / total, LIKELY**2 / total
    centre = (share + weight / 2) / (1 + weight)
    reach = (weight * share * (1 - share) + weight**2 / 4) ** 0.5 / (1 + weight)
    # with no or only successes, rounding must not move an end beyond 0 or 1
    lowest = max(0.0, centre - reach) if successes else 0.0
    highest = min(1.0, centre + reach) if successes < total else 1.0
    return Interval(mean=share, lowest=lowest, highest=highest)
