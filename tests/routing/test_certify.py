import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

from progresvit.routing import certified_threshold, certified_thresholds, near_lossless, needed_images
from progresvit.routing.decide import exit_rounds

POPULATION = 50_000


def population(seed=0, size=POPULATION):
    """Entropies and harms as of a trained model: most images are sure, and the unsure are harmed more often."""
    rng = np.random.default_rng(seed)
    entropy = math.log(10) * rng.beta(0.6, 1.2, size)
    harm = rng.random(size) < 0.12 * (entropy / math.log(10)) ** 1.5
    return entropy, harm


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.001, 0.005, 0.01])
def test_the_guarantee_holds_over_two_thousand_calibration_sets(epsilon):
    entropy, harm = population()
    rng, delta, sets, size = np.random.default_rng(1), 0.1, 2000, 5000
    harmful = np.sort(entropy[harm])
    broken = 0
    for _ in range(sets):
        drawn = rng.integers(0, POPULATION, size)  # the population is the truth, each set a draw from it
        threshold = certified_threshold(entropy[drawn], harm[drawn], epsilon, delta).threshold
        broken += np.searchsorted(harmful, threshold, side="left") / POPULATION > epsilon
    assert broken / sets <= delta + 2 * math.sqrt(delta * (1 - delta) / sets)
    assert broken > 0  # the test has teeth: a threshold a little higher would break the bound too often


def test_a_walk_that_ignores_the_tail_would_break_the_guarantee():
    """The check above can fail: taking the empirical share for the truth breaks the bound about every other time."""
    entropy, harm = population()
    rng, epsilon = np.random.default_rng(2), 0.005
    harmful = np.sort(entropy[harm])
    broken = 0
    for _ in range(200):
        drawn = rng.integers(0, POPULATION, 5000)
        bad = np.sort(entropy[drawn][harm[drawn]])
        naive = bad[int(epsilon * 5000)]
        broken += np.searchsorted(harmful, naive, side="left") / POPULATION > epsilon
    assert broken / 200 > 0.25


def test_the_best_of_many_scores_breaks_the_guarantee_unless_the_choices_are_counted():
    """Twenty scores, each unsafe from 0.5 on by a little: the cheapest that passes is unsafe more often than delta."""
    rng, epsilon, delta, sets, count = np.random.default_rng(3), 0.02, 0.1, 60, 20
    broken = {1: 0, count: 0}
    for _ in range(sets):
        highest = dict.fromkeys(broken, 0.0)
        for _ in range(count):
            score = rng.random(2000)
            harm = (score < 0.5) & (rng.random(2000) < 2.002 * epsilon)  # a share of 1.001 epsilon in all
            for choices in broken:
                certified = certified_threshold(score, harm, epsilon, delta, highest=1.0, grid=200, choices=choices)
                assert certified.p_value <= delta / choices
                highest[choices] = max(highest[choices], certified.threshold)
        for choices, threshold in highest.items():
            broken[choices] += threshold >= 0.5
    assert broken[1] / sets > 0.5
    assert broken[count] / sets <= delta + 2 * math.sqrt(delta * (1 - delta) / sets)


def test_more_images_are_needed_for_one_of_several_choices():
    assert needed_images(0.001, 0.05, choices=3) == needed_images(0.001, 0.05 / 3) > needed_images(0.001, 0.05)
    scores, harms = np.linspace(0, 1, 2994), np.zeros(2994)
    assert certified_threshold(scores, harms, 0.001, 0.05, choices=3).too_few
    for choices in (0, -1):
        with pytest.raises(ValueError, match=rf"choices must be at least 1, got {choices}"):
            needed_images(0.001, 0.05, choices)


def test_the_certificate_keeps_nine_tenths_of_what_an_oracle_saves():
    entropy, harm = population(size=500_000)
    epsilon, saved = 0.005, 5.355  # GMACs of an image that exits early
    oracle = np.sort(entropy[harm])[int(epsilon * len(entropy))]
    for seed in range(5):
        drawn = np.random.default_rng(seed).integers(0, len(entropy), 50_000)
        certified = certified_threshold(entropy[drawn], harm[drawn], epsilon, 0.05).threshold
        kept = (entropy < certified).mean() * saved
        assert kept >= 0.9 * (entropy < oracle).mean() * saved


