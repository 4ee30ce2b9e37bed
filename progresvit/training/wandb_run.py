"""Weights & Biases: the numbers of a run, logged to a project as well (extra ``wandb``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from progresvit.io.extras import not_installed
from progresvit.io.files import replace_file

FOLDER = "wandb"
"""In the folder of the run; wandb keeps its files there, too."""


def import_wandb() -> Any:
    """The package; an error that names the extra if it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"run.wandb: {not_installed('wandb', 'wandb')}") from error
    if not hasattr(wandb, "init"):  # a folder of this name in the working directory, such as that of earlier runs
        raise ValueError(f"run.wandb: {not_installed('wandb', 'wandb')}")
    return wandb


def start_wandb(project: str, folder: Path, recipe: Mapping[str, Any]) -> Any:
    """A run of the project, or the one that this folder logged to before; it has ``log`` and ``finish``."""
    wandb = import_wandb()
    known = folder / FOLDER / "run_id.txt"
    before = known.read_text(encoding="utf-8") if known.exists() else None
    known.parent.mkdir(exist_ok=True)
    try:
        run = wandb.init(
            project=project,
            name=folder.name,
            dir=str(folder),
            config=dict(recipe),
            id=before,
            resume="allow",
            settings=wandb.Settings(console="off"),  # the progress bar is not logged
        )
    except wandb.Error as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"run.wandb: Weights & Biases refused the run ({reason}); run wandb login, set WANDB_MODE=offline, or "
            "remove run.wandb."
        ) from error
    replace_file(known, str(run.id))
    return run
