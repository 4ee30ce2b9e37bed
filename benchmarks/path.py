"""How long the way through the package is: functions that are entered, their files, and changes of room.

    python benchmarks/path.py [classify serve train evaluate]

Each case runs twice in a fresh process on a CPU, and the second run is traced, so that imports and caches do not count.
``classify`` is the command for one image, ``serve`` one request to the server, ``train`` one training step of the
recipe digits, ``evaluate`` the command for ten images. A function counts once however often it is called; lambdas and
comprehensions belong to their function. A room is a folder or file at the top of the package, and a change is a call
whose room differs from the room of the call before it, in the order of time over all threads. The script calls only
the command line, so it runs with old and new code alike (set PYTHONPATH to the code to be traced).
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import progresvit

PACKAGE = Path(progresvit.__file__).resolve().parent
SAMPLES = next(PACKAGE.glob("*/CREDITS.md")).parent
IMAGE = SAMPLES / "tabby.jpg"
PORT = 8391


class Trace:
    """Calls of the package's functions in all threads that start after it is installed, while ``is_on``."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: list[CodeType] = []

    def install(self) -> None:
        """Trace this thread and those that start later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.calls.append(frame.f_code)

    def result(self) -> dict[str, int]:
        """The three counts."""
        is_function = inspect.CO_OPTIMIZED  # a module or the body of a class is not optimized
        calls = [code for code in self.calls if code.co_flags & is_function and not code.co_name.startswith("<")]
        rooms = [Path(code.co_filename).relative_to(PACKAGE).parts[0] for code in calls]
        return {
            "functions": len({(code.co_filename, code.co_qualname) for code in calls}),
            "files": len({code.co_filename for code in calls}),
            "room_changes": sum(room != before for before, room in itertools.pairwise(rooms)),
        }


def command(*words: object) -> None:
    """``progresvit …`` in this process, without its output."""
    from progresvit.cli import app

    with open(os.devnull, "w") as nowhere:
        stdout, sys.stdout = sys.stdout, nowhere
        try:
            app([str(word) for word in words], standalone_mode=False)
        finally:
            sys.stdout = stdout


def trace_command(trace: Trace, *words: object) -> None:
    """The second of two runs of a command."""
    command(*words)
    trace.is_on = True
    command(*words)
    trace.is_on = False


def trace_classify(trace: Trace, folder: Path) -> None:
    """``progresvit classify`` of one image."""
    trace_command(trace, "classify", IMAGE, "--device", "cpu", "--json")


def trace_evaluate(trace: Trace, folder: Path) -> None:
    """``progresvit evaluate`` of the sample images."""
    words = ("evaluate", "imagenet-tiny", "--data", SAMPLES, "--unlabelled", "--workers", 0, "--device", "cpu")
    trace_command(trace, *words, "--out", folder / "records.parquet", "--overwrite")


def trace_train(trace: Trace, folder: Path) -> None:
    """The way from one step of the optimizer to the next, in the second epoch."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    write_digits(folder / "digits")
    steps = 0

    def step_has_ended(*_: object) -> None:
        nonlocal steps
        steps += 1
        trace.is_on = steps == 30

    register_optimizer_step_post_hook(step_has_ended)
    words = ("train", "digits", "--data", folder / "digits", "--out", folder / "run", "--device", "cpu")
    command(*words, "--set", "schedule.epochs=2", "--set", "schedule.cooldown=0")


def write_digits(folder: Path) -> None:
    """Handwritten digits as image files."""
    from progresvit.data.digits import write_digits

    write_digits(folder)


def trace_serve(trace: Trace, folder: Path) -> None:
    """A request to ``progresvit serve``, after one like it."""

    head = f'--part\r\nContent-Disposition: form-data; name="image"; filename="{IMAGE.name}"\r\n\r\n'
    body = head.encode() + IMAGE.read_bytes() + b"\r\n--part--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=part"}
    answered = []

    def post() -> None:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{PORT}/classify", body, headers)
        ) as reply:
            answered.append(json.load(reply))

    def client() -> None:
        sys.setprofile(None)
        try:
            while not answered:
                try:
                    post()
                except urllib.error.HTTPError:
                    raise
                except urllib.error.URLError:  # it does not listen yet
                    time.sleep(0.2)
            time.sleep(0.5)  # what the server does after the answer
            trace.is_on = True
            post()
            time.sleep(0.5)
            trace.is_on = False
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=client, daemon=True).start()
    command("serve", "imagenet-tiny", "--port", PORT, "--device", "cpu")
    assert len(answered) == 2


CASES: dict[str, Callable[[Trace, Path], None]] = {
    "classify": trace_classify,
    "serve": trace_serve,
    "train": trace_train,
    "evaluate": trace_evaluate,
}


def trace_case(name: str) -> dict[str, int]:
    """The counts of a case, traced in this process."""
    import torch

    torch.set_num_threads(1)
    trace = Trace()
    trace.install()
    with tempfile.TemporaryDirectory() as folder:
        CASES[name](trace, Path(folder))
    threading.setprofile(None)  # type: ignore[arg-type]  # documented
    sys.setprofile(None)
    return trace.result()


def main() -> None:
    """Print a row for each case, or the counts of one that was started for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--here", action="store_true", help="trace the one case in this process, print JSON")
    options = parser.parse_args()
    unknown = sorted(set(options.cases) - set(CASES))
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    if options.here:
        print(json.dumps(trace_case(options.cases[0])))
        return
    print(f"{'case':<10}{'functions':>10}{'files':>7}{'changes of room':>17}")
    for name in options.cases or CASES:
        words = [sys.executable, __file__, name, "--here"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr}")
        counts = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:<10}{counts['functions']:>10}{counts['files']:>7}{counts['room_changes']:>17}", flush=True)


if __name__ == "__main__":
    main()
