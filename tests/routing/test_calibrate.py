import numpy as np
import pytest

from progresvit.routing import operating_point, threshold_for_budget, threshold_for_exit_share
from progresvit.routing.calibrate import entropy_quantiles

GMACS = [0.912, 6.267]


@pytest.fixture
def scores():
    return np.random.default_rng(0).random((500, 2)) * 2.3


@pytest.mark.parametrize("budget", [0.912, 1.5, 4.467, 6.0, 6.267])
def test_a_budget_is_used_up_to_the_last_image(scores, budget):
    point = operating_point(scores, None, GMACS, threshold_for_budget(scores, GMACS, budget))
    one_image = (GMACS[1] - GMACS[0]) / len(scores)
    assert budget - one_image < point.gmacs <= budget + 1e-9


@pytest.mark.parametrize("budget", [0.5, 0.911, 6.268, float("nan")])
def test_a_budget_below_round_one_or_above_the_full_path_is_refused(scores, budget):
    with pytest.raises(ValueError, match=r"round 1 alone costs 0\.912 and all rounds 6\.267"):
        threshold_for_budget(scores, GMACS, budget)


def test_a_budget_that_broken_images_make_impossible_is_refused(scores):
    scores[:250] = np.nan
    with pytest.raises(ValueError, match=r"250 of 500 images have NaN .* at least 3\.59"):
        threshold_for_budget(scores, GMACS, 2.0)
    with pytest.raises(ValueError, match="only 250 of 500 images can exit early"):
        threshold_for_exit_share(scores, 0.6)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.336, 1.0])
def test_an_exit_share_is_met_with_the_fewest_images(scores, share):
    point = operating_point(scores, None, GMACS, threshold_for_exit_share(scores, share))
    assert share <= point.exit_shares[0] + 1e-12 < share + 1 / len(scores) + 1e-9


def test_an_exit_share_out_of_range_is_refused(scores):
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match="between 0 and 1"):
            threshold_for_exit_share(scores, share)


def test_three_rounds_count_every_early_exit():
    scores = np.random.default_rng(1).random((300, 3))
    point = operating_point(scores, None, [1, 2, 4], threshold_for_exit_share(scores, 0.5))
    assert sum(point.exit_shares[:2]) == pytest.approx(0.5)


def test_a_budget_may_be_rounded_as_tables_round_it(scores):
    costs = [0.91234, 6.26689]
    assert threshold_for_budget(scores, costs, 6.267) == 0.0
    lowest = threshold_for_budget(scores, costs, 0.912)
    assert operating_point(scores, None, costs, lowest).exit_shares[0] == 1.0


def test_quantiles_are_entropies_up_to_which_there_are_as_many_images():
    entropies = np.random.default_rng(2).permutation(np.append(np.zeros(40), np.arange(1, 61)))
    quantiles = entropy_quantiles(entropies)
    assert len(quantiles) == 101
    assert quantiles == tuple(np.append(0.0, np.sort(entropies)).tolist())
    for level, quantile in enumerate(entropy_quantiles(entropies[:37])):
        assert (
            (entropies[:37] < quantile).sum() < max(37 * level / 100, 1) <= max((entropies[:37] <= quantile).sum(), 1)
        )
    assert entropy_quantiles([0.5, float("nan")])[50:52] == (0.5, float("inf"))
    with pytest.raises(ValueError, match="0 or more, not -1"):
        entropy_quantiles([-1.0, 0.5])
