"""Carrying out a study: stand-ins for the commands, real processes, real signals."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from progresvit.results import carry_out as module
from progresvit.results.carry_out import How, Stopped, carry_out
from progresvit.results.format import Data, Machine, Measurement
from progresvit.results.plan import Places, plan
from progresvit.results.study import Study

STUDY = Study.model_validate(
    {
        "title": "made",
        "data": "digits",
        "recipe": "digits",
        "runs": {"one": {"seeds": [1]}, "two": {"seeds": [1]}},
        "routing": {"routing": {"model": "two", "learned_from": False}},
    }
)

STAND_IN = """
import pathlib, signal, sys, time
makes, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
makes.parent.mkdir(parents=True, exist_ok=True)
with open(makes.parent / "calls.txt", "a") as calls:
    calls.write(" ".join(sys.argv[3:]) + "\\n")
if behaviour == "fail":
    sys.exit("error: it went wrong")
if behaviour == "slow":
    saved = []
    def save(number, frame):
        (makes.parent / f"saved-{makes.name}-{len(saved)}").touch()
        saved.append(number)
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    (makes.parent / f"ready-{makes.name}").touch()
    time.sleep(60)
makes.touch()
"""


def measure(done):
    return Measurement(
        format=1,
        name=done.task.name,
        commands=done.commands,
        seed=None,
        seconds=done.seconds,
        date="2026",
        revision="r",
        machine=Machine(device="cpu", processes=1, jobs=done.jobs, python="3", torch="2"),
        data=Data(name="digits", train=None, val=1, classes=2, names="", learned=None),
        precision="fp32",
    )


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Carries the study out with stand-ins that behave as told by the command's first word."""
    script = tmp_path / "stand_in.py"
    script.write_text(textwrap.dedent(STAND_IN))
    places, results, said = Places(data="D", runs=tmp_path / "runs"), tmp_path / "results", []

    def carry(*, jobs=1, only=(), **behaviours):
        def words(step, how):
            out = step.arguments[step.arguments.index("--out") + 1]
            behaviour = behaviours.get(
                f"{step.arguments[0]}_{os.path.basename(out).split('.')[0].replace('-', '_')}", ""
            )
            return [sys.executable, str(script), str(step.makes), behaviour or "well", *original(step, how)[3:]]

        monkeypatch.setattr(module, "_words", words)
        return carry_out(
            STUDY, plan(STUDY, only), places, results, measure=measure, how=How(jobs=jobs), tell=said.append
        )

    original = module._words
    carry.places, carry.results, carry.said = places, results, said
    return carry


def written(attempt):
    return sorted(path.stem for path in attempt.results.glob("*.json"))


def test_each_task_leaves_a_results_file(attempt):
    assert attempt() == {}
    assert written(attempt) == ["one-1", "routing", "two-1"]


def test_what_is_done_is_not_done_again(attempt):
    attempt()
    calls = attempt.places.runs / "records" / "calls.txt"
    before = calls.read_text()
    (attempt.results / "one-1.json").unlink()
    assert attempt() == {}
    assert calls.read_text() == before  # records and model were there
    assert "two-1: is there already" in attempt.said


def test_a_failure_is_told_and_the_others_go_on(attempt):
    failed = attempt(train_one_1="fail")
    assert list(failed) == ["one-1"]
    assert "progresvit train ended with 1: error: it went wrong" in failed["one-1"]
    assert written(attempt) == ["routing", "two-1"]


def test_what_needs_a_failed_model_fails_with_it(attempt):
    failed = attempt(train_two_1="fail")
    assert sorted(failed) == ["routing", "two-1"]
    assert written(attempt) == ["one-1"]


def test_a_measurement_whose_model_was_never_trained_says_so(attempt):
    failed = attempt(only=["routing"])
    assert "two-1 is not trained yet" in failed["routing"]


def test_a_model_that_was_measured_elsewhere_is_asked_for(attempt):
    attempt(only=["two"])
    (attempt.places.folder("two-1") / "model").unlink()
    failed = attempt()
    assert "two-1 was measured elsewhere and its model is not here; copy it to" in failed["routing"]


