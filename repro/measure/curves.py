"""Loss and entropies of a training of the task dino over time, from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from repro.formats import TrainingCurves

POINTS = 60
"""Logged steps of a run that its results file keeps at most."""


def measure_curves(log: Sequence[Mapping[str, Any]]) -> TrainingCurves | None:
    """The first and the last logged step, and steps in between at equal distances; None if nothing was logged."""
    lines = [line for line in log if line["event"] == "train" and "teacher_entropy" in line]
    finished = [line for line in log if line["event"] == "evaluation"]  # at the end of an epoch
    if not lines or not finished:
        return None
    steps_per_epoch = finished[-1]["step"] / (finished[-1]["epoch"] + 1)
    places = np.unique(np.linspace(0, len(lines) - 1, POINTS).round().astype(int))
    lines = [lines[index] for index in places]
    return TrainingCurves(
        epochs=tuple(round(line["step"] / steps_per_epoch, 3) for line in lines),
        losses=_column(lines, "losses"),
        teacher_entropy=_column(lines, "teacher_entropy"),
        mean_entropy=_column(lines, "mean_entropy"),
        centre_entropy=_column(lines, "centre_entropy"),
    )


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(value, 4) for value in line[key]) for line in lines)
