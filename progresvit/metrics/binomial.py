"""Probabilities of counts, in numpy and without scipy, which a host of exports need not have.

Letters: k of n images, each with probability p.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from progresvit.metrics.arrays import Floats

SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)
"""Coefficients of the error of Stirling's formula: of 1 / x, 1 / x³, 1 / x⁵, …"""
SHIFTS = 8
"""Steps after which the series is exact to 1e-12, from arguments of 1/2 on."""
NEGLIGIBLE = 1e-17
"""Terms smaller than this share of their sum end it."""


def stirling_error(x: ArrayLike) -> Floats:
    """ln Gamma(x) - ((x - 1/2) ln x - x + ln(2 pi) / 2) for x of 1/2 or more, without cancellation for large x."""
    value = np.asarray(x, np.float64)
    error = np.zeros_like(value)
    for _ in range(SHIFTS):  # Gamma(x + 1) = x Gamma(x)
        error = error + ((value + 0.5) * np.log1p(1 / value) - 1)
        value = value + 1
    power = 1 / value
    for coefficient in SERIES:
        error, power = error + coefficient * power, power / value**2
    return np.asarray(error)


def binomial_tail(k: int, n: int, p: float) -> float:
    """P(Bin(n, p) <= k), for 0 <= k <= n and 0 < p < 1."""
    if k == n:
        return 1.0
    if k > n * p:  # the upper tail is the shorter sum
        return 1.0 - _falling_sum(n - k - 1, n, 1 - p, p)
    return _falling_sum(k, n, p, 1 - p)


def _falling_sum(k: int, n: int, p: float, q: float) -> float:
    """The sum of the probabilities of k, k - 1, …, 0, which fall, with q = 1 - p."""
    log_odds = 0.0 if not k else k * math.log(n * p / k)
    log_odds += (n - k) * math.log(n * q / (n - k))
    if k:
        first, second, third = stirling_error([n, k, n - k]).tolist()
        log_odds += 0.5 * math.log(n / (2 * math.pi * k * (n - k))) + first - second - third
    term = total = 1.0
    while k and term > NEGLIGIBLE * total:
        term *= k * q / ((n - k + 1) * p)
        total += term
        k -= 1
    return math.exp(log_odds) * total