def test_what_another_command_made_is_not_taken_for_this_ones(attempt, monkeypatch):
    attempt(only=["one"])
    (attempt.results / "one-1.json").unlink()
    other = STUDY.model_copy(update={"set": ("optimizer.lr=1.0",)})
    monkeypatch.setattr(sys.modules[__name__], "STUDY", other)
    failed = attempt(only=["one"])
    assert "one-1/model was made by another command, progresvit train digits" in failed["one-1"]
    assert "remove it" in failed["one-1"]
    assert written(attempt) == []


def test_what_nobody_remembers_making_is_not_taken_either(attempt):
    records = attempt.places.records("one-1")
    records.parent.mkdir(parents=True)
    records.touch()
    failed = attempt(only=["one"])
    assert "records/one-1.parquet was not made by this study" in failed["one-1"]


def test_a_command_that_outlives_its_study_keeps_others_from_its_task(attempt, tmp_path):
    """As after SIGKILL: the child is detached, and holds the lock that it inherited."""
    lock = attempt.places.log("one-1").with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with module._locked(lock) as descriptor:
        orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(descriptor,))
    try:
        assert "another process is at work on it" in attempt(only=["one"])["one-1"]
    finally:
        orphan.communicate(b"\n")
    assert attempt(only=["one"]) == {}


def test_a_signal_on_top_of_a_signal_is_no_second_one(attempt):
    """The handler may be interrupted by itself, in the middle of telling the children."""
    running, told = module._Running(), []

    class Child:
        def send_signal(self, number):
            told.append(number)
            os.kill(os.getpid(), signal.SIGTERM)

    running.children.add(Child())
    with module._stop_signals(running):
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 5
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
    assert told == [signal.SIGTERM]
    assert running.signal_number == signal.SIGINT


def test_the_error_of_a_command_is_found_among_what_torchrun_adds(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("$ old\nerror: before\n$ new\nerror: no pictures\n=====\n")
    assert module._last_word(log) == "error: no pictures"
    log.write_text("$ new\nSegmentation fault\n\n")
    assert module._last_word(log) == "Segmentation fault"


@pytest.fixture
def _heard():
    """Whoever runs the tests under nohup ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_heard")
def test_under_nohup_a_closed_terminal_stops_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    running = module._Running()
    with module._stop_signals(running):
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert running.signal_number == 0


@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_children_save_and_begins_nothing_new(attempt, number):
    ready = attempt.places.runs / "one-1" / "ready-model"
    before = signal.getsignal(number)

    def send():
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(Stopped) as stopped:
        attempt(train_one_1="slow")
    assert stopped.value.number == number
    assert sorted(path.name for path in ready.parent.glob("saved*")) == ["saved-model-0"]  # asked once
    assert written(attempt) == []
    assert signal.getsignal(number) == before


def test_a_stopped_study_goes_on_and_counts_all_its_seconds(attempt):
    test_a_signal_lets_the_children_save_and_begins_nothing_new(attempt, signal.SIGTERM)
    log = attempt.places.log("one-1").with_suffix(".json")
    first = json.loads(log.read_text())["seconds"]
    assert first > 0
    (attempt.places.folder("one-1") / "recipe.yaml").touch()  # as a training leaves one
    assert attempt() == {}
    assert json.loads(log.read_text())["seconds"] > first
    assert "--resume" in (attempt.places.runs / "one-1" / "calls.txt").read_text().splitlines()[-1]


def test_how_many_shared_the_machine_is_remembered(attempt):
    attempt(jobs=2)
    assert json.loads((attempt.results / "one-1.json").read_text())["machine"]["jobs"] == 2


def test_several_gpus_are_several_processes():
    step = module.Step(arguments=("train", "r"), makes=attempt)
    assert module._words(step, How())[1:4] == ["-m", "progresvit", "train"]
    several = module._words(step, How(gpus=8, device="cuda", workers=3))
    assert several[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert several[-2:] == ["--device", "cuda"]  # workers are the recipe's
    evaluating = module._words(module.Step(arguments=("evaluate", "m"), makes=attempt), How(workers=3))
    assert evaluating[-2:] == ["--workers", "3"]


def test_no_jobs_are_refused():
    with pytest.raises(ValueError, match="1 or more"):
        How(jobs=0)
