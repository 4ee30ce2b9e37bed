"""Runs side by side: what may be compared, and the difference of two runs image by image."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from repro.compare import (
    ComparedRun,
    CrossedDifference,
    Difference,
    RunShift,
    crossed_difference,
    gather,
    is_clear_among,
    line_up,
    paired_difference,
    run_shift,
)
from repro.store import read_results
from repro.study import read_study
from tests.repro.made import change, measured, run_result, write_result


@pytest.mark.parametrize("field", ["val", "train", "classes", "names", "learned", "name"])
def test_runs_of_different_data_are_not_compared(folder, field):
    changed = {"val": 39, "train": 7, "classes": 9}.get(field, "other")
    if field == "val":
        fewer = run_result("width", 2, 39)
        write_result(folder, fewer | {"data": fewer["data"] | {"train": 200}})
    else:
        change(folder / "width-2.json", lambda values: values["data"].update({field: changed}))
    with pytest.raises(ValueError, match=rf"the comparison construction .* differ in data\.{field}: ") as error:
        line_up(read_results(folder), read_study(folder / "study.yaml"), "construction")
    assert "width-2" in str(error.value)


def test_seeds_of_a_run_may_differ_in_the_seed_alone(folder):
    study = read_study(folder / "study.yaml")
    change(folder / "full-2.json", lambda values: values.update(epochs=41))
    with pytest.raises(ValueError, match="full-1 and full-2 are seeds of one run and differ in epochs: 40 and 41"):
        line_up(read_results(folder), study, "schedules")
    change(folder / "full-2.json", lambda values: values.update(epochs=40, recipe={"seed": 2, "ema": 0.9}))
    with pytest.raises(ValueError, match=r"differ in recipe\.ema: 0\.998 and 0\.9"):
        line_up(read_results(folder), study, "schedules")


def test_one_comparison_is_measured_in_one_precision(folder):
    for seed in (1, 2):
        change(folder / f"width-{seed}.json", lambda values: values.update(precision="bf16"))
    with pytest.raises(ValueError, match=r"the comparison construction compares .* differ in precision: bf16 and fp32"):
        line_up(read_results(folder), read_study(folder / "study.yaml"), "construction")


def test_rows_are_compared_with_the_row_above_or_with_the_one_that_is_named(folder):
    results, study = read_results(folder), read_study(folder / "study.yaml")
    compared = line_up(results, study, "construction")
    assert [row.label for row in compared.rows] == ["width only", "+ PSG"]
    assert compared.missing == ("+ more",)
    assert compared.base_of(0) is None
    assert compared.base_of(1).run == "width"
    compared = line_up(results, study, "schedules")
    assert compared.base_of(0) is None
    assert [compared.base_of(number).run for number in (1, 2)] == ["full", "full"]
    for seed in (1, 2):
        (folder / f"full-{seed}.json").unlink()
    compared = line_up(read_results(folder), study, "schedules")
    assert compared.unmeasured_base == "160→224"
    assert [compared.base_of(number) for number in range(2)] == [None, None]


def test_the_difference_of_two_runs_is_that_of_the_bits_with_seeds_averaged(made):
    compared = line_up(read_results(made), read_study(made / "study.yaml"), "construction")
    bits = {run: [measured(run, 40, seed)[1] for seed in (1, 2)] for run in ("width", "full")}
    for place in (0, 1):
        found = compared.rows[1].less(compared.rows[0], place)
        differences = []
        for image in range(40):
            ours, theirs = (sum(float(one[image, place]) for one in bits[run]) / 2 for run in ("full", "width"))
            differences.append(ours - theirs)
        mean = sum(differences) / 40
        deviation = (sum((one - mean) ** 2 for one in differences) / 39) ** 0.5
        assert found.mean == pytest.approx(mean)
        assert found.highest - found.mean == pytest.approx(1.96 * deviation / 40**0.5)
        assert found.mean - found.lowest == pytest.approx(found.highest - found.mean)
        assert found.clear == (found.lowest > 0 or found.highest < 0)


def test_a_run_is_given_by_the_mean_over_its_seeds(made):
    full = gather(read_results(made), "full")
    right = [measured("full", 40, seed)[1].mean(axis=0) for seed in (1, 2)]
    assert [one.seed for one in full.seeds] == [1, 2]
    assert full.top1() == pytest.approx((right[0][1] + right[1][1]) / 2)
    assert full.top1(0) == pytest.approx((right[0][0] + right[1][0]) / 2)
    assert full.top1_of_seeds() == pytest.approx([one[1] for one in right])
    assert full.spread(0) == pytest.approx(abs(right[0][0] - right[1][0]))
    assert (full.gmacs(), full.gmacs(0)) == (1.546, 0.286)
    points = [one.near_lossless.gmacs_paper for one in full.seeds]
    assert full.saving == pytest.approx(1 - np.mean(points) / 1.546)
    assert gather(read_results(made), "never").seeds == ()


def test_compute_at_an_accuracy_is_where_the_frontier_stays_above_it(made):
    three = gather(read_results(made), "three")
    frontier = three.first.frontier
    top1 = frontier[len(frontier) // 2].top1
    spent = three.gmacs_at(top1)
    assert all(point.top1 >= top1 for point in frontier if point.gmacs_paper >= spent)
    assert any(point.top1 < top1 for point in frontier if point.gmacs_paper < spent)
    assert three.gmacs_at(0.0) == frontier[0].gmacs_paper
    with pytest.raises(ValueError, match="three-1 never reaches"):
        three.gmacs_at(1.1)


def test_the_interval_is_that_of_a_bootstrap_over_images():
    rng = np.random.default_rng(0)
    ours = (rng.random((2000, 2)) < 0.9).mean(axis=1)
    theirs = np.where(rng.random(2000) < 0.8, ours, (rng.random(2000) < 0.85).astype(float))
    found = paired_difference(ours, theirs)
    drawn = rng.integers(0, 2000, (4000, 2000))
    low, high = np.quantile((ours - theirs)[drawn].mean(axis=1), [0.025, 0.975])
    assert found.lowest == pytest.approx(low, abs=0.0008)
    assert found.highest == pytest.approx(high, abs=0.0008)


def test_equal_runs_differ_by_exactly_zero():
    right = np.array([1.0, 0.0, 1.0])
    found = paired_difference(right, right)
    assert (found.mean, found.lowest, found.highest) == (0, 0, 0)


def simulated(rng, seeds, images, *, of_seeds, of_images, of_flips, mean=0.0):
    """A table with known variances."""
    table = rng.normal(mean, of_flips**0.5, (seeds, images))
    return table + rng.normal(0, of_seeds**0.5, (seeds, 1)) + rng.normal(0, of_images**0.5, images)


@pytest.mark.parametrize(
    ("of_seeds", "of_images"), [(0.0, 0.0), (0.01, 0.0), (0.02, 0.2), (0.1, 0.2), (1.0, 0.0), (0.0, 2.0)]
)
def test_intervals_over_seeds_and_images_cover_the_truth_in_95_of_100_studies(of_seeds, of_images):
    rng = np.random.default_rng(1)
    seeds, images, studies = 8, 80, 300
    covered, errors = 0, []
    for _ in range(studies):
        ours = simulated(rng, seeds, images, of_seeds=of_seeds, of_images=of_images, of_flips=1.0, mean=0.3)
        found = crossed_difference(ours, np.zeros_like(ours), draws=400)
        covered += found.lowest <= 0.3 <= found.highest
        errors.append(found.error)
    assert 0.915 <= covered / studies <= 0.985  # 2.8 standard errors of 300 studies about 0.95
    expected = (of_seeds / seeds + of_images / images + 1 / (seeds * images)) ** 0.5
    assert 0.92 < np.mean(errors) / expected < 1.15


def test_flips_are_counted_once():
    """Of independent flips alone, the mean varies by E / KN."""
    rng = np.random.default_rng(0)
    errors = [crossed_difference(rng.normal(size=(8, 400)), np.zeros((8, 400)), draws=500).error for _ in range(40)]
    assert np.median(errors) == pytest.approx((8 * 400) ** -0.5, rel=0.1)


def test_the_part_of_the_seeds_is_not_understated():
    """Images that agree leave the shift of each seed alone: its unbiased standard error."""
    shifts = np.random.default_rng(0).normal(size=(8, 1))
    found = crossed_difference(np.repeat(shifts, 50, axis=1), np.zeros((8, 50)))
    error = shifts.std(ddof=1) / 8**0.5
    assert found.error == pytest.approx(error, rel=0.02)
    assert found.detectable == pytest.approx((2.365 + 0.84) * error, rel=0.02)  # t of 7 degrees of freedom
    assert found.power(found.detectable) == pytest.approx(0.8, abs=0.001)
    assert found.power(found.detectable / 2) < 0.5 < found.power(found.highest - found.mean + 1e-9) < 0.8
    assert (found.highest - found.lowest) / 2 == pytest.approx(2.365 * error, rel=0.06)


def test_the_power_is_80_percent_at_the_detectable_difference():
    rng = np.random.default_rng(2)
    shape = {"of_seeds": 0.0, "of_images": 2.0, "of_flips": 1.0}
    detectable = 2.8 * (2 / 80 + 1 / (8 * 80)) ** 0.5
    zeros, hits, reported = np.zeros((8, 80)), 0, []
    for _ in range(300):
        found = crossed_difference(simulated(rng, 8, 80, mean=detectable, **shape), zeros, draws=400)
        hits += found.lowest > 0
        reported.append(found.detectable)
    assert 0.7 < hits / 300 < 0.9
    assert np.median(reported) == pytest.approx(detectable, rel=0.1)


def test_a_constant_difference_is_exact():
    theirs = np.random.default_rng(0).integers(0, 2, (3, 20)).astype(float)
    found = crossed_difference(theirs + 0.5, theirs)
    assert (found.mean, found.lowest, found.highest, found.error, found.detectable) == (0.5, 0.5, 0.5, 0, 0)


def test_swapping_the_runs_turns_the_difference_round():
    rng = np.random.default_rng(0)
    ours, theirs = rng.random((2, 5, 60))
    there, back = crossed_difference(ours, theirs), crossed_difference(theirs, ours)
    assert (back.mean, back.lowest, back.highest) == pytest.approx((-there.mean, -there.highest, -there.lowest))
    assert (back.error, back.detectable) == pytest.approx((there.error, there.detectable))


def test_the_bootstrap_is_the_same_every_time_and_other_draws_differ():
    ours, theirs = np.random.default_rng(0).random((2, 5, 60))
    assert crossed_difference(ours, theirs) == crossed_difference(ours, theirs)
    other = crossed_difference(ours, theirs, seed=1)
    assert other.lowest != crossed_difference(ours, theirs).lowest
    assert other.mean == crossed_difference(ours, theirs).mean


def test_one_seed_has_no_interval_over_seeds():
    with pytest.raises(ValueError, match="1 seeds and 60 images; compare at least two of each"):
        crossed_difference(np.zeros((1, 60)), np.zeros((1, 60)))


def table_of_runs(rng, seeds, images, shift, flip):
    """Whether each of several runs is right on each image: (K, N)."""
    ease = rng.uniform(0.2, 0.8, images)
    chance = ease + rng.normal(0, shift, (seeds, 1)) + rng.normal(0, flip, (seeds, images))
    return chance > 0.5


def of_bits(correct):
    """A run whose seeds have these bits, as far as ``run_shift`` looks."""
    rounds = [SimpleNamespace(correct=lambda images, row=row: row[:, None]) for row in correct]
    seeds = tuple(SimpleNamespace(rounds=one, data=SimpleNamespace(val=correct.shape[1])) for one in rounds)
    return ComparedRun("made", "made", seeds)


def test_the_shift_of_a_run_is_what_flips_of_images_do_not_explain():
    rng = np.random.default_rng(0)
    still = [of_bits(table_of_runs(rng, 4, 4000, 0.0, 0.2)) for _ in range(20)]
    moved = [of_bits(table_of_runs(rng, 4, 4000, 0.02, 0.2)) for _ in range(20)]
    assert run_shift(still).deviation < 0.004
    density = (2 * stats.norm.cdf(0.3 / 0.2) - 1) / 0.6  # of ease plus flips at 0.5, where answers change
    assert run_shift(moved).deviation == pytest.approx(0.02 * density, rel=0.2)  # 2 errors of 60 degrees of freedom
    assert run_shift(moved).freedom == 20 * 3
    with pytest.raises(ValueError, match="no run has two seeds"):
        run_shift([of_bits(table_of_runs(rng, 1, 100, 0, 0.2))])


def test_variances_of_shifts_add_to_that_of_the_images():
    found = Difference(mean=0.02, lowest=0.01, highest=0.03)
    assert RunShift(deviation=0.0, freedom=2).widen(found, 1, 1).highest == pytest.approx(found.highest, abs=1e-6)
    known = RunShift(deviation=0.003, freedom=10**9).widen(found, 1, 2)
    assert known.half_width == pytest.approx((0.01**2 + 1.96**2 * 0.003**2 * 1.5) ** 0.5, rel=1e-4)
    assert known.mean - known.lowest == pytest.approx(known.highest - known.mean)
    rough = RunShift(deviation=0.003, freedom=2).widen(found, 1, 2)
    assert known.half_width < rough.half_width < 2.2 * known.half_width  # 4.3 standard errors at most, for 1.96


def test_a_run_that_lacks_a_seed_of_the_study_is_not_compared(folder):
    study = read_study(folder / "study.yaml")
    (folder / "width-2.json").unlink()
    with pytest.raises(
        ValueError, match=r"construction: width lacks seed 2, which .* full-2 has\. Measure width-2, or take"
    ):
        line_up(read_results(folder), study, "construction")
    (folder / "full-2.json").unlink()
    (folder / "early-2.json").unlink(missing_ok=True)
    missing = line_up(read_results(folder), study, "construction").missing
    assert "seed 2 of width only" in missing


def test_more_intervals_are_wider():
    ratio = 3.0233 / 1.96  # of normal quantiles at 0.025 / 20 and 0.025
    for mean, clear in ((0.02 * ratio * 1.001, True), (0.02 * ratio * 0.999, False)):
        found = Difference(mean=mean, lowest=mean - 0.02, highest=mean + 0.02)
        assert is_clear_among(found, 1)
        assert is_clear_among(found, 20) == clear
        few = CrossedDifference(**vars(found), error=0.01, freedom=4, shift=0.01, detectable=0.03)
        assert not is_clear_among(few, 20)  # t grows faster with few degrees of freedom
    assert not is_clear_among(Difference(mean=0.1, lowest=0.1, highest=0.1), 1)
