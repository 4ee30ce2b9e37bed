import numpy as np
import pytest
import torch

from progresvit.evaluation import fit_temperatures, reliabilities, reliability_bins
from progresvit.evaluation.reliability import (
    fit_temperature,
    measure_reliability,
    measure_scaled_reliability,
    probabilities,
)
from tests.evaluation.made import make_logits, make_records


def test_the_error_by_hand():
    found = reliability_bins([0.05, 0.15, 0.15, 0.95], [0, 1, 0, 1], bins=10)
    assert found.images.tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 0, 1]
    assert found.error == pytest.approx((0.05 * 1 + abs(0.15 - 0.5) * 2 + 0.05 * 1) / 4)


def test_a_plain_loop_gives_the_same_error():
    rng = np.random.default_rng(0)
    sure, right = rng.random(3000), rng.random(3000) < 0.6
    expected = 0.0
    for number in range(15):
        inside = (sure > number / 15) & (sure <= (number + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(sure[inside].mean() - right[inside].mean())
    assert reliability_bins(sure, right).error == pytest.approx(expected)


def test_honest_probabilities_have_a_small_error_and_boasting_ones_a_large_one():
    rng = np.random.default_rng(1)
    sure = rng.random(100_000)
    right = rng.random(100_000) < sure
    assert reliability_bins(sure, right).error < 0.01
    assert reliability_bins(np.sqrt(sure), right).error > 0.1


def test_the_temperature_of_sharpened_logits_is_found():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, (20_000, 10))
    labels = torch.distributions.Categorical(logits=torch.tensor(logits)).sample().numpy()
    assert fit_temperature(logits, labels) == pytest.approx(1, rel=0.05)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3, rel=0.05)
    assert fit_temperature(logits / 2, labels) == pytest.approx(0.5, rel=0.05)


def test_temperatures_change_probabilities_and_never_answers_or_routes():
    logits, _ = make_logits(4000)
    records = make_records(4000, keep_logits=True, logits=3 * logits)
    temperatures = fit_temperatures(records)
    before, after = reliabilities(records), reliabilities(records, temperatures=temperatures)
    for name in ("round 1", "round 2", "routed"):
        assert after[name].error < before[name].error
        hits = (after[name].accuracy * after[name].images)[after[name].images > 0].sum()
        hits_before = (before[name].accuracy * before[name].images)[before[name].images > 0].sum()
        assert hits == pytest.approx(hits_before)
    assert probabilities(records, (1.0, 1.0)) == pytest.approx(probabilities(records), abs=1e-6)


def test_temperatures_are_reported_on_images_that_they_were_not_fitted_on():
    records = make_records(2000, keep_logits=True)
    found = measure_scaled_reliability(records)
    table, temperatures = found.table, found.temperatures
    fitted, report = records.split(0.5)
    assert temperatures == fit_temperatures(fitted)
    assert table.rows[0]["images"] == len(report)
    assert table.rows[0]["scaled_ece"] == pytest.approx(
        reliabilities(report, temperatures=temperatures)["round 1"].error
    )
    assert [row["scaled_ece"] for row in table.rows] == [bins.error for bins in found.bins.values()]
    assert f"temperatures from {len(fitted)} images, results on {len(report)} others" in table.title


def test_restricted_classes_are_scaled_among_themselves():
    logits, labels = make_logits(500)
    keep = labels < 4
    records = make_records(500, keep_logits=True, classes=(0, 1, 2, 3)).take(keep)
    assert probabilities(records, (1.0, 1.0)) == pytest.approx(probabilities(records), abs=1e-6)
    assert fit_temperatures(records)[0] == pytest.approx(
        fit_temperature(logits[0][keep][:, :4], labels[keep]), rel=1e-3
    )


def test_broken_images_are_left_out_and_counted_by_their_absence():
    logits, _ = make_logits(100)
    logits[0, :10] = np.nan
    found = measure_reliability(make_records(100, logits=logits), threshold=0.5)
    assert [row["images"] for row in found.table.rows] == [90, 100, 100]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="evaluate again with keep_logits=True"):
        measure_scaled_reliability(make_records())
    with pytest.raises(ValueError, match="one per image"):
        reliability_bins([0.5], [1, 0])
    with pytest.raises(ValueError, match="between 0 and 1"):
        reliability_bins([1.5], [1])
    with pytest.raises(ValueError, match="have no label"):
        measure_reliability(make_records(labelled=False), threshold=0.5)


def test_scaling_leaves_out_the_same_images():
    logits, _ = make_logits(300)
    logits[0, :50, 3] = -np.inf  # a softmax would pass over it
    records = make_records(300, logits=logits, keep_logits=True)
    before, after = reliabilities(records, threshold=0.5), reliabilities(records, threshold=0.5, temperatures=(2, 2))
    assert before["round 1"].images.sum() == after["round 1"].images.sum() == 250
    hits = [np.nansum(bins["round 1"].accuracy * bins["round 1"].images) for bins in (before, after)]
    assert hits[0] == pytest.approx(hits[1])
    with pytest.raises(ValueError, match="nothing to fit temperatures on"):
        fit_temperatures(make_records(20, logits=np.full((2, 20, 12), np.nan), keep_logits=True))