def test_the_walk_stops_at_the_first_threshold_that_fails():
    """Plainly, threshold by threshold, with scipy's tail."""
    entropy, harm = population(3, size=8000)
    found = certified_threshold(entropy, harm, 0.01, 0.05)
    grid, passed = np.linspace(0, math.log(10), found.tested), 0.0
    for threshold in grid:
        k = int((harm & (entropy < threshold)).sum())
        if binom.cdf(k, 8000, 0.01) > 0.05:
            break
        passed, last_k = threshold, k
    assert (found.threshold, found.harmed, found.images) == (passed, last_k, 8000)
    assert found.p_value == binom.cdf(last_k, 8000, 0.01)
    assert 0 < found.threshold < math.log(10)
    assert found.tested >= 200


def test_without_harm_all_of_the_grid_is_certified_and_too_few_images_certify_nothing():
    entropy = np.linspace(0, 2.3, 2995)
    assert certified_threshold(entropy, np.zeros(2995), 0.001, 0.05).threshold == pytest.approx(math.log(10))
    few = certified_threshold(entropy[:2994], np.zeros(2994), 0.001, 0.05)
    assert (few.threshold, few.too_few) == (0.0, True)


@pytest.mark.parametrize(("epsilon", "delta", "images"), [(0.001, 0.05, 2995), (0.005, 0.05, 598), (0.01, 0.1, 230)])
def test_needed_images(epsilon, delta, images):
    assert needed_images(epsilon, delta) == images
    assert (1 - epsilon) ** images <= delta < (1 - epsilon) ** (images - 1)


def test_tensors_lists_and_any_float_type_give_the_same():
    entropy, harm = population(4, size=3000)
    halves = torch.tensor(entropy).bfloat16()
    expected = certified_threshold(halves.float().numpy(), harm, 0.01, 0.05)
    assert expected.threshold > 0
    assert certified_threshold(halves, torch.tensor(harm), 0.01, 0.05) == expected
    assert certified_threshold(halves.tolist(), harm.astype(int).tolist(), 0.01, 0.05) == expected


def test_broken_entropies_never_exit_and_so_never_harm():
    entropy, harm = population(5, size=3000)
    broken, marked = entropy.copy(), harm.copy()
    broken[:500], marked[:500] = np.nan, True
    unharmed = np.where(np.arange(3000) < 500, False, harm)
    assert certified_threshold(broken, marked, 0.01, 0.05) == certified_threshold(entropy, unharmed, 0.01, 0.05)


def three_rounds(size, seed=0):
    rng = np.random.default_rng(seed)
    hard = rng.beta(0.7, 1.2, size)
    noise = rng.normal(0, 0.08, (size, 3))
    entropy = math.log(10) * np.clip(hard[:, None] * [1.0, 0.8, 0.6] + noise, 0, 1)
    loss = rng.random((size, 3)) < np.clip(hard[:, None], 0, 1) ** 2 * [0.25, 0.08, 0.0]
    return entropy, loss


def harm_share(entropy, loss, thresholds):
    rounds = exit_rounds(entropy, thresholds)
    return loss[np.arange(len(rounds)), rounds][rounds < 2].sum() / len(rounds)


@pytest.mark.slow
def test_three_rounds_get_a_threshold_each_and_the_guarantee_holds():
    truth = three_rounds(200_000)
    epsilon, delta, sets = 0.02, 0.2, 60
    broken, thresholds = 0, set()
    for seed in range(sets):
        rows = np.random.default_rng(seed).integers(0, 200_000, 3000)
        found = certified_thresholds(truth[0][rows], truth[1][rows], [0.188, 1.735, 7.097], epsilon, delta, seed=seed)
        assert found.images + found.design_images == 3000
        broken += harm_share(*truth, found.threshold) > epsilon
        thresholds.add(found.threshold)
    assert all(len(row) == 2 and max(row) > 0 for row in thresholds)
    assert broken / sets <= delta + 2 * math.sqrt(delta * (1 - delta) / sets)


def test_a_path_ordered_on_a_design_split_saves_more_than_none_and_stays_within_what_is_possible():
    entropy, loss = three_rounds(30_000)
    gmacs = [0.188, 1.735, 7.097]
    found = certified_thresholds(entropy, loss, gmacs, 0.02, 0.05)
    rounds = exit_rounds(entropy, found.threshold)
    assert np.take(gmacs, rounds).mean() < 0.8 * gmacs[-1]
    assert harm_share(entropy, loss, found.threshold) <= 0.02


