"""The audit of a certificate while a model serves, and the drift of its entropies.

A certificate on unlabelled images bounds the disagreement rate: the share of all images that exit early with another
class than the last round's. It holds for images from the calibration's distribution. The audit measures the rate on
served images. It samples each image with the same probability, whatever its exit round. A sampled image that exited
early also runs to the last round; a sampled image that ran every round agrees.

Letters: n audited images, k disagreements, m a disagreement rate.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from threading import Lock

import numpy as np
from numpy.typing import ArrayLike

from progresvit.metrics.arrays import Floats
from progresvit.metrics.binomial import stirling_error
from progresvit.routing.calibrate import check_quantiles
from progresvit.routing.settings import Setting

RATE = 0.01
"""Default share of the images to audit."""
PRIOR = 0.5
"""Both parameters of the beta mixture: Jeffreys' prior."""
REMEMBERED = 100_000
"""Sampled images whose copies are recognised."""
WINDOW = 4000
"""Images over which drift is measured."""
ENOUGH = 500
"""Fewest images for a distance. Without drift, the distance of 500 images is below 0.06 in about 95 of 100 cases."""


def limit_of(setting: Setting | None) -> float | None:
    """The disagreement rate that the setting's certificate bounds; None without such a certificate.

    Only a certificate with the loss ``unlabelled`` bounds disagreement. One with the loss ``labelled`` bounds the share
    of images that lose a correct answer. They are a subset of the images that disagree, so the disagreement rate can
    exceed epsilon although the certificate holds, and there is no alarm; a rate below epsilon confirms the certificate.
    ``pixel-error`` bounds a mean loss, which is not a share of images.
    """
    return setting.epsilon if setting is not None and setting.loss == "unlabelled" else None


def log_evidence(disagreements: ArrayLike, images: ArrayLike, rate: ArrayLike) -> Floats:
    """Logarithm of the evidence against a disagreement rate of m: the beta-binomial mixture likelihood ratio.

    B(k + 1/2, n - k + 1/2) / (B(1/2, 1/2) m^k (1 - m)^(n - k)). If m is the rate, the ratio is a martingale with
    expectation 1. By Ville's inequality it ever reaches 1 / delta with a probability of at most delta (Robbins 1970,
    "Statistical methods related to the law of the iterated logarithm"; Howard et al. 2021, "Time-uniform,
    nonparametric, nonasymptotic confidence sequences"). The arguments broadcast.
    """
    count, total, share = (np.asarray(value, np.float64) for value in (disagreements, images, rate))
    with np.errstate(divide="ignore", invalid="ignore"):  # a rate of 0 or 1 is impossible with some counts
        agreeing = np.where(count == total, 0.0, (total - count) * np.log1p(-share))
        disagreeing = np.where(count == 0, 0.0, count * np.log(share))
    return np.asarray(_log_mixture(count, total) - disagreeing - agreeing)


def _log_mixture(disagreements: ArrayLike, images: ArrayLike) -> Floats:
    """Logarithm of the likelihood's mean over the prior: ln B(k + 1/2, n - k + 1/2) - ln B(1/2, 1/2).

    By Stirling's formula, in which the powers of large numbers cancel, and its error; B(1/2, 1/2) is pi.
    """
    count, total = np.asarray(disagreements, np.float64), np.asarray(images, np.float64)
    first, second, both = count + PRIOR, total - count + PRIOR, total + 2 * PRIOR
    powers = count * np.log(first / both) + (total - count) * np.log(second / both) - 0.5 * np.log(both)
    errors = stirling_error(first) + stirling_error(second) - stirling_error(both)
    return np.asarray(powers + errors + 0.5 * math.log(2 / math.pi))


def rate_bounds(disagreements: int, images: int, delta: float) -> tuple[float, float]:
    """The interval of disagreement rates against which the evidence is below 1 / delta; it contains k / n.

    With probability 1 - delta the intervals of all n contain the rate, so it is valid to look after every image and to
    stop at any time. The bounds are exact up to rounding.
    """
    return _lowest(disagreements, images, delta), 1.0 - _lowest(images - disagreements, images, delta)


def _lowest(disagreements: int, images: int, delta: float) -> float:
    """The lower bound; the upper one follows, since the prior is symmetric."""
    if disagreements == 0:
        return 0.0

    agreements, evidence = images - disagreements, float(_log_mixture(disagreements, images)) + math.log(delta)

    def excess(log_rate: float) -> float:
        """Logarithm of the evidence times delta; it falls to 0 or less up to k / n."""
        return evidence - disagreements * log_rate - (agreements and agreements * math.log1p(-math.exp(log_rate)))

    # without its factor (1 - m)^(k - n) >= 1 the root has a closed form and is lower
    low, high = evidence / disagreements, math.log(disagreements / images)
    if excess(low) <= 0:  # the factor is 1, up to rounding
        return math.exp(low)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.exp(low)


