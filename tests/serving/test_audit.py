"""The audit's bounds hold at all times, its alarm is soon and rarely false; drift is a distance of distributions."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betaln, xlog1py, xlogy
from scipy.stats import beta, ks_2samp

from progresvit.routing import Setting
from progresvit.routing.calibrate import entropy_quantiles
from progresvit.serving.audit import ENOUGH, Audit, EntropyDrift, limit_of, log_evidence, rate_bounds

DELTA = 0.05
RUNS, IMAGES = 1000, 3000


def cumulative_disagreements(rate, *, seed):
    """Counts after each image, (runs, images), and the number of images, (images,)."""
    disagrees = np.random.default_rng(seed).random((RUNS, IMAGES)) < rate
    return disagrees.cumsum(axis=1, dtype=np.int32), np.arange(1, IMAGES + 1)


def a_setting(**fields):
    fixed = {
        "threshold": 0.5,
        "rounds": 2,
        "weights": "w",
        "preprocessing": "p",
        "precision": "fp32",
        "n": 2000,
        "k": 0,
    }
    return Setting(**{"rule": "guarantee", "epsilon": 0.01, "delta": 0.05, **fixed, **fields})


@pytest.mark.parametrize("images", [1, 7, 300, 100_000])
@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.02, 0.7, 1.0])
def test_the_evidence_is_the_ratio_of_the_beta_binomial_mixture(images, rate):
    counts = np.unique(np.linspace(0, images, 9).round())
    mixture = betaln(counts + 0.5, images - counts + 0.5) - betaln(0.5, 0.5)
    expected = mixture - xlogy(counts, rate) - xlog1py(images - counts, -rate)
    np.testing.assert_allclose(log_evidence(counts, images, rate), expected, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_in_few_runs_the_true_rate_is_ever_outside_the_bounds(rate):
    counts, images = cumulative_disagreements(rate, seed=0)
    failing = (log_evidence(counts, images, rate) >= -math.log(DELTA)).any(axis=1).mean()
    assert 0 < failing <= DELTA


def test_bounds_for_a_fixed_number_of_images_would_fail_on_such_runs():
    counts, images = cumulative_disagreements(0.1, seed=0)
    counts, images = counts[:, 50::50], images[50::50]
    lowest = beta.ppf(DELTA, counts, images - counts + 1)  # Clopper-Pearson, one-sided
    assert (lowest > 0.1).any(axis=1).mean() > 2 * DELTA


def test_a_rate_at_the_limit_or_varying_below_it_rarely_alarms():
    rng = np.random.default_rng(1)
    for rates in (np.full(1500, 0.02), np.where(np.arange(1500) < 500, 0.001, 0.02)):
        alarms = 0
        for _ in range(100):
            audit = Audit(limit=0.02, delta=DELTA)
            has_alarmed = False
            for disagrees in (rng.random(1500) < rates).tolist():
                audit.record(disagrees)
                has_alarmed |= audit.alarm
            alarms += has_alarmed
        assert alarms <= 8  # binomial, 100 runs of at most 5 %: more than 8 in 6 of 100


def test_three_times_the_limit_alarms_soon_and_the_alarm_ends_with_the_evidence():
    rng = np.random.default_rng(2)
    needed = []
    for _ in range(20):
        audit = Audit(limit=0.02)
        while not audit.alarm:
            assert audit.images < 2000
            audit.record(rng.random() < 0.06)
        needed.append(audit.images)
        assert audit.bounds()[0] > 0.02
    assert np.median(needed) < 500
    for _ in range(5000):
        audit.record(False)
    assert audit.bounds()[1] < 0.02
    assert not audit.alarm


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.floats(0.001, 0.999),
    st.floats(0.001, 0.999),
)
def test_there_is_an_alarm_while_the_lower_bound_exceeds_the_limit(disagree, limit, delta):
    audit = Audit(limit=limit, delta=delta)
    for disagrees in disagree:
        audit.record(disagrees)
        lowest, highest = audit.bounds()
        assert 0 <= lowest <= audit.disagreements / audit.images <= highest <= 1
        if abs(lowest - limit) < 1e-12:  # rounding decides
            return
        assert audit.alarm == (lowest > limit)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(1e-6, 0.999))
def test_bounds_are_where_the_evidence_reaches_one_over_delta(disagreements, images, delta):
    disagreements = min(disagreements, images)
    share, (lowest, highest) = disagreements / images, rate_bounds(disagreements, images, delta)
    assert 0 < lowest < share <= highest <= 1
    assert log_evidence(disagreements, images, lowest * (1 - 1e-6)) >= -math.log(delta) - 1e-5
    assert log_evidence(disagreements, images, lowest + (share - lowest) * 1e-6) <= -math.log(delta) + 1e-5
    mirrored = rate_bounds(images - disagreements, images, delta)
    assert mirrored == (pytest.approx(1 - highest, abs=1e-12), pytest.approx(1 - lowest, abs=1e-12))


def test_bounds_of_known_counts():
    assert Audit(limit=None).bounds() == (0.0, 1.0)
    lowest, highest = rate_bounds(0, 1, 0.05)
    assert (lowest, highest) == (0.0, pytest.approx(1 - 0.5 * 0.05))  # B(1/2, 3/2) / B(1/2, 1/2) is 1/2
    assert rate_bounds(1, 1, 0.05) == (pytest.approx(0.5 * 0.05), 1.0)
    lowest, highest = rate_bounds(100, 10_000, 0.05)
    assert 0.006 < lowest < 0.008 < 0.012 < highest < 0.015
    narrow, wide = rate_bounds(100, 10_000, 0.1), rate_bounds(100, 10_000, 0.001)
    assert wide[0] < lowest < narrow[0] < narrow[1] < highest < wide[1]


def test_without_a_limit_there_is_no_alarm():
    audit = Audit(limit=None)
    for _ in range(100):
        audit.record(True)
    assert (audit.images, audit.disagreements, audit.alarm) == (100, 100, False)
    assert audit.bounds()[0] > 0.9


def test_copies_are_recognised_until_they_are_forgotten(monkeypatch):
    monkeypatch.setattr("progresvit.serving.audit.REMEMBERED", 3)
    audit = Audit(limit=None)
    assert [audit.is_new(name) for name in (b"a", b"a", b"b", b"c", b"a", b"d", b"a")] == [
        True, False, True, True, False, True, True,
    ]  # fmt: skip


def test_a_reset_forgets_the_evidence_and_not_the_images():
    audit = Audit(limit=0.01)
    assert audit.is_new(b"a")
    for _ in range(50):
        audit.record(True)
    assert audit.alarm
    audit.reset()
    assert (audit.images, audit.alarm, audit.bounds()) == (0, False, (0.0, 1.0))
    assert not audit.is_new(b"a")


def test_a_share_of_the_images_is_sampled():
    audit = Audit(limit=None, rate=0.1, seed=3)
    sampled = [audit.samples() for _ in range(20_000)]
    assert abs(sum(sampled) - 2000) < 200
    again = Audit(limit=None, rate=0.1, seed=3)
    assert sampled[:500] == [again.samples() for _ in range(500)]
    assert not any(Audit(limit=None, rate=0).samples() for _ in range(100))
    assert all(Audit(limit=None, rate=1).samples() for _ in range(100))


class SlowTruth:
    """Another thread runs while its truth is asked for."""

    def __bool__(self):
        time.sleep(0)
        return True


class SlowArray(np.ndarray):
    """Another thread runs while an element is read."""

    def __getitem__(self, place):
        time.sleep(0)
        return super().__getitem__(place)


def test_many_threads_lose_no_image():
    audit, drift = Audit(limit=0.9, rate=0.5), EntropyDrift(np.linspace(0, 1, 101), window=ENOUGH)
    drift._counts = drift._counts.view(SlowArray)

    def work(number):
        for image in range(500):
            audit.record(SlowTruth() if image % 4 == 0 else False)
            drift.add((image * 8 + number) / 4000)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert (audit.images, audit.disagreements, audit.alarm) == (4000, 1000, False)
    assert np.bincount(drift._cells, minlength=len(drift._counts)).tolist() == drift._counts.tolist()
    assert drift._counts.sum() == ENOUGH


@pytest.mark.parametrize(
    ("name", "wrong", "match"),
    [
        ("limit", (0, 1, -1, math.nan), "limit, a share of the images, must be between 0 and 1"),
        ("rate", (-0.1, 2, math.nan), "rate, the share of images to audit, must be from 0 to 1"),
        ("delta", (0, 1, math.nan), "delta, the risk of a false alarm, must be between 0 and 1"),
    ],
)
def test_numbers_out_of_range_are_refused(name, wrong, match):
    for number in wrong:
        with pytest.raises(ValueError, match=match):
            Audit(**{"limit": 0.01, name: number})


def test_only_a_certificate_on_disagreement_is_a_limit():
    assert limit_of(a_setting(loss="unlabelled")) == 0.01
    assert limit_of(a_setting(loss="labelled")) is None
    assert limit_of(a_setting(loss="pixel-error", mean_loss=0.0001)) is None
    assert limit_of(a_setting(rule="budget", epsilon=None, delta=None)) is None
    assert limit_of(None) is None


def test_the_same_distribution_has_no_drift_and_a_shifted_one_has():
    rng = np.random.default_rng(4)
    reference = rng.beta(0.4, 1.0, 5000) * 2
    drift = EntropyDrift(entropy_quantiles(reference), window=2000)
    for entropy in rng.beta(0.4, 1.0, ENOUGH - 1) * 2:
        drift.add(entropy)
    assert math.isnan(drift.distance())
    for entropy in rng.beta(0.4, 1.0, 3000) * 2:
        drift.add(entropy)
    assert drift.distance() < 0.05
    for entropy in rng.beta(0.4, 1.0, 2000) * 2 + 0.5:
        drift.add(entropy)
    assert drift.distance() > 0.3
    for entropy in rng.beta(0.4, 1.0, 2000) * 2:  # the window forgets
        drift.add(entropy)
    assert drift.distance() < 0.05


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.integers(1, 900), st.sampled_from([1, 2, 7, 10**6]))
def test_the_distance_is_that_of_kolmogorov_and_smirnov_within_one_step(seed, calibrated, more, values):
    rng = np.random.default_rng(seed)  # few values are shared by many images
    reference, recent = (rng.integers(0, values, size) / values for size in (calibrated, ENOUGH + more))
    recent = recent ** rng.choice([0.5, 1.0, 2.0])
    drift = EntropyDrift(entropy_quantiles(reference))
    for entropy in recent.tolist():
        drift.add(entropy)
    assert drift.distance() == pytest.approx(ks_2samp(reference, recent).statistic, abs=0.01 + 1e-9)


def test_infinite_entropies_are_drift_and_images_that_cannot_be_opened_are_not():
    drift = EntropyDrift(np.linspace(0, 1, 101))
    for _ in range(ENOUGH):
        drift.add(math.nan)
    assert math.isnan(drift.distance())
    for _ in range(ENOUGH):
        drift.add(math.inf)
    assert drift.distance() == 1
    broken = EntropyDrift(entropy_quantiles([0.5, math.inf]))
    for number in range(ENOUGH):
        broken.add((0.5, math.inf)[number % 2])
    assert broken.distance() <= 0.01 + 1e-9


@pytest.mark.parametrize("quantiles", [[], [0.5], [1.0, 0.5], [-1.0, 0.5], [0.0, math.nan], [[0.0, 1.0]]])
def test_wrong_quantiles_are_refused(quantiles):
    with pytest.raises(
        ValueError, match="at least two ascending numbers of 0 or more; the command progresvit calibrate"
    ):
        EntropyDrift(quantiles)


def test_a_short_window_is_refused():
    with pytest.raises(ValueError, match="10 images is too short to measure drift; use 500 or more"):
        EntropyDrift([0.0, 1.0], window=10)
