"""The tasks of a study for doit: train, evaluate and measure what a run list names.

    doit -f repro/dodo.py -n 3 study=photos data='photos/*.tar' runs=runs/photos [TASK ...]

README.md explains the variables. A command is a process of its own. Ctrl-C, SIGTERM and a closed terminal stop doit,
which stops its commands; a training saves a checkpoint first. The same command resumes.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doit import get_initial_workdir
from doit.exceptions import InvalidDodoFile, TaskFailed
from doit.tools import config_changed
from pydantic import Field

sys.path.insert(0, str(Path(__file__).parents[1]))

from progresvit.io.files import replace_file
from progresvit.io.parse import Section, parse
from repro.store import measured_names
from repro.study import STUDY_FILE, Command, Entry, Places, commands_of, entries_of, load_study

Task = dict[str, Any]


class Variables(Section):
    """NAME=VALUE on the command line."""

    study: str
    """A name in repro/runs, or the path of a YAML file."""
    data: str
    """What progresvit train takes: a folder or tars with <split>/<class>/<image>."""
    runs: Path
    """Folder for models, records and logs."""
    results: Path | None = None
    """Folder for results files; by default RUNS/results."""
    set: str = ""
    """Changes to every run's recipe, separated by spaces: "schedule.epochs=30 ema=0.9"."""
    unlabelled: str | None = None
    """More images for runs whose task is dino: a folder or tars, in any structure."""
    gpus: int = Field(0, ge=0)
    """Spread the entries of the study over this many GPUs; 0: leave the choice to each command."""
    processes: int = Field(1, ge=1)
    """Processes of one command, under torchrun: one training on several GPUs."""
    workers: int | None = None
    """Processes that decode images, of one evaluation."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""


HERE = Path(get_initial_workdir() or Path.cwd())  # doit changes to the folder of this file
try:
    typed = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word and not word.startswith("-"))
    GIVEN = parse(Variables, typed, origin="variables of repro/dodo.py")
    SOURCE = HERE / GIVEN.study if GIVEN.study.endswith(".yaml") else GIVEN.study
    STUDY = load_study(SOURCE, shlex.split(GIVEN.set), GIVEN.unlabelled)
    ENTRIES = entries_of(STUDY)
    PLACES = Places(data=GIVEN.data, runs=HERE / GIVEN.runs)
    RESULTS = HERE / (GIVEN.results or GIVEN.runs / "results")
    MEASURED = measured_names(RESULTS)
    if MEASURED:
        from repro.measure.entries import check_earlier

        check_earlier(STUDY, RESULTS, PLACES)
except (ValueError, OSError) as error:
    raise InvalidDodoFile(str(error)) from error

TO_MEASURE = [entry for entry in ENTRIES if entry.name not in MEASURED]
DOIT_CONFIG = {
    "backend": "json",
    "dep_file": str(PLACES.runs / ".doit.json"),
    "par_type": "thread",
    "continue": True,  # a failed task does not stop the others
    "verbosity": 0,
    "default_tasks": [f"measure:{name}" for name in (STUDY_FILE, *(entry.name for entry in ENTRIES))],  # entry by entry
}
PLACES.runs.mkdir(parents=True, exist_ok=True)

running: set[subprocess.Popen[bytes]] = set()
"""Commands at work."""


def task_train() -> Iterator[Task]:
    """A model for each run and seed that is still to be measured, or whose model is needed."""
    starts = {entry.name: entry.start for entry in ENTRIES}
    needed = {entry.trained for entry in TO_MEASURE}
    while more := {starts.get(name or "") for name in needed} - needed:
        needed |= more
    for entry in ENTRIES:
        if entry.kind == "run" and entry.name in needed:
            yield _task(entry, entry.name, commands_of(STUDY, entry, PLACES)[0])


def task_evaluate() -> Iterator[Task]:
    """Records of each model that is still to be measured, clean and corrupted."""
    for entry in TO_MEASURE:
        for command in commands_of(STUDY, entry, PLACES):
            if command.words[0] != "train":
                name = command.makes.stem if command.words[0] == "evaluate" else f"{entry.name}-shifted"
                yield _task(entry, name, command)


def task_measure() -> Iterator[Task]:
    """A results file for each entry."""
    file = RESULTS / STUDY_FILE
    written = file.is_file() and file.read_text(encoding="utf-8") == STUDY.to_yaml()
    yield {"name": STUDY_FILE, "actions": [write_study], "targets": [file], "uptodate": [written]}
    for entry in ENTRIES:
        if entry.name in MEASURED:
            yield {"name": entry.name, "actions": None, "uptodate": [True], "doc": "already measured"}
            continue
        words = [sys.executable, str(Path(__file__).parent / "measure"), entry.name]
        words += ["--runs", str(PLACES.runs), "--results", str(RESULTS)]
        yield {
            "name": entry.name,
            "doc": f"writes {RESULTS / entry.name}.json",
            "actions": [(run, [entry, words])],
            "file_dep": [command.makes for command in commands_of(STUDY, entry, PLACES)],
            "task_dep": [f"measure:{STUDY_FILE}"],
            "targets": [RESULTS / f"{entry.name}.json"],
        }


def task_group() -> Iterator[Task]:
    """Tasks by name: a run with its seeds, an entry, the runs of a comparison, the models of a shift entry."""
    groups: dict[str, dict[str, None]] = {}
    for entry in ENTRIES:
        for name in (entry.name, entry.key):
            groups.setdefault(name, {})[f"measure:{entry.name}"] = None
    compared_runs = {name: {*plan.rows.values(), plan.against} for name, plan in STUDY.comparisons.items()}
    compared_runs |= {name: set(plan.rows.values()) for name, plan in STUDY.frontiers.items()}
    for name, compared in compared_runs.items():
        wanted = {f"measure:{entry.name}": None for entry in ENTRIES if entry.kind == "run" and entry.key in compared}
        groups.setdefault(name, {}).update(wanted)
    for name, tasks in groups.items():
        yield {"basename": name, "actions": None, "task_dep": list(tasks), "doc": " ".join(tasks)}


def _task(entry: Entry, name: str, command: Command) -> Task:
    """A progresvit command: run again if the command or the weights of the model that it uses changed."""
    used = entry.start if command.words[0] == "train" else entry.trained
    return {
        "name": name,
        "doc": shlex.join(("progresvit", *command.words)),
        "actions": [(progresvit, [entry, command])],
        "file_dep": [] if used is None else [PLACES.run(used) / "model" / "model.safetensors"],
        "targets": [command.makes],
        "uptodate": [config_changed(shlex.join(command.words))],
    }


def write_study() -> None:
    """The study beside its results: the page and the measurements read it there."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    replace_file(RESULTS / STUDY_FILE, STUDY.to_yaml())


