"""Every rule against brute force over the thresholds, from the label maps themselves."""

import math
from dataclasses import replace

import numpy as np
import pytest

from progresvit.evaluation import (
    calibrate_budget,
    calibrate_near_lossless,
    calibrate_segmentation_budget,
    calibrate_segmentation_exit_share,
    calibrate_segmentation_guarantee,
    calibrate_segmentation_near_lossless,
)
from progresvit.routing import certified_thresholds, hoeffding_bentkus, load_setting, threshold_for_budget
from progresvit.routing.certify import GRID
from progresvit.routing.decide import exit_rounds
from tests.evaluation.made import make_records
from tests.evaluation.made_segmentation import CLASSES, IGNORE, make_maps, make_segmentation_records, naive_miou


def candidates(scores):
    """A threshold at, below and above every score."""
    distinct = np.unique(scores[:, :-1].astype(np.float64))
    return np.concatenate([[0.0], distinct, distinct + 1e-9])


def walk(records, maps):
    """mIoU, GMACs and exit share of each threshold, image by image."""
    labels, predictions, scores = maps
    for threshold in candidates(scores):
        rounds = exit_rounds(scores, float(threshold))
        routed = predictions[rounds, np.arange(len(labels))]
        gmacs = np.mean([records.gmacs()[row, s] for row, s in enumerate(rounds)])
        early = (rounds < scores.shape[1] - 1).mean()
        yield threshold, naive_miou(routed, labels), gmacs, early


@pytest.fixture(scope="module", params=[2, 3])
def case(request):
    maps = make_maps(120, rounds=request.param)
    records = make_segmentation_records(120, request.param, maps=maps)
    return records, maps, list(walk(records, maps))


@pytest.mark.parametrize("drop", [0.0003, 0.02])
def test_near_lossless_is_the_cheapest_threshold_within_the_drop(case, drop):
    records, maps, every = case
    setting = calibrate_segmentation_near_lossless(records, max_drop=drop)
    full = naive_miou(maps[1][-1], maps[0])
    cheapest = min(gmacs for _, miou, gmacs, _ in every if miou >= full - drop - 1e-12)
    assert setting.expected["gmacs"] == pytest.approx(cheapest)
    assert setting.expected["miou"] >= full - drop - 1e-12
    assert setting.expected["full_miou"] == pytest.approx(full)
    assert setting.rule == "near-lossless"


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 1.0])
def test_a_budget_is_spent_on_as_many_images_as_it_allows(case, part):
    records, _, every = case
    first, full = records.gmacs()[:, [0, -1]].mean(axis=0)
    budget = first + part * (full - first)
    setting = calibrate_segmentation_budget(records, budget)
    most = max(gmacs for *_, gmacs, _ in every if gmacs <= budget + 1e-9)
    assert setting.expected["gmacs"] == pytest.approx(most)
    executed = calibrate_segmentation_budget(records, records.gmacs("executed")[:, 0].mean(), convention="executed")
    assert executed.expected["convention"] == "executed"
    assert executed.expected["gmacs"] == pytest.approx(records.gmacs("executed")[:, 0].mean())
    with pytest.raises(ValueError, match=f"round 1 alone costs {first:.3f} and all rounds {full:.3f}"):
        calibrate_segmentation_budget(records, 2 * full)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_an_exit_share_is_reached_with_as_few_images_as_possible(case, share):
    records, _, every = case
    setting = calibrate_segmentation_exit_share(records, share)
    fewest = min(early for *_, early in every if early >= share - 1e-9)
    assert sum(setting.expected["exit_shares"][:-1]) == pytest.approx(fewest)


def test_a_setting_says_what_it_gives_and_what_it_is_bound_to(tmp_path):
    maps = labels, predictions, scores = make_maps(200)
    records = make_segmentation_records(200, maps=maps)
    setting = calibrate_segmentation_exit_share(records, 0.4)
    rounds = exit_rounds(scores, setting.threshold)
    routed, kept = predictions[rounds, np.arange(200)], labels != IGNORE
    spent = records.gmacs()[np.arange(200), rounds].mean()
    full = records.gmacs()[:, -1].mean()
    expected = dict(setting.expected)
    assert expected.pop("exit_shares") == pytest.approx([0.4, 0.6])
    assert expected == pytest.approx(
        {
            "miou": naive_miou(routed, labels),
            "full_miou": naive_miou(predictions[1], labels),
            "pixel_accuracy": (routed == labels)[kept].mean(),
            "full_pixel_accuracy": (predictions[1] == labels)[kept].mean(),
            "gmacs": spent,
            "full_gmacs": full,
            "saving": 1 - spent / full,
            "convention": "paper",
        }
    )
    header = records.header
    assert (setting.weights_sha256, setting.preprocessing_sha256) == (
        header.weights_sha256,
        header.preprocessing_sha256,
    )
    assert (setting.n, setting.rounds, setting.data, setting.precision) == (200, 2, "made", "fp32")
    setting.save(tmp_path / "t.json")
    assert load_setting(tmp_path / "t.json") == setting


