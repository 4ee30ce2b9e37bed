from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from progresvit.evaluation import calibrate_near_lossless, measure_ood, with_abstention, with_ood
from progresvit.evaluation.ood import auroc, fpr95, ood_limit, ood_table, rejected_share
from progresvit.routing import OOD_SCORES, Setting, load_setting
from progresvit.routing.decide import exit_rounds
from progresvit.routing.scores import recorded_ood_score
from tests.evaluation.made import CLASSES, make_records


def unknown_records(count=500, seed=1):
    """Of the same model, on images of none of its classes."""
    logits = np.random.default_rng(seed).normal(size=(2, count, CLASSES))
    return make_records(count, seed=seed, labelled=False, logits=logits)


@pytest.mark.parametrize("digits", [0, 1, 8])  # many ties, some, none
def test_auroc_and_fpr95_are_those_of_scikit_learn(digits):
    rng = np.random.default_rng(digits)
    known, unknown = rng.normal(1, 1, 230).round(digits), rng.normal(0, 1, 170).round(digits)
    truth, scores = np.repeat([1, 0], [230, 170]), np.concatenate([known, unknown])
    assert auroc(known, unknown) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert fpr95(known, unknown) == pytest.approx(false[true >= 0.95 - 1e-12].min(), abs=1e-12)


def test_scores_that_are_not_finite_are_the_lowest():
    assert auroc([1.0, 2.0], [np.nan, -np.inf]) == 1
    assert auroc([np.nan], [-np.inf]) == 0.5
    assert fpr95([1.0, 2.0], [np.nan]) == 0


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_a_limit_rejects_its_share_of_new_images(share):
    rng = np.random.default_rng(0)
    rejected = [(rng.normal(size=400) < ood_limit(rng.normal(size=59), share)).mean() for _ in range(500)]
    assert np.mean(rejected) == pytest.approx(share, abs=0.01)


def test_limits_need_enough_finite_scores():
    assert ood_limit(np.arange(19.0)) == 0
    with pytest.raises(ValueError, match=r"18 images are too few .* evaluate on 19 or more"):
        ood_limit(np.arange(18.0))
    with pytest.raises(ValueError, match="5 of 50 images have NaN"):
        ood_limit(np.r_[np.full(5, np.nan), np.arange(45.0)])
    assert ood_limit(np.r_[np.full(1, np.nan), np.arange(49.0)]) == 0
    for share in (0, 1, -0.1, 5, np.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            ood_limit(np.arange(100.0), share)


@pytest.mark.parametrize("score", OOD_SCORES)
def test_a_calibrated_setting_rejects_few_known_and_many_unknown_images(score, tmp_path):
    records = make_records(2000)
    plain = calibrate_near_lossless(records)
    setting = with_ood(records, plain, 0.05, score=score)
    assert setting.threshold == plain.threshold
    rounds = exit_rounds(records.top10_entropy, setting.threshold)
    scores = recorded_ood_score(score, records.statistics[np.arange(2000), rounds])
    assert setting.ood.limit == np.sort(scores)[99]
    assert (
        setting.expected["out_of_distribution"]
        == rejected_share(records, setting)
        == (scores < setting.ood.limit).mean()
    )
    assert rejected_share(make_records(2000, seed=5), setting) == pytest.approx(0.05, abs=0.02)
    assert rejected_share(unknown_records(), setting) > 0.1
    setting.save(tmp_path / "ood.json")
    assert load_setting(tmp_path / "ood.json") == setting
    assert "ood" not in plain.to_json()


def test_abstention_and_out_of_distribution_limits_share_a_setting():
    records = make_records(2000)
    careful = with_abstention(records, calibrate_near_lossless(records), 0.1)
    both = with_ood(records, careful)
    assert both.abstain == careful.abstain
    assert both.expected["coverage"] <= careful.expected["coverage"]
    assert with_abstention(records, with_ood(records, calibrate_near_lossless(records)), 0.1).expected == both.expected
    with pytest.raises(ValueError, match="every answer would be withheld"):
        with_ood(records, careful.model_copy(update={"abstain": 0.0}))


def test_a_setting_with_a_damaged_limit_is_refused(tmp_path):
    text = with_ood(make_records(), calibrate_near_lossless(make_records())).to_json()
    for old, new, match in (
        ('"energy"', '"enrgy"', "did you mean 'energy'"),
        ('"limit"', '"limits"', "did you mean 'limit'"),
        ('"share": 0.05', '"share": 2', "ood.share"),
    ):
        assert old in text
        (tmp_path / "t.json").write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=match):
            load_setting(tmp_path / "t.json")
    assert Setting.model_validate_json(text).ood.score == "energy"


def test_every_score_is_measured_routed_and_in_the_last_round():
    known, unknown = make_records(800), unknown_records()
    results = measure_ood(known, unknown, 0.4)
    assert [(one.answers, one.score) for one in results] == [
        (answers, score) for answers in ("routed", "round 2") for score in OOD_SCORES
    ]
    last = {one.score: one for one in results if one.answers == "round 2"}
    high, low = known.statistics[:, 1], unknown.statistics[:, 1]
    for score in OOD_SCORES:
        scores = recorded_ood_score(score, high), recorded_ood_score(score, low)
        assert last[score].auroc == auroc(*scores)
        assert last[score].fpr95 == fpr95(*scores)
    always_last = measure_ood(known, unknown, 0.0)
    assert [one.auroc for one in always_last[:4]] == [one.auroc for one in always_last[4:]]
    assert measure_ood(known, unknown) == measure_ood(known, unknown, known.near_lossless_threshold())
    assert "| routed | energy |" in ood_table(results).to_markdown()


def test_records_that_cannot_be_compared_are_refused():
    known, unknown = make_records(100), unknown_records(100)
    for name, what in (
        ("weights_sha256", "weights"),
        ("preprocessing_sha256", "preprocessing"),
        ("precision", "precision"),
    ):
        other = replace(unknown, header=replace(unknown.header, **{name: "x"}))
        with pytest.raises(ValueError, match=f"models with other {what}"):
            measure_ood(known, other, 0.5)
    with pytest.raises(ValueError, match="the same"):
        measure_ood(known, known, 0.5)
    with pytest.raises(ValueError, match="there are no unknown images"):
        measure_ood(known, unknown.take(np.zeros(100, bool)), 0.5)
    with pytest.raises(ValueError, match="at least one image"):
        auroc([1.0], [])
