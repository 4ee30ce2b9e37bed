"""The folder of a run: whose it is, and what lies in it."""

from __future__ import annotations

import hashlib
import json
import shutil
import unicodedata
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from progresvit.data.dataset import ImageDataset
from progresvit.distributed import Processes
from progresvit.io.files import replace_file
from progresvit.training.journal import surroundings
from progresvit.training.recipe import Recipe, make_recipe

RECIPE_FILE = "recipe.yaml"
ABOUT_FILE = "run.json"
RUN_FILES = ("checkpoints", "log.jsonl", "unreadable.txt", "tensorboard", "model", "best", ABOUT_FILE, RECIPE_FILE)
"""In the order in which they are removed: as long as the recipe is there, the folder is known to hold a run."""
FREE_TO_CHANGE = {"run", "data.workers", "optimizer.lr"}
"""What may differ on resuming: how a run is carried out, and the rate, which a broken run goes on with when lowered."""


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
        if not isinstance(before, dict):
            raise ValueError(f"{out / RECIPE_FILE} is damaged; put the recipe of the run back, or use --overwrite.")
        before = yaml.safe_load(_read_recipe(before, out).to_yaml())  # with keys newer than it
        differing = changed_keys(before, yaml.safe_load(recipe.to_yaml()))
        if differing:
            raise ValueError(
                f"{out} holds a run of another recipe ({', '.join(differing)}); resume with the same one, "
                "or name another folder."
            )


def _read_recipe(known: dict[str, Any], out: Path) -> Recipe:
    try:
        return make_recipe(known, origin=RECIPE_FILE)
    except ValueError as error:
        raise ValueError(
            f"{out} holds a run of another recipe, which this version cannot read ({error}); name another folder, or "
            "remove the run with --overwrite."
        ) from error


def claim_folder(
    out: Path,
    recipe: Recipe,
    data: str,
    splits: tuple[ImageDataset, ImageDataset],
    processes: Processes,
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """Make the run's folder, now that the run can start; on resuming, see that the data is that of the run."""
    pictures, held_out = splits
    about: dict[str, Any] = {"pictures": len(pictures), "held_back": len(held_out), "names": _names_hash(splits)}
    about |= {"class_ids": list(pictures.class_ids), "data": data}
    about |= surroundings(processes.device, processes.count)
    before = _read_about(out) if resume else {}
    for key in ("pictures", "class_ids", "names"):
        if before.get(key, about[key]) != about[key]:
            raise ValueError(
                f"the run in {out} was made with other data: {before.get('data')}, {before.get('pictures')} pictures "
                f"of {len(before.get('class_ids', []))} classes; resume with the same, or name another folder."
            )
    processes.wait()  # all have looked before one of them writes
    if processes.first:
        for path in (out / name for name in RUN_FILES) if overwrite else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        told = {**before, "resumed": [*before.get("resumed", []), about]} if before else about
        replace_file(out / RECIPE_FILE, recipe.to_yaml())  # first: with it the folder is known to hold a run
        replace_file(out / ABOUT_FILE, json.dumps(told, indent=2))
    processes.wait()


def _names_hash(splits: tuple[ImageDataset, ImageDataset]) -> str:
    """Of what the pictures of both splits are called: a set without splits is split by that."""
    names = [sorted(unicodedata.normalize("NFC", entry.name) for entry in pictures.entries) for pictures in splits]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def _read_about(out: Path) -> dict[str, Any]:
    """What the run in the folder said of itself; nothing where there is no run yet."""
    path = out / ABOUT_FILE
    if not path.exists():
        return {}
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to go on without the check of the data.") from error
    return about


def changed_keys(
    before: dict[str, Any], now: dict[str, Any], *, free: Collection[str] = FREE_TO_CHANGE, prefix: str = ""
) -> list[str]:
    """Keys whose change makes it another run; those that are ``free`` do not."""
    found = []
    for key in {**before, **now}:
        name, old, new = f"{prefix}{key}", before.get(key), now.get(key)
        if name in free or old == new:
            continue
        found += (
            changed_keys(old, new, free=free, prefix=f"{name}.")
            if isinstance(old, dict) and isinstance(new, dict)
            else [name]
        )
    return found