def test_the_guarantee_is_on_what_early_exits_add_to_the_pixel_error():
    labels, predictions, scores = make_maps(3000)
    labels[5] = IGNORE  # an image without labels loses nothing
    records = make_segmentation_records(3000, maps=(labels, predictions, scores))
    setting = calibrate_segmentation_guarantee(records, epsilon=0.05, delta=0.1)
    kept = labels != IGNORE
    error = [[(found[row] != label[row]).mean() if row.any() else 0.0 for found, label, row in zip(of, labels, kept)]
             for of in predictions]  # fmt: skip
    loss = np.maximum(np.subtract(*error), 0)
    passed = 0.0
    for threshold in np.linspace(0, math.log(len(CLASSES)), GRID):
        mean = np.where(scores[:, 0] < threshold, loss, 0).mean()
        if hoeffding_bentkus(mean, 3000, 0.05) > 0.1:
            break
        passed = threshold
    lost = np.where(scores[:, 0] < setting.threshold, loss, 0)
    assert setting.threshold == passed > 0
    assert setting.mean_loss == pytest.approx(lost.mean())
    assert (setting.n, setting.k, setting.loss) == (3000, (lost > 0).sum(), "pixel-error")
    assert (setting.epsilon, setting.delta, setting.rule) == (0.05, 0.1, "guarantee")
    assert setting.p_value == pytest.approx(float(hoeffding_bentkus(lost.mean(), 3000, 0.05)))
    error = records.pixel_error
    routed = np.where(scores[:, 0] < setting.threshold, error[:, 0], error[:, 1])
    assert routed.mean() - error[:, 1].mean() <= setting.mean_loss


def test_three_rounds_are_certified_on_images_that_do_not_order_them():
    records = make_segmentation_records(2000, rounds=3)
    setting = calibrate_segmentation_guarantee(records, epsilon=0.1, delta=0.05, seed=4)
    assert (setting.n, len(setting.threshold)) == (1400, 2)
    loss = np.maximum(records.pixel_error - records.pixel_error[:, -1:], 0)
    certified = certified_thresholds(
        records.scores, loss, records.header.gmacs["paper"], 0.1, 0.05, highest=math.log(4), seed=4
    )
    assert setting.threshold == certified.threshold
    assert setting.mean_loss == certified.mean_loss


def test_rounds_that_are_alternatives_have_no_setting():
    records = make_segmentation_records(20)
    fixed = replace(records, header=replace(records.header, routable=False))
    for calibrate in (calibrate_segmentation_near_lossless, lambda r: calibrate_segmentation_exit_share(r, 0.5)):
        with pytest.raises(ValueError, match="are alternatives, so there is no routing"):
            calibrate(fixed)


def test_a_budget_for_equal_images_is_that_of_one_list_of_gmacs():
    rng = np.random.default_rng(0)
    scores, gmacs = rng.random((300, 3)), [1.0, 3.0, 7.0]
    for budget in (1.0, 2.5, 6.0, 7.0):
        expected = threshold_for_budget(scores, gmacs, budget)
        assert threshold_for_budget(scores, np.tile(gmacs, (300, 1)), budget) == expected
    scores[:10] = np.inf
    with pytest.raises(ValueError, match="10 of 300 images have NaN or infinite logits"):
        threshold_for_budget(scores, np.tile(gmacs, (300, 1)), 1.0)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda records: calibrate_near_lossless(records, per_round=True), "thresholds per round are chosen by top-1"),
        (lambda records: calibrate_budget(records, 1.0, per_round=True), "leave out per_round=True"),
        (lambda records: records.losses("labelled"), "pass loss='pixel-error'"),
        (lambda records: records.exit_scores(object()), "segmentation takes router=None"),
        (lambda records: make_records(20).losses("pixel-error"), "pass loss='labelled' or loss='unlabelled'"),
    ],
)
def test_rules_of_the_other_kind_of_model_are_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(make_segmentation_records(20))
