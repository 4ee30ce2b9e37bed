"""The tasks of a study: stand-ins for progresvit's commands, real doit, real processes and signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from doit.exceptions import InvalidDodoFile

from repro.measure import entries
from tests.repro.dodo import DODO, doit, load
from tests.waiting import PATIENCE, wait_until

STUDY = {
    "title": "made",
    "data": "digits",
    "recipe": "digits",
    "runs": {"one": {"seeds": [1]}, "two": {"seeds": [1]}},
    "comparisons": {"both": {"title": "Both", "rows": {"first": "one"}, "against": "two"}},
    "frontiers": {"costs": {"title": "Costs", "ours": "one", "rows": {"first": "one"}, "margin": 1}},
    "routing": {"routing": {"model": "two", "learned_from": False}},
}
UNTRAINED = {"title": "made", "data": "digits", "recipe": "digits", "routing": {"routing": {"model": "nettewoof-tiny"}}}
"""A study that loads without torch."""
STEPS = ("train", "evaluate", "measure")
EVERYTHING = [
    *("train one-1", "evaluate one-1", "measure one-1", "train two-1", "evaluate two-1", "measure two-1"),
    *("evaluate routing", "measure routing"),
]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Runs tasks with stand-ins that write what the commands would; returns the exit code."""
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    monkeypatch.setattr(entries, "check_earlier", lambda *arguments: None)

    def run(*words, failing=(), **variables):
        module = load(**{"study": tmp_path / "study.yaml", "data": tmp_path, "runs": tmp_path / "runs"} | variables)

        def command(entry, wanted):
            done.append(f"{wanted.words[0]} {entry.name}")
            if done[-1] in failing:
                return module.TaskFailed("failed")
            wanted.makes.parent.mkdir(parents=True, exist_ok=True)
            wanted.makes.write_text(f"{wanted.words}")
            return None

        def measure(entry, words):
            done.append(f"measure {entry.name}")
            (module.RESULTS / f"{entry.name}.json").touch()

        done.clear()
        module.progresvit, module.run = command, measure
        return doit(module, *words)

    run.done = done = []
    run.runs, run.results = tmp_path / "runs", tmp_path / "runs" / "results"
    return run


def test_every_entry_is_trained_evaluated_and_measured(study):
    assert study() == 0
    assert study.done == EVERYTHING
    assert yaml.safe_load((study.results / "study.yaml").read_text()) == STUDY


def test_a_study_that_is_stopped_has_as_many_seeds_of_every_run(study, tmp_path):
    runs = {"one": {"seeds": [1, 2, 3]}, "two": {"seeds": [1, 2]}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"runs": runs}))
    assert study() == 0
    order = [f"{step} {name}" for name in ("one-1", "two-1", "one-2", "two-2", "one-3") for step in STEPS]
    assert study.done == [*order, "evaluate routing", "measure routing"]


def test_several_at_a_time_do_the_same(study):
    assert study("-n", "3") == 0
    assert sorted(study.done) == sorted(EVERYTHING)
    assert study.done.index("train two-1") < study.done.index("evaluate routing") < study.done.index("measure routing")


def test_what_is_done_is_not_done_again(study):
    study()
    assert study() == 0
    assert study.done == []
    (study.results / "one-1.json").unlink()
    study()
    assert study.done == ["measure one-1"]


def test_results_from_another_machine_are_not_made_again(study):
    study.results.mkdir(parents=True)
    for name in ("one-1", "two-1"):
        (study.results / f"{name}.json").touch()
    assert study() == 0
    assert study.done == ["train two-1", "evaluate routing", "measure routing"]  # its model is needed


def test_a_model_that_was_trained_again_is_evaluated_and_measured_again(study):
    study()
    (study.runs / "two-1" / "model" / "model.safetensors").write_text("trained again")
    (study.results / "two-1.json").unlink()
    study()
    assert study.done == ["evaluate two-1", "measure two-1"]


def test_another_recipe_is_handed_to_training_which_refuses_it(study):
    study()
    (study.results / "one-1.json").unlink()
    study(set="optimizer.lr=1.0")
    assert study.done[0] == "train one-1"


def test_a_failure_does_not_stop_the_others(study):
    assert study(failing=["train one-1"]) != 0
    assert study.done == [step for step in EVERYTHING if step not in ("evaluate one-1", "measure one-1")]
    assert study() == 0
    assert study.done == ["train one-1", "evaluate one-1", "measure one-1"]


