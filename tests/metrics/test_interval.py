"""95 % intervals of means, shares and their changes."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from progresvit.metrics.interval import LIKELY, mean_interval, paired_change, share_interval


@pytest.mark.parametrize(("successes", "total"), [(0, 5), (1, 5), (5, 5), (7, 20), (150, 300), (299, 300)])
def test_the_interval_of_a_share_is_wilsons(successes, total):
    expected = binomtest(successes, total).proportion_ci(method="wilson")  # its quantile is 1.959964
    interval = share_interval(successes, total)
    assert interval.mean == successes / total
    assert (interval.lowest, interval.highest) == pytest.approx((expected.low, expected.high), abs=1e-4)
    assert 0 <= interval.lowest <= interval.mean <= interval.highest <= 1


def test_the_ends_of_a_share_are_those_whose_test_just_fails():
    interval = share_interval(30, 100)
    for end in (interval.lowest, interval.highest):
        assert abs(interval.mean - end) == pytest.approx(LIKELY * math.sqrt(end * (1 - end) / 100))


def test_a_share_of_no_images_says_nothing():
    interval = share_interval(0, 0)
    assert math.isnan(interval.mean)
    assert (interval.lowest, interval.highest) == (0, 1)


@pytest.mark.parametrize(("successes", "total"), [(6, 5), (-1, 5), (1, 0)])
def test_more_successes_than_images_are_refused(successes, total):
    with pytest.raises(ValueError, match=f"from 0 to {total} of {total} images, not {successes}"):
        share_interval(successes, total)


def test_the_interval_of_a_mean_is_normal():
    values = np.random.default_rng(0).normal(size=50)
    interval = mean_interval(values)
    reach = 1.96 * values.std(ddof=1) / math.sqrt(50)
    assert (interval.mean, interval.lowest, interval.highest) == pytest.approx(
        (values.mean(), values.mean() - reach, values.mean() + reach)
    )
    assert mean_interval([2.0]).highest == math.inf


def test_the_interval_of_a_change_is_that_of_the_table_with_half_an_image_added_to_each_cell():
    ours, theirs = np.array([1, 1, 1, 0, 0, 1, 0, 1], bool), np.array([1, 0, 0, 1, 0, 1, 0, 0], bool)
    gained, lost, total = 3.5, 1.5, 10
    change = (gained - lost) / total
    reach = 1.96 * math.sqrt((gained + lost) / total - change**2) / math.sqrt(total)
    found = paired_change(ours, theirs)
    assert found.mean == 2 / 8
    assert (found.lowest, found.highest) == pytest.approx((change - reach, change + reach))


def test_no_change_of_few_images_is_not_certain():
    few, many = (paired_change(np.ones(n), np.ones(n)) for n in (10, 1000))
    assert few.mean == many.mean == 0
    assert few.highest == -few.lowest == pytest.approx(1.96 / 12)
    assert many.highest == pytest.approx(1.96 / 1002)
    everything = paired_change(np.ones(4), np.zeros(4))
    assert everything.mean == everything.highest == 1


@pytest.mark.parametrize(("gain", "loss"), [(0.0, 0.0), (0.01, 0.01), (0.02, 0.1), (0.3, 0.2)])
def test_the_interval_of_a_change_covers_the_truth(gain, loss):
    rng, covered = np.random.default_rng(0), 0
    for _ in range(500):
        drawn = rng.random(200)
        up, down = drawn < gain, drawn > 1 - loss
        found = paired_change(up, down)
        covered += found.lowest <= gain - loss <= found.highest
    assert covered / 500 > 0.925


def test_a_share_is_printed_with_its_interval():
    assert share_interval(40, 40).as_percent() == "100.00% (91.24 to 100.00)"
