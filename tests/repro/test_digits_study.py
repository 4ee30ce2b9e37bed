"""A small study of real digits from its run list to its page; commands run in this process."""

import json
from unittest import mock

import numpy as np
import pytest
import yaml
from doit.exceptions import InvalidDodoFile

import progresvit
from progresvit.compute import parameters
from repro import page
from repro.measure import __main__ as measure
from repro.measure import entries
from repro.store import read_results
from tests import commands
from tests.model import pooled  # noqa: F401  registers its kinds
from tests.repro.dodo import doit, load

STUDY = {
    "title": "Digits",
    "data": "four digits",
    "recipe": "digits",
    "set": [
        *("model.resolutions=[16, 32]", "model.patch_size=8", "schedule.epochs=1", "schedule.cooldown=0"),
        *("schedule.warmup=0", "optimizer.batch=16", "ema=0"),
    ],
    "runs": {"full": {}},
    "comparisons": {"alone": {"title": "Alone", "rows": {"one run": "full"}}},
    "routing": {"routing": {"model": "full"}},
    "shift": {"shift": {"models": ["full"], "corruptions": ["fog"], "severities": [5]}},
}


def carry_out(study, digits, *words, **variables):
    """Exit code of doit, and what its commands printed. Routers are fitted in a few steps, on a few digits."""
    variables = {"study": study, "data": digits, "runs": study.parent / "runs", **variables}
    module = load(**variables, device="cpu", workers=0)
    printed = []

    def run(entry, words):
        module.PLACES.log(entry.name).parent.mkdir(exist_ok=True)
        with module.PLACES.timings(entry.name).open("a") as timings:
            timings.write(json.dumps({"seconds": 1.5, "jobs": 2, "processes": 1}) + "\n")
        if "-m" in words:
            result = commands.run(*words[3:])
            printed.append(result.output)
            return None if result.exit_code == 0 else module.TaskFailed(result.output)
        with mock.patch("sys.argv", words[1:]), mock.patch("progresvit.routing.router.LEAST_STEPS", 5):
            try:
                return measure.main()
            except SystemExit as stop:
                printed.append(str(stop))
                return module.TaskFailed(str(stop))

    module.run = run
    return doit(module, *words), "\n".join(printed)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("study") / "study.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    return path


@pytest.fixture(scope="module")
def done(digits, study):
    code, printed = carry_out(study, digits)
    assert code == 0, printed
    return study.parent / "runs"


ALTERNATIVES = {
    "kind": "test_alternatives",
    "fields": {"rounds": [{"resolution": 16, "grid": 2}, {"resolution": 32, "grid": 8}], "crop": 1.0},
}
TEST = {"label": "+ grid", "ours": "other", "theirs": "first", "margin": 1}
OTHER_KIND = STUDY | {
    "set": ["schedule.epochs=1", "schedule.cooldown=0", "schedule.warmup=0", "optimizer.batch=16", "ema=0"],
    "runs": {
        name: {"seeds": [1, 2], "set": [f"model={json.dumps(ALTERNATIVES)}", f"optimizer.lr={rate}"]}
        for name, rate in (("first", 0.001), ("other", 0.01))
    },
    "comparisons": {"kinds": {"title": "Kinds", "rows": {"1": "first", "2": "other"}, "tests": [TEST]}},
    "routing": {},
    "shift": {},
}


def test_another_kind_of_model_goes_from_its_run_list_to_a_tested_difference(digits, tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(OTHER_KIND))
    code, printed = carry_out(tmp_path / "study.yaml", digits)
    assert code == 0, printed
    folder = tmp_path / "runs" / "results"
    one = read_results(folder).runs["other-2"]
    assert (one.rounds.heads, one.near_lossless, one.frontier) == (None, None, ())
    assert one.parameters == (12 + 1) * 16 + (192 + 1) * 16 + 2 * 2 * 16 + (16 + 1) * one.data.classes
    assert one.rounds.log_losses(one.data.val).mean() == pytest.approx(np.log(one.data.classes), rel=0.6)
    page.main([str(folder)])
    text = (folder / "results.md").read_text()
    assert "| 1 | 16 / 32 |" in text
    assert "| + grid | 2 × 24 |" in text
    assert carry_out(tmp_path / "study.yaml", digits) == (0, "")


@pytest.mark.slow
def test_two_runs_under_corruption_go_from_their_run_list_to_a_difference_over_seeds(digits, tmp_path):
    shift = {"models": ["full", "plain"], "corruptions": ["fog"], "severities": [5], "seeds": [1, 2], "cache": True}
    runs = {"full": {"seeds": [1, 2]}, "plain": {"seeds": [1, 2], "set": ["model.resolutions=[32]", "model.heads=[2]"]}}
    study = STUDY | {"runs": runs, "comparisons": {}, "routing": {}, "shift": {"corrupted": shift | {"budget": 0.001}}}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    code, printed = carry_out(path, digits)
    assert code == 0, printed
    folder = tmp_path / "runs" / "results"
    results = read_results(folder)
    assert {name: one.seed for name, one in results.shift.items()} == {
        f"corrupted-{run}-{seed}": seed for run in runs for seed in (1, 2)
    }
    assert len({one.weights for one in results.shift.values()}) == 4
    for one in results.shift.values():
        trained = results.runs[f"{one.model}-{one.seed}"]
        first, last = one.sets[0].bits[0], trained.rounds.bits[-1]
        assert first.tolist() == last.tolist()  # the model of that seed, images in the same order
    assert len(list((tmp_path / "runs" / "corrupted").iterdir())) == 1
    page.main([str(folder)])
    assert "full minus plain" in (folder / "results.md").read_text()
    path.write_text(yaml.safe_dump(study | {"shift": {"corrupted": shift | {"budget": 0.0011}}}))
    with pytest.raises(InvalidDodoFile) as error:
        carry_out(path, digits)
    assert "corrupted-full-1.json was made differently from what the study says (other budget)" in str(error.value)


