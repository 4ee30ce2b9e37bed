"""Learned routers against entropy, on made-up records."""

import json
from dataclasses import replace

import numpy as np
import pytest

from progresvit.evaluation import write_records
from progresvit.evaluation.routers import matched_table
from progresvit.routing import TENTHS, fit_router
from progresvit.routing.scores import STATISTICS
from repro.measure import routers as module
from repro.measure.routers import (
    compare,
    cross_fitted_scores,
    folds_of,
    gain_interval,
    measure_matched,
    measure_rejection,
    reject,
)
from tests.commands import works
from tests.evaluation.made import make_records


@pytest.fixture(autouse=True)
def short_fits(monkeypatch):
    monkeypatch.setattr("progresvit.routing.router.LEAST_STEPS", 10)


def compare_here(records, scores, **changes):
    return compare(records, scores, **{"router": "made", "fitted_on": "air", "rates": TENTHS, "seed": 0, **changes})


def test_a_router_that_knows_the_truth_gains():
    records = make_records(1000)
    truth = records.correct[:, 1].astype(np.float32) - records.correct[:, 0]
    found = compare_here(records, [truth])
    assert found.lowest[1] > 0
    mended = (records.correct[:, 0] | records.correct[:, 1]).mean()
    assert max(found.router_top1) == pytest.approx(mended)


def test_entropy_gains_nothing_over_itself():
    records = make_records(300)
    found = compare_here(records, [records.top10_entropy[:, 0]] * 3)
    assert found.router_top1 == found.entropy_top1
    assert set(found.lowest) == set(found.highest) == {0.0}
    assert found.fits == 3


def test_figures_are_those_of_the_matched_table():
    records = make_records(500)
    router = fit_router(records.statistics, records.correct)
    found = compare_here(records, [router.scores(records.statistics)[:, 0]])
    rows = matched_table(records, {"made": router}).rows
    assert found.shares == tuple(row["continue"] for row in rows)
    assert found.entropy_top1 == pytest.approx([row["entropy"] for row in rows])
    assert found.router_top1 == pytest.approx([row["made"] for row in rows])
    assert found.gmacs_paper == pytest.approx([row["gmacs_paper"] for row in rows])


@pytest.mark.parametrize("target", ["benefit", "error"])
def test_the_commands_and_the_pipeline_give_the_same_figures(tmp_path, target):
    fitting, test = make_records(1200).split(0.5, seed=3)
    write_records(fitting, tmp_path / "fit.parquet")
    write_records(test, tmp_path / "test.parquet")
    routers = []
    for seed in (5, 6):
        file = tmp_path / f"r{seed}.safetensors"
        works("fit-router", tmp_path / "fit.parquet", "--out", file, "--target", target, "--seed", seed)
        routers += ["--router", file]
    works("compare-routers", tmp_path / "test.parquet", *routers, "--out", tmp_path / "table.json")
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    found = measure_matched(test, fitting, fits=2, seed=5)
    pipeline = next(one for one in found if (one.router, one.fitted_on) == (target, module.TRAINING))
    by_command = [(row["router r5"] + row["router r6"]) / 2 for row in rows]
    assert by_command == pytest.approx(pipeline.router_top1, abs=1e-12)
    assert [row["entropy"] for row in rows] == list(pipeline.entropy_top1)
    assert [row["gmacs_paper"] for row in rows] == list(pipeline.gmacs_paper)
    gains = [(row["router r5_gain"] + row["router r6_gain"]) / 2 for row in rows]
    assert max(map(abs, gains)) > 0  # routers differ from entropy


def test_no_image_is_scored_by_a_router_that_was_fitted_on_it(monkeypatch):
    records = make_records(300)
    asked = []

    class Told:
        def __init__(self, ids):
            self.ids = set(ids.tolist())

        def count_seen(self, ids):
            return len(self.ids & set(ids.tolist()))

        def scores(self, statistics):
            rows = statistics[:, 0, 0].astype(int)
            asked.extend(rows.tolist())
            assert not self.ids & set(records.ids[rows].tolist())
            assert self.ids | set(records.ids[rows].tolist()) == set(records.ids.tolist())
            return statistics[:, :, 0]

    numbered = np.zeros((300, 2, len(STATISTICS)), np.float32)
    numbered += np.arange(300)[:, None, None]
    monkeypatch.setattr(module, "fit_on", lambda part, **_: Told(part.ids))
    scores = cross_fitted_scores(replace(records, statistics=numbered), target="benefit", seed=0)
    assert sorted(asked) == list(range(300))
    np.testing.assert_array_equal(scores, np.arange(300))


