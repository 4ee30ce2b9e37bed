"""Runs that are stopped, killed or spoiled: they lose nothing and resume as if nothing had happened."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import progresvit
from progresvit.io.files import replacing_file, replacing_folder
from progresvit.io.lock import FolderLock
from progresvit.training import loop, state
from progresvit.training.logger import remove_after
from progresvit.training.recipe import load_recipe
from progresvit.training.run_folder import check_folder, remove_leftovers
from progresvit.training.state import checkpoints
from progresvit.training.tasks.supervised import Supervised
from tests.training.runs import assert_equal_runs, assert_resumes_to_the_bit, losses, recipe, run
from tests.training.toy_tasks import Colour
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    """The folder of a whole run; no test may change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(recipe(), digits, folder)
    return folder


@pytest.fixture
def out(finished, tmp_path):
    """A copy of the whole run."""
    return shutil.copytree(finished, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "log_every"), [("in_memory", 1), ("loader", 5)])
def test_resumed_run_equals_an_unbroken_one(digits, tmp_path, mode, log_every):
    wanted = recipe(data={"mode": mode}, run={"log_every": log_every, "keep": 9})
    whole = assert_resumes_to_the_bit(wanted, digits, tmp_path, "model", "ema", "optimizer")
    assert whole.name == "step-000000012"


@pytest.mark.slow
def test_a_run_from_before_a_key_existed_resumes(digits, out):
    path = out / "recipe.yaml"
    older = [line for line in path.read_text().splitlines() if not line.startswith("ema_warmup")]
    path.write_text("\n".join(older))
    run(recipe(), digits, out, resume=True)
    with pytest.raises(ValueError, match=r"another recipe \(ema_warmup\)"):
        run(recipe(ema_warmup=True), digits, out, resume=True)


@pytest.mark.slow
def test_a_run_from_before_defaults_changed_goes_on_as_it_began(digits, out):
    path, newer = out / "recipe.yaml", ("erase_before_mixing", "start_gates")
    older = [line for line in path.read_text().splitlines() if not any(key in line for key in newer)]
    path.write_text("\n".join(older))
    assert load_recipe(str(path), stored=True).augment.erase_before_mixing
    with pytest.raises(ValueError, match=r"another recipe \(augment\.erase_before_mixing\)"):
        run(recipe(augment={"erase_before_mixing": False}), digits, out, resume=True)
    for _ in range(2):  # the first writes the new keys into the recipe
        run(recipe(), digits, out, resume=True)
        began = load_recipe(str(path))
        assert (began.augment.erase_before_mixing, began.model.start_gates) == (True, "torch")


def start(out, digits, *options):
    """A run in a process of its own, slow enough to be stopped."""
    values = recipe(
        schedule={"epochs": 2000, "cooldown": 0}, run={"log_every": 1, "save_every": 2000, "evaluate_every": 2000}
    )
    path = out.parent / "recipe.yaml"
    path.write_text(values.to_yaml())
    command = [sys.executable, "-m", "progresvit", "train", path, "--data", digits, "--out", out]
    command += ["--device", "cpu", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(part) for part in command], stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("number", "mode"), [(signal.SIGTERM, "in_memory"), (signal.SIGINT, "loader")])
def test_a_signal_finishes_the_step_saves_and_prints_how_to_resume(digits, tmp_path, number, mode):
    out = tmp_path / "out"
    process = start(out, digits, "--set", f"data.mode={mode}", "--set", "data.workers=1")
    log = out / "log.jsonl"
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) > 3, process)
    os.killpg(process.pid, number)  # as a terminal does it: to the workers too
    message = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 128 + number
    assert "--resume" in message
    assert "Traceback" not in message
    (saved,) = checkpoints(out / "checkpoints")
    step = json.loads((saved / "progress.json").read_text())["progress"]["step"]
    assert f"stopped after step {step}" in message
    assert losses(out)[-1][0] == step


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(digits, tmp_path, monkeypatch):
    wanted = recipe(run={"log_every": 3})
    seen = []
    original = Supervised.losses

    def breaks_in_step_five(self, outputs, batch):
        value = original(self, outputs, batch)
        seen.append(1)
        return value * (float("nan") if len(seen) == 5 else 1.0)

    monkeypatch.setattr(Supervised, "losses", breaks_in_step_five)
    kept = {}
    update = loop.TrainingStep._update

    def remember(self, *arguments):
        update(self, *arguments)
        kept[len(seen)] = {key: value.clone() for key, value in self.model.state_dict().items()}

    monkeypatch.setattr(loop.TrainingStep, "_update", remember)
    with pytest.raises(
        ValueError,
        match=r"was not finite at step 5 \(learning rate .*resume=True with a lower rate, optimizer\.lr=0\.001",
    ):
        run(wanted, digits, tmp_path / "out")
    assert not all(torch.equal(kept[4][key], kept[3][key]) for key in kept[4])
    assert all(torch.equal(kept[5][key], kept[4][key]) for key in kept[4])
    assert all(torch.equal(kept[6][key], kept[4][key]) for key in kept[4])
    assert [path.name for path in checkpoints(tmp_path / "out" / "checkpoints")] == ["step-000000003"]
    monkeypatch.undo()
    run(recipe(run={"log_every": 3}, optimizer={"lr": 1e-3}), digits, tmp_path / "out", resume=True)