class Audit:
    """A confidence sequence for the disagreement rate of served images, with an alarm.

    There is an alarm while the lower bound exceeds the limit. If the disagreement rate, constant or not, never exceeds
    the limit, the probability of an alarm at any time is at most delta. The bounds assume a constant rate; they cover
    all audited images since the start or the last reset, not only recent ones. An image counts once, however often it
    is sent.

    An alarm says that early exits change more answers than was certified: the images differ from the calibration
    images, or the certificate fails, which happens with the probability of its own delta. The disagreement rate is at
    least the drop in accuracy, so the upper bound holds for the drop too, and the lower bound does not: an alarm does
    not prove that accuracy fell. Withheld answers count like the others.

    Args:
        limit: The highest disagreement rate without an alarm, such as ``limit_of(setting)``; None for no alarm.
        rate: The share of images to audit; 0 for none.
        delta: The probability that the bounds ever fail.
        seed: Seed of the sampling; None for a random one.

    Attributes:
        images: Audited images, n.
        disagreements: Audited images that exited early with another class than the last round's, k.
        alarm: Whether the lower bound exceeds the limit.
    """

    def __init__(
        self, *, limit: float | None, rate: float = RATE, delta: float = 0.05, seed: int | None = None
    ) -> None:
        if limit is not None and not 0 < limit < 1:
            raise ValueError(
                f"limit, a share of the images, must be between 0 and 1 (0.005 for 0.5 %), got {limit}; for no alarm "
                "pass limit=None."
            )
        if not 0 <= rate <= 1:
            raise ValueError(f"rate, the share of images to audit, must be from 0 to 1 (0.01 for 1 %), got {rate}.")
        if not 0 < delta < 1:
            raise ValueError(f"delta, the risk of a false alarm, must be between 0 and 1 (0.05 for 95 %), got {delta}.")
        self.limit, self.rate, self.delta = limit, rate, delta
        self.images = self.disagreements = 0
        self.alarm = False
        self._random, self._lock = random.Random(seed), Lock()
        self._seen: dict[bytes, None] = {}

    def samples(self) -> bool:
        """Whether to audit the next image: true with the probability ``rate``. Call it once for each image."""
        with self._lock:
            return self._random.random() < self.rate

    def is_new(self, digest: bytes) -> bool:
        """Whether no sampled image had this hash, among the last ``REMEMBERED``; it has from now on."""
        with self._lock:
            if digest in self._seen:
                return False
            self._seen[digest] = None
            if len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]
            return True

    def record(self, disagrees: bool) -> None:
        """Count an audited image. Do not record images that could not be opened, and copies of others."""
        with self._lock:
            self.images += 1
            self.disagreements += bool(disagrees)
            self.alarm = self._exceeds_limit()

    def reset(self) -> None:
        """Forget the evidence; images that were counted are not counted again."""
        with self._lock:
            self.images = self.disagreements = 0
            self.alarm = False

    def _exceeds_limit(self) -> bool:
        """Whether the lower bound is above the limit; no root is needed for that."""
        if self.limit is None or self.disagreements <= self.limit * self.images:
            return False
        return float(log_evidence(self.disagreements, self.images, self.limit)) > -math.log(self.delta)

    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound of the disagreement rate; 0 and 1 before the first audited image."""
        with self._lock:
            disagreements, images = self.disagreements, self.images
        return rate_bounds(disagreements, images, self.delta)


class EntropyDrift:
    """Kolmogorov-Smirnov distance between recent entropies of round 1 and the entropies of the calibration images.

    All images run round 1, so its entropies do not depend on the threshold. The distance is computed at the quantiles;
    its error is at most one step of them (0.01 for 101 quantiles).

    Args:
        quantiles: ``Setting.entropy_quantiles``.
        window: Number of recent images.
    """

    def __init__(self, quantiles: Sequence[float], *, window: int = WINDOW) -> None:
        check_quantiles(quantiles)
        if window < ENOUGH:
            raise ValueError(f"a window of {window} images is too short to measure drift; use {ENOUGH} or more.")
        values = np.asarray(quantiles, np.float64)
        levels = np.linspace(0, 1, len(values))
        points = np.unique(values)  # equal quantiles are one point, at which the distribution jumps
        self._below = levels[np.searchsorted(values, points, side="left")]
        self._up_to = levels[np.searchsorted(values, points, side="right") - 1]
        self._points = points
        self._cells: deque[int] = deque(maxlen=window)
        self._counts = np.zeros(2 * len(points) + 1, np.int64)  # before the first point, at it, after it, ...
        self._lock = Lock()

    def add(self, entropies: ArrayLike) -> None:
        """Count images by their entropies in round 1, without NaN."""
        values = np.asarray(entropies, np.float64).ravel()
        values = values[~np.isnan(values)]
        cells = np.searchsorted(self._points, values) + np.searchsorted(self._points, values, side="right")
        with self._lock:
            for cell in cells.tolist():
                if len(self._cells) == self._cells.maxlen:
                    self._counts[self._cells[0]] -= 1  # appending drops it
                self._cells.append(cell)
                self._counts[cell] += 1

    def distance(self) -> float:
        """From 0, the same distribution, to 1; NaN before ``ENOUGH`` images."""
        with self._lock:
            counts = self._counts.copy()
        images = int(counts.sum())
        if images < ENOUGH:
            return math.nan
        shares = counts.cumsum() / images
        below, up_to = shares[:-1:2], shares[1::2]  # shares of images below each point, and up to it
        return float(max(np.abs(below - self._below).max(), np.abs(up_to - self._up_to).max()))
