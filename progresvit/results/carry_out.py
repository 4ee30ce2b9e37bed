"""Carrying out a study: each command in a process of its own, several at a time, resumable at any moment.

A task is done when its results file is there. What a stopped task has finished, a model or records, is not done
again, and a training goes on from its last checkpoint. Beside its log a task remembers the commands that it began: what
another command made is never taken for this one's. A lock that the commands inherit keeps a second study from a task
whose first one died and left a command at work. For Linux and macOS.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from progresvit.io.files import replace_file
from progresvit.results.format import Measurement
from progresvit.results.plan import FOR_READERS, Places, Step, Task, steps
from progresvit.results.study import Study

Measure = Callable[["Done"], Measurement]
"""From what the commands left to a results file."""


STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(Exception):  # noqa: N818  (it is no error)
    """A signal came; children have saved."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped; the same command goes on")
        self.number = number


class StepFailed(Exception):  # noqa: N818  (the command had the error)
    """A command ended badly."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A task whose commands have all ended well."""

    study: Study
    task: Task
    places: Places
    commands: tuple[str, ...]
    """As a reader would type them."""
    jobs: int
    """The most that it shared the machine with, itself included."""
    gpus: int
    """Processes of one command."""
    seconds: float
    """Of all its commands, in all attempts."""


@dataclass(frozen=True, kw_only=True)
class How:
    """What does not change the outcome."""

    jobs: int = 1
    """Tasks at a time. Small models leave a GPU idle while they start, decode and compile."""
    gpus: int = 1
    """Processes of one command, under torchrun."""
    device: str | None = None
    workers: int | None = None
    """That decode pictures, of one command; None: the command's own number."""

    def __post_init__(self) -> None:
        if self.jobs < 1 or self.gpus < 1:
            raise ValueError(f"jobs ({self.jobs}) and GPUs ({self.gpus}) are 1 or more.")


@dataclass
class _Running:
    """Children at work, and whether they shall stop."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    children: set[subprocess.Popen[bytes]] = field(default_factory=set)
    signal_number: int = 0


def carry_out(
    study: Study,
    tasks: Sequence[Task],
    places: Places,
    results: Path,
    *,
    measure: Measure,
    how: How,
    tell: Callable[[str], None],
) -> dict[str, str]:
    """Every task whose results file is missing; returns what went wrong by task. Raises Stopped after a signal."""
    for folder in (places.runs / "logs", places.runs / "records", results):
        folder.mkdir(parents=True, exist_ok=True)
    running, failed = _Running(), {}
    futures: dict[str, Future[None]] = {}

    def attempt(task: Task) -> None:
        if task.needs in futures:
            _wait_for(task.needs, futures[task.needs])
        elif task.needs and not (model := places.folder(task.needs) / "model").exists():
            if (results / f"{task.needs}.json").exists():
                raise StepFailed(f"{task.needs} was measured elsewhere and its model is not here; copy it to {model}")
            raise StepFailed(f"its model {task.needs} is not trained yet; leave --only out, or name it too")
        with _locked(places.log(task.name).with_suffix(".lock")) as lock:
            told = _run_steps(study, task, places, how, _Shared(running, lock), tell)
            commands = reader_commands(study, task)
            result = measure(Done(study=study, task=task, places=places, commands=commands, gpus=how.gpus, **told))
            replace_file(results / f"{task.name}.json", to_json(result))
        tell(f"{task.name}: {results / task.name}.json is written")

    with _stop_signals(running), ThreadPoolExecutor(how.jobs) as pool:
        for task in tasks:
            if (results / f"{task.name}.json").exists():
                tell(f"{task.name}: is there already")
            else:
                futures[task.name] = pool.submit(attempt, task)
        for name, future in futures.items():
            try:
                future.result()
            except (StepFailed, ValueError, OSError) as error:
                failed[name] = str(error)
    if running.signal_number:
        raise Stopped(running.signal_number)
    return failed


def _wait_for(name: str, training: Future[None]) -> None:
    """It was handed in earlier, so it does not wait in turn."""
    try:
        training.result()
    except (StepFailed, ValueError, OSError) as error:
        raise StepFailed(f"its model {name} could not be made") from error


@dataclass(frozen=True)
class _Shared:
    """What a task's commands have in common: who stops them, and the lock that they hold."""

    running: _Running
    lock: int


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Holds a task. Commands inherit the lock, so one that outlives its study goes on holding it."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StepFailed(f"another process is at work on it ({path}); wait for it, or stop it") from error
        yield file.fileno()