@pytest.mark.slow
def test_a_run_stopped_in_the_middle_of_an_epoch_resumes_as_if_nothing_had_been(digits, tmp_path, monkeypatch):
    wanted = recipe(run={"log_every": 5, "keep": 9})
    run(wanted, digits, tmp_path / "whole")
    step = loop.TrainingStep.__call__

    def stops_after_step_eight(self, number, batches):
        step(self, number, batches)
        if number == 7:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop.TrainingStep, "__call__", stops_after_step_eight)
    with pytest.raises(loop.Interrupted, match="stopped after step 8"):
        run(wanted, digits, tmp_path / "broken")
    monkeypatch.undo()
    run(wanted, digits, tmp_path / "broken", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken", "model")


@pytest.mark.slow
def test_a_run_that_dies_while_evaluating_has_saved_before_and_evaluates_again(finished, digits, tmp_path, monkeypatch):
    def dies(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(Supervised, "validate", dies)
    with pytest.raises(MemoryError):
        run(recipe(), digits, tmp_path / "broken")
    monkeypatch.undo()
    assert [path.name for path in checkpoints(tmp_path / "broken" / "checkpoints")] == ["step-000000003"]
    run(recipe(), digits, tmp_path / "broken", resume=True)
    assert_equal_runs(finished, tmp_path / "broken")


@pytest.mark.slow
def test_long_epochs_are_saved_by_the_clock(digits, tmp_path):
    run(recipe(run={"save_minutes": 1e-6, "keep": 99}), digits, tmp_path / "out")
    assert len(checkpoints(tmp_path / "out" / "checkpoints")) == 12


@pytest.mark.parametrize(
    ("parameter", "value"), [("model.cls_token", math.nan), ("task.heads.0.bias", math.inf)], ids=["model", "task"]
)
def test_a_gradient_that_is_not_finite_is_not_applied_either(digits, tmp_path, monkeypatch, parameter, value):
    update, count = loop.TrainingStep._update, iter(range(100))

    def spoiled(self, *arguments):
        if next(count) == 5:
            self.trained.get_parameter(parameter).grad.fill_(value)
        update(self, *arguments)

    monkeypatch.setattr(loop.TrainingStep, "_update", spoiled)
    with pytest.raises(ValueError, match="not finite at step 6"):
        run(recipe(), digits, tmp_path / "out", task=Colour)
    (saved,) = checkpoints(tmp_path / "out" / "checkpoints")
    assert saved.name == "step-000000003"


@pytest.mark.slow
def test_resuming_with_other_data_is_refused(digits, out, tmp_path):
    other = shutil.copytree(digits, tmp_path / "other")
    (other / "train" / "0" / "0.png").unlink()
    with pytest.raises(ValueError, match="other data"):
        run(recipe(), other, out, resume=True)
    with pytest.raises(ValueError, match=r"another recipe \(data\.mode\)"):
        run(recipe(data={"mode": "loader"}), digits, out, resume=True)
    run(recipe(data={"workers": 1}), digits, out, resume=True)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(digits, tmp_path, monkeypatch):
    write, count = state.write_safetensors, iter(range(100))

    def full(weights, path):
        if next(count) == 7:  # in the middle of the third checkpoint
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(weights, path)

    monkeypatch.setattr(state, "write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        run(recipe(), digits, tmp_path / "out")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path / "out" / "checkpoints")) == ["step-000000003", "step-000000006"]
    run(recipe(), digits, tmp_path / "out", resume=True)
    assert losses(tmp_path / "out")[-1][0] == 12


def left_of(folder):
    """Hidden files and folders."""
    return sorted(path.name.rpartition(".")[0] for path in folder.rglob(".*"))


KILLED = """
import os, signal, sys
from progresvit.training import state
from tests.training.runs import recipe, run
write, count = state.write_safetensors, iter(range(100))
def killed(weights, path):
    if next(count) == 7:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    write(weights, path)
state.write_safetensors = killed
run(recipe(), sys.argv[1], state.Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_the_checkpoint_that_a_killed_run_was_writing_is_removed_when_it_resumes(digits, tmp_path):
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, digits, out], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert left_of(out) == [".step-000000009"]
    run(recipe(), digits, out, resume=True)
    assert left_of(out) == []
    assert losses(out)[-1][0] == 12


def leave_behind(out):
    """Every temporary file and folder that a killed run may leave, and two files of the user.

    They remain as long as the result is kept.
    """
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    folders = [replacing_folder(target) for target in (out / "model", out / "best", out / "checkpoints/step-000000009")]
    files = [replacing_file(out / name) for name in ("recipe.yaml", "run.json", "log.jsonl")]
    for folder in folders:
        (folder.__enter__() / "model.safetensors").write_bytes(b"half")
    for file in files:
        file.__enter__().write_bytes(b"half")
    (out / ".notes.01234567").touch()
    (out / "checkpoints" / ".mine").touch()
    return folders, files


def test_leftovers_of_a_run_are_removed_and_other_files_stay(tmp_path):
    kept = leave_behind(tmp_path)
    assert len(left_of(tmp_path)) == 8
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob(".*")) == [".mine", ".notes.01234567"]
    del kept


def test_a_run_that_was_killed_before_it_wrote_its_recipe_starts_again(tmp_path):
    with replacing_file(tmp_path / "recipe.yaml") as staged:
        staged.write_bytes(b"half")
        check_folder(tmp_path, recipe(), resume=False, overwrite=False)
        staged.replace(tmp_path / "other")
        with pytest.raises(ValueError, match="holds other files and no run"):
            check_folder(tmp_path, recipe(), resume=False, overwrite=False)
        (tmp_path / "other").replace(staged)


def test_leftovers_of_a_run_in_progress_stay(digits, tmp_path):
    kept = leave_behind(tmp_path)
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    before, lock = left_of(tmp_path), FolderLock(tmp_path, "wait")
    lock.acquire()
    with pytest.raises(ValueError, match="is used by another run right now"):
        run(recipe(), digits, tmp_path, resume=True)
    lock.release()
    assert left_of(tmp_path) == before
    del kept


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(digits, out, capsys):
    whole = losses(out)
    *_, newest = checkpoints(out / "checkpoints")
    weights = newest / "ema.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    run(recipe(), digits, out, resume=True)
    assert f"{newest} is damaged and skipped" in capsys.readouterr().err
    assert losses(out) == whole
    for path in checkpoints(out / "checkpoints"):
        (path / "progress.json").unlink()
    with pytest.raises(ValueError, match="pass overwrite=True to start again"):
        run(recipe(), digits, out, resume=True)


@pytest.mark.slow
def test_last_and_best_are_kept(digits, tmp_path):
    run(recipe(run={"keep": 2}), digits, tmp_path / "out")
    assert [path.name for path in checkpoints(tmp_path / "out" / "checkpoints")] == ["step-000000009", "step-000000012"]
    for name in ("best", "model"):
        assert progresvit.load(tmp_path / "out" / name).config.num_classes == 4


@pytest.mark.slow
def test_a_folder_with_another_run_is_refused(digits, out, tmp_path):
    before = losses(out)
    with pytest.raises(ValueError, match=r"resume=True.*overwrite=True"):
        run(recipe(), digits, out)
    with pytest.raises(ValueError, match=r"another recipe \(optimizer\.batch, seed\)"):
        run(recipe(optimizer={"batch": 8}, seed=1), digits, out, resume=True)
    with pytest.raises(ValueError, match="pass only one of them"):
        run(recipe(), digits, out, resume=True, overwrite=True)
    assert losses(out) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds other files"):
        run(recipe(), digits, tmp_path / "other")
    run(recipe(optimizer={"batch": 8}), digits, out, overwrite=True)
    assert losses(out) != before


@pytest.mark.slow
@pytest.mark.parametrize("died_early", [False, True])
def test_a_finished_run_stays_as_it_is_and_one_without_a_checkpoint_starts_again(finished, digits, out, died_early):
    if died_early:
        shutil.rmtree(out / "checkpoints")
    run(recipe(), digits, out, resume=True)
    assert_equal_runs(finished, out, "model")


def test_lines_after_the_checkpoint_and_lines_cut_short_are_removed(tmp_path):
    log = tmp_path / "log.jsonl"
    lines = [json.dumps({"event": event, "step": step}) for step in (1, 2, 3) for event in ("train", "evaluation")]
    log.write_text("\n".join(lines) + '\n{"st')
    remove_after(log, 2, evaluated_step=1)
    assert log.read_text().splitlines() == lines[:3]


@pytest.mark.slow
def test_a_damaged_description_of_the_run_is_refused(digits, out):
    (out / "run.json").write_text("{")
    with pytest.raises(ValueError, match="delete it to skip the check"):
        run(recipe(), digits, out, resume=True)
