"""Commands that are stopped, that fill the disk, or that share a folder: one line, and nothing finished is lost."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
from PIL import Image

from progresvit.engine import predict_files
from progresvit.engine.embedding import EmbeddingEngine
from progresvit.evaluation import parts as evaluation_parts
from progresvit.evaluation import run as evaluation
from progresvit.io import files, resumable
from progresvit.training import loop
from progresvit.training.state import checkpoints
from tests.commands import refused, run, works
from tests.processes import ROOT, TORCHRUN
from tests.training.runs import losses, recipe
from tests.waiting import wait_until

CPU = ("--device", "cpu")
STOPPED = "stopped; the same command continues\n"


def evaluate(model, digits, out):
    return ("evaluate", model, "--data", digits, "--out", out, "--workers", 0, "--batch", 5, *CPU)


def embed(model, digits, out):
    return ("embed", digits / "val", "--model", model, "--out", out, "--batch", 5, "--workers", 1, *CPU)


def classify(model, digits, out):
    return ("classify", digits / "val", "--model", model, "--threshold", 0.5, "--out", out, *CPU)


COMMANDS = {
    "evaluate": (evaluate, "a.parquet", evaluation, "record_columns", 5),
    "embed": (embed, "a.parquet", EmbeddingEngine, "_run", 5),
    "classify": (classify, "a.parquet", predict_files, "row", 24),
    "classify into CSV": (classify, "a.csv", predict_files, "row", 24),
}
"""The words of a command, its output, the function that it calls for each batch or row, and the number of calls."""


def rows(path):
    """The table as text, in which NaN equals NaN and different numbers differ."""
    return path.read_text() if path.suffix == ".csv" else repr(pq.read_table(path).to_pylist())


def stop_in_call(number, patch, place, name, act):
    """Do ``act`` in place of this call of a function, from 1; returns a list with an item for each other call."""
    function, calls = getattr(place, name), []

    def counted(*arguments, **options):
        if len(calls) + 1 == number:
            act()
        calls.append(number)
        return function(*arguments, **options)

    patch.setattr(place, name, counted)
    return calls


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_stops_with_one_line_and_the_same_command_continues(
    model, digits, tmp_path, monkeypatch, command, number, code
):
    make, name, *place, calls = COMMANDS[command]
    out, whole = tmp_path / name, tmp_path / f"whole {name}"
    works(*make(model, digits, whole))
    words = make(model, digits, out)
    handlers = [signal.getsignal(signal_number) for signal_number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        stop_in_call(4, patch, *place, lambda: signal.raise_signal(number))
        result = run(*words)
    assert (result.exit_code, result.stderr) == (code, STOPPED)
    assert [signal.getsignal(signal_number) for signal_number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert not out.exists()
    repeated = stop_in_call(0, monkeypatch, *place, None)
    works(*words)
    assert len(repeated) == calls - 3
    assert rows(out) == rows(whole)
    assert [path.name for path in tmp_path.glob(f"{name}*")] == [name]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_signal_ends_at_once_and_loses_nothing(model, digits, tmp_path, monkeypatch, command):
    """The second comes while the finished batches are written."""
    make, name, *place, calls = COMMANDS[command]
    words, keep, ends = make(model, digits, tmp_path / name), resumable.ResumableTable._keep_part, []

    def ends_at_once(code):
        ends.append(code)
        raise SystemExit(code)

    def kept(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        keep(self, *arguments)

    with monkeypatch.context() as patch:
        stop_in_call(4, patch, *place, lambda: signal.raise_signal(signal.SIGINT))
        patch.setattr(resumable.ResumableTable, "_keep_part", kept)
        patch.setattr("os._exit", ends_at_once)
        assert run(*words).stderr == STOPPED
    assert ends == [130]
    repeated = stop_in_call(0, monkeypatch, *place, None)
    works(*words)
    assert len(repeated) == calls - 3


@pytest.mark.slow
def test_a_second_signal_ends_a_training_at_its_last_checkpoint(digits, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(recipe().to_yaml())
    words = ("train", tmp_path / "recipe.yaml", "--data", digits, *CPU, "--out")

    def stop():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        stop_in_call(5, patch, loop.TrainingStep, "__call__", stop)
        result = run(*words, tmp_path / "run")
    assert result.exit_code == 130
    *_, message, command = result.stderr.splitlines()
    assert message == "stopped at once; the same command and --resume continue from the last checkpoint."
    assert "Traceback" not in result.output
    assert shlex.split(command) == ["progresvit", *map(str, words), str(tmp_path / "run"), "--resume"]
    works(*shlex.split(command)[1:])
    works(*words, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def start(words, *, together=False, constants=None):
    """A command in a process of its own, or in two under torchrun; see :mod:`tests.processes`."""
    program = TORCHRUN if together else (sys.executable,)
    arguments = json.dumps([[str(word) for word in words]]), json.dumps(constants or {})
    return subprocess.Popen(
        [*program, "-m", "tests.processes", *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def many(digits, tmp_path):
    """Enough images that a run with batches of one takes seconds."""
    image = Image.open(next((digits / "val").rglob("*.png")))
    for digit in "0123":
        (tmp_path / "many" / "val" / digit).mkdir(parents=True)
        for number in range(100):
            image.rotate(number).save(tmp_path / "many" / "val" / digit / f"{number}.png")
    return tmp_path / "many"


KEEP_ALWAYS = {"progresvit.io.resumable.KEEP_EVERY": 0, "progresvit.evaluation.parts.CHUNK": 40}


@pytest.mark.long
def test_a_process_that_gets_signals_keeps_its_records(model, many, tmp_path, monkeypatch):
    out, images = tmp_path / "a.parquet", []
    words = ("evaluate", model, "--data", many, "--workers", 0, "--batch", 1, *CPU, "--out")
    parts = tmp_path / "a.parquet.parts"
    for number in (signal.SIGINT, signal.SIGTERM):
        process, begun = start((*words, out), constants=KEEP_ALWAYS), time.time_ns()
        wait_until(lambda: any(path.stat().st_mtime_ns > begun for path in parts.glob("0*.npz")), process)  # noqa: B023
        process.send_signal(number)
        assert process.communicate()[1] == STOPPED
        assert process.returncode == 128 + number
        images.append(40 * len(list(parts.glob("0*.npz"))))
    assert 0 < images[0] < images[1] < 400
    monkeypatch.setattr(evaluation_parts, "CHUNK", 40)
    works(*words, out)
    works(*words, tmp_path / "whole.parquet")
    assert rows(out) == rows(tmp_path / "whole.parquet")


@pytest.mark.long
def test_two_processes_that_torchrun_ends_continue_with_the_same_command(model, many, tmp_path):
    out, parts = tmp_path / "a.parquet", tmp_path / "a.parquet.parts"
    words = ("evaluate", model, "--data", many, "--workers", 0, "--batch", 1, *CPU, "--out")
    process = start((*words, out), together=True, constants=KEEP_ALWAYS)
    wait_until(lambda: len(list(parts.glob("0*.npz"))) > 1, process)
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[1].count(STOPPED) == 1  # the rest is torchrun's
    kept = len(list(parts.glob("0*.npz")))
    assert 1 < kept < 10
    continued = start((*words, out), together=True, constants={"progresvit.evaluation.parts.CHUNK": 40})
    assert continued.communicate()[0].count("is ready") == 1
    works(*words, tmp_path / "whole.parquet")
    assert rows(out) == rows(tmp_path / "whole.parquet")


def fill_disk_after(number, patch):
    """The disk takes this number of files and folders."""
    sync, synced = files._sync, []

    def full(path):
        synced.append(path)
        if len(synced) > number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    patch.setattr(files, "_sync", full)


def test_a_full_disk_in_the_middle_of_an_evaluation_loses_no_batch_that_was_kept(model, digits, tmp_path, monkeypatch):
    words = evaluate(model, digits, tmp_path / "a.parquet")
    monkeypatch.setattr(resumable, "KEEP_EVERY", 0)
    with monkeypatch.context() as patch:
        fill_disk_after(6, patch)  # run.json and two batches, each with its folder
        refused("a.parquet cannot be written (No space left on device); free some space there and run the same", *words)
    batches = stop_in_call(0, monkeypatch, evaluation, "record_columns", None)
    works(*words)
    assert len(batches) == 3
    works(*evaluate(model, digits, tmp_path / "whole.parquet"))
    assert rows(tmp_path / "a.parquet") == rows(tmp_path / "whole.parquet")


@pytest.mark.slow
def test_a_full_disk_in_the_middle_of_a_training_keeps_the_checkpoints(digits, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(recipe(run={"keep": 9}).to_yaml())
    words = ("train", tmp_path / "recipe.yaml", "--data", digits, *CPU, "--out")
    with monkeypatch.context() as patch:
        fill_disk_after(20, patch)
        full = f"{tmp_path / 'run'} cannot be written (No space left on device); free some space there and continue "
        refused(f"{full}with the same command and --resume", *words, tmp_path / "run")
    kept = [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")]
    assert 0 < len(kept) < 4
    works(*words, tmp_path / "run", "--resume")
    works(*words, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_other_commands_name_the_remedy_for_a_full_disk_too(model, digits, tmp_path, monkeypatch):
    works(*evaluate(model, digits, tmp_path / "r.parquet"))
    fill_disk_after(0, monkeypatch)
    words = ("calibrate", tmp_path / "r.parquet", "--exit-share", 0.5, "--out", tmp_path / "s.json")
    refused("No space left on device; free some space there and run the same command again", *words)


HOLD = """
import sys
from pathlib import Path
from progresvit.io.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "go")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("make", "folder"),
    [
        (evaluate, "a.parquet.parts"),
        (embed, "a.parquet.parts"),
        (lambda model, digits, out: ("train", "photos_tiny", "--data", digits, "--out", out.with_name("run")), "run"),
    ],
)
def test_a_folder_that_another_run_uses_is_refused_in_one_line(model, digits, tmp_path, make, folder):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        words = make(model, digits, tmp_path / "a.parquet")
        refused(f"is used by another run right now (process {other.pid} on ", *words)
        refused(f"is used by another run right now (process {other.pid} on ", *words, "--overwrite")
        other.kill()
