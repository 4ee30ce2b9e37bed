"""The folder of a run: what it contains, and whether it belongs to a given run."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from progresvit.config import BaseConfig
from progresvit.distributed import Processes
from progresvit.io.files import NO_SPACE, WriteError, is_staged, remove_staged, replace_file
from progresvit.io.lock import LOCK_FILE, FolderLock
from progresvit.io.parse import parse_json, read_text
from progresvit.io.yaml_files import read_mapping
from progresvit.model.registry import parse_config
from progresvit.training.logger import LOG_FILE, environment
from progresvit.training.recipe import Recipe, as_began, make_recipe
from progresvit.training.tasks.task import Splits

RECIPE_FILE = "recipe.yaml"
ABOUT_FILE = "run.json"
RUN_FILES = (
    "checkpoints",
    LOG_FILE,
    "unreadable.txt",
    "tensorboard",
    "wandb",
    "model",
    "best",
    ABOUT_FILE,
    RECIPE_FILE,
)
"""Files of a run, in the order of removal. The recipe is last: it marks the folder as a run."""
_NAMES = "|".join(map(re.escape, RUN_FILES))
FREE_TO_CHANGE = {"run", "data.workers", "data.in_memory_cache", "optimizer.lr"}
"""Keys that may change when a run resumes. The learning rate is one of them, for runs that diverged."""
_CLASS_KEYS = ("num_classes", "class_ids", "labels", "task")


def check_folder(out: Path, recipe: Recipe, *, resume: bool, overwrite: bool) -> Recipe:
    """Refuse a folder that contains anything but this run. Nothing is written yet.

    Returns the recipe, by which a run that began before one of its keys existed goes on as it began.
    """
    if resume and overwrite:
        raise ValueError("resume=True continues a run and overwrite=True removes it; pass only one of them.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder.")
    if not (out / RECIPE_FILE).is_file():
        if out.is_dir() and any(path.name != LOCK_FILE and not is_staged(path, _NAMES) for path in out.iterdir()):
            raise ValueError(f"{out} holds other files and no run; name a new folder.")
        return recipe
    if not resume and not overwrite:
        raise ValueError(
            f"{out} already holds a run; pass resume=True to continue it, overwrite=True to replace it, or name "
            "another folder."
        )
    if resume:
        try:
            before = read_mapping(out / RECIPE_FILE, "recipe", "model: and schedule:")
        except ValueError as error:
            raise ValueError(
                f"{out / RECIPE_FILE} is damaged ({error}); restore the recipe of the run, or pass overwrite=True."
            ) from error
        began = _read_recipe(before, out)
        recipe = as_began(recipe, began)
        before = yaml.safe_load(began.to_yaml())  # adds keys that are newer than the run
        differing = changed_keys(before, yaml.safe_load(recipe.to_yaml()))
        if differing:
            raise ValueError(
                f"{out} holds a run of another recipe ({', '.join(differing)}); resume with the same recipe, or "
                "name another folder."
            )
    return recipe


def remove_leftovers(out: Path) -> None:
    """Remove checkpoints and files of a run that was killed while it wrote them. The folder must be locked."""
    remove_staged(out, _NAMES)
    remove_staged(out / "checkpoints", r"step-\d+")


@contextmanager
def using_folder(out: Path, *, first: bool) -> Iterator[FolderLock]:
    """Refuse a folder that another run uses, and lock it in the ``first`` process as soon as it exists.

    The error of a full disk says how to continue.
    """
    lock = FolderLock(out, "name another folder")
    if first and out.exists():
        lock.acquire()
    try:
        yield lock
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise WriteError(out, error, "continue with the same command and resume=True; checkpoints are kept") from error
    finally:
        lock.release()


def _read_recipe(values: dict[str, Any], out: Path) -> Recipe:
    try:
        return make_recipe(values, origin=RECIPE_FILE, stored=True)
    except ValueError as error:
        raise ValueError(
            f"{out} holds a run of another recipe, which this version cannot read ({error}); name another "
            "folder, or pass overwrite=True to remove the run."
        ) from error


def claim_folder(
    out: Path,
    recipe: Recipe,
    data: str,
    splits: Splits,
    config: BaseConfig,
    processes: Processes,
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """Create the folder of a run that can start. When a run resumes, check that its data is the same."""
    about: dict[str, Any] = {
        "pictures": len(splits.train),  # as version 0.1.0 called it
        "held_back": len(splits.val),
        "names": _names_hash(splits),
        "class_ids": list(splits.train.class_ids),
        "data": data,
        "model": {key: value for key, value in config.to_dict().items() if key not in _CLASS_KEYS},
        **environment(processes.device, processes.count),
    }
    before = _read_about(out) if resume else {}
    for key in ("pictures", "class_ids", "names"):
        if before.get(key, about[key]) != about[key]:
            raise ValueError(
                f"the run in {out} used other data: {before.get('data')}, {before.get('pictures')} images of "
                f"{len(before.get('class_ids', []))} classes, and this data has {about['pictures']} images of "
                f"{len(about['class_ids'])}; resume with the same data, or name another folder."
            )
    processes.wait()  # until all processes have read
    if processes.first:
        for path in (out / name for name in RUN_FILES) if overwrite else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        content = {**before, "resumed": [*before.get("resumed", []), about]} if before else about
        replace_file(out / RECIPE_FILE, recipe.to_yaml())  # first: it marks the folder as a run
        replace_file(out / ABOUT_FILE, json.dumps(content, indent=2))
    processes.wait()


def run_config(out: Path) -> BaseConfig | None:
    """The config of the run's model, without classes; None before the run has started."""
    about = _read_about(out)
    values = [about, *about.get("resumed", [])][-1].get("model")  # a run without checkpoints starts again
    if values is None:
        return None
    try:
        return parse_config({**values, "num_classes": 0})
    except ValueError as error:
        raise ValueError(f"{out / ABOUT_FILE}: model: {error}") from error


def _names_hash(splits: Splits) -> str:
    """SHA-256 of the names of all images. They also decide how a dataset without splits is split."""
    names = [sorted(unicodedata.normalize("NFC", entry.name) for entry in split.entries) for split in splits]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def _read_about(out: Path) -> dict[str, Any]:
    """The description of the run in the folder; empty before the run has started."""
    path = out / ABOUT_FILE
    if not path.exists():
        return {}
    try:
        about: dict[str, Any] = parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to skip the check of the data.") from error
    return about


def changed_keys(
    before: dict[str, Any], now: dict[str, Any], *, free: Collection[str] = FREE_TO_CHANGE, prefix: str = ""
) -> list[str]:
    """Keys with different values, except those in ``free``."""
    changed = []
    for key in {**before, **now}:
        name, old, new = f"{prefix}{key}", before.get(key), now.get(key)
        if name in free or old == new:
            continue
        changed += (
            changed_keys(old, new, free=free, prefix=f"{name}.")
            if isinstance(old, dict) and isinstance(new, dict)
            else [name]
        )
    return changed
