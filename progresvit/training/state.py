"""Checkpoints: everything that a run needs to resume, in folders that are written atomically.

They contain no state of random generators: every draw follows from the seed and the step (data/sampler.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from progresvit.io.files import replacing_folder
from progresvit.io.parse import parse_json, read_text
from progresvit.io.weights import read_safetensors, write_safetensors
from progresvit.model.interface import RoundModel
from progresvit.model.saving import save
from progresvit.training.step import RoundLosses
from progresvit.training.tasks.task import Task

TASK_FILE = "task.safetensors"
"""The state of a task with modules, in a checkpoint and in a model folder."""

_NAME = "step-{:09d}"


@dataclass
class TrainState:
    """The position of a run."""

    step: int = 0
    best: float | None = None
    """Highest primary metric so far."""
    best_step: int = -1
    """Step of ``best``."""
    seconds: float = 0.0
    logged_step: int = 0
    """The last step that was logged."""
    loss_sums: list[float] = field(default_factory=list)
    """Sums of the losses since ``logged_step``."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """The evaluations, one entry each."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """Read the state of a checkpoint. Earlier versions called ``best`` ``best_top1``, and it was -1 at first."""
        values = dict(values)
        if "best_top1" in values:
            best = values.pop("best_top1")
            values["best"] = best if best >= 0 else None
        return cls(**values)


def save_state(
    folder: Path,
    *,
    trained: RoundLosses,
    average: RoundLosses,
    optimizer: torch.optim.Optimizer,
    scaler: dict[str, Any],
    state: TrainState,
) -> Path:
    """Write a checkpoint. Its folder gets its name only when it is complete.

    Args:
        folder: The folder of all checkpoints.
        trained: Model and task.
        average: Their moving average.
        optimizer: Saved are its moments and step counts; rates and decays follow from the recipe.
        scaler: The state of the loss scaler.
        state: The position of the run.
    """
    target = folder / _NAME.format(state.step)
    with replacing_folder(target) as staged:
        for name, module in _files(trained, average).items():
            write_safetensors(module.state_dict(), staged / name)
        moments = {
            f"{index}/{name}": value  # by the number of the parameter
            for index, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        write_safetensors(moments, staged / "optimizer.safetensors")
        (staged / "progress.json").write_text(json.dumps({"progress": vars(state), "scaler": scaler}, indent=2))
    return target


def load_state(
    folder: Path, *, trained: RoundLosses, average: RoundLosses, optimizer: torch.optim.Optimizer
) -> tuple[TrainState, dict[str, Any]]:
    """Restore a checkpoint. Returns the position of the run and the state of the loss scaler."""
    for name, module in _files(trained, average).items():
        module.load_state_dict(read_safetensors(folder / name))
    stored = parse_json(read_text(folder / "progress.json"))
    state: dict[int, dict[str, Any]] = {}
    for key, value in read_safetensors(folder / "optimizer.safetensors").items():
        index, name = key.split("/")
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return TrainState.from_dict(stored["progress"]), stored["scaler"]


def _files(trained: RoundLosses, average: RoundLosses) -> dict[str, nn.Module]:
    """The files of a checkpoint that hold the state of a module. A task without state has none."""
    models: dict[str, nn.Module] = {"model.safetensors": trained.model, "ema.safetensors": average.model}
    tasks = {TASK_FILE: trained.task, "task_ema.safetensors": average.task}
    return models | tasks if trained.task.state_dict() else models


def checkpoints(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def prune(folder: Path, *, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def save_model(model: RoundModel, task: Task, folder: Path) -> None:
    """Write a model folder, with the state of a task that has modules (a head, a decoder)."""
    state = task.state_dict()
    save(model, folder, extra={TASK_FILE: state} if state else None)
