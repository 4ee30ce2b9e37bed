"""Guarantees on bootstrap draws of made-up records, recomputed image by image."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from repro.measure import certificates as module
from repro.measure.certificates import check_certificate
from tests.evaluation.made import make_records

EPSILON, DELTA = 0.02, 0.1


def lost_by_loss(records):
    """Whether an exit after round 1 loses a right answer, and whether it changes the answer."""
    labels, answers = records.labels.tolist(), records.predictions.tolist()
    return {
        "labelled": [first != label == last for (first, last), label in zip(answers, labels)],
        "unlabelled": [first != last for first, last in answers],
    }


def certify(entropy, lost, rows):
    """The last threshold of the grid before the first at which so few losses are not surprising."""
    passed = 0.0
    drawn = np.array([entropy[row] for row in rows])
    marks = np.array([lost[row] for row in rows])
    for tau in np.linspace(0.0, math.log(10), 2001):
        if binom.cdf((marks & (drawn < tau)).sum(), len(rows), EPSILON) > DELTA:
            break
        passed = tau
    return passed


@pytest.mark.parametrize("loss", ["labelled", "unlabelled"])
def test_each_draw_certifies_and_the_population_judges(loss):
    records, draws, images = make_records(600), 12, 400
    entropy, lost = records.top10_entropy[:, 0].tolist(), lost_by_loss(records)[loss]
    rng = np.random.default_rng(3)
    harms, savings = [], []
    first, last = records.gmacs()
    for _ in range(draws):
        tau = certify(entropy, lost, rng.integers(0, 600, images).tolist())
        exiting = [value < tau for value in entropy]
        harms.append(sum(gone and mark for gone, mark in zip(exiting, lost)) / 600)
        savings.append(sum(exiting) / 600 * (last - first) / last)
    found = check_certificate(records, epsilon=EPSILON, delta=DELTA, loss=loss, images=images, draws=draws, seed=3)
    assert (found.draws, found.images) == (draws, images)
    assert found.exceeded == sum(harm > EPSILON for harm in harms)
    assert (found.mean, found.highest) == pytest.approx((np.mean(harms), max(harms)))
    assert found.saving == pytest.approx(np.mean(savings))
    assert len(set(harms)) > 1


def test_certificates_exceed_their_bound_about_as_rarely_as_they_say():
    records = make_records(3000)
    found = check_certificate(records, epsilon=0.01, delta=0.05, images=1500, draws=300)
    assert 0 < found.exceeded <= 300 * (0.05 + 2 * math.sqrt(0.05 * 0.95 / 300))


def test_a_threshold_that_pays_no_heed_to_the_bound_exceeds_it_in_every_draw(monkeypatch):
    class Careless:
        threshold = 10.0

    records = make_records(1000)
    monkeypatch.setattr(module, "certified_thresholds", lambda *_: Careless)
    found = check_certificate(records, epsilon=0.01, delta=0.05, loss="unlabelled", images=500, draws=5)
    assert found.exceeded == 5
    assert found.mean == pytest.approx((records.predictions[:, 0] != records.predictions[:, 1]).mean())


def test_three_rounds_are_checked_too():
    found = check_certificate(make_records(3000, rounds=3), epsilon=0.05, delta=0.1, images=2000, draws=20)
    assert 0 < found.mean < 0.05
    assert 0 < found.saving < 1
