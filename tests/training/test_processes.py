"""Two processes under torchrun against one that takes two turns."""

import os
import subprocess
import sys

import pytest

from tests.training.runs import losses, recipe, run

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def train_alone(digits, folder, values):
    """The losses of a run in this process."""
    run(values, digits, folder / "out")
    return losses(folder / "out")


def train_together(digits, folder, values):
    """The losses of a run in two processes."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(values.to_yaml())
    command = [
        *TORCHRUN,
        "-m",
        "progresvit",
        "train",
        folder / "recipe.yaml",
        "--data",
        digits,
        "--out",
        folder / "out",
    ]
    done = subprocess.run(
        [str(part) for part in [*command, "--device", "cpu"]],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return losses(folder / "out")


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_in_two_turns(digits, tmp_path):
    schedule = {"epochs": 2, "cooldown": 0, "warmup": 1}
    alone = train_alone(digits, tmp_path / "alone", recipe(optimizer={"accumulate": 2}, schedule=schedule))
    together = train_together(digits, tmp_path / "together", recipe(schedule=schedule))
    assert [step for step, *_ in alone] == [step for step, *_ in together] == list(range(1, 7))
    for (_, one, _), (_, two, _) in zip(alone, together):
        assert one == pytest.approx(two, abs=1e-5)
