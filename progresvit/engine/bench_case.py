"""What the inference benchmark measures: cases, and the rows that come out. Plain data, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

Row = dict[str, Any]

SUBJECTS = ("engine", "round", "eager", "compiled", "deit")
MEASURES = ("throughput", "latency")
BACKENDS = ("torch", "onnxruntime", "openvino")
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
DEIT_SIZES = {3: "Ti", 6: "S", 12: "B"}
"""By the number of heads."""
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
    "spread",
    "note",
    "error",
)
"""What is measured; every row has every key, None where it does not apply. Spread is that of the repeated
stretches, slowest minus fastest, as a share of the median."""


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
            ("backend", self.backend or "torch", BACKENDS),
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
