"""What makes a short run on few images comfortable: freezing, early stopping, class weights, warm-up, threads."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from progresvit.cli import app
from progresvit.distributed import set_threads
from progresvit.training.logger import read_log
from progresvit.training.optim import warmup_epochs
from progresvit.training.recipe import load_recipe
from progresvit.training.tasks.supervised import Supervised, balanced_weights
from progresvit.training.tasks.task import Metrics
from tests.training.runs import evaluations, losses, ready, recipe, run, run_until_killed, take_steps


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_everything_but_the_head_can_be_frozen_as_a_linear_probe(digits):
    started = ready(recipe(optimizer={"freeze": ["*", "!head.*"]}), digits)
    before = {name: value.clone() for name, value in started.model.state_dict().items()}
    take_steps(started, 2)
    moved = {name for name, value in started.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize(("epochs", "warmup", "expected"), [(3, 5, 1), (1, 1, 0), (2, 2, 1), (3, 2, 2), (300, 5, 5)])
def test_a_run_is_never_all_warm_up(epochs, warmup, expected):
    overrides = [f"schedule.epochs={epochs}", f"schedule.warmup={warmup}"]
    assert warmup_epochs(load_recipe("192_240", overrides).schedule) == expected


def test_a_shorter_warm_up_is_reported_and_reaches_the_full_rate(digits, tmp_path, capsys):
    schedule = {"epochs": 2, "cooldown": 0, "warmup": 5, "warmup_lr": 1e-6}
    run(recipe(schedule=schedule, run={"log_every": 3}), digits, tmp_path)
    assert "schedule.warmup: using 1 epoch, not 5, because there are only 2" in capsys.readouterr().err
    rates = [lr for _, _, lr in losses(tmp_path)]
    assert rates[0] == pytest.approx(1e-6)
    assert rates[-1] > 1e-4


class Worsening(Supervised):
    """The second evaluation is the best one."""

    def validate(self, model, data, *, processes, dtype):
        metrics = super().validate(model, data, processes=processes, dtype=dtype)
        Worsening.evaluations += 1
        return Metrics(primary=-abs(Worsening.evaluations - 2), values=metrics.values)

    evaluations = 0


def test_a_run_stops_after_evaluations_without_a_better_one_and_resumes_to_the_same_end(digits, tmp_path, capsys):
    wanted = recipe(schedule={"epochs": 9, "cooldown": 0}, run={"patience": 2, "log_every": 3})
    Worsening.evaluations = 0
    run(wanted, digits, tmp_path / "whole", task=Worsening)
    evaluated = [line["epoch"] for line in evaluations(tmp_path / "whole")]
    assert evaluated == [0, 1, 2, 3]
    shown = capsys.readouterr().err
    assert "stopped early: no better evaluation since step 6" in shown
    assert f"next: progresvit evaluate {tmp_path / 'whole' / 'best'}" in shown

    Worsening.evaluations = 0
    run_until_killed(
        10, wanted, digits, tmp_path / "killed", task=Worsening
    )  # in the fourth epoch, after one evaluation that was not better
    Worsening.evaluations = 2  # the checkpoint was written before the third evaluation
    run(wanted, digits, tmp_path / "killed", task=Worsening, resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_run_that_stopped_early_and_is_resumed_takes_no_further_step(digits, tmp_path):
    wanted = recipe(schedule={"epochs": 9, "cooldown": 0}, run={"patience": 1, "log_every": 3})
    Worsening.evaluations = 0
    run(wanted, digits, tmp_path, task=Worsening)
    before = losses(tmp_path)
    Worsening.evaluations = 2
    run(wanted, digits, tmp_path, task=Worsening, resume=True)
    assert losses(tmp_path) == before
    assert len(before) == 3


def test_balanced_weights_give_every_class_the_same_sum():
    weights = balanced_weights([0] * 6 + [1] * 2 + [2], 4)  # no image of the last class
    assert (weights[:3] * torch.tensor([6, 2, 1])).tolist() == pytest.approx([3.0] * 3)
    assert weights.isfinite().all()


def test_class_weights_change_the_loss_of_an_unbalanced_set_alone(digits, tmp_path):
    shutil.copytree(digits, tmp_path / "data")
    for number in range(2, 12):
        (tmp_path / "data" / "train" / "3" / f"{number}.png").unlink()
    first = {}
    for name, data in (("even", digits), ("uneven", tmp_path / "data")):
        for weights in (None, "balanced"):
            started = ready(recipe(task_options={"class_weights": weights}), data)
            take_steps(started, 1)
            first[name, weights] = started.step.sums.tolist()
    assert first["even", "balanced"] == pytest.approx(first["even", None])
    assert first["uneven", "balanced"] != pytest.approx(first["uneven", None], rel=1e-3)


def test_the_log_has_the_time_left(digits, tmp_path, capsys):
    run(recipe(schedule={"epochs": 1, "cooldown": 1}), digits, tmp_path)
    lines = [line for line in read_log(tmp_path) if line["event"] == "train"]
    assert [round(line["seconds_left"] * line["images_per_second"] / 16) for line in lines] == [5, 4, 3, 2, 1, 0]
    assert re.search(r"step 6/6 .* images/s, 0:00 left", capsys.readouterr().err)


def test_one_unreadable_image_among_few_is_skipped_and_named(digits, tmp_path, capsys):
    shutil.copytree(digits, tmp_path / "data")
    (tmp_path / "data" / "train" / "1" / "0.png").write_bytes(b"not an image")
    run(recipe(schedule={"epochs": 1, "cooldown": 0}), tmp_path / "data", tmp_path / "out")
    assert "unreadable and skipped: train/1/0.png: " in capsys.readouterr().err


def test_threads_are_the_cores_that_workers_leave(keep_threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu = torch.device("cpu")
    torch.set_num_threads(4)
    assert set_threads(None, workers=0, device=cpu) == 4
    assert set_threads(None, workers=1, device=cpu) == 3
    assert set_threads(None, workers=1, device=torch.device("cuda")) == 3  # the cores wait for the GPU
    assert set_threads(None, workers=8, device=cpu) == 1
    assert set_threads(2, workers=8, device=cpu) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert set_threads(None, workers=8, device=cpu) == 2


def test_the_command_sets_the_threads(tmp_path, keep_threads):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.png").write_bytes(b"")
    words = ["train", "digits", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    result = CliRunner().invoke(app, [*words, "--threads", "3"])
    assert torch.get_num_threads() == 3
    assert result.exit_code == 2
    assert "1 images without class folders" in result.stderr
    assert not (tmp_path / "out").exists()


AT_THE_IMPORT_OF_TORCH = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
from progresvit.cli import app
app(["train", "digits", "--data", "data", "--out", "out"])
"""


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_sleep_unless_the_environment_decides(given, expected):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_IMPORT_OF_TORCH],
        env={**environment, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [expected]  # OpenMP reads it when torch is loaded
