import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.compute import cumulative_gmacs
from progresvit.config import preset
from progresvit.routing.frontier import near_lossless, operating_point


def brute_force(entropy, correct, gmacs, allowed):
    """Every threshold that can matter, one by one."""
    full = operating_point(entropy, correct, gmacs, 0.0)
    candidates = [0.0, *np.nextafter(np.unique(entropy[:, :-1]), np.inf)]
    points = [operating_point(entropy, correct, gmacs, threshold) for threshold in candidates]
    good = [p for p in points if round((full.top1 - p.top1) * len(entropy)) <= allowed]
    return min(point.gmacs for point in good)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 60), st.integers(0, 4))
def test_near_lossless_is_the_cheapest_of_all_thresholds(seed, rounds, count, allowed):
    rng = np.random.default_rng(seed)
    entropy = rng.integers(0, 12, (count, rounds)) / 5  # many are equal
    correct = rng.random((count, rounds)) < 0.6
    gmacs = np.cumsum(rng.random(rounds) + 0.1).tolist()
    found = near_lossless(entropy, correct, gmacs, max_drop=allowed / count)
    assert found.gmacs == pytest.approx(brute_force(entropy, correct, gmacs, allowed))


def test_a_point_on_the_bound_is_taken():
    """15 of 50,000 is 0.03 points exactly; 16 is too many."""
    entropy = np.full((50_000, 2), 2.0)
    correct = np.ones((50_000, 2), bool)
    entropy[:100, 0] = 0.1
    correct[:15, 0] = False  # they leave at 0.1 and are wrong there
    entropy[100, 0], correct[100, 0] = 0.2, False  # the sixteenth
    point = near_lossless(entropy, correct, cumulative_gmacs(preset("progresvit_small_192_240")))
    assert point.exit_shares[0] == 100 / 50_000
    assert 0.1 < point.threshold <= 0.2
    assert point.top1 == 1 - 15 / 50_000


def test_the_exit_rule_is_strict():
    entropy, correct = np.array([[0.5, 0.0]]), np.array([[True, True]])
    assert operating_point(entropy, correct, [1.0, 3.0], 0.5).gmacs == 3.0
    assert operating_point(entropy, correct, [1.0, 3.0], np.nextafter(0.5, 1)).gmacs == 1.0
    assert operating_point(np.zeros((1, 2)), correct, [1.0, 3.0], 0.0).exit_shares == (0.0, 1.0)