def test_a_fold_is_drawn_by_the_name_alone():
    names = [f"val/{number}" for number in range(1000)]
    numbers = folds_of(names, seed=0)
    np.testing.assert_array_equal(numbers[::-1][:10], folds_of(names[::-1][:10], seed=0))
    assert not np.array_equal(numbers, folds_of(names, seed=1))
    assert np.bincount(numbers).min() > 150
    assert set(numbers.tolist()) == set(range(5))


def test_intervals_hold_the_estimate_and_narrow_with_more_images():
    rng = np.random.default_rng(0)
    gains = rng.choice([-1, 0, 1], (4, 2000, 3), p=[0.05, 0.85, 0.1]).astype(np.float32)
    low, high = gain_interval(gains, seed=0)
    assert (low < gains.mean(axis=(0, 1))).all()
    assert (gains.mean(axis=(0, 1)) < high).all()
    few_low, few_high = gain_interval(gains[:, :200], seed=0)
    assert (few_high - few_low > 2 * (high - low)).all()


def test_intervals_are_as_wide_as_the_normal_ones_and_fits_that_differ_widen_them():
    one = np.random.default_rng(1).choice([-1, 0, 1], (1, 3000, 1), p=[0.1, 0.8, 0.1]).astype(np.float32)
    low, high = gain_interval(one, seed=0)
    assert (high - low)[0] == pytest.approx(2 * 1.96 * one.std() / np.sqrt(3000), rel=0.1)
    shifted = np.concatenate([one + step for step in (-0.1, 0.0, 0.1)])
    low, high = gain_interval(shifted, seed=0)
    assert (high - low)[0] > 0.15


def test_routers_are_fitted_on_what_was_learned_and_across_folds():
    records, learned = make_records(400), make_records(500, seed=1)
    found = measure_matched(records, learned, fits=2, seed=3)
    assert found == measure_matched(records, learned, fits=2, seed=3)
    assert [(one.router, one.fitted_on.split()[0]) for one in found] == [
        ("benefit", "training"), ("benefit", "other"), ("error", "training"), ("error", "other")
    ]  # fmt: skip
    for one in found:
        gains = np.subtract(one.router_top1, one.entropy_top1)
        assert (np.array(one.lowest) <= gains + 1e-9).all()
        assert (gains <= np.array(one.highest) + 1e-9).all()
        assert one.lowest[0] == one.highest[0] == one.lowest[-1] == one.highest[-1] == 0
        assert one.fits == 2
    assert len(measure_matched(records, None, fits=1)) == 2


def test_a_model_that_has_all_training_images_right_gives_no_router_examples():
    records, learned = make_records(400), make_records(500, seed=1)
    perfect = learned.take(learned.correct.all(axis=1))
    found = measure_matched(records, perfect, fits=1)
    assert [one.fitted_on.split()[0] for one in found] == ["other", "other"]


def test_rejected_images_continue_after_all_others():
    entropy = np.array([0.1, 2.3, 0.5, 1.0], np.float32)
    chances = np.array([0.2, 0.9, 0.95, 0.1], np.float32)
    assert np.argsort(-reject(entropy, chances, 0.25)).tolist() == [1, 3, 0, 2]
    assert np.argsort(-reject(entropy, chances, 0.5)).tolist() == [3, 0, 1, 2]
    np.testing.assert_array_equal(reject(entropy, chances, 0.0), entropy)


def test_rejection_is_measured_at_the_same_compute_as_entropy():
    records = make_records(500)
    found = measure_rejection(records, fits=1, seed=2)
    assert [one.router for one in found] == [f"entropy, {share} % rejected" for share in (0.5, 1, 2, 5)]
    chances = cross_fitted_scores(records, target="unrecoverable", seed=2)
    rejected = sorted(range(500), key=lambda row: -chances[row])[:25]
    order = sorted(set(range(500)) - set(rejected), key=lambda row: -records.top10_entropy[row, 0])
    continuing = set(order[:150])
    right = [records.correct[row, int(row in continuing)] for row in range(500)]
    assert found[3].shares[3] == 0.3
    assert found[3].router_top1[3] == pytest.approx(np.mean(right))
    assert found[3].gmacs_paper == found[0].gmacs_paper


def test_three_rounds_have_no_rate_to_match():
    assert measure_matched(make_records(100, rounds=3), None) == []
