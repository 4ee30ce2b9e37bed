"""Runs side by side: what may be compared, and the difference of two runs image by image."""

import numpy as np
import pytest

from repro.compare import gather, line_up, paired_difference
from repro.formats import read_results
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
