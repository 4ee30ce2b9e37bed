"""Weights & Biases: the numbers of a run, logged to a project as well (extra ``wandb``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from progresvit.io.extras import not_installed
from progresvit.io.files import replace_file

FOLDER = "wandb"
"""Folder in the run's folder, in which wandb keeps its files too."""


def import_wandb() -> Any:
    """The package, or an error that names the extra."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"run.wandb: {not_installed('wandb', 'wandb')}") from error
    if not hasattr(wandb, "init"):  # it is a folder named wandb in the working directory
        raise ValueError(f"run.wandb: {not_installed('wandb', 'wandb')}")
    return wandb


def start_wandb(project: str, folder: Path, recipe: Mapping[str, Any]) -> Any:
    """A run of the project with ``log`` and ``finish``; a folder that resumes continues its run."""
    wandb = import_wandb()
    id_file = folder / FOLDER / "run_id.txt"
    before = id_file.read_text(encoding="utf-8") if id_file.exists() else None
    id_file.parent.mkdir(exist_ok=True)
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
    replace_file(id_file, str(run.id))
    return run
