"""Settings, groups, withheld answers and compute at equal accuracy of made-up records."""

import json
from dataclasses import replace

import numpy as np
import pytest

from progresvit import evaluation
from progresvit.routing import operating_point
from repro.formats import RoutingResult
from repro.measure.routing import measure_abstention, measure_equal_accuracy, measure_routing
from repro.measure.settings import (
    answer,
    calibrate_within_reach,
    calibrations,
    measure_groups,
    measure_halves,
    measure_settings,
)
from tests.evaluation.made import CLASSES, make_records

IDS = tuple(f"n{number:02}" for number in range(CLASSES))
COMMON = {
    "format": 1, "kind": "routing", "name": "made", "commands": ("progresvit evaluate",), "seed": 0, "seconds": 1.0,
    "date": "2026-01-01", "revision": "abc", "precision": "fp32", "model": "made", "weights": "w",
    "machine": {"device": "cpu", "processes": 1, "jobs": 1, "python": "3.11", "torch": "2.13"},
    "data": {"name": "made", "train": None, "val": 3000, "classes": CLASSES, "names": "n", "learned": None},
}  # fmt: skip


def named(records):
    """The same with names for the classes."""
    return replace(records, header=replace(records.header, config={**records.header.config, "class_ids": IDS}))


@pytest.fixture(scope="module")
def val():
    return named(make_records(3000))


@pytest.fixture(scope="module")
def learned():
    return named(make_records(1500, seed=1))


@pytest.fixture(scope="module")
def measured(val, learned):
    return measure_routing(val, learned, groups={"low": IDS[:4], "high": IDS[4:]}, fits=1, halves=3, splits=2)


def test_what_is_measured_is_a_result_and_survives_json(measured):
    result = RoutingResult(**COMMON, **measured)
    text = json.dumps(result.model_dump(mode="json"), allow_nan=False)
    assert RoutingResult.model_validate(json.loads(text)) == result
    assert [one.name for one in result.settings] == ["near-lossless", "drop-0.5", "drop-1", "careful"]
    assert len(result.matched) == 4


def test_settings_are_those_of_the_calibrations(measured, val):
    near, half, point, careful = measured["settings"]
    assert near.point.threshold == evaluation.calibrate_near_lossless(val).threshold
    assert point.point.threshold == evaluation.calibrate_guarantee(val, epsilon=0.01, delta=0.05).threshold
    assert (half.epsilon, half.delta, near.epsilon) == (0.005, 0.05, None)
    assert (near.answered, near.top1_of_answered) == (1.0, pytest.approx(near.point.top1))
    expected = evaluation.with_abstention(val, evaluation.calibrate_near_lossless(val), 0.05)
    assert careful.abstain == expected.abstain
    assert careful.answered == expected.expected["coverage"] < 1
    assert careful.top1_of_answered == pytest.approx(expected.expected["answered_top1"])
    assert careful.top1_of_answered >= 0.95


def test_halves_calibrate_on_one_part_and_measure_on_the_other(val):
    found = measure_halves(val, calibrations()["drop-1"], number=4)
    drops, savings = [], []
    for seed in range(4):
        design, report = val.split(0.5, seed)
        threshold = evaluation.calibrate_guarantee(design, epsilon=0.01, delta=0.05).threshold
        point = operating_point(report.scores(), report.correct, report.gmacs(), threshold)
        drops.append(report.correct[:, -1].mean() - point.top1)
        savings.append(1 - point.gmacs / report.gmacs()[-1])
    assert (found.drop.lowest, found.drop.highest) == pytest.approx((min(drops), max(drops)))
    assert found.saving.mean == pytest.approx(np.mean(savings))
    assert found.number == 4
    assert found.broken in range(5)
    assert measure_halves(val, calibrations()["near-lossless"], number=2).broken is None


def test_a_guarantee_that_is_broken_is_counted(val):
    """A threshold that pays no heed to the promise breaks it on every half."""

    def careless(records):
        return evaluation.calibrate_guarantee(records, epsilon=0.01, delta=0.05).model_copy(update={"threshold": 2.0})

    assert measure_halves(val, careless, number=3).broken == 3


def test_settings_out_of_reach_are_left_out():
    few = make_records(700)
    assert set(calibrate_within_reach(few)) == {"near-lossless", "drop-0.5", "drop-1", "careful"}
    found = {one.name: one for one in measure_settings(few, calibrate_within_reach(few), halves=3)}
    assert found["drop-0.5"].halves is None  # half as many cannot certify it
    assert found["drop-1"].halves is not None
    assert set(calibrate_within_reach(make_records(100))) == {"near-lossless", "careful"}


