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
from progresvit.io.parse import Section, did_you_mean, parse
from repro.store import measured_names
from repro.study import (
    PRINTED,
    STUDY_FILE,
    Command,
    Entry,
    Places,
    check_data,
    commands_of,
    entries_of,
    load_study,
    options_of,
    read_study,
    with_data,
)

Task = dict[str, Any]


class Variables(Section):
    """NAME=VALUE on the command line, beside one for each of the study's ``places``."""

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
    precision: str | None = None
    """Precision of evaluations, such as tf32; by default that of progresvit evaluate. A recipe has its own."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""


HERE = Path(get_initial_workdir() or Path.cwd())  # doit changes to the folder of this file
try:
    typed = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word and not word.startswith("-"))
    named = typed.get("study", "")
    SOURCE = HERE / named if named.endswith(".yaml") else named
    elsewhere = set(read_study(SOURCE).places) if named else set()
    for name in set(typed) - {*Variables.model_fields, *elsewhere} if elsewhere else ():
        nearest = did_you_mean(name, [*Variables.model_fields, *elsewhere])
        raise ValueError(f"variables of repro/dodo.py: {name}: unknown key; {nearest}")
    GIVEN = parse(
        Variables, {name: typed[name] for name in typed if name not in elsewhere}, origin="variables of repro/dodo.py"
    )
    STUDY = load_study(SOURCE, shlex.split(GIVEN.set), GIVEN.unlabelled)
    PLACES = Places(
        data=GIVEN.data, runs=HERE / GIVEN.runs, others={name: typed[name] for name in typed if name in elsewhere}
    )
    RESULTS = HERE / (GIVEN.results or GIVEN.runs / "results")
    MEASURED = measured_names(RESULTS)
    ENTRIES = with_data(STUDY, entries_of(STUDY), PLACES, MEASURED)
    if MEASURED:
        from repro.measure.entries import check_earlier

        check_earlier(STUDY, RESULTS, PLACES)
    TO_MEASURE = [entry for entry in ENTRIES if entry.name not in MEASURED]
    if "list" not in sys.argv[1:2]:
        check_data(STUDY, TO_MEASURE, PLACES, HERE)
except (ValueError, OSError) as error:
    raise InvalidDodoFile(str(error)) from error

TO_EVALUATE = {entry.name for entry in TO_MEASURE}
while more := {name for entry in ENTRIES if entry.name in TO_EVALUATE for name in entry.reads} - TO_EVALUATE:
    TO_EVALUATE |= more
DOIT_CONFIG = {
    "backend": "json",
    "dep_file": str(PLACES.runs / ".doit.json"),
    "par_type": "thread",
    "continue": True,  # a failed task does not stop the others
    "verbosity": 0,
    "default_tasks": [f"measure:{name}" for name in (STUDY_FILE, *(entry.name for entry in ENTRIES))],  # entry by entry
}
PLACES.runs.mkdir(parents=True, exist_ok=True)

start: Any = subprocess.Popen
"""Starts the process of a command; ``rehearse.py`` has another."""
running: set[subprocess.Popen[bytes]] = set()
"""Commands at work."""


def task_train() -> Iterator[Task]:
    """A model for each run and seed that is still to be measured, or whose model is needed."""
    starts = {entry.name: entry.start for entry in ENTRIES}
    needed = {name for entry in ENTRIES if entry.name in TO_EVALUATE for name in entry.uses}
    while more := {start for name in needed if (start := starts.get(name))} - needed:
        needed |= more
    for entry in ENTRIES:
        if entry.kind == "run" and entry.name in needed:
            yield _task(entry, entry.name, commands_of(STUDY, entry, PLACES)[0])


def task_evaluate() -> Iterator[Task]:
    """Records of each model that is still to be measured, clean and corrupted, and what commands make."""
    names = {"command": "made", "shift": "shifted"}
    for entry in (entry for entry in ENTRIES if entry.name in TO_EVALUATE):
        for command in commands_of(STUDY, entry, PLACES):
            if command.words[0] != "train":
                is_records = command.makes.suffix == ".parquet"
                yield _task(entry, command.makes.stem if is_records else f"{entry.name}-{names[entry.kind]}", command)


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
    if STUDY.segmentation is not None:
        compared_runs["segmentation"] = set(STUDY.segmented)
    for name, compared in compared_runs.items():
        wanted = {f"measure:{entry.name}": None for entry in ENTRIES if entry.kind == "run" and entry.key in compared}
        groups.setdefault(name, {}).update(wanted)
    for name, tasks in groups.items():
        yield {"basename": name, "actions": None, "task_dep": list(tasks), "doc": " ".join(tasks)}


def _task(entry: Entry, name: str, command: Command) -> Task:
    """A progresvit command: run again if the command, the weights of a model or the records that it uses changed."""
    used = entry.uses if command.words[0] != "train" else filter(None, [entry.start])
    files = [PLACES.run(trained) / "model" / "model.safetensors" for trained in used]
    return {
        "name": name,
        "doc": shlex.join(("progresvit", *command.words)),
        "actions": [(progresvit, [entry, command])],
        "file_dep": [
            *files,
            *(PLACES.records(name) for name in entry.records.values()),
            *(PLACES.made(name) / PRINTED for name in entry.made),
        ],
        "targets": [command.makes],
        "uptodate": [config_changed(shlex.join(command.words))],
    }


def write_study() -> None:
    """The study beside its results: the page and the measurements read it there."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    replace_file(RESULTS / STUDY_FILE, STUDY.to_yaml())


def progresvit(entry: Entry, command: Command) -> TaskFailed | None:
    """Run a command. A training with a checkpoint resumes; records of an earlier model are replaced."""
    words, known = [sys.executable], options_of(command.words)
    if GIVEN.processes > 1 and entry.kind != "command":
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GIVEN.processes)]
    words += ["-m", "progresvit", *command.words]
    if command.words[0] == "train" and (PLACES.run(entry.name) / "recipe.yaml").exists():
        words.append("--resume")
    if command.words[0] != "train" and "--overwrite" in known and entry.kind != "shift":  # shift resumes
        words.append("--overwrite")
    if GIVEN.device is not None and "--device" in known:
        words += ["--device", GIVEN.device]
    if GIVEN.precision is not None and command.words[0] in ("evaluate", "shift"):
        words += ["--precision", GIVEN.precision]
    if GIVEN.workers is not None and "--workers" in known:
        words += ["--workers", str(GIVEN.workers)]
    if entry.kind != "command":
        return run(entry, words)
    command.makes.parent.mkdir(parents=True, exist_ok=True)
    log = PLACES.log(entry.name)
    before = log.stat().st_size if log.exists() else 0
    failed = run(entry, words)
    if failed is None:
        _, _, printed = log.read_bytes()[before:].decode(errors="replace").partition("\n")  # without the command
        replace_file(command.makes, printed)
    return failed


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
        child = start(
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
