"""What a run must remember to go on: weights, their average, the optimizer, the step. Folders that change in one step.

Random draws are not among it: every one follows from the seed and the step (progresvit.data.sampler).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from progresvit.checkpoint import read_safetensors, write_safetensors
from progresvit.io.files import replacing_folder

_NAME = "step-{:09d}"


@dataclass
class Progress:
    """Where a run stands, in plain numbers."""

    step: int = 0
    best_top1: float = -1.0
    best_step: int = -1
    seconds: float = 0.0
    logged_step: int = 0
    """The last step that the log speaks of, and the sums of the losses since."""
    loss_sums: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    """One entry an evaluation."""


def save_state(
    folder: Path,
    *,
    model: nn.Module,
    ema: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: dict[str, Any],
    progress: Progress,
) -> Path:
    """Write a checkpoint; it has its name only once it is whole."""
    target = folder / _NAME.format(progress.step)
    with replacing_folder(target) as staged:
        write_safetensors(model.state_dict(), staged / "model.safetensors")
        write_safetensors(ema.state_dict(), staged / "ema.safetensors")
        write_safetensors(_optimizer_tensors(optimizer), staged / "optimizer.safetensors")
        (staged / "progress.json").write_text(json.dumps({"progress": vars(progress), "scaler": scaler}, indent=2))
    return target


def load_state(
    checkpoint: Path, *, model: nn.Module, ema: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Progress, dict[str, Any]]:
    """Put everything back as it was; returns where the run stands and the loss scaler's state."""
    model.load_state_dict(read_safetensors(checkpoint / "model.safetensors"))
    ema.load_state_dict(read_safetensors(checkpoint / "ema.safetensors"))
    stored = json.loads((checkpoint / "progress.json").read_text())
    state: dict[int, dict[str, Any]] = {}
    for key, value in read_safetensors(checkpoint / "optimizer.safetensors").items():
        index, name = key.split("/")
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return Progress(**stored["progress"]), stored["scaler"]


def checkpoints(folder: Path) -> list[Path]:
    """All whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def prune(folder: Path, *, keep: int) -> None:
    """Remove all but the newest."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments and step counts, named by parameter; learning rates and decays follow from the recipe."""
    return {
        f"{index}/{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
