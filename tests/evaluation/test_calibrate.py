import json
from dataclasses import replace

import numpy as np
import pytest

from progresvit.evaluation import calibrate_budget, calibrate_exit_share, calibrate_guarantee, calibrate_near_lossless
from progresvit.routing import certified_threshold, fit_router, load_setting, near_lossless
from progresvit.routing.decide import exit_rounds
from progresvit.routing.settings import Setting
from tests.evaluation.made import make_records


def test_a_setting_says_what_it_is_bound_to_and_comes_back(tmp_path):
    records = make_records(3000)
    setting = calibrate_guarantee(records, epsilon=0.01, delta=0.05)
    setting.save(tmp_path / "t.json")
    known = json.loads((tmp_path / "t.json").read_text())
    wanted = {"threshold", "epsilon", "delta", "n", "k", "loss", "weights", "preprocessing", "precision"}
    assert wanted <= set(known)
    assert (known["weights"], known["precision"]) == (records.header.weights_sha256, "fp32")
    assert known["preprocessing"] == records.header.preprocessing_sha256
    assert load_setting(tmp_path / "t.json") == setting
    setting.check_weights("w" * 64)
    with pytest.raises(
        ValueError, match=r"with other weights, and does not hold for this one\. Calibrate on this model"
    ):
        setting.check_weights("x")
    assert setting.caveat(preprocessing_sha256=setting.preprocessing_sha256, precision="fp32") is None
    assert "other preprocessing and precision: the certificate" in setting.caveat(
        preprocessing_sha256="y", precision="bf16"
    )


def test_a_threshold_of_tf32_is_used_in_float32_but_its_certificate_is_not():
    records = make_records(3000)
    records = replace(records, header=replace(records.header, precision="tf32"))
    used = {"preprocessing_sha256": records.header.preprocessing_sha256}
    threshold, certificate = calibrate_exit_share(records, 0.5), calibrate_guarantee(records, epsilon=0.05, delta=0.05)
    assert threshold.caveat(**used, precision="fp32") is None
    assert "other precision: expect other results" in threshold.caveat(**used, precision="bf16")
    assert "other precision: the certificate does not hold" in certificate.caveat(**used, precision="fp32")


def test_below_float32_a_setting_is_bound_to_the_backend_and_the_graphs(tmp_path):
    records = make_records(3000)
    known = {"precision": "int8", "backend": "openvino", "graphs_sha256": "g"}
    setting = calibrate_exit_share(replace(records, header=replace(records.header, **known)), 0.5)
    assert {name: getattr(setting, name) for name in known} == known
    used = {"preprocessing_sha256": setting.preprocessing_sha256, **known}
    assert setting.caveat(**used) is None
    for name in ("backend", "graphs_sha256"):
        what = name.removesuffix("_sha256")
        assert f"calibrated with other {what}: expect other results" in setting.caveat(**{**used, name: None})
    in_torch = {"precision": "fp32", "backend": None, "graphs_sha256": None}
    assert "other precision: expect" in setting.caveat(**{**used, **in_torch})
    plain = calibrate_exit_share(records, 0.5)  # float32 is float32
    assert plain.caveat(preprocessing_sha256=plain.preprocessing_sha256, precision="fp32", backend="openvino") is None


def test_the_labelled_guarantee_counts_right_answers_lost():
    records = make_records(3000)
    setting = calibrate_guarantee(records, epsilon=0.01, delta=0.05)
    lost = ~records.correct[:, 0] & records.correct[:, 1]
    assert setting.threshold == certified_threshold(records.top10_entropy[:, 0], lost, 0.01, 0.05).threshold > 0
    leaving = records.top10_entropy[:, 0] < setting.threshold
    assert (setting.n, setting.k) == (3000, (leaving & lost).sum())
    assert setting.loss == "labelled"


def test_the_unlabelled_guarantee_needs_no_labels_and_is_stricter():
    free = make_records(3000, labelled=False)
    setting = calibrate_guarantee(free, epsilon=0.02, delta=0.05, loss="unlabelled")
    leaving = free.top10_entropy[:, 0] < setting.threshold
    assert setting.k == (leaving & (free.predictions[:, 0] != free.predictions[:, 1])).sum()
    assert 0 < setting.threshold <= calibrate_guarantee(make_records(3000), epsilon=0.02, delta=0.05).threshold
    assert "top1" not in setting.expected
    with pytest.raises(ValueError, match="3000 of 3000 images in these records have no label"):
        calibrate_guarantee(free, epsilon=0.02, delta=0.05)