def progresvit(entry: Entry, command: Command) -> TaskFailed | None:
    """Run a command. A training with a checkpoint resumes; records of an earlier model are replaced."""
    words = [sys.executable]
    if GIVEN.processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GIVEN.processes)]
    words += ["-m", "progresvit", *command.words]
    if command.words[0] == "train" and (PLACES.run(entry.name) / "recipe.yaml").exists():
        words.append("--resume")
    if command.words[0] == "evaluate":
        words.append("--overwrite")
    if GIVEN.device is not None:
        words += ["--device", GIVEN.device]
    if GIVEN.workers is not None and command.words[0] != "train":
        words += ["--workers", str(GIVEN.workers)]
    return run(entry, words)


def run(entry: Entry, words: list[str]) -> TaskFailed | None:
    """Run a process with output to the entry's log, and note how long it took."""
    log, began = PLACES.log(entry.name), time.monotonic()
    log.parent.mkdir(exist_ok=True)
    environment = dict(os.environ)
    if GIVEN.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = str(ENTRIES.index(entry) % GIVEN.gpus)
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(words)}\n".encode())
        file.flush()
        child = subprocess.Popen(
            words, cwd=HERE, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
        )
        running.add(child)  # in a group of its own: Ctrl-C reaches it once, through stop_running
        jobs = len(running)
        try:
            code = child.wait()
        finally:
            jobs = max(jobs, len(running))
            timing = {"seconds": time.monotonic() - began, "jobs": jobs, "processes": GIVEN.processes}
            with PLACES.timings(entry.name).open("a", encoding="utf-8") as timings:
                timings.write(json.dumps(timing) + "\n")
    running.discard(child)
    if code == 0:
        return None
    errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("$ ", "error: "))]
    return TaskFailed(f"{shlex.join(words[1:])}\nended with {code}: {errors[-1]}\nAll of its output: {log}")


@atexit.register
def stop_running() -> None:
    """Ask the commands to stop, and wait until they have."""
    for child in list(running):
        child.terminate()
    for child in list(running):
        child.wait()


for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