def test_what_needs_a_failed_model_is_not_run(study):
    assert study(failing=["train two-1"]) != 0
    assert study.done == ["train one-1", "evaluate one-1", "measure one-1", "train two-1"]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["one"], ["train one-1", "evaluate one-1", "measure one-1"]),
        (["one-1"], ["train one-1", "evaluate one-1", "measure one-1"]),
        (["routing"], ["train two-1", "evaluate routing", "measure routing"]),
        (["both"], [step for step in EVERYTHING if "routing" not in step]),
        (["costs"], ["train one-1", "evaluate one-1", "measure one-1"]),
        (["train:two-1"], ["train two-1"]),
    ],
)
def test_tasks_are_chosen_by_name(study, names, steps):
    assert study(*names) == 0
    assert sorted(study.done) == sorted(steps)


STARTED = {"one": {"seeds": [1]}, "two": {"seeds": [1], "start": "one"}}


@pytest.mark.parametrize("words", [(), ("-n", "3")])
def test_a_run_that_starts_from_another_is_trained_after_it(study, tmp_path, words):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"runs": dict(reversed(STARTED.items()))}))
    assert study(*words, "two") == 0
    assert study.done == ["train one-1", "train two-1", "evaluate two-1", "measure two-1"]


def test_the_model_that_a_run_starts_from_is_trained_although_it_was_measured(study, tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"runs": STARTED, "routing": {}}))
    study.results.mkdir(parents=True)
    (study.results / "one-1.json").touch()
    assert study() == 0
    assert study.done == ["train one-1", "train two-1", "evaluate two-1", "measure two-1"]


COMMANDS = {
    "table": {"title": "Table", "words": "frontier {records[one]} --out {out}/a.md"},
    "speed": {"title": "Speed", "words": "bench {model} {made[table]} --out {out}/a.md", "rows": {"it": "two"}},
}


def test_what_a_command_uses_is_made_first(study, tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"routing": {}, "commands": COMMANDS}, sort_keys=False))
    assert study("table") == 0
    assert study.done == ["train one-1", "evaluate one-1", "frontier table", "measure table"]
    assert study("speed") == 0
    assert study.done == ["train two-1", "bench speed-it", "measure speed-it"]
    study.results.joinpath("table.json").touch()  # measured elsewhere
    (study.runs / "made" / "table" / "printed.txt").unlink()
    (study.results / "speed-it.json").unlink()
    assert study("speed") == 0
    assert study.done == ["frontier table", "measure speed-it"]  # the table is made again and is the same


def test_records_that_a_command_reads_are_made_again_although_they_were_measured(study, tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"routing": {}, "commands": COMMANDS}, sort_keys=False))
    study.results.mkdir(parents=True)
    (study.results / "one-1.json").touch()
    assert study("table") == 0
    assert study.done == ["train one-1", "evaluate one-1", "frontier table", "measure table"]


def test_entries_without_data_are_named_before_anything_begins(study, tmp_path):
    runs = {"one": {"seeds": [1]}, "two": {"seeds": [1], "data": "masks"}}
    changes = {"runs": runs, "routing": {}, "comparisons": {}, "places": {"masks": "ADE20K"}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | changes))
    for variables, message in [
        ({}, "two-1 need ADE20K; say where it is with masks=FOLDER"),
        ({"masks": tmp_path / "no"}, f"no images at {tmp_path / 'no'}, which two-1 need"),
        ({"masks": tmp_path, "data": "no"}, "no images at no, which one-1 need"),
        ({"mask": tmp_path}, "mask: unknown key; did you mean 'masks'"),
    ]:
        with pytest.raises(InvalidDodoFile) as error:
            study(**variables)
        assert message in str(error.value)
        assert not study.runs.exists()
    assert study(masks="none") == 0
    assert study.done == ["train one-1", "evaluate one-1", "measure one-1"]


def test_what_a_command_printed_is_kept_beside_what_it_wrote(module, tmp_path):
    make = module  # writes the study of the other tests first
    commands = {"listed": {"title": "List", "words": "info nettewoof-tiny", "printed": True}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(UNTRAINED | {"routing": {}, "commands": commands}))
    made = make()
    (entry,) = made.ENTRIES
    (command,) = made.commands_of(made.STUDY, entry, made.PLACES)
    for _ in range(2):  # the log grows
        assert made.progresvit(entry, command) is None
        assert command.makes.read_text().count("\nRounds ") == 1
        assert "-m progresvit" not in command.makes.read_text()


def test_processes_share_an_evaluation_and_a_linear_probe(module, tmp_path):
    runs = {"one": {"seeds": [1], "task": "knn"}, "two": {"seeds": [1], "task": "linear"}}
    make = module  # writes the study of the other tests first
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY | {"runs": runs}))
    made = make(processes=8)
    assert "torch.distributed.run" in words_of(made, 1, "one-1")
    assert "torch.distributed.run" in words_of(made, 1, "two-1")


