"""The folder of a run: whose it is, and what lies in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from progresvit.training.journal import surroundings
from progresvit.training.processes import Processes
from progresvit.training.recipe import Recipe

RECIPE_FILE = "recipe.yaml"
RUN_FILES = (RECIPE_FILE, "run.json", "log.jsonl", "unreadable.txt", "checkpoints", "tensorboard", "model", "best")
FREE_TO_CHANGE = {"run", "data"}
"""Sections of a recipe that may differ on resuming: they say how a run is carried out, not what it is."""


def check_folder(out: Path, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds something else than this very run. Nothing is written yet."""
    if resume and overwrite:
        raise ValueError("--resume goes on with a run and --overwrite removes it; give one of them.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give the name of a folder.")
    if not (out / RECIPE_FILE).is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ValueError(f"{out} holds other files and no run; name a new folder.")
        return
    if not resume and not overwrite:
        raise ValueError(
            f"{out} already holds a run; go on with it (--resume), replace it (--overwrite), or name another."
        )
    if resume:
        before = yaml.safe_load((out / RECIPE_FILE).read_text(encoding="utf-8"))
        differing = _differences(before, yaml.safe_load(recipe.to_yaml()))
        if differing:
            raise ValueError(
                f"{out} holds a run of another recipe ({', '.join(differing)}); resume with the same one, "
                "or name another folder."
            )


def claim_folder(out: Path, recipe: Recipe, data: str, processes: Processes, *, overwrite: bool) -> None:
    """Make the run's folder, now that the run can start."""
    if processes.first:
        for path in (out / name for name in RUN_FILES) if overwrite else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / RECIPE_FILE).write_text(recipe.to_yaml(), encoding="utf-8")
        about = {"data": data, **surroundings(processes.device, processes.count)}
        (out / "run.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
    processes.wait()


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Keys whose change makes it another run. The learning rate is not one: lowering it is how a broken run goes on."""
    found = []
    for key in {**before, **now}:
        name, old, new = f"{prefix}{key}", before.get(key), now.get(key)
        if name in FREE_TO_CHANGE or name == "optimizer.lr" or old == new:
            continue
        found += _differences(old, new, f"{name}.") if isinstance(old, dict) and isinstance(new, dict) else [name]
    return found
