"""The cases of the inference benchmark, each measured in a fresh process; rows come back.

The process that asks needs no torch, stays small and touches no device, and none of a case's compiled kernels or memory
helps or hinders another's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO

from progresvit.engine.bench_case import Case, Row, make_row

TIMEOUT = 300.0
"""Seconds after which a case is given up."""
PATIENCE = 20.0
"""Seconds that a process has to clear up."""


class FreshProcess:
    """Measures cases one after the other in one process of its own. Use it in a ``with``.

    A case that fails gives a row that says why (``error``), and the next one begins with a new process.
    """

    def __init__(self, *, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._words: IO[bytes] | None = None

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def measure(self, case: Case) -> Row:
        """The case's row."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self.timeout, stop)
        timer.start()
        try:
            process.stdin.write(json.dumps(case.to_dict()) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            row: Row = json.loads(line)
            if row["error"] is not None:
                self._end()
            return row
        code = process.wait()
        reason = f"took more than {self.timeout:.0f} s and was stopped" if late.is_set() else self._last_words(code)
        self._end()
        return make_row(case, error=reason)

    def _start(self) -> subprocess.Popen[str]:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  (closed in _end)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "progresvit.engine.bench"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
        )
        return self._process

    def _last_words(self, code: int) -> str:
        assert self._words is not None
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        cause = "likely for want of memory" if code == -9 else (lines[-1] if lines else "without a word")
        return f"the process ended with code {code}: {cause}"

    def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            try:
                process.communicate(timeout=PATIENCE)  # no more cases, so it ends and clears up
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        if self._words is not None:
            self._words.close()
            self._words = None


def run_case(case: Case, *, timeout: float = TIMEOUT) -> Row:
    """The row of a case, measured in a fresh process."""
    with FreshProcess(timeout=timeout) as process:
        return process.measure(case)


def run_cases(cases: Iterable[Case], *, timeout: float = TIMEOUT) -> Iterator[Row]:
    """The rows of cases that may share a process, as they come."""
    with FreshProcess(timeout=timeout) as process:
        for case in cases:
            yield process.measure(case)


def serve() -> None:
    """The other end of a ``FreshProcess``: cases in, rows out, a line each."""
    from progresvit.engine.bench_measure import measure

    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print goes elsewhere
    for line in sys.stdin:
        case = Case.from_dict(json.loads(line))
        try:
            row = measure(case)
        except Exception as error:
            row = make_row(case, error=_reason(error, case))
        print(json.dumps(row), file=out, flush=True)


def _reason(error: Exception, case: Case) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory with a batch of {case.batch}; choose a smaller one"
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no reason given"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    serve()
