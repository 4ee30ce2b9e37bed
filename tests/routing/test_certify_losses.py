"""Certificates for losses between 0 and 1: the p-value and the threshold."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from progresvit.routing import (
    certified_threshold,
    certified_thresholds,
    hoeffding_bentkus,
    needed_images,
    routed_sums,
)
from progresvit.routing.decide import exit_rounds


def literal_bound(mean, n, epsilon):
    """As the papers write it."""

    def times_log(x, y):
        return 0.0 if x == 0 else x * math.log(x / y)

    low = min(mean, epsilon)
    hoeffding = math.exp(-n * (times_log(low, epsilon) + times_log(1 - low, 1 - epsilon)))
    most = min(math.ceil(round(n * mean, 6)), n)
    tail = sum(math.comb(n, k) * epsilon**k * (1 - epsilon) ** (n - k) for k in range(most + 1))
    return min(hoeffding, math.e * tail, 1.0)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 300])
@pytest.mark.parametrize("epsilon", [0.001, 0.05, 0.3, 0.5, 0.97])
def test_the_bound_agrees_with_the_papers(n, epsilon):
    means = np.unique([0.0, 1e-6, epsilon / 2, epsilon, 1.0, *np.linspace(0, 1, 41), *(np.arange(n + 1) / n)])
    found = hoeffding_bentkus(means, n, epsilon)
    assert found == pytest.approx([literal_bound(mean, n, epsilon) for mean in means.tolist()], rel=1e-9)
    assert (np.diff(found) >= -1e-12).all()  # more loss is never more evidence
    assert found[0] == pytest.approx((1 - epsilon) ** n, rel=1e-9)
    assert (found[means >= epsilon] == 1).all()
    assert found[-1] == 1


def test_rounding_does_not_cost_an_image():
    n, epsilon = 100, 0.2
    mean = 0.07  # 100 * 0.07 is 7.000000000000001
    assert math.ceil(n * mean) == 8
    assert hoeffding_bentkus(mean, n, epsilon) == pytest.approx(math.e * binom.cdf(7, n, epsilon))
    assert hoeffding_bentkus(mean + 1e-6, n, epsilon) > 1.1 * hoeffding_bentkus(mean, n, epsilon)


def test_all_arguments_broadcast():
    means, images, bounds = np.array([0.0, 0.01, 0.2])[:, None, None], np.array([10, 500])[:, None], [0.05, 0.1]
    found = hoeffding_bentkus(means, images, bounds)
    assert found.shape == (3, 2, 2)
    assert found[1, 1, 0] == hoeffding_bentkus(0.01, 500, 0.05)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((1.2, 100, 0.1), "between 0 and 1; divide losses"),
        ((-0.1, 100, 0.1), "between 0 and 1; divide losses"),
        (([0.1, math.nan], 100, 0.1), "between 0 and 1; divide losses"),
        ((0.1, 0, 0.1), "at least one image"),
        ((0.1, 100, 0.0), "epsilon is between 0 and 1"),
        ((0.1, 100, 1.0), "epsilon is between 0 and 1"),
    ],
)
def test_a_bound_of_impossible_numbers_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        hoeffding_bentkus(*arguments)


EPSILON, DELTA, IMAGES, SETS, GRID = 0.05, 0.1, 300, 2000, 200


def growing(size=50_000, seed=0):
    """Scores and losses as of a trained model: the loss by an early exit grows with the score."""
    rng = np.random.default_rng(seed)
    score = rng.beta(0.8, 1.2, size)
    return score, np.clip(rng.normal(0.25 * score**1.5, 0.15), 0, 1)


def at_the_bound(loss, rest=0.0, size=50_000):
    """The worst case: at every threshold above 0 the risk is just above the bound.

    Nothing is lost but by images of score 0: ``loss`` each, and for one image in IMAGES ``rest``.
    """
    others = size // IMAGES if rest else 0
    count = math.ceil((1.002 * EPSILON * size - rest * others) / loss)
    losses = np.zeros(size)
    losses[:count], losses[count : count + others] = loss, rest
    score = np.full(size, 0.5)
    score[: count + others] = 0.0
    assert EPSILON < losses.mean() < 1.003 * EPSILON
    return score, losses


POPULATIONS = {
    "growing": growing(),
    "at the bound, half losses": at_the_bound(0.5),
    "at the bound, nearly whole losses": at_the_bound(0.99),
    "at the bound, either test": at_the_bound(1.0, rest=0.5),  # a third of the sets holds zeros and ones only
}


def naive_threshold(score, loss):
    """The highest threshold up to which the mean loss of the images is within the bound."""
    grid = np.linspace(0, 1, GRID)
    means = routed_sums(np.stack([score, score], axis=1), np.stack([loss, 0 * loss], axis=1), grid) / len(score)
    return grid[np.append(means > EPSILON, True).argmax() - 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", POPULATIONS)
def test_the_guarantee_holds_over_two_thousand_calibration_sets(name):
    score, loss = POPULATIONS[name]
    order = np.argsort(score)
    risk = np.append(0, np.cumsum(loss[order])) / len(score)  # of the population, by the number of exits

    def breaks(threshold):
        return risk[np.searchsorted(score[order], threshold, side="left")] > EPSILON

    rng, broken, naive = np.random.default_rng(1), 0, 0
    for _ in range(SETS):
        drawn = rng.integers(0, len(score), IMAGES)  # the population is the truth, each set a draw from it
        found = certified_threshold(score[drawn], loss[drawn], EPSILON, DELTA, highest=1.0, grid=GRID)
        broken += breaks(found.threshold)
        naive += breaks(naive_threshold(score[drawn], loss[drawn]))
    allowed = DELTA + 2 * math.sqrt(DELTA * (1 - DELTA) / SETS)
    assert broken / SETS <= allowed
    assert naive / SETS > 2 * allowed  # the test has teeth: taking the mean for the truth fails it


def test_the_walk_over_losses_stops_at_the_first_threshold_that_fails():
    """Plainly, threshold by threshold."""
    score, loss = growing(4000, seed=3)
    loss[loss < 0.02] = 0
    found = certified_threshold(score, loss, EPSILON, DELTA, highest=1.0)
    passed = None
    for threshold in np.linspace(0, 1, found.tested):
        lost = np.where(score < threshold, loss, 0)
        p_value = float(hoeffding_bentkus(lost.mean(), 4000, EPSILON))
        if p_value > DELTA:
            break
        passed = threshold, int((lost > 0).sum()), lost.mean(), p_value
    assert 0 < found.threshold < 1
    assert (found.threshold, found.harmed, found.images) == (passed[0], passed[1], 4000)
    assert (found.mean_loss, found.p_value) == pytest.approx(passed[2:])
    assert found.mean_loss < EPSILON


@pytest.mark.parametrize("kind", [bool, int, np.float32, np.float64])
def test_losses_of_zero_and_one_keep_the_exact_test(kind):
    rng = np.random.default_rng(0)
    score = rng.random(5000)
    harm = rng.random(5000) < 0.1 * score
    found = certified_threshold(score, harm.astype(kind), 0.02, 0.05, highest=1.0)
    grid = np.linspace(0, 1, 2001)
    harmed = np.array([np.count_nonzero(harm & (score < threshold)) for threshold in grid])
    p_values = binom.cdf(harmed, 5000, 0.02)
    last = int((p_values > 0.05).argmax()) - 1
    assert 0 < last < 2000
    assert (found.threshold, found.harmed, found.p_value) == (grid[last], harmed[last], p_values[last])
    assert found.mean_loss == harmed[last] / 5000


def test_as_many_images_are_needed_as_for_losses_of_zero_and_one():
    needed = needed_images(0.01, 0.05)
    score, loss = np.linspace(0.1, 0.9, needed), np.zeros(needed)
    score[-1], loss[-1] = math.nan, 0.5  # never exits; its loss asks for the other test
    assert certified_threshold(score, loss, 0.01, 0.05, highest=1.0).threshold == 1.0
    few = certified_threshold(score[1:], loss[1:], 0.01, 0.05, highest=1.0)
    assert (few.threshold, few.too_few, few.mean_loss, few.harmed) == (0.0, True, 0.0, 0)


def three_rounds(size, seed=0):
    rng = np.random.default_rng(seed)
    hard = rng.beta(0.7, 1.2, (size, 1))
    score = np.clip(hard * [1.0, 0.8, 0.6] + rng.normal(0, 0.05, (size, 3)), 0, 1)
    return score, np.clip(rng.normal(hard * [0.2, 0.08, 0.0], 0.05), 0, 1)


def risk_of(score, loss, thresholds):
    rounds = exit_rounds(score, thresholds)
    return np.where(rounds < 2, loss[np.arange(len(rounds)), rounds], 0).mean()


def test_three_rounds_get_a_threshold_each_for_losses_too():
    score, loss = three_rounds(20_000)
    gmacs, given_loss = [1.0, 3.0, 8.0], loss.copy()
    found = certified_thresholds(score, loss, gmacs, EPSILON, DELTA, highest=1.0)
    assert np.array_equal(loss, given_loss)
    assert min(found.threshold) > 0
    assert found.images + found.design_images == 20_000
    assert found.mean_loss == pytest.approx(risk_of(score, loss, found.threshold), rel=0.05)
    assert found.mean_loss < EPSILON
    assert found.p_value == pytest.approx(float(hoeffding_bentkus(found.mean_loss, found.images, EPSILON)))
    assert np.take(gmacs, exit_rounds(score, found.threshold)).mean() < 0.5 * gmacs[-1]


@pytest.mark.slow
def test_the_guarantee_holds_for_three_rounds_of_losses():
    truth = three_rounds(100_000)
    broken, sets = 0, 60
    for seed in range(sets):
        drawn = np.random.default_rng(seed).integers(0, 100_000, 1000)
        found = certified_thresholds(
            truth[0][drawn], truth[1][drawn], [1, 3, 8], EPSILON, DELTA, highest=1.0, seed=seed
        )
        assert max(found.threshold) > 0
        broken += risk_of(*truth, found.threshold) > EPSILON
    assert broken / sets <= DELTA + 2 * math.sqrt(DELTA * (1 - DELTA) / sets)


def test_a_sample_of_zeros_and_ones_does_not_choose_the_test_of_fractional_losses():
    """Whether losses can be fractional is known before the sample, and the exact test is for those that cannot."""
    scores, losses = np.linspace(0.1, 1, 400), np.zeros(400)
    losses[::100] = 1
    exact = certified_threshold(scores, losses, 0.05, 0.1, grid=200)
    bound = certified_threshold(scores, losses, 0.05, 0.1, grid=200, fractional=True)
    assert exact.p_value == pytest.approx(binom.cdf(exact.harmed, 400, 0.05))
    assert bound.p_value == pytest.approx(float(hoeffding_bentkus(bound.mean_loss, 400, 0.05)))
    assert bound.p_value > exact.p_value
    both = np.column_stack([scores, scores])
    rounds = certified_thresholds(both, np.column_stack([losses, 0 * losses]), [1, 5], 0.05, 0.1, fractional=True)
    assert rounds.p_value == pytest.approx(float(hoeffding_bentkus(rounds.mean_loss, 400, 0.05)))
    with pytest.raises(ValueError, match=r"not 0\.5; count a gain as 0"):
        certified_threshold(scores, losses / 2, 0.05, 0.1, fractional=False)
