"""Results files as they come back, and what is refused of them."""

import json

import numpy as np
import pytest
from progresvit.results.compare import line_up, paired_difference
from progresvit.results.format import pack, unpack
from progresvit.results.read import read_measurement, read_results
from progresvit.results.study import load_study

from tests.report.made import change, measured, run_result, write_result, write_results


@pytest.fixture
def folder(tmp_path):
    return write_results(tmp_path / "results")


def test_every_measurement_is_read_and_seeds_are_joined_by_run(folder):
    results = read_results(folder)
    assert len(results.runs) == 6
    assert list(results.routing) == ["routing"]
    assert set(results.shift) == {"shift", "shift_both-full", "shift_both-plain"}
    assert [one.seed for one in results.of_run("full")] == [1, 2]
    assert results.of_run("never") == []


def test_bits_come_back_as_they_went(folder):
    assert (read_results(folder).runs["full-1"].rounds.correct(40) == measured("full", 40, 1)[1]).all()
    for count in (1, 7, 8, 9):
        marks = np.random.default_rng(count).random(count) < 0.5
        assert (unpack(pack(marks), count) == marks).all()


def test_an_infinite_threshold_is_refused(folder):
    """What is measured writes the lowest threshold above every entropy instead: other readers know no infinity."""
    change(folder / "full-1.json", lambda values: values["frontier"][0].update(threshold=float("inf")))
    with pytest.raises(ValueError, match=r"frontier.*finite"):
        read_measurement(folder / "full-1.json")


def flip_a_bit(values):
    first = values["rounds"]["bits"][0]
    values["rounds"]["bits"][0] = f"{int(first[0], 16) ^ 8:x}{first[1:]}"


def cut_the_bits(values):
    values["rounds"]["bits"][0] = values["rounds"]["bits"][0][:-2]
    values["rounds"]["right"][0] = int(values["rounds"]["bits"][0], 16).bit_count()


