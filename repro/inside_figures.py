"""The figures of docs/inside.md that need no images: drawn from inside.json, and from the gates of the bundled models.

The tables of reports do not hold the machine of a measurement, so :data:`CPU` repeats the names in the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import progresvit
from progresvit.analysis.gate_depth import gate_depth, gate_depth_figure
from progresvit.analysis.gate_distributions import gate_distributions, gate_distributions_figure
from progresvit.analysis.gates import gates_figure, round_gates
from progresvit.analysis.low_pass import draw_low_pass
from progresvit.analysis.memory import Memory, PeakMemory, memory_figure
from progresvit.analysis.noise_replacement import draw_noise_replacement
from progresvit.analysis.similarity import draw_similarity
from progresvit.analysis.throughput import SpeedPoint, Throughput, throughput_figure
from progresvit.analysis.token_swap import draw_token_swap
from progresvit.metrics.interval import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CPU: dict[str, Any] = {"hardware": "AMD EPYC, 2 threads", "precision": "fp32", "batch": 64}
"""Conditions of the timings on a CPU; precision and batch are the engine's defaults there."""
GPU_PRECISION = "bf16"
"""Precision of the memory figures, the default on a GPU."""


def of_tables(results: Mapping[str, Any]) -> dict[str, Callable[[], Figure]]:
    """Figures by name, from the results of a model."""
    drawn: dict[str, Callable[[], Figure]] = {
        "low-pass": partial(draw_low_pass, results["low-pass"]),
        "token-swap": partial(draw_token_swap, results["token-swap"]),
        "noise-replacement": partial(draw_noise_replacement, results["noise-replacement"]),
        "similarity": partial(draw_similarity, results["similarity"], handover=True),
    }
    if "memory" in results:
        drawn["memory"] = partial(_memory, results["memory"], hardware=results["about"][1].partition(",")[0])
    if "throughput-cpu" in results:
        drawn["throughput-cpu"] = partial(_throughput, results["throughput-cpu"])
    return drawn


def of_gates(name: str) -> dict[str, Callable[[], Figure]]:
    """Figures by name, from the weights of a bundled model."""
    model = progresvit.load(name)
    return {
        "gates": lambda: gates_figure(round_gates(model)),
        "gate-distributions": lambda: gate_distributions_figure(gate_distributions(model)),
        "gate-depth": lambda: gate_depth_figure(gate_depth(model)),
    }


def _memory(rows: list[dict[str, Any]], *, hardware: str) -> Figure:
    points = tuple(PeakMemory(**row) for row in rows)
    return memory_figure(Memory(points=points, hardware=hardware, precision=GPU_PRECISION))


def _throughput(rows: list[dict[str, Any]]) -> Figure:
    """The throughput figure of a model of two rounds."""
    points = tuple(
        SpeedPoint(
            threshold=(float(row["threshold"]),),
            accuracy=Interval(mean=row["accuracy"], lowest=row["accuracy_low"], highest=row["accuracy_high"]),
            exit_shares=(1 - row["continuing"], row["continuing"]),
            images_per_s=row["images_per_s"],
            spread=row["spread"],
        )
        for row in rows
    )
    return throughput_figure(Throughput(points=points, images=rows[0]["images"], **CPU))