def test_two_rounds_need_no_design_split():
    entropy, harm = population(6, size=4000)
    scores, losses = np.column_stack([entropy, entropy]), np.column_stack([harm, harm])
    assert certified_thresholds(scores, losses, [1, 2], 0.01, 0.05) == certified_threshold(entropy, harm, 0.01, 0.05)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": 1.5}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": 0.95}, "at most 0.5 .* not 0.95: a guarantee that fails more often than it holds says nothing"),
        ({"loss": [True]}, "one of each per image"),
        ({"loss": [1.5, 0.0, 1.0]}, r"true .* or false, or numbers from 0 to 1, not 1\.5"),
        ({"loss": [0.5, -0.2, 0.0]}, r"not -0\.2; count a gain as 0"),
        ({"loss": [0.5, math.nan, 0.0]}, "not nan; .* leave out images without a loss"),
        ({"loss": [0.0, math.inf, 0.0]}, "not inf"),
        ({"loss": [0, 2, 1]}, "not 2"),
        ({"loss": [[0.5], [0.1], [0.2]]}, "one of each per image"),
        ({"entropy": np.zeros((3, 1))}, "one of each per image"),
        ({"entropy": [], "loss": []}, "no images"),
        ({"grid": 10}, "at least 200"),
        ({"entropy": [-0.1, 0.2, 0.3]}, "0 or more, not -0.1"),
        ({"highest": float("inf")}, "ends above 0"),
        ({"highest": -1.0}, "ends above 0"),
    ],
)
def test_bad_input_is_refused(change, match):
    given = {"entropy": [0.1, 0.2, 0.3], "loss": [False, False, True], "epsilon": 0.01, "delta": 0.05} | change
    with pytest.raises(ValueError, match=match):
        certified_threshold(**given)


def test_a_one_round_model_has_nothing_to_certify():
    with pytest.raises(ValueError, match="one round"):
        certified_thresholds(np.zeros((3, 1)), np.zeros((3, 1)), [1.0], 0.01, 0.05)
    assert near_lossless(np.zeros((3, 1)), np.ones((3, 1)), [1.0]).exit_shares == (1.0,)


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0.0, 0.05, 0.3, 1.0])
def test_every_round_of_three_gets_its_share_wherever_the_entropies_begin(floor):
    """A model that is never quite sure, as after label smoothing, has no entropies near zero."""
    rng = np.random.default_rng(0)
    hard = rng.beta(0.7, 1.2, (20_000, 1))
    entropy = floor + (2.3 - floor) * np.clip(hard * [1.0, 0.8, 0.6] + rng.normal(0, 0.05, (20_000, 3)), 0, 1)
    loss = rng.random((20_000, 3)) < hard**2 * [0.1, 0.03, 0.0]
    gmacs = [0.188, 1.735, 7.097]
    found = certified_thresholds(entropy, loss, gmacs, 0.01, 0.05)
    spent = np.take(gmacs, exit_rounds(entropy, found.threshold)).mean()
    best = min(
        np.take(gmacs, exit_rounds(entropy, pair)).mean()
        for pair in np.quantile(entropy[:, 0], np.linspace(0, 1, 21))[np.stack(np.meshgrid(range(21), range(21)), -1)]
        .reshape(-1, 2)
        .tolist()
        if harm_share(entropy, loss, pair) <= 0.008
    )
    assert min(found.threshold) > floor
    assert spent <= 1.2 * best


def test_losses_of_three_rounds_are_checked_too():
    scores = np.random.default_rng(0).random((10, 3))
    for bad in (1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"true .* or false, or numbers from 0 to 1"):
            certified_thresholds(scores, np.full((10, 3), bad), [1, 2, 3], 0.1, 0.1)
    with pytest.raises(ValueError, match="both are images x rounds"):
        certified_thresholds(scores, np.zeros((10, 2)), [1, 2, 3], 0.1, 0.1)
    assert certified_thresholds(torch.tensor(scores), torch.zeros(10, 3), [1, 2, 3], 0.5, 0.5).images == 7


@pytest.mark.slow
def test_three_rounds_keep_something_where_the_design_split_sees_no_harm():
    """A harm rarer than the design split can show must not cost everything: the path begins with small steps."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        hard = rng.random((5000, 1))
        entropy = 0.2 + 2 * np.clip(hard * [1.0, 0.9, 0.8], 0, 1)
        loss = rng.random((5000, 3)) < 0.004 * hard * [1.0, 0.5, 0.0]
        found = certified_thresholds(entropy, loss, [0.188, 1.735, 7.097], 0.0015, 0.05, seed=seed)
        assert max(found.threshold) > 0.2
        assert (exit_rounds(entropy, found.threshold) < 2).mean() > 0.02
