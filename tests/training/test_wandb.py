"""Weights & Biases gets the numbers of the log. The package is replaced by a small one that keeps what it is given."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from progresvit.training.logger import read_log
from tests.training.runs import recipe, run, run_until_killed

TRACKED = {"log_every": 1, "wandb": "flowers"}


class FakeRun:
    def __init__(self, options):
        self.options, self.id, self.rows, self.exit_code = options, options["id"] or "abc123", [], None

    def log(self, values, *, step):
        assert self.exit_code is None
        self.rows.append((step, values))

    def finish(self, *, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    module = ModuleType("wandb")
    module.runs, module.Error, module.refusal = [], type("Error", (Exception,), {}), None
    module.Settings = lambda **options: SimpleNamespace(**options)

    def init(**options):
        if module.refusal:
            raise module.Error(module.refusal)
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_project_gets_the_numbers_of_the_log(wandb, digits, tmp_path):
    run(recipe(run=TRACKED), digits, tmp_path / "out")
    (tracked,) = wandb.runs
    assert tracked.exit_code == 0
    assert (tracked.options["project"], tracked.options["name"]) == ("flowers", "out")
    assert tracked.options["config"]["optimizer"]["batch"] == 16
    log = read_log(tmp_path / "out")
    assert [step for step, _ in tracked.rows] == [line["step"] for line in log]
    for (_, values), line in zip(tracked.rows, log):
        if line["event"] == "train":
            assert values["train/loss"] == line["loss"]
            assert [values["train/losses/round 1"], values["train/losses/round 2"]] == line["losses"]
        else:
            assert values["evaluation/top1/round 2"] == line["top1"][1]
            assert values["evaluation/near_lossless/gmacs"] == line["near_lossless"]["gmacs"]


def test_a_resumed_run_continues_the_run_of_its_project(wandb, digits, tmp_path):
    run_until_killed(4, recipe(run=TRACKED), digits, tmp_path / "out")
    run(recipe(run=TRACKED), digits, tmp_path / "out", resume=True)
    first, second = wandb.runs
    assert (first.exit_code, second.exit_code) == (1, 0)
    assert (first.options["id"], second.options["id"]) == (None, "abc123")
    assert [step for step, _ in second.rows] == [3, 4, 5, 6, 6, 7, 8, 9, 9, 10, 11, 12, 12]
    run(recipe(run=TRACKED), digits, tmp_path / "out", overwrite=True)
    assert wandb.runs[2].options["id"] is None  # another run


def test_nothing_is_tracked_by_default(wandb, digits, tmp_path):
    run(recipe(schedule={"epochs": 1, "cooldown": 0}), digits, tmp_path / "out")
    assert wandb.runs == []
    assert not (tmp_path / "out" / "wandb").exists()


@pytest.mark.parametrize("found", [None, ModuleType("wandb")], ids=["nothing", "a folder of that name"])
def test_a_missing_package_is_reported_before_anything_is_written(found, digits, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(ValueError, match=r"run\.wandb: wandb is not installed; run: pip install '?(\.\[)?wandb"):
        run(recipe(run=TRACKED), digits, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_refusal_says_what_to_do(wandb, digits, tmp_path):
    wandb.refusal = "No API key configured.\nUse `wandb login`."
    with pytest.raises(
        ValueError, match=r"refused the run \(No API key configured\.\); run wandb login, set WANDB_MODE"
    ):
        run(recipe(run=TRACKED), digits, tmp_path / "out")
