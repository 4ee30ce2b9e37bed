"""One threshold for each round from records: rows of the frontier, settings, and what is refused."""

import numpy as np
import pytest

from progresvit.evaluation import calibrate_budget, calibrate_near_lossless, frontier_table
from progresvit.evaluation.per_round import OTHER_HALF, cross_fitted_curve, find_thresholds
from progresvit.evaluation.records import split_by_id
from progresvit.routing import Policy, load_setting, near_lossless, operating_point
from progresvit.routing.decide import exit_rounds
from tests.evaluation.made import make_records


def test_the_near_lossless_setting_saves_more_with_a_threshold_for_each_round(tmp_path):
    records = make_records(2000, rounds=3)
    setting, shared = calibrate_near_lossless(records, per_round=True), calibrate_near_lossless(records)
    assert len(setting.threshold) == 2
    assert setting.expected["saving"] > shared.expected["saving"]
    assert setting.expected["top1"] >= setting.expected["full_top1"] - 0.0003
    point = operating_point(records.scores(), records.correct, records.gmacs(), setting.threshold)
    assert point.gmacs == setting.expected["gmacs"]
    setting.save(tmp_path / "s.json")
    loaded = load_setting(tmp_path / "s.json")
    assert loaded == setting
    assert Policy.make(3, loaded.threshold).thresholds == setting.threshold


def test_a_setting_says_what_its_choice_gives_on_the_other_half():
    records = make_records(1000, rounds=3)
    expected = calibrate_near_lossless(records, per_round=True).expected[OTHER_HALF]
    first, right, spent = split_by_id(records.ids, 0.5, 0), 0, 0.0
    for design, report in ((first, ~first), (~first, first)):
        found = find_thresholds(records.take(design)).near_lossless()
        rounds = exit_rounds(records.scores()[report], found)
        right += int(records.correct[report][np.arange(len(rounds)), rounds].sum())
        spent += float(np.array(records.gmacs())[rounds].sum())
    assert expected["top1"] == right / 1000
    assert expected["gmacs"] == pytest.approx(spent / 1000)


def test_a_budget_with_a_threshold_for_each_round_is_kept_and_more_accurate():
    records = make_records(2000, rounds=3)
    budget = records.gmacs()[1] * 0.8
    setting, shared = calibrate_budget(records, budget, per_round=True), calibrate_budget(records, budget)
    assert setting.expected["gmacs"] <= budget
    assert setting.expected["top1"] > shared.expected["top1"] + 0.01
    with pytest.raises(ValueError, match="all rounds"):
        calibrate_budget(records, 99, per_round=True)
    with pytest.raises(ValueError, match="round 1 alone"):
        calibrate_budget(records, records.gmacs()[0] / 10, per_round=True)


def test_the_frontier_of_three_rounds_has_rows_per_round_and_that_of_two_does_not():
    records = make_records(600, rounds=3)
    rows = frontier_table({"m": records}, [0.5]).rows
    notes = [row["note"] for row in rows]
    assert notes[:4] == [
        "",
        "near-lossless",
        "near-lossless, per round",
        "near-lossless, per round, chosen on the other half",
    ]
    assert set(notes[4:]) == {"per round, chosen on the other half"}
    assert rows[2]["threshold"] == find_thresholds(records).near_lossless()
    assert rows[2]["gmacs_paper"] <= near_lossless(records.scores(), records.correct, records.gmacs()).gmacs
    assert all(row["threshold"] is None for row in rows[3:])
    for records in (make_records(600), make_records(99, rounds=3), make_records(600, rounds=3, labelled=False)):
        assert not any("per round" in row["note"] for row in frontier_table({"m": records}, [0.5]).rows)


def test_a_curve_keeps_to_its_budgets_about_and_has_each_point_once():
    records = make_records(2000, rounds=3)
    budgets = np.linspace(*records.gmacs()[::2], 30)[1:-1]
    points, _ = cross_fitted_curve(records, budgets.tolist())
    assert len({point.gmacs for point in points}) == len(points) < len(budgets)
    assert all(sum(point.exit_shares) == pytest.approx(1) for point in points)
    span = budgets[-1] - budgets[0]
    for point, budget in zip(points[:5], budgets):
        assert abs(point.gmacs - budget) < 0.05 * span


def test_images_without_finite_logits_in_one_half_do_not_stop_a_curve():
    records = make_records(300, rounds=3)
    records.top10_entropy[split_by_id(records.ids, 0.5, 0), 0] = np.inf
    points, _ = cross_fitted_curve(records, [records.gmacs()[0]])
    assert points[0].exit_shares[0] < 0.6


def test_two_rounds_few_images_and_missing_labels_are_refused():
    for records, match in (
        (make_records(600), "for 3 rounds or more, and these records have 2; leave out per_round=True"),
        (make_records(60, rounds=3), "60 images are too few for thresholds per round, which need 100"),
        (make_records(600, rounds=3, labelled=False), "have no label"),
    ):
        with pytest.raises(ValueError, match=match):
            calibrate_near_lossless(records, per_round=True)
