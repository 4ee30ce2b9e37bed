"""Settings, groups, withheld answers and compute at equal accuracy of made-up records."""

from dataclasses import replace

import numpy as np
import pytest

from progresvit import evaluation
from progresvit.routing import Router, operating_point
from repro.formats import RoutingResult, to_json
from repro.measure.certificates import check_certificate
from repro.measure.routers import measure_rejection
from repro.measure.routing import _added, measure_abstention, measure_equal_accuracy, measure_routing
from repro.measure.settings import (
    answer,
    calibrate_within_reach,
    calibrations,
    label_free_calibrations,
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


@pytest.fixture(scope="module", autouse=True)
def _short_fits():
    """Routers are fitted in a few steps: what is measured of them does not depend on how good they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("progresvit.routing.router.LEAST_STEPS", 20)
        yield


@pytest.fixture(scope="module")
def val():
    return named(make_records(3000))


@pytest.fixture(scope="module")
def learned():
    return named(make_records(1500, seed=1))


@pytest.fixture(scope="module")
def measured(val, learned):
    return measure_routing(val, learned, groups={"low": IDS[:4], "high": IDS[4:]}, fits=1, halves=3, draws=20, splits=2)


def test_what_is_measured_is_a_result_and_survives_json(measured):
    result = RoutingResult(**COMMON, **measured)
    text = to_json(result)
    assert to_json(RoutingResult.model_validate_json(text)) == text
    assert [one.name for one in result.settings] == [
        *("near-lossless", "drop-0.5", "drop-1", "careful", "drop-0.5-unlabelled", "drop-1-unlabelled")
    ]
    assert len(result.matched) == 4
    assert len(result.rejection) == 4


def test_settings_are_those_of_the_calibrations(measured, val):
    near, half, point, careful, *_ = measured["settings"]
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


def test_halves_count_lost_and_changed_answers_image_by_image(val):
    found = measure_halves(val, label_free_calibrations()["drop-1-unlabelled"], number=2)
    harms, changes = [], []
    for seed in range(2):
        design, report = val.split(0.5, seed)
        tau = evaluation.calibrate_guarantee(design, epsilon=0.01, delta=0.05, loss="unlabelled").threshold
        early = [
            (p, label) for p, label, e in zip(report.predictions, report.labels, report.top10_entropy) if e[0] < tau
        ]
        harms.append(sum(first != label == last for (first, last), label in early) / len(report))
        changes.append(sum(first != last for (first, last), _ in early) / len(report))
    assert (found.harm.lowest, found.harm.highest) == pytest.approx((min(harms), max(harms)))
    assert found.disagreement.mean == pytest.approx(np.mean(changes))
    assert 0 < found.harm.mean < found.disagreement.mean


def test_guarantees_are_checked_on_draws_of_all_images(measured, val):
    by_name = {one.name: one for one in measured["settings"]}
    assert [name for name, one in by_name.items() if one.draws is None] == ["near-lossless", "careful"]
    for name, epsilon, loss in (("drop-0.5", 0.005, "labelled"), ("drop-1-unlabelled", 0.01, "unlabelled")):
        expected = check_certificate(val, epsilon=epsilon, delta=0.05, loss=loss, images=3000, draws=20)
        assert by_name[name].draws == expected
        assert by_name[name].loss == loss


def test_a_label_free_guarantee_does_not_look_at_labels(measured, val):
    by_name = {one.name: one for one in measured["settings"]}
    shuffled = replace(val, labels=np.roll(val.labels, 1))
    again = calibrate_within_reach(shuffled, label_free_calibrations())
    assert set(again) == {"drop-0.5-unlabelled", "drop-1-unlabelled"}
    for name, setting in again.items():
        assert setting.threshold == by_name[name].point.threshold
        assert setting.threshold < by_name[name.removesuffix("-unlabelled")].point.threshold
        assert (by_name[name].epsilon, by_name[name].loss) == (setting.epsilon, "unlabelled")


def test_settings_out_of_reach_are_left_out():
    few = make_records(700)
    assert set(calibrate_within_reach(few)) == {"near-lossless", "drop-0.5", "drop-1", "careful"}
    found = {one.name: one for one in measure_settings(few, calibrations(), halves=3, draws=2)}
    assert found["drop-0.5"].halves is None  # half as many cannot certify it
    assert found["drop-1"].halves is not None
    assert set(calibrate_within_reach(make_records(100))) == {"near-lossless", "careful"}


def test_the_error_rate_among_answers_is_that_of_the_study(val, monkeypatch):
    for name in ("measure_matched", "measure_equal_accuracy", "measure_rejection"):  # slow, and without that rate
        monkeypatch.setattr(f"repro.measure.routing.{name}", lambda *records, **options: [])
    found = {rate: measure_routing(val, max_error=rate, fits=1, halves=1, draws=1, splits=1) for rate in (0.05, 0.02)}
    loose, strict = ({one.name: one for one in found[rate]["settings"]}["careful"] for rate in (0.05, 0.02))
    assert found[0.02]["max_error"] == 0.02
    assert loose.top1_of_answered >= 0.95
    assert strict.top1_of_answered >= 0.98
    assert strict.answered < loose.answered


def test_groups_that_make_up_the_whole_add_up_to_it(measured, val):
    low, high = measured["groups"]
    assert low.pictures + high.pictures == len(val)
    shares = np.array([low.pictures, high.pictures]) / len(val)
    np.testing.assert_allclose(shares @ [low.top1, high.top1], val.correct.mean(axis=0))
    for number, setting in enumerate(measured["settings"][:4]):
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


def test_compute_at_equal_accuracy_is_a_mean_over_splits(measured, val):
    each = [measure_equal_accuracy(val, seed=seed, splits=1) for seed in (0, 1)]
    for mean, *parts in zip(measured["equal_accuracy"], *each):
        assert mean.top1 == pytest.approx(np.mean([one.top1 for one in parts]))
        assert mean.gmacs_paper == pytest.approx(np.mean([one.gmacs_paper for one in parts]))
        assert (mean.rule, mean.drop) == (parts[0].rule, parts[0].drop)
    assert measure_equal_accuracy(val.take(val.correct.all(axis=1)), splits=1) == []


def test_what_giving_up_adds_is_the_difference_of_two_rows(measured):
    rows = {(row.rule, row.drop): row for row in measured["equal_accuracy"]}
    giving_up = [row for row in rows.values() if row.errors_added]
    assert [row.rule for row in giving_up] == [row.rule for row in rows.values() if "rejected" in row.rule]
    for row in giving_up:
        other = rows[row.rule.removesuffix(", unrecoverable rejected"), row.drop]
        assert row.errors_added.mean == pytest.approx(other.top1 - row.top1, abs=1e-6)
        assert row.saving_added.mean == pytest.approx(row.saving - other.saving, abs=1e-6)
        for added in (row.errors_added, row.saving_added):
            assert added.lowest <= added.mean + 1e-6
            assert added.mean <= added.highest + 1e-6
    assert any(row.saving_added.lowest < row.saving_added.highest for row in giving_up)


def test_the_interval_of_what_giving_up_adds_is_that_of_the_reported_images():
    rng = np.random.default_rng(0)
    reported = np.arange(4000) % 2 == 0
    errors = rng.choice([-1, 0, 1], 2000, p=[0.05, 0.85, 0.1])
    values = np.stack([errors, np.full(2000, 0.25)], axis=1).astype(np.float32)
    found = _added([(reported, {("made", 0.01): values})], seed=0)["made", 0.01]
    reach = 1.96 * errors.std() / np.sqrt(2000)
    assert found["errors_added"].mean == pytest.approx(errors.mean(), abs=1e-6)
    assert found["errors_added"].highest - found["errors_added"].lowest == pytest.approx(2 * reach, rel=0.1)
    assert found["saving_added"].mean == pytest.approx(0.25)


def test_no_router_scores_an_image_that_it_was_fitted_on(val, monkeypatch):
    names = {row.tobytes(): name for row, name in zip(val.statistics, val.ids.tolist())}
    assert len(names) == len(val)
    asked, score = [], Router.scores

    def watch(router, statistics):
        ids = np.array([names[row.tobytes()] for row in statistics])
        assert not router.count_seen(ids)
        asked.append((router.origin.target, len(ids)))
        return score(router, statistics)

    monkeypatch.setattr(Router, "scores", watch)
    assert measure_equal_accuracy(val, splits=1)
    assert {target for target, _ in asked} == {"unrecoverable", "benefit"}
    assert {count for _, count in asked} <= set(range(850, 1150))  # a third
    asked.clear()
    assert measure_rejection(val, fits=1)
    assert [target for target, _ in asked] == ["unrecoverable"] * 5
    assert sum(count for _, count in asked) == len(val)


def test_three_rounds_are_measured_without_matched_rates():
    found = measure_routing(make_records(3000, rounds=3), fits=1, halves=1, draws=3, splits=1)
    assert found["matched"] == found["rejection"] == ()
    thresholds = {one.name: one.point.threshold for one in found["settings"]}
    assert isinstance(thresholds["near-lossless"], float)
    assert len(thresholds["drop-1"]) == 2
    assert [one.name for one in found["abstention"]] == ["round 1", "round 3", "routed"]
    to_json(RoutingResult(**COMMON, **found))


def test_what_cannot_be_routed_is_refused(val, learned):
    with pytest.raises(ValueError, match="no routing to measure"):
        measure_routing(make_records(50, rounds=1))
    with pytest.raises(ValueError, match="3000 images are in both"):
        measure_routing(val, val)
    other = replace(learned, header=replace(learned.header, weights_sha256="v"))
    with pytest.raises(ValueError, match="different weights"):
        measure_routing(val, other)
