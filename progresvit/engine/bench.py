"""The cases of the inference benchmark, and fresh processes to measure them in.

A case says what is measured and how; a row, plain data, is what came out. This file needs no torch: the process that
asks stays small and touches no device, and none of a case's compiled kernels or memory helps or hinders another's.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import IO, Any

Row = dict[str, Any]

SUBJECTS = ("engine", "round", "eager", "compiled", "deit")
MEASURES = ("throughput", "latency")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
DEIT_SIZES = {3: "Ti", 6: "S", 12: "B"}
"""By the number of heads."""
TIMEOUT = 300.0
"""Seconds after which a case is given up."""

RESULTS = (
    "images",
    "images_per_s",
    "milliseconds",
    "gmacs",
    "tflops",
    "peak_gib",
    "share_continuing",
    "exit_shares",
    "threshold",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "top1",
    "repeats",
    "note",
    "error",
)
"""What is measured; every row has every key, None where it does not apply."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure.

    Subjects: ``engine``, the routed engine; ``round``, one of its rounds alone; ``eager``, the model round by round
    with a batch that shrinks, as the authors' release runs it; ``compiled``, the folded rounds under torch.compile,
    with full batches and nothing spent on moving images; ``deit``, timm's plain ViT.
    """

    subject: str
    model: str
    """A preset (random weights), a model folder or a hub id; for ``deit`` its name in timm."""
    measure: str = "throughput"
    """Throughput, or the latency of one image after another."""
    device: str = "cpu"
    precision: str = "fp32"
    backend: str | None = None
    """The engine's."""
    kernels: str | None = None
    """The engine's."""
    threads: int | None = None
    batch: int = 8
    round: int | None = None
    """From 1; for ``round``, and for ``compiled`` if it is to be one alone."""
    resolution: int | None = None
    """For ``deit``."""
    continuing: float | None = None
    """The share of the images that go on after each round; or instead ..."""
    threshold: tuple[float, ...] | None = None
    """... one for all rounds, or one for each but the last."""
    images: int | None = None
    """How many pictures are routed; None chooses by batch and device."""
    pictures: str | None = None
    """An .npz with ``pixels``, bytes (N, C, R, R), and perhaps ``labels``; None makes random ones."""
    memory: bool = False
    """Peak memory is the point: on a CPU it is measured for these alone, each in a process of its own."""
    seconds: float = 3.0
    """Roughly what the timing itself may take."""

    def __post_init__(self) -> None:
        if self.threshold is not None:
            object.__setattr__(self, "threshold", tuple(float(number) for number in self.threshold))
        self._check_choices()
        self._check_numbers()
        self._check_routing()

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def routed(self) -> bool:
        """Whether images leave after different rounds."""
        return self.subject in ("engine", "eager") or (self.subject == "compiled" and self.round is None)

    @property
    def name(self) -> str:
        """For a table, where batch, precision and share have columns of their own."""
        if self.subject == "deit":
            size = next((DEIT_SIZES[heads] for heads in DEIT_SIZES if self.model == deit_name(heads)), self.model)
            return f"timm DeiT-{size} {self.resolution}, {'compiled' if self.on_gpu else 'eager'}"
        if self.subject == "eager":
            return "round by round, eager"
        rounds = "routed" if self.round is None else f"round {self.round} alone"
        if self.subject == "compiled":
            return f"torch.compile, {rounds}"
        by = "" if self.backend in (None, "torch") else f", {self.backend}"
        return f"engine, {rounds}{by}" + (f", {self.kernels} kernels" if self.kernels else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {key: as_json(value) for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Case:
        """Read what :meth:`to_dict` wrote."""
        return cls(**{key: values[key] for key in (field.name for field in fields(cls)) if key in values})

    def same_as(self, other: Mapping[str, Any] | None) -> bool:
        """Whether a row's case is this one; how long it was timed does not matter."""
        return other is not None and {**self.to_dict(), "seconds": None} == {**other, "seconds": None}

    def _check_choices(self) -> None:
        for what, value, known in (
            ("subject", self.subject, SUBJECTS),
            ("measure", self.measure, MEASURES),
            ("precision", self.precision, PRECISIONS),
        ):
            if value not in known:
                raise ValueError(f"unknown {what} {value!r}; choose {', '.join(known)}.")
        if not self.device.startswith(("cpu", "cuda")):
            raise ValueError(f"unknown device {self.device!r}; choose cpu or cuda.")
        if self.precision in ("fp8", "fp16") and not self.on_gpu:
            raise ValueError(f"{self.precision} needs a GPU; use fp32 or bf16 on a CPU.")
        if self.precision == "fp8" and self.subject not in ("engine", "round"):
            raise ValueError("fp8 is the engine's alone; measure the others in bf16.")
        if self.backend not in (None, "torch"):
            if self.subject not in ("engine", "round"):
                raise ValueError(f"a backend is the engine's; {self.subject} is torch's own.")
            if self.on_gpu:
                raise ValueError(f"{self.backend} runs on the CPU here; use --device cpu, or the torch backend.")

    def _check_numbers(self) -> None:
        if self.batch < 1:
            raise ValueError(f"a batch holds one image at least, not {self.batch}.")
        if self.measure == "latency" and self.batch != 1:
            raise ValueError(f"latency is that of one image; use batch 1, not {self.batch}.")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads are 1 or more, not {self.threads}.")
        if self.images is not None and self.images < 1:
            raise ValueError(f"there must be one image at least, not {self.images}.")
        if not self.seconds > 0:
            raise ValueError(f"timing takes more than {self.seconds} seconds; give a number above 0.")

    def _check_routing(self) -> None:
        if self.continuing is not None and not 0 <= self.continuing <= 1:
            raise ValueError(f"a share of the images is from 0 to 1, not {self.continuing}; 0.664 is 66.4 %.")
        if self.routed and (self.continuing is None) == (self.threshold is None):
            raise ValueError(f"{self.subject} needs a share of images that go on, or a threshold: one of the two.")
        if (self.subject == "round") != (self.round is not None) and self.subject != "compiled":
            raise ValueError("a round, counted from 1, is given for a round alone, and for nothing else.")
        if (self.subject == "deit") != (self.resolution is not None):
            raise ValueError("a resolution is given for timm's ViT, and for nothing else; models have their own.")


def deit_name(heads: int) -> str:
    """timm's plain ViT of so many heads."""
    sizes = {3: "tiny", 6: "small", 12: "base"}
    if heads not in sizes:
        raise ValueError(f"timm has no DeiT of {heads} heads to compare with; there are 3 (Ti), 6 (S) and 12 (B).")
    return f"deit_{sizes[heads]}_patch16_224"


def as_json(value: Any) -> Any:
    """JSON has no infinity; a threshold may be one, and becomes a word that ``float`` reads."""
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def make_row(case: Case, **results: Any) -> Row:
    """What the case says and what came out, every key there."""
    assert results.keys() <= set(RESULTS) | {"hardware", "torch", "version"}, results.keys()
    about = {
        "name": case.name, "subject": case.subject, "measure": case.measure, "device": case.device,
        "precision": case.precision, "batch": case.batch, "hardware": None, "torch": None, "version": None,
    }  # fmt: skip
    row = {**about, **dict.fromkeys(RESULTS), **results, "case": case.to_dict()}
    return {key: as_json(value) for key, value in row.items()}


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
        timer = threading.Timer(self.timeout, lambda: (late.set(), process.kill()))
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
        self._words = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__ if __name__ != "__main__" else "progresvit.engine.bench"],
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
            self._process.kill()
            self._process.communicate()
            self._process = None
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
    from progresvit.engine import bench  # not as __main__: there is one Case

    bench.serve()
