"""The best threshold of each round: what it reaches, that it is honest, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.routing import (
    cross_fitted_exits,
    frontier,
    near_lossless,
    operating_point,
    per_round_frontier,
)
from progresvit.routing.calibrate import OutOfReachError
from progresvit.routing.decide import exit_rounds
from progresvit.routing.per_round import PerRoundFrontier, _cuts
from progresvit.routing.sums import every_threshold


def made(count, rounds, seed=0):
    """Later rounds are surer and better, and rounds differ in the entropy of an image that they have right."""
    rng = np.random.default_rng(seed)
    hard = rng.beta(0.6, 1.2, (count, 1))
    scale = rng.uniform(0.3, 1, rounds)
    scores = scale * np.clip(hard + rng.normal(0, 0.1, (count, rounds)), 0, 2)
    correct = rng.random((count, rounds)) > hard * np.linspace(0.9, 0.3, rounds)
    return scores, correct, np.cumsum(rng.uniform(0.2, 2, rounds)).tolist()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(1, 200))
def test_each_point_is_what_its_thresholds_give_and_dearer_points_are_more_accurate(seed, rounds, count):
    scores, correct, gmacs = made(count, rounds, seed)
    scores[np.random.default_rng(seed).random(scores.shape) < 0.1] = np.nan
    found = per_round_frontier(scores, correct, gmacs)
    assert found.thresholds.shape == (len(found.right), rounds - 1)
    for point, right, spent in zip(frontier(scores, correct, gmacs, found.thresholds), found.right, found.gmacs):
        assert round(point.top1 * count) == right
        assert point.gmacs == pytest.approx(spent)
    assert (np.diff(found.right) > 0).all()
    assert (np.diff(found.gmacs) > 0).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(3, 5), st.integers(1, 300))
def test_it_is_nowhere_worse_than_one_threshold_for_all_rounds(seed, rounds, count):
    scores, correct, gmacs = made(count, rounds, seed)
    found = per_round_frontier(scores, correct, gmacs)
    for point in frontier(scores, correct, gmacs, every_threshold(scores)):
        own = operating_point(scores, correct, gmacs, found.within(point.gmacs))
        assert own.gmacs <= point.gmacs + 1e-9
        assert own.top1 >= point.top1 - 1e-9
    for max_drop in (0.0003, 0.02):
        own = operating_point(scores, correct, gmacs, found.near_lossless(max_drop))
        assert own.gmacs <= near_lossless(scores, correct, gmacs, max_drop).gmacs + 1e-9
        assert own.top1 >= correct[:, -1].mean() - max_drop - 1e-9


def test_rounds_that_are_right_below_different_scores_get_these_as_thresholds():
    rng = np.random.default_rng(0)
    scores = rng.random((2000, 3))
    correct = np.column_stack([scores[:, 0] < 0.25, scores[:, 1] < 0.75, np.ones(2000, bool)])
    found = per_round_frontier(scores, correct, [1.0, 2.0, 6.0])
    first, second = found.near_lossless()
    assert first == pytest.approx(0.25, abs=0.03)  # cuts are 64 images apart
    assert second == pytest.approx(0.75, abs=0.04)
    shared = near_lossless(scores, correct, [1.0, 2.0, 6.0])
    assert shared.gmacs > 3.9
    assert operating_point(scores, correct, [1.0, 2.0, 6.0], (first, second)).gmacs < 2.9


@pytest.mark.parametrize(("rounds", "seed"), [(3, 0), (3, 1), (3, 2), (4, 3), (4, 4)])
def test_it_comes_close_to_trying_all_vectors(rounds, seed):
    scores, correct, gmacs = made(400, rounds, seed)
    found = per_round_frontier(scores, correct, gmacs)
    vectors = list(itertools.product(*(_cuts(scores[:, s])[0] for s in range(rounds - 1))))
    points = frontier(scores, correct, gmacs, vectors)
    for budget in np.linspace(gmacs[0], gmacs[-1], 9):
        best = max(point.top1 for point in points if point.gmacs <= budget + 1e-9)
        own = operating_point(scores, correct, gmacs, found.within(budget)).top1
        assert own >= best - 0.006


def test_thresholds_of_an_image_do_not_depend_on_the_labels_of_its_half():
    scores, correct, gmacs = made(600, 3)
    half = np.arange(600) % 2 == 0
    choices = [PerRoundFrontier.near_lossless, lambda found: found.within(gmacs[1])]
    exits = cross_fitted_exits(scores, correct, gmacs, half, choices)
    changed = correct.copy()
    changed[half] = np.random.default_rng(1).random((300, 3)) < 0.5
    others = cross_fitted_exits(scores, changed, gmacs, half, choices)
    assert (others[:, half] == exits[:, half]).all()
    assert (others[:, ~half] != exits[:, ~half]).any()
    chosen = per_round_frontier(scores[half], correct[half], gmacs).near_lossless()
    assert exits[0, ~half].tolist() == exit_rounds(scores[~half], chosen).tolist()


def test_bad_input_is_refused():
    scores, correct, gmacs = made(50, 3)
    with pytest.raises(ValueError, match="compute of 2 rounds"):
        per_round_frontier(scores, correct, gmacs[:2])
    with pytest.raises(ValueError, match=r"correct answers of shape \(40, 3\)"):
        per_round_frontier(scores, correct[:40], gmacs)
    with pytest.raises(ValueError, match="alternatives are not routed"):
        per_round_frontier(scores, correct, [2.0, 1.0, 3.0])
    with pytest.raises(OutOfReachError, match="cheapest thresholds spend"):
        per_round_frontier(scores, correct, gmacs).within(gmacs[0] / 2)