def test_too_few_images_say_how_many_are_needed():
    with pytest.raises(ValueError, match=r"400 images are too few .* 0\.001 at 0\.95: at least 2,995 are needed"):
        calibrate_guarantee(make_records(400), epsilon=0.001, delta=0.05)
    with pytest.raises(ValueError, match=r"280 images are too few .* 2,995 are needed beside the 120"):
        calibrate_guarantee(make_records(400, rounds=3), epsilon=0.001, delta=0.05)


def test_three_rounds_get_a_threshold_each(tmp_path):
    records = make_records(4000, rounds=3)
    setting = calibrate_guarantee(records, epsilon=0.02, delta=0.05)
    assert len(setting.threshold) == 2
    assert setting.n == 2800
    rounds = exit_rounds(records.top10_entropy, setting.threshold)
    lost = ~records.correct[np.arange(4000), rounds] & records.correct[:, -1]
    assert lost.mean() < 0.02
    setting.save(tmp_path / "t.json")
    assert load_setting(tmp_path / "t.json").threshold == setting.threshold


def test_near_lossless_budget_and_exit_share():
    records = make_records(1000)
    point = near_lossless(records.top10_entropy, records.correct, records.gmacs())
    setting = calibrate_near_lossless(records)
    assert setting.threshold == point.threshold
    assert setting.expected["gmacs"] == pytest.approx(point.gmacs)
    low, high = records.gmacs("executed")
    budget = calibrate_budget(records, (low + high) / 2, convention="executed")
    assert budget.expected["gmacs"] == pytest.approx((low + high) / 2, rel=1e-3)
    assert budget.expected["convention"] == "executed"
    share = calibrate_exit_share(make_records(1000, labelled=False), 0.25)
    assert share.expected["exit_shares"][0] == pytest.approx(0.25, abs=0.002)
    with pytest.raises(ValueError, match="round 1 alone costs"):
        calibrate_budget(records, low / 2)
    with pytest.raises(ValueError, match="all rounds"):
        calibrate_budget(records, high * 2)
    with pytest.raises(ValueError, match="have no label"):
        calibrate_near_lossless(make_records(1000, labelled=False))


def test_a_learned_router_can_be_calibrated_like_entropy():
    records = make_records(4000)
    router = fit_router(records.statistics, records.correct, target="error")
    fresh = make_records(4000, seed=1)
    for setting in (
        calibrate_guarantee(fresh, epsilon=0.02, delta=0.05, router=router),
        calibrate_near_lossless(fresh, router=router),
        calibrate_exit_share(fresh, 0.3, router=router),
    ):
        assert 0 < setting.threshold <= 1
        assert setting.router is not None
        assert setting.expected["exit_shares"][0] > 0.05


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("[]", "not a valid setting"),
        ("{}", "not a valid setting"),
        ("{not json", "not a valid setting"),
        ('{"rule": "budget", "luck": 1}', "luck: unknown key"),
        (
            '{"rule": "budget", "threshold": -1, "rounds": 2, "weights": "", "preprocessing": "", "precision": "fp32",'
            ' "n": 1}',
            "0 .every round runs. or more, not -1",
        ),
    ],
)
def test_a_file_that_is_no_setting_is_refused(tmp_path, content, match):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=match):
        load_setting(tmp_path / "t.json")
    with pytest.raises(ValueError, match="no setting at"):
        load_setting(tmp_path / "none.json")


def test_a_setting_checks_its_threshold():
    known = {"rule": "budget", "rounds": 3, "weights": "", "preprocessing": "", "precision": "fp32", "n": 1}
    with pytest.raises(ValueError, match="so 2 for 3 rounds, not 1"):
        Setting(threshold=(0.1,), **known)


def test_images_that_the_router_was_fitted_on_cannot_certify_it():
    records = make_records(3000)
    router = fit_router(records.statistics, records.correct, target="error", ids=records.ids)
    with pytest.raises(ValueError, match="fitted on 3000 of these images"):
        calibrate_guarantee(records, epsilon=0.05, delta=0.05, router=router)
    assert calibrate_near_lossless(records, router=router).rule == "near-lossless"  # an observation may be made
    assert calibrate_guarantee(make_records(3000, seed=1), epsilon=0.05, delta=0.05, router=router).k is not None


def test_records_of_some_classes_do_not_speak_for_a_model_that_chooses_among_all():
    with pytest.raises(ValueError, match="evaluate with restrict_classes=False"):
        calibrate_exit_share(make_records(classes=(0, 1, 2)), 0.5)


def test_a_setting_names_the_corruption_of_its_images():
    records = make_records(200)
    damaged = replace(records, header=replace(records.header, corruption="fog/3"))
    assert calibrate_exit_share(damaged, 0.5).data == "made (fog/3)"