def test_groups_that_make_up_the_whole_add_up_to_it(measured, val):
    low, high = measured["groups"]
    assert low.pictures + high.pictures == len(val)
    shares = np.array([low.pictures, high.pictures]) / len(val)
    np.testing.assert_allclose(shares @ [low.top1, high.top1], val.correct.mean(axis=0))
    for number, setting in enumerate(measured["settings"]):
        at = [low.at[number], high.at[number]]
        assert at[0].setting == setting.name
        assert shares @ [one.top1 for one in at] == pytest.approx(setting.point.top1)
        assert shares @ [one.gmacs_paper for one in at] == pytest.approx(setting.point.gmacs_paper)
        assert shares @ [one.answered for one in at] == pytest.approx(setting.answered)
        np.testing.assert_allclose(shares @ [one.exit_shares for one in at], setting.point.exit_shares)


def test_a_group_is_of_classes_that_the_model_knows(val):
    with pytest.raises(ValueError, match="does not know: n99"):
        measure_groups(val, {"odd": ("n01", "n99")}, {})
    with pytest.raises(ValueError, match=r"class_ids of its config.json are missing"):
        measure_groups(make_records(20), {"odd": ("n01",)}, {})
    with pytest.raises(ValueError, match="'last' has no images"):
        measure_groups(val.take(val.labels != 3), {"last": ("n03",)}, {})


def test_a_setting_that_withholds_all_answers_none(val):
    setting = evaluation.calibrate_near_lossless(val).model_copy(update={"abstain": 0.0})
    assert not answer(val, setting).given.any()
    (group,) = measure_groups(val, {"low": IDS[:4]}, {"mute": setting})
    assert (group.at[0].answered, group.at[0].top1_of_answered) == (0.0, None)


def test_risk_curves_are_thinned_and_keep_their_ends_and_area(measured, val):
    whole = evaluation.risk_coverage_curves(val)
    assert [one.name for one in measured["abstention"]] == ["round 1", "round 2", "routed"]
    for curve in measured["abstention"]:
        assert len(curve.risk) == len(curve.coverage) == 100
        assert curve.area == whole[curve.name].area
        assert (curve.coverage[0], curve.coverage[-1]) == (1 / len(val), 1.0)
        assert curve.risk[-1] == whole[curve.name].risk[-1]
    assert len(measure_abstention(val.take(np.arange(30)))[0].risk) == 30


def test_compute_at_equal_accuracy_goes_from_every_round_to_the_oracle(measured, val):
    rows = measured["equal_accuracy"]
    assert (rows[0].rule, rows[0].saving, rows[-1].rule) == ("every round", 0.0, "oracle")
    assert len(rows) == 2 + 3 * 4
    assert {row.drop for row in rows[1:-1]} == {0.0003, 0.005, 0.01}
    assert all((row.given_up is not None) == ("rejected" in row.rule) for row in rows)
    alone = measure_equal_accuracy(val, None, splits=1)
    assert [row.rule for row in alone] == [row.rule for row in rows]
    assert alone != list(rows)


def test_compute_at_equal_accuracy_is_a_mean_over_splits(val, learned):
    both = measure_equal_accuracy(val, learned, splits=2)
    each = [measure_equal_accuracy(val, learned, seed=seed, splits=1) for seed in (0, 1)]
    for mean, *parts in zip(both, *each):
        assert mean.top1 == pytest.approx(np.mean([one.top1 for one in parts]))
        assert mean.gmacs_paper == pytest.approx(np.mean([one.gmacs_paper for one in parts]))
        assert (mean.rule, mean.drop) == (parts[0].rule, parts[0].drop)
    assert measure_equal_accuracy(val, learned.take(learned.correct.all(axis=1)), splits=1) == []


def test_three_rounds_are_measured_without_matched_rates():
    found = measure_routing(make_records(3000, rounds=3), fits=1, halves=1, splits=1)
    assert found["matched"] == ()
    thresholds = {one.name: one.point.threshold for one in found["settings"]}
    assert isinstance(thresholds["near-lossless"], float)
    assert len(thresholds["drop-1"]) == 2
    assert [one.name for one in found["abstention"]] == ["round 1", "round 3", "routed"]
    json.dumps(RoutingResult(**COMMON, **found).model_dump(mode="json"), allow_nan=False)


def test_what_cannot_be_routed_is_refused(val, learned):
    with pytest.raises(ValueError, match="no routing to measure"):
        measure_routing(make_records(50, rounds=1))
    with pytest.raises(ValueError, match="3000 images are in both"):
        measure_routing(val, val)
    other = replace(learned, header=replace(learned.header, weights="v"))
    with pytest.raises(ValueError, match="different weights"):
        measure_routing(val, other)
