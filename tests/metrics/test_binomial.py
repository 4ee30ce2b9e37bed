"""Probabilities of counts without scipy agree with scipy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln
from scipy.stats import binom

from progresvit.metrics.binomial import binomial_tail, stirling_error


def test_stirlings_error_is_what_the_formula_leaves_of_the_gamma_function():
    x = np.arange(1, 200) / 2
    formula = (x - 0.5) * np.log(x) - x + 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(stirling_error(x) + formula, gammaln(x), rtol=1e-13, atol=2e-13)
    np.testing.assert_allclose(stirling_error([1e6, 1e12]), [1 / 12e6, 1 / 12e12], rtol=1e-6, atol=1e-15)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 100_000), st.floats(0, 1), st.floats(1e-4, 0.9999))
def test_the_tail_is_that_of_scipy(n, share, p):
    k = round(n * p + (share - 0.5) * 12 * (n * p * (1 - p)) ** 0.5)  # six standard deviations around the mean
    k = min(max(k, 0), n)
    assert binomial_tail(k, n, p) == pytest.approx(float(binom.cdf(k, n, p)), rel=1e-9)


@pytest.mark.parametrize("p", [1e-9, 0.01, 0.5, 0.99])
def test_the_tail_of_no_and_of_all_images_is_exact(p):
    assert binomial_tail(0, 1000, p) == pytest.approx((1 - p) ** 1000, rel=1e-12)
    assert binomial_tail(1000, 1000, p) == 1.0
    assert binomial_tail(999, 1000, p) == pytest.approx(1 - p**1000, rel=1e-12)


def test_the_tail_of_very_many_images_is_found_at_once():
    assert binomial_tail(10**10, 10**12, 0.01) == pytest.approx(0.5, abs=1e-5)
    assert binomial_tail(10**12 - 1, 10**12, 0.01) == 1.0
    assert binomial_tail(0, 10**12, 0.01) == 0.0
