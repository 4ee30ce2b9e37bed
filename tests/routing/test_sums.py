import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.routing import routed_sums
from progresvit.routing.decide import exit_rounds
from progresvit.routing.sums import every_threshold


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