def _run_steps(
    study: Study, task: Task, places: Places, how: How, shared: _Shared, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Those that are not done yet; returns what they took, in this attempt and those before it."""
    path = places.log(task.name).with_suffix(".json")
    memory = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    memory = {"jobs": 1, "seconds": 0.0, "commands": {}} | memory
    for step in steps(study, task, places):
        command = shlex.join(step.arguments)
        if step.makes.exists():
            _check_made_by(command, memory["commands"].get(str(step.makes)), step.makes)
            continue
        tell(f"{task.name}: {step.arguments[0]}")
        memory["jobs"] = max(how.jobs, memory["jobs"])
        memory["commands"][str(step.makes)] = command
        replace_file(path, json.dumps(memory, indent=1))  # ahead of it, for whoever finds what it made
        began = time.monotonic()
        try:
            _run(step, places.log(task.name), how, shared)
        finally:
            memory["seconds"] += time.monotonic() - began
            replace_file(path, json.dumps(memory, indent=1))
    return {"jobs": memory["jobs"], "seconds": memory["seconds"]}


def _check_made_by(command: str, made_by: str | None, made: Path) -> None:
    if made_by != command:
        said = "was not made by this study" if made_by is None else f"was made by another command, progresvit {made_by}"
        raise StepFailed(f"{made} {said}; remove it to make it again, or name another folder for the runs")


def _run(step: Step, log: Path, how: How, shared: _Shared) -> None:
    running = shared.running
    words = _words(step, how)
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(words)}\n".encode())
        file.flush()
        with running.lock:
            if running.signal_number:
                raise StepFailed("stopped before it began")
            child = subprocess.Popen(
                words,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches it once, through us: a second signal would end it without saving
                pass_fds=(shared.lock,),
            )
            running.children.add(child)
        code = child.wait()
        with running.lock:
            running.children.discard(child)
    if code != 0:
        raise StepFailed(f"progresvit {step.arguments[0]} ended with {code}: {_last_word(log)} ({log} has it all)")


def _last_word(log: Path) -> str:
    """Its last error, or its last line: torchrun adds lines of its own."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    since = max(number for number, line in enumerate(lines) if line.startswith("$ "))
    errors = [line for line in lines[since:] if line.startswith("error: ")]
    return (errors or lines)[-1][:300]


def _words(step: Step, how: How) -> list[str]:
    launch = [sys.executable]
    if how.gpus > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(how.gpus)]
    words = [*launch, "-m", "progresvit", *step.arguments]
    if step.begun is not None and step.begun.exists():
        words.append("--resume")
    if how.device is not None:
        words += ["--device", how.device]
    if how.workers is not None and step.arguments[0] != "train":
        words += ["--workers", str(how.workers)]
    return words


def reader_commands(study: Study, task: Task) -> tuple[str, ...]:
    """The commands as they are written down."""
    return tuple(shlex.join(("progresvit", *step.arguments)) for step in steps(study, task, FOR_READERS))


def to_json(result: Measurement) -> str:
    """As it lies in the folder."""
    return json.dumps(result.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


@contextmanager
def _stop_signals(running: _Running) -> Iterator[None]:
    """SIGTERM, Ctrl-C and a closed terminal are handed to the children, which save; nothing new begins."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        if running.signal_number:
            return  # asked already, and perhaps in the middle of the lines below
        running.signal_number = number
        with running.lock:  # held by other threads alone, and for a moment: none is begun unseen
            for child in running.children:
                child.send_signal(signal.SIGTERM)

    heard = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]  # nohup wants no hang-up heard
    before = {number: signal.signal(number, hand_on) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
