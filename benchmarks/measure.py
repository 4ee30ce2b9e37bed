"""Cases of the inference benchmark, and the row that measuring one of them in a fresh process gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from subjects import SUBJECTS

import progresvit
from progresvit.config import preset
from progresvit.engine.measurement import Measurement, hardware, in_fresh_process

Row = dict[str, Any]

DEIT_SIZES = {3: ("Ti", "tiny"), 6: ("S", "small"), 12: ("B", "base")}
"""Names of the sizes of DeiT, by the number of heads."""
RESULTS = (
    "hardware", "torch", "version", "images", "images_per_s", "milliseconds", "gmacs", "tflops", "peak_gib",
    "share_continuing", "exit_shares", "threshold", "p50_ms", "p95_ms", "p99_ms", "repeats", "spread", "note", "error",
)  # fmt: skip
"""Every row has every key, None where it does not apply. Spread: (slowest - fastest repeat) / median."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure."""

    subject: str
    """A key of ``SUBJECTS``."""
    model: str
    """A preset (random weights), a model folder or a hub id; for ``deit`` its name in timm, for ``plain`` a preset."""
    measure: str = "throughput"
    """throughput, latency (one image after another) or memory (throughput, timed shortly)."""
    device: str = "cpu"
    precision: str = "fp32"
    backend: str | None = None
    """Backend of the engine."""
    threads: int | None = None
    batch: int = 8
    round: int | None = None
    """Number of the round, from 1; only for ``round``."""
    resolution: int | None = None
    """Side of the images; only for ``deit`` and ``plain``."""
    continuing: float | None = None
    """Share of the images that continue after each round."""
    images: int | None = None
    """Number of images that are routed; None chooses by batch and device."""
    seconds: float = 3.0
    """Approximate duration of the timing."""

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def name(self) -> str:
        """The name in a table that has columns for batch, precision and share."""
        if self.subject == "deit":
            sizes = [size for heads, (size, _) in DEIT_SIZES.items() if self.model == deit_name(heads)]
            return f"timm DeiT-{sizes[0]} {self.resolution}, {'compiled' if self.on_gpu else 'eager'}"
        if self.subject == "plain":
            return f"engine, plain DeiT-{DEIT_SIZES[preset(self.model).heads][0]} {self.resolution}"
        if self.subject == "eager":
            return "round by round, eager"
        if self.subject == "compiled":
            return "torch.compile, routed"
        what = "routed" if self.round is None else f"round {self.round} alone"
        return f"engine, {what}" + ("" if self.backend is None else f", {self.backend}")

    @property
    def key(self) -> tuple[tuple[str, Any], ...]:
        """Equal for cases that measure the same thing."""
        return case_key(asdict(self))


def case_key(case: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The key of a row's case; the duration and unset fields do not count."""
    fields = {name: value for name, value in case.items() if value is not None and value is not False}
    return tuple(sorted((name, value) for name, value in fields.items() if name != "seconds"))


def deit_name(heads: int) -> str:
    """The name of timm's plain ViT with this number of heads."""
    if heads not in DEIT_SIZES:
        raise ValueError(f"timm has no DeiT of {heads} heads to compare with; there are 3 (Ti), 6 (S) and 12 (B).")
    return f"deit_{DEIT_SIZES[heads][1]}_patch16_224"


def measure(case: Case) -> Row:
    """The row of a case, measured in this process."""
    timing = {"device": case.device, "threads": case.threads, "seconds": case.seconds}
    measurement = Measurement(lambda: SUBJECTS[case.subject](case), **timing)
    found = measurement.latency() if case.measure == "latency" else measurement.throughput()
    found.update(measurement.subject.facts())
    return make_row(
        case,
        **found,
        milliseconds=1000 * case.batch / found["images_per_s"],
        tflops=2 * found["gmacs"] * found["images_per_s"] / 1000,  # a multiply and an add for each MAC
        peak_gib=measurement.peak_gib(),
        hardware=hardware(case.device),
        torch=torch.__version__,
        version=progresvit.__version__,
    )


def make_row(case: Case, **results: Any) -> Row:
    """The case and its results, with every key."""
    assert results.keys() <= set(RESULTS), results.keys()
    about = {key: getattr(case, key) for key in ("name", "subject", "measure", "device", "precision", "batch")}
    return {**about, **dict.fromkeys(RESULTS), **results, "case": asdict(case)}


def run_case(case: Case, *, timeout: float) -> Row:
    """The row of a case, measured in a fresh process; a failure is a row with its reason."""
    try:
        row: Row = in_fresh_process(measure, case, timeout=timeout)
    except TimeoutError:
        return make_row(case, error=f"took more than {timeout:.0f} s and was stopped")
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        kind = "" if isinstance(error, ValueError | MemoryError) else f"{type(error).__name__}: "
        return make_row(case, error=kind + reason)
    return row
