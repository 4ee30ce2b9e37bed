"""Segmentation: the score of an image, sums over routed images, and certificates for losses between 0 and 1."""

import json
import math

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from progresvit.routing import (
    Setting,
    certified_threshold,
    certified_thresholds,
    hoeffding_bentkus,
    load_setting,
    needed_images,
    patch_entropy,
    routed_sums,
    uncertain_entropy,
)
from progresvit.routing.decide import exit_rounds
from progresvit.routing.sums import every_threshold

# the score of an image


def patch_logits(classes, side=3, images=4, seed=0):
    """Sharp patches, flat ones and ties, (B, K, g, g)."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.0, 1e-3, 0.3, 1, 4, 30, 1e4], size=(images, 1, side, side))
    return (rng.normal(size=(images, classes, side, side)) * scale).astype(np.float32)


def slow_patch_entropy(logits):
    """Patch by patch, in float64."""
    images, _, height, width = logits.shape
    entropy = np.zeros((images, height * width))
    for b in range(images):
        for y in range(height):
            for x in range(width):
                p = scipy.special.softmax(logits[b, :, y, x].astype(np.float64))
                entropy[b, y * width + x] = -sum(v * math.log(v) for v in p.tolist() if v > 0)
    return entropy


@pytest.mark.parametrize("classes", [1, 2, 19, 150])
def test_the_entropy_of_every_patch_is_over_all_classes(classes):
    logits = patch_logits(classes)
    found = patch_entropy(torch.from_numpy(logits))
    assert found.dtype == torch.float32
    assert found.shape == (4, 9)
    assert found.numpy() == pytest.approx(slow_patch_entropy(logits), abs=2e-5)
    assert (found >= 0).all()


def test_patches_come_row_by_row():
    logits = torch.zeros(1, 5, 2, 3)
    logits[0, 0, 1, 0] = 100.0  # the only sure patch
    assert (patch_entropy(logits)[0] < 1).tolist() == [False, False, False, True, False, False]


def test_flat_patches_reach_ln_k_and_never_pass_it():
    for classes in range(1, 200):
        for value in (0.0, 0.1, -3.3, 1e4):
            entropy = patch_entropy(torch.full((1, classes, 4, 4), value))
            assert entropy.double().max().item() <= math.log(classes)
            assert entropy.double().min().item() >= math.log(classes) - 2e-6
            assert uncertain_entropy(entropy).double().item() <= math.log(classes)


def test_the_entropy_of_a_patch_is_float32_whatever_comes_in():
    logits = torch.from_numpy(patch_logits(7))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        given_logits = (logits / 10).to(dtype)
        found = patch_entropy(given_logits)
        assert found.dtype == uncertain_entropy(found).dtype == torch.float32
        assert torch.equal(found, patch_entropy(given_logits.float()))
    assert uncertain_entropy(torch.ones(2, 30, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_logit_makes_its_patch_and_its_image_infinite(bad):
    logits = torch.from_numpy(patch_logits(7))
    logits[1, 4, 2, 0] = bad
    entropy = patch_entropy(logits)
    assert entropy.isinf().nonzero().tolist() == [[1, 6]]
    assert not entropy.isnan().any()
    assert uncertain_entropy(entropy).isinf().tolist() == [False, True, False, False]
    assert (exit_rounds(uncertain_entropy(entropy)[:, None].expand(-1, 2).numpy(), math.inf) == [0, 1, 0, 0]).all()


@pytest.mark.parametrize("patches", [*range(1, 26), 30, 70, 100, 196, 784, 1296])
def test_the_most_uncertain_tenth_of_the_patches_is_rounded_up(patches):
    entropy = np.random.default_rng(patches).random((5, patches)).astype(np.float32)
    count = -(-patches // 10)
    expected = np.sort(entropy.astype(np.float64), axis=1)[:, patches - count :].mean(axis=1)
    found = uncertain_entropy(torch.from_numpy(entropy))
    assert found.shape == (5,)
    assert found.numpy() == pytest.approx(expected, abs=1e-6)
    marked = torch.zeros(patches)
    marked[:count] = 1.0
    assert uncertain_entropy(marked).item() == 1.0  # exactly the marked ones, in any number of dimensions
    marked[count - 1] = 0.0
    assert uncertain_entropy(marked).item() < 1.0


def test_the_mean_is_not_above_the_largest():
    for value in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist():
        entropy = torch.full((784,), value)
        assert uncertain_entropy(entropy).item() <= entropy[0].item()


# sums over routed images


def plain_sums(scores, values, limits):
    """Image by image, as one would explain it."""
    total = np.zeros(values.shape[2:], np.int64 if values.dtype.kind in "bui" else np.float64)
    for row, numbers in zip(scores, values):
        s = 0
        while s < len(row) - 1 and not row[s] < limits[s]:
            s += 1
        total += numbers[s]
    return total


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 3))
def test_sums_are_what_walking_image_by_image_gives(seed, rounds, count, per_round, whole, numbers):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 12, (count, rounds)) / 5  # many are equal
    scores[rng.random(scores.shape) < 0.1] = np.inf
    scores[rng.random(scores.shape) < 0.1] = np.nan
    shape = (count, rounds, numbers) if numbers else (count, rounds)
    values = rng.integers(-(10**12), 10**12, shape) if whole else rng.normal(size=shape)
    thresholds = rng.integers(0, 13, (7, rounds - 1) if per_round else 7) / 5
    thresholds[0] = 0
    thresholds[-1] = np.inf
    found = routed_sums(scores, values, thresholds)
    assert found.shape == (7, *shape[2:])
    assert found.dtype == (np.int64 if whole else np.float64)
    for sums, threshold in zip(found, thresholds):
        expected = plain_sums(scores, values, threshold if per_round else [threshold] * (rounds - 1))
        assert np.array_equal(sums, expected) if whole else sums == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rounds", [2, 3])
def test_marks_are_summed_as_they_are_counted_at_every_threshold(rounds):
    rng = np.random.default_rng(rounds)
    scores = np.round(rng.random((500, rounds)), 2)
    marks = rng.random((500, rounds)) < 0.4
    thresholds = every_threshold(scores)
    rows = np.stack([thresholds] * (rounds - 1), axis=1)  # the same, one for each round
    others = rows / np.linspace(1, 2, rounds - 1)
    for limits in (thresholds, rows, others):
        expected = [marks[np.arange(500), exit_rounds(scores, limit)].sum() for limit in limits]
        assert np.array_equal(routed_sums(scores, marks, limits), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, np.int64])
@pytest.mark.parametrize("thresholds", [[0.0, 0.3, 0.7, np.inf], [[0.0, 0.0], [0.3, 0.7], [0.7, 0.3], [np.inf, 0.0]]])
def test_sums_of_integers_are_exact_where_their_type_or_a_float_is_too_small(dtype, thresholds):
    rng = np.random.default_rng(0)
    scores = rng.random((300, 3))
    values = rng.integers(0, min(np.iinfo(dtype).max, 2**53), (300, 3, 2), dtype=dtype)
    found = routed_sums(scores, values, thresholds)
    rounds = [exit_rounds(scores, threshold) for threshold in thresholds]
    expected = [[sum(int(v) for v in values[np.arange(300), row, m]) for m in range(2)] for row in rounds]
    assert found.dtype == np.int64
    assert found.tolist() == expected


def test_the_full_path_is_summed_without_any_rounding_by_other_rounds():
    values = np.array([[1e20, 0.1], [1e20, 0.2]])
    assert routed_sums(np.full((2, 2), 0.5), values, [0.0])[0] == 0.1 + 0.2


def test_all_thresholds_of_many_images_are_summed_in_one_pass():
    rng = np.random.default_rng(0)
    scores, values = rng.random((50_000, 2)), rng.integers(0, 1000, (50_000, 2, 8))
    thresholds = np.append(np.sort(scores[:, 0]), np.inf)  # a loop over them would take many minutes
    found = routed_sums(scores, values, thresholds)
    order = np.argsort(scores[:, 0])
    for exited in (0, 1, 777, 49_999, 50_000):
        expected = values[order[:exited], 0].sum(axis=0) + values[order[exited:], 1].sum(axis=0)
        assert np.array_equal(found[exited], expected)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (3, 2), (4, 2, 2, 2)])
def test_values_of_another_shape_than_the_scores_are_refused(shape):
    with pytest.raises(ValueError, match=r"scores of shape \(4, 2\) with values of shape .* images x rounds"):
        routed_sums(np.zeros((4, 2)), np.zeros(shape), [0.1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="leave out images that have none"):
        routed_sums(np.zeros((1, 2)), [[bad, 0.0]], [0.1])


# the p-value


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
def test_the_bound_is_that_of_the_papers(n, epsilon):
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


def test_the_bound_is_never_below_the_exact_tail_of_harms():
    for n, epsilon in ((50, 0.1), (300, 0.02), (5000, 0.005)):
        k = np.arange(n + 1)
        assert (hoeffding_bentkus(k / n, n, epsilon) >= binom.cdf(k, n, epsilon) * (1 - 1e-9)).all()


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


# the certificate

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


def test_losses_that_are_nearly_whole_certify_less_than_the_exact_test():
    rng = np.random.default_rng(0)
    score = rng.random(5000)
    harm = (rng.random(5000) < 0.1 * score).astype(float)
    exact = certified_threshold(score, harm, 0.02, 0.05, highest=1.0)
    bounded = certified_threshold(score, harm * (1 - 1e-9), 0.02, 0.05, highest=1.0)
    assert 0.8 * exact.threshold < bounded.threshold < exact.threshold


def test_half_the_loss_certifies_more():
    score, loss = growing(4000, seed=5)
    whole = certified_threshold(score, loss, EPSILON, DELTA, highest=1.0)
    half = certified_threshold(score, loss / 2, EPSILON, DELTA, highest=1.0)
    assert 0 < whole.threshold < half.threshold


def test_as_many_images_are_needed_as_for_losses_of_zero_and_one():
    needed = needed_images(0.01, 0.05)
    score, loss = np.linspace(0.1, 0.9, needed), np.zeros(needed)
    score[-1], loss[-1] = math.nan, 0.5  # never exits; its loss asks for the other test
    assert certified_threshold(score, loss, 0.01, 0.05, highest=1.0).threshold == 1.0
    few = certified_threshold(score[1:], loss[1:], 0.01, 0.05, highest=1.0)
    assert (few.threshold, few.too_few, few.mean_loss, few.harmed) == (0.0, True, 0.0, 0)


def test_tensors_and_any_float_type_of_losses_give_the_same():
    score, loss = growing(2000, seed=6)
    losses = torch.tensor(loss).bfloat16()
    expected = certified_threshold(score, losses.double().numpy(), EPSILON, DELTA, highest=1.0)
    assert expected.threshold > 0
    assert certified_threshold(torch.tensor(score), losses, EPSILON, DELTA, highest=1.0) == expected


def test_two_rounds_of_losses_need_no_design_split_and_the_last_round_loses_nothing():
    score, loss = growing(2000, seed=7)
    expected = certified_threshold(score, loss, EPSILON, DELTA, highest=1.0)
    found = certified_thresholds(
        np.stack([score, score], axis=1), np.stack([loss, loss], axis=1), [1, 2], EPSILON, DELTA, highest=1.0
    )
    assert found == expected


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


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        ([0.5, 0.0, 1.5], r"numbers from 0 to 1, not 1\.5"),
        ([0.5, -0.2, 0.0], r"not -0\.2; count a gain as 0"),
        ([0.5, math.nan, 0.0], "not nan; .* leave out images without a loss"),
        ([0.0, math.inf, 0.0], "not inf"),
        ([0, 2, 1], "not 2"),
        ([0.5, 0.1], "one of each per image"),
        ([[0.5], [0.1], [0.2]], "one of each per image"),
    ],
)
def test_bad_losses_are_refused(loss, match):
    with pytest.raises(ValueError, match=match):
        certified_threshold([0.1, 0.2, 0.3], loss, 0.01, 0.05)


def test_bad_losses_of_three_rounds_are_refused():
    scores = np.random.default_rng(0).random((10, 3))
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="numbers from 0 to 1"):
            certified_thresholds(scores, np.full((10, 3), bad), [1, 2, 3], 0.1, 0.1)
    with pytest.raises(ValueError, match="both are images x rounds"):
        certified_thresholds(scores, np.full((10, 2), 0.5), [1, 2, 3], 0.1, 0.1)


# the setting


def test_a_setting_keeps_the_mean_loss_and_leaves_it_out_without_one(tmp_path):
    known = {"rounds": 2, "weights": "w", "preprocessing": "p", "precision": "fp32", "n": 9, "threshold": 0.4}
    setting = Setting(rule="guarantee", epsilon=0.01, delta=0.05, k=3, mean_loss=0.004, loss="pixel-error", **known)
    setting.save(tmp_path / "drop.json")
    assert load_setting(tmp_path / "drop.json") == setting
    assert json.loads(setting.to_json())["mean_loss"] == 0.004
    assert "mean_loss" not in Setting(rule="guarantee", k=3, loss="labelled", **known).to_json()


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
