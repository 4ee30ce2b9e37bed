import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from progresvit.compute import cumulative_gmacs
from progresvit.config import preset
from progresvit.routing import top10_entropy
from progresvit.routing.decide import exit_rounds
from progresvit.routing.frontier import PAPER_THRESHOLDS, frontier, near_lossless, operating_point
from progresvit.routing.sums import every_threshold, exit_counts


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
    correct[:15, 0] = False  # they exit at 0.1 and are wrong there
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


ROUTER_TABLE_GMACS = [0.912, 1.447, 1.983, 2.518, 3.054, 3.590, 4.125, 4.661, 5.196, 5.732, 6.267]


def test_the_papers_router_table_when_a_tenth_more_of_the_images_continues_each_time():
    entropy = np.column_stack([np.arange(1000) / 1000 + 0.0005, np.zeros(1000)])
    thresholds = [1 - share / 10 for share in range(11)]
    points = frontier(entropy, None, cumulative_gmacs(preset("progresvit_small_192_240")), thresholds)
    assert [round(point.gmacs, 3) for point in points] == ROUTER_TABLE_GMACS
    assert [point.exit_shares[1] for point in points] == pytest.approx(np.arange(11) / 10)


def plain_frontier(scores, correct, gmacs, threshold):
    """Image by image, as one would explain it."""
    spent = right = 0
    for row, hits in zip(scores, correct):
        s = 0
        while s < len(row) - 1 and not row[s] < threshold[s]:
            s += 1
        spent, right = spent + gmacs[s], right + hits[s]
    return right / len(scores), spent / len(scores)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_the_frontier_is_what_walking_image_by_image_gives(seed, rounds, count, per_round):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 12, (count, rounds)) / 5
    scores[rng.random(scores.shape) < 0.1] = np.nan
    correct = rng.random((count, rounds)) < 0.6
    gmacs = np.cumsum(rng.random(rounds) + 0.1).tolist()
    thresholds = rng.integers(0, 13, (7, rounds - 1) if per_round else 7) / 5
    for point, threshold in zip(frontier(scores, correct, gmacs, thresholds), thresholds):
        limits = threshold if per_round else [threshold] * (rounds - 1)
        assert (point.top1, point.gmacs) == pytest.approx(plain_frontier(scores, correct, gmacs, limits))


FINITE_LOGITS = arrays(
    np.float32,
    st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(2, 15)),
    elements=st.floats(-1e4, 1e4, width=32),
)


@settings(deadline=None, max_examples=80)
@given(FINITE_LOGITS, st.integers(0, 100))
def test_zero_runs_every_round_infinity_only_the_first_and_exits_grow_between(logits, label):
    tensor = torch.from_numpy(logits)
    count, rounds, classes = logits.shape
    entropy = top10_entropy(tensor.flatten(0, 1)).view(count, rounds).numpy()
    correct = logits.argmax(axis=-1) == label % classes
    gmacs = list(range(1, rounds + 1))
    points = frontier(entropy, correct, gmacs, [0.0, *np.linspace(0, 3, 30), np.inf])
    assert (points[0].top1, points[0].gmacs) == (correct[:, -1].mean(), gmacs[-1])
    assert (points[-1].top1, points[-1].gmacs) == (correct[:, 0].mean(), gmacs[0])
    exited = np.cumsum([point.exit_shares for point in points], axis=1)  # by each round
    assert (np.diff(exited, axis=0) >= -1e-12).all()


def test_images_with_broken_logits_run_every_round_and_are_counted():
    entropy = np.array([[0.1, 0.1], [np.inf, 0.1], [np.nan, 0.1], [0.2, 0.1]])
    correct = np.array([[1, 0], [1, 0], [1, 1], [1, 0]], bool)
    point = operating_point(entropy, correct, [1.0, 3.0], np.inf)
    assert point.exit_shares == (0.5, 0.5)
    assert point.top1 == 3 / 4


def test_top5_is_read_in_the_round_of_the_exit():
    entropy, correct = np.array([[0.1, 0.0], [0.9, 0.0]]), np.array([[0, 1], [0, 0]], bool)
    correct5 = np.array([[1, 1], [0, 1]], bool)
    points = frontier(entropy, correct, [1.0, 3.0], [0.0, 0.5, 1.0], correct5=correct5)
    assert [(point.top1, point.top5) for point in points] == [(0.5, 1.0), (0.0, 1.0), (0.0, 0.5)]


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_every_threshold_reaches_every_set_of_exits(rounds):
    scores = np.random.default_rng(0).random((30, rounds)).astype(np.float32)
    scores[3, 0] = np.nextafter(scores[4, 0], np.float32(2))  # neighbours without a middle
    fine = exit_counts(
        scores, np.unique([0, *scores.ravel().tolist(), *np.nextafter(scores.astype(float), 2).ravel(), 3])
    )
    found = exit_counts(scores, every_threshold(scores))
    assert {tuple(row) for row in found.tolist()} == {tuple(row) for row in fine.tolist()}


@pytest.mark.parametrize(
    ("threshold", "match"),
    [(-0.1, "0 .* or more, not -0.1"), (float("nan"), "not nan"), ((0.1, 0.2), "so 1 for 2 rounds, not 2")],
)
def test_a_bad_threshold_is_refused(threshold, match):
    with pytest.raises(ValueError, match=match):
        exit_rounds(np.zeros((3, 2)), threshold)


@pytest.mark.parametrize(
    ("scores", "correct", "rounds", "thresholds", "match"),
    [
        (np.zeros((4, 3)), None, 2, PAPER_THRESHOLDS, "scores of 3 rounds with the compute of 2"),
        (np.zeros((4, 2)), np.zeros((4, 3)), 2, PAPER_THRESHOLDS, "values are images x rounds"),
        (np.zeros((0, 2)), None, 2, PAPER_THRESHOLDS, "not of shape"),
        ([[-0.5, 0.1]], None, 2, [0.1], r"0 or more, not -0\.5"),
        (np.zeros((4, 3)), None, 3, [[0.1], [0.1, 0.2]], "rows of equal length"),
    ],
)
def test_scores_and_thresholds_that_do_not_fit_are_refused(scores, correct, rounds, thresholds, match):
    with pytest.raises(ValueError, match=match):
        frontier(scores, correct, [1.0, 2.0, 3.0][:rounds], thresholds)