BROKEN = {
    "the field epochs is missing": lambda values: values.pop("epochs"),
    "the field machine.jobs is missing": lambda values: values["machine"].pop("jobs"),
    "the field mood is foreign": lambda values: values.update(mood="good"),
    "the field data.colour is foreign": lambda values: values["data"].update(colour="red"),
    "round 1 has": flip_a_bit,
    "32 bits for 40 pictures": cut_the_bits,
    "other-1 should be called full-1, by its run and its seed": lambda values: values.update(name="other-1"),
    "is called full-7 inside; rename the file full-7.json": lambda values: values.update(name="full-7", seed=7),
    "full-1 should be called other-1": lambda values: values.update(run="other"),
    "kind is [] and should be one of": lambda values: values.update(kind=[]),
    "not pairs of hexadecimal digits": lambda values: values["rounds"]["bits"].__setitem__(0, "xyz"),
    "near_lossless.top1: Input should be less than or equal to 1": lambda values: values["near_lossless"].update(
        top1=88.5
    ),
    "near_lossless.top1: Input should be a finite number": lambda values: values["near_lossless"].update(
        top1=float("nan")
    ),
    "seconds: Input should be greater than or equal to 0": lambda values: values.update(seconds=-3),
    "exit_shares has 0 figures for 2 rounds": lambda values: values["near_lossless"].update(exit_shares=[]),
    "frontier: Tuple should have at least 1 item": lambda values: values.update(frontier=[]),
    "the frontier does not end with the accuracy of the last round": lambda values: values["frontier"][-1].update(
        top1=0.5
    ),
    "kind is 'walk' and should be one of run, routing, shift": lambda values: values.update(kind="walk"),
    "is of format 2 and this version reads 1": lambda values: values.update(format=2),
    "the field format is missing": lambda values: values.pop("format"),
    "heads has 1 entries for 2 rounds": lambda values: values["rounds"].update(heads=[2]),
    "epochs: Input should be a valid integer": lambda values: values.update(epochs="many"),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_what_is_wrong(folder, said):
    change(folder / "full-1.json", BROKEN[said])
    with pytest.raises(ValueError, match=r"full-1\.json") as error:
        read_results(folder)
    assert said in str(error.value)
    assert "Value error" not in str(error.value)


@pytest.mark.parametrize(("text", "said"), [("{", "is no JSON"), ("[1]", "holds no measurement"), ("\0", "is no JSON")])
def test_what_is_no_measurement_is_refused(folder, text, said):
    (folder / "full-1.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_results(folder)


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        read_results(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no results"):
        read_results(tmp_path)


@pytest.mark.parametrize("field", ["val", "train", "classes", "names", "learned", "name"])
def test_runs_of_different_data_are_not_compared(folder, field):
    changed = {"val": 39, "train": 7, "classes": 9}.get(field, "other")
    if field == "val":
        fewer = run_result("width", 2, 39)
        write_result(folder, fewer | {"data": fewer["data"] | {"train": 200}})
    else:
        change(folder / "width-2.json", lambda values: values["data"].update({field: changed}))
    with pytest.raises(
        ValueError, match=rf"the comparison construction compares .* different data: .* \({field}\) are"
    ) as error:
        line_up(read_results(folder), load_study(folder / "study.yaml"), "construction")
    assert "width-2" in str(error.value)


def test_seeds_of_a_run_may_differ_in_the_seed_alone(folder):
    study = load_study(folder / "study.yaml")
    change(folder / "full-2.json", lambda values: values.update(epochs=41))
    with pytest.raises(ValueError, match="full-1 and full-2 are seeds of one run and differ in epochs: 40 and 41"):
        line_up(read_results(folder), study, "schedules")
    change(folder / "full-2.json", lambda values: values.update(epochs=40, recipe={"seed": 2, "ema": 0.9}))
    with pytest.raises(ValueError, match=r"differ in recipe\.ema: 0\.998 and 0\.9"):
        line_up(read_results(folder), study, "schedules")


def test_one_comparison_is_measured_in_one_precision(folder):
    change(folder / "width-1.json", lambda values: values.update(precision="bf16"))
    change(folder / "width-2.json", lambda values: values.update(precision="bf16"))
    with pytest.raises(ValueError, match=r"the comparison construction compares .* measured in .*; measure them alike"):
        line_up(read_results(folder), load_study(folder / "study.yaml"), "construction")


def test_rows_are_compared_with_the_row_above_or_with_the_one_that_is_named(folder):
    results, study = read_results(folder), load_study(folder / "study.yaml")
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


def test_the_difference_of_two_runs_is_that_of_the_bits_seeds_averaged(folder):
    compared = line_up(read_results(folder), load_study(folder / "study.yaml"), "construction")
    bits = {run: [measured(run, 40, seed)[1] for seed in (1, 2)] for run in ("width", "full")}
    for place in (0, 1):
        found = compared.rows[1].less(compared.rows[0], place)
        differences = []
        for picture in range(40):
            ours, theirs = (sum(float(one[picture, place]) for one in bits[run]) / 2 for run in ("full", "width"))
            differences.append(ours - theirs)
        mean = sum(differences) / 40
        deviation = (sum((one - mean) ** 2 for one in differences) / 39) ** 0.5
        assert found.mean == pytest.approx(mean)
        assert found.highest - found.mean == pytest.approx(1.96 * deviation / 40**0.5)
        assert found.mean - found.lowest == pytest.approx(found.highest - found.mean)


def test_the_interval_is_that_of_a_bootstrap_over_pictures():
    rng = np.random.default_rng(0)
    ours = (rng.random((2000, 2)) < 0.9).mean(axis=1)
    theirs = np.where(rng.random(2000) < 0.8, ours, (rng.random(2000) < 0.85).astype(float))
    found = paired_difference(ours, theirs)
    drawn = rng.integers(0, 2000, (4000, 2000))
    low, high = np.quantile((ours - theirs)[drawn].mean(axis=1), [0.025, 0.975])
    assert found.lowest == pytest.approx(low, abs=0.0008)
    assert found.highest == pytest.approx(high, abs=0.0008)


def test_equal_runs_differ_by_nought_for_sure():
    right = np.array([1.0, 0.0, 1.0])
    found = paired_difference(right, right)
    assert (found.mean, found.lowest, found.highest) == (0, 0, 0)


def test_what_is_written_is_what_is_read(folder):
    one = read_results(folder).routing["routing"]
    assert json.loads(one.model_dump_json()) == json.loads((folder / "routing.json").read_text())