def test_every_entry_has_results(done, digits):
    results = read_results(done / "results")
    full, shift = results.runs["full-42"], results.shift["shift"]
    held_out = len(list(digits.glob("val/*/*")))
    assert (full.data.val, full.data.train) == (held_out, len(list(digits.glob("train/*/*"))))
    assert full.rounds.resolutions == (16, 32)
    assert full.parameters == parameters(progresvit.load(done / "full-42" / "model").config)
    assert full.seconds > 0
    assert full.machine.jobs == 2
    assert full.commands[0].startswith("progresvit train digits --data DATA --out RUNS/full-42 --set ")
    assert [one.corruption for one in shift.sets] == [None, "fog"]
    assert shift.sets[0].top1 == tuple(right / held_out for right in full.rounds.right)  # the model of that run
    assert shift.weights == results.routing["routing"].weights
    assert shift.seconds == 4.5  # two commands and the measurement
    assert str(done) not in (done / "results" / "full-42.json").read_text()


def test_nothing_is_done_again(done, digits, study):
    code, printed = carry_out(study, digits)
    assert (code, printed) == (0, "")


def test_a_finished_training_is_not_trained_again_after_a_crash(done, digits, study, tmp_path):
    """A crash of doit loses its record of what is up to date."""
    weights = done / "full-42" / "model" / "model.safetensors"
    before = weights.read_bytes()
    (done / ".doit.json").unlink()
    code, printed = carry_out(study, digits, "full", results=tmp_path)
    assert code == 0, printed
    assert weights.read_bytes() == before
    ours, theirs = (read_results(folder).runs["full-42"] for folder in (tmp_path, done / "results"))
    assert ours.rounds.model_dump_json() == theirs.rounds.model_dump_json()
    assert ours.history == theirs.history


def test_its_page_is_built(done):
    page.main([str(done / "results")])
    text = (done / "results" / "results.md").read_text()
    assert "| one run | 16→32, 1→2 heads |" in text
    assert "| fog |" in text
    page.main([str(done / "results"), "--check"])


@pytest.mark.parametrize("change", ["optimizer.lr=1.0", "run.precision=bf16"])
def test_another_recipe_beside_those_results_is_refused(done, digits, study, change):
    with pytest.raises(InvalidDodoFile) as error:
        carry_out(study, digits, set=change)
    key = change.partition("=")[0]
    assert f"full-42.json was made differently from what the study says (other {key})" in str(error.value)


def test_how_a_run_is_carried_out_may_change(done, digits, study):
    assert carry_out(study, digits, set="run.log_every=7") == (0, "")


def test_a_model_of_another_recipe_is_not_taken_for_this_one(done, digits, study, tmp_path):
    code, printed = carry_out(study, digits, "full", results=tmp_path, set="ema=0.5")
    assert code != 0
    assert "holds a run of another recipe (ema)" in printed
    assert not (tmp_path / "full-42.json").exists()


def test_a_model_that_was_trained_again_has_no_results_yet(done, digits, study, monkeypatch, tmp_path):
    monkeypatch.setattr(entries, "_weights", lambda model, merge=None: "other")
    with pytest.raises(InvalidDodoFile) as error:
        carry_out(study, digits)
    assert "routing.json was made differently from what the study says (other weights)" in str(error.value)
    code, printed = carry_out(study, digits, "full", results=tmp_path)
    assert code != 0
    assert "full-42.parquet is of other weights than its model; delete it" in printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "letters"}, "full-42.json was made differently from what the study says (other data)"),
        ({"shift": {"shift": {"models": ["full"], "severities": [5]}}}, "shift.json was made differently"),
        ({"groups": {"low": ["0"]}}, "routing.json was made differently from what the study says (other groups)"),
    ],
)
def test_another_study_beside_those_results_is_refused(done, digits, study, change, message):
    other = study.with_name("other.yaml")
    other.write_text(yaml.safe_dump({**STUDY, **change}))
    with pytest.raises(InvalidDodoFile) as error:
        carry_out(other, digits)
    assert message in str(error.value)


def test_missing_data_is_an_error_before_anything_runs(study, tmp_path):
    with pytest.raises(InvalidDodoFile, match=r"no images at .*nowhere, which full-42, routing, shift need"):
        carry_out(study, tmp_path / "nowhere", "full", runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_results_are_json_that_any_reader_knows(done):
    def refuse(constant):
        raise AssertionError(constant)

    for path in (done / "results").glob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)