@pytest.fixture
def module(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))

    def make(**variables):
        return load(study=tmp_path / "study.yaml", data=tmp_path, runs=tmp_path / "runs", **variables)

    return make


def words_of(module, number, name):
    """The words that a command is run with."""
    found = []
    module.run = lambda entry, words: found.extend(words)
    entry = next(entry for entry in module.ENTRIES if entry.name == name)
    module.progresvit(entry, module.commands_of(module.STUDY, entry, module.PLACES)[number])
    return found


def test_commands_are_run_as_they_are_written_down(module, tmp_path):
    made = module()
    assert words_of(made, 0, "one-1")[:4] == [sys.executable, "-m", "progresvit", "train"]
    assert words_of(made, 0, "one-1")[-2:] == ["--set", "seed=1"]
    assert words_of(made, 0, "routing")[-1] == "--overwrite"
    (tmp_path / "runs" / "one-1").mkdir()
    (tmp_path / "runs" / "one-1" / "recipe.yaml").touch()
    assert words_of(made, 0, "one-1")[-1] == "--resume"


def test_several_processes_are_started_by_torchrun(module):
    made = module(processes=8, device="cuda", workers=3)
    train, evaluate = words_of(made, 0, "one-1"), words_of(made, 1, "one-1")
    assert train[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert train[-2:] == ["--device", "cuda"]  # workers are the recipe's
    assert evaluate[-4:] == ["--device", "cuda", "--workers", "3"]


def test_entries_are_spread_over_the_gpus(module):
    made = module(gpus=2)
    for entry in made.ENTRIES:
        assert made.run(entry, [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]) is None
    shown = [made.PLACES.log(entry.name).read_text().splitlines()[-1] for entry in made.ENTRIES]
    assert shown == ["0", "1", "0"]


def test_seconds_of_every_attempt_are_kept(module):
    made = module(processes=2)
    entry = made.ENTRIES[0]
    failed = made.run(entry, [sys.executable, "-c", "print('error: no images'); print('====='); exit(3)"])
    assert "ended with 3: error: no images" in str(failed.message)
    assert str(made.PLACES.log(entry.name)) in failed.message
    made.run(entry, [sys.executable, "-c", "import time; time.sleep(0.2)"])
    timings = [json.loads(line) for line in made.PLACES.timings(entry.name).read_text().splitlines()]
    assert [(one["jobs"], one["processes"]) for one in timings] == [(1, 2), (1, 2)]
    assert timings[1]["seconds"] > 0.2
    assert not made.running


STOPPED = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from tests.repro.dodo import doit, load
module = load(True, study="study.yaml", data=".", runs="runs")
slow = '''
import pathlib, signal, time
stop = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: stop.append("x"))
pathlib.Path("ready").touch()
while not stop:
    time.sleep(0.05)
time.sleep(1)
pathlib.Path("saved").write_text("".join(stop))
'''
module.progresvit = lambda entry, command: module.run(entry, [sys.executable, "-c", slow])
sys.exit(doit(module, "-n", "2", "evaluate:routing"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_commands_once_and_waits_until_they_have_saved(tmp_path, number):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(UNTRAINED))
    environment = {**os.environ, "PYTHONPATH": str(DODO.parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, process_group=0
    )
    wait_until((tmp_path / "ready").exists, process)
    os.killpg(process.pid, number)  # as a terminal does
    assert process.wait(PATIENCE) != 0
    assert (tmp_path / "saved").read_text() == "x"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"study": "photo"}, "there is no study 'photo'; did you mean 'photos'"),
        ({"study": "digits", "gpu": 2}, "gpu: unknown key; did you mean 'gpus'"),
        ({"study": "digits", "gpus": "all"}, "gpus: input should be a valid integer"),
        ({"study": "digits", "processes": 0}, "processes: input should be greater than or equal to 1"),
        ({"study": "digits", "set": "schedule.epoch=1"}, "epochs"),
        ({}, "study: Field required"),
    ],
)
def test_a_wrong_variable_is_an_error_before_anything_begins(variables, message, tmp_path):
    with pytest.raises(InvalidDodoFile) as error:
        load(data="D", runs=tmp_path / "runs", **variables)
    assert message in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_doit_lists_the_commands_of_a_study_from_any_folder(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(UNTRAINED))
    words = [sys.executable, "-m", "doit", "list", "--all", "-f", DODO, "study=study.yaml", "data=D", "runs=out"]
    shown = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    (evaluate,) = [line for line in shown.stdout.splitlines() if line.startswith("evaluate:routing ")]
    records = tmp_path / "out" / "records" / "routing.parquet"
    assert evaluate.endswith(f"progresvit evaluate nettewoof-tiny --data D --out {records}")
    assert not (Path(DODO).parent / "out").exists()
