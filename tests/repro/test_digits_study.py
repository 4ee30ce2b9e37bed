"""``progresvit study`` and then ``progresvit report``, as a user types them: real processes, real digits."""

import json

import pytest
import yaml
from progresvit.results.read import read_results

from tests.commands import refused, run, works

MICRO = ["model.resolutions=[16, 32]", "model.patch_size=8", "schedule.epochs=1", "schedule.cooldown=0"]
STUDY = {
    "title": "Digits",
    "data": "four digits",
    "recipe": "digits",
    "set": [*MICRO, "schedule.warmup=0", "optimizer.batch=16", "ema=0"],
    "runs": {"full": {}},
    "comparisons": {"alone": {"title": "Alone", "rows": {"one run": "full"}}},
    "shift": {"shift": {"models": ["full"], "corruptions": ["fog"], "severities": [5]}},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    return path


@pytest.fixture(scope="module")
def done(digits, study):
    runs = study.parent / "runs"
    result = run("study", study, "--data", digits, "--runs", runs, "--device", "cpu", "--workers", 0)
    assert result.exit_code == 0, result.output
    return runs


def test_a_study_leaves_results_of_every_task(done, digits):
    results = read_results(done / "results")
    full, shift = results.runs["full-42"], results.shift["shift"]
    held_back = len(list(digits.glob("val/*/*")))
    assert full.data.val == held_back
    assert full.data.train == len(list(digits.glob("train/*/*")))
    assert full.rounds.resolutions == (16, 32)
    assert full.seconds > 0
    assert full.commands[0].startswith("progresvit train digits --data DATA --out RUNS/full-42 --set ")
    assert [one.corruption for one in shift.sets] == [None, "fog"]
    assert shift.sets[0].top1 == tuple(right / held_back for right in full.rounds.right)  # the model of that run
    assert str(done) not in (done / "results" / "full-42.json").read_text()


def test_the_study_again_finds_everything_done(done, digits, study):
    result = run("study", study, "--data", digits, "--runs", done)
    assert result.exit_code == 0
    assert result.output.count("is there already") == 2


def test_its_report_is_a_page(done):
    assert run("report", done / "results").exit_code == 0
    page = (done / "results" / "results.md").read_text()
    assert "| one run | 16→32, 1→2 heads |" in page
    assert "fog" in page
    assert run("report", done / "results", "--check").exit_code == 0


@pytest.mark.parametrize("change", ["optimizer.lr=1.0", "run.precision=bf16"])
def test_another_recipe_beside_those_results_is_refused(done, digits, study, change):
    words = ("study", study, "--data", digits, "--runs", done, "--set", change)
    refused(f"full-42.json was made otherwise than the study says (other {change.partition('=')[0]})", *words)


def test_how_a_run_is_carried_out_may_change(done, digits, study):
    works("study", study, "--data", digits, "--runs", done, "--set", "run.log_every=7")


def test_another_recipe_for_the_runs_alone_is_refused(done, digits, study, tmp_path):
    """With other results, so that only the model that is there could be taken for the one that is asked for."""
    words = ("--data", digits, "--runs", done, "--results", tmp_path, "--set", "optimizer.lr=1.0", "--only", "full")
    result = run("study", study, *words)
    assert result.exit_code == 1
    assert "full-42/model was made by another command" in result.output
    assert not (tmp_path / "full-42.json").exists()


def test_results_that_are_not_asked_for_are_looked_at_too(done, digits, study):
    """study.yaml, which is written anew, speaks of all of them."""
    result = run("study", study, "--data", digits, "--runs", done, "--set", "optimizer.lr=1.0", "--only", "shift")
    assert result.exit_code == 2
    assert "full-42.json was made otherwise" in result.output


def test_a_model_that_was_trained_anew_leaves_older_results_behind(done, digits, study, monkeypatch, tmp_path):
    from progresvit.results import measures

    monkeypatch.setattr(measures, "_weights", lambda model: "other")
    result = run("study", study, "--data", digits, "--runs", done)
    assert result.exit_code == 2
    assert "shift.json was made otherwise than the study says (other weights)" in result.output
    words = ("--data", digits, "--runs", done, "--results", tmp_path, "--only", "full")
    result = run("study", study, *words)  # its records are there from before
    assert result.exit_code == 1
    assert "full-42.parquet is of other weights than its model; remove it" in result.output


def test_other_data_beside_those_results_is_refused(done, digits, study, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**STUDY, "data": "letters"}))
    result = run("study", other, "--data", digits, "--runs", done)
    assert result.exit_code == 2
    assert "of four digits and the study of letters" in result.output


def test_a_corruption_more_beside_those_results_is_refused(done, digits, study, tmp_path):
    other = tmp_path / "other.yaml"
    shift = {"shift": {"models": ["full"], "corruptions": ["fog", "snow"], "severities": [5]}}
    other.write_text(yaml.safe_dump({**STUDY, "shift": shift}))
    result = run("study", other, "--data", digits, "--runs", done)
    assert result.exit_code == 2
    assert "shift.json was made otherwise" in result.output


def test_commands_can_be_looked_at_first(study, tmp_path):
    result = run("study", study, "--data", "D", "--runs", tmp_path / "runs", "--list")
    assert result.exit_code == 0
    assert result.output.count("progresvit ") == 4
    assert not (tmp_path / "runs").exists()


def test_missing_data_fails_with_the_commands_own_words(study, tmp_path):
    words = ("--data", tmp_path / "nowhere", "--runs", tmp_path / "runs", "--only", "full", "--device", "cpu")
    result = run("study", study, *words)
    assert result.exit_code == 1
    assert "error: full-42: progresvit train ended with 2: error: " in result.output
    assert "nowhere" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["photo"], "there is no study 'photo'"),
        (["digits", "--only", "widht"], "did you mean width?"),
        (["digits", "--jobs", "0"], "are 1 or more"),
        (["digits", "--set", "schedule.epoch=1"], "epochs"),
    ],
)
def test_what_is_typed_wrong_is_one_line(words, message, tmp_path):
    result = run("study", *words, "--data", "D", "--runs", tmp_path / "runs")
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "runs").exists()


def test_results_are_json_that_any_reader_knows(done):
    def refuse(constant):
        raise AssertionError(constant)

    for path in (done / "results").glob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)
