"""Model folders: config.json and model.safetensors, found on this machine or downloaded from the hub. No torch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from progresvit.config import parse_object
from progresvit.io.parse import did_you_mean, read_text

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SETTINGS = "settings"
"""Optional folder in a model folder with calibrated thresholds by name."""
BUDGETS_FILE = "budgets.json"
"""Optional file in a model folder with the GMACs of thresholds."""
CARD_FILE = "README.md"
"""Optional file in a model folder: the model card."""
TRAINING_LIST_FILE = "learned_from.json"
"""The hashes of the names of the training images, if the split was drawn."""
SPLITS_FILE = "trained_on.json"
"""Hashes of the names of the training and of the validation images, each as a whole."""
TRAINING_LISTS = (TRAINING_LIST_FILE, SPLITS_FILE)
MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, f"{SETTINGS}/*.json", BUDGETS_FILE, CARD_FILE, *TRAINING_LISTS)
"""Patterns of the files that a hub repository shares."""
DEFAULT_MODEL = "imagenet-tiny"
"""The bundled model that is used unless another is asked for."""
BUNDLED = (DEFAULT_MODEL, "nettewoof-tiny")
"""Names of the bundled models, accepted wherever a model folder is."""
ALIASES = {"shipped": "nettewoof-tiny"}
"""Former names of bundled models."""
PICKLE_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl", ".pickle")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TIMM_NAME = re.compile(r"(vit|deit|flexivit)|.*_patch\d")
"""Names of plain ViTs in timm, and of other transformers on patches, for which errors name the nearest plain ViT."""

Source = str | os.PathLike[str]
"""A folder's path, the name of a bundled model, or a Hugging Face hub id such as ``organisation/model``."""


def bundled_folder(name: str = DEFAULT_MODEL) -> Path:
    """The folder of a bundled model."""
    name = ALIASES.get(name, name)
    if name not in BUNDLED:
        raise ValueError(f"there is no bundled model {name!r}; {did_you_mean(name, BUNDLED)}")
    return Path(__file__).parent.parent / "bundled" / name


def is_bundled(source: Source) -> bool:
    """Whether ``source`` is the name of a bundled model."""
    return os.fspath(source) in (*BUNDLED, *ALIASES)


def is_local(source: Source) -> bool:
    """Whether ``source`` is a folder on this machine or a bundled model."""
    return is_bundled(source) or Path(os.path.expanduser(source)).is_dir()


def may_be_timm_name(source: Source) -> bool:
    """Whether ``source`` looks like the name of a ViT in timm, which takes seconds to import. Paths do not."""
    path = Path(source)
    is_path = path.name != str(source) or path.suffix in (".safetensors", *PICKLE_SUFFIXES) or path.exists()
    return isinstance(source, str) and not is_path and _TIMM_NAME.match(source) is not None


def is_foreign(folder: Path) -> bool:
    """Whether a folder holds a model of timm or another project: config.json has an architecture and no rounds."""
    if not (folder / CONFIG_FILE).is_file():
        return False
    values = read_config_values(folder)
    return "architecture" in values and not {"kind", "rounds"} & set(values)


def copy_training_lists(model: object, folder: Path) -> None:
    """Copy what the folder of a loaded model says about its training images, which it keeps whatever becomes of it."""
    origin = getattr(model, "loaded_from", None)
    for name in TRAINING_LISTS:
        if origin is not None and (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


def find_folder(
    source: Source,
    *,
    revision: str | None = None,
    files: Sequence[str] = MODEL_FILES,
    cache_dir: Source | None = None,
) -> Path:
    """The folder that ``source`` names. A local folder comes before a bundled model and a hub id.

    Args:
        source: A folder, the name of a bundled model, or a hub id.
        revision: Branch, tag or commit on the hub.
        files: Patterns of the files to download from the hub unless they are cached.
        cache_dir: The cache of the hub; by default huggingface_hub's.
    """
    folder = Path(os.path.expanduser(source))
    if folder.is_dir():
        return folder
    if is_bundled(source):
        return bundled_folder(os.fspath(source))
    if folder.exists():
        if folder.suffix in PICKLE_SUFFIXES:
            raise ValueError(refuse_pickle(folder))
        raise ValueError(f"{folder} is a file; give the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}.")
    if not (isinstance(source, str) and _HUB_ID.fullmatch(source)):
        raise ValueError(
            f"there is no model folder or bundled model {str(source)!r}; {did_you_mean(source, BUNDLED)} "
            "Or give a folder that progresvit.save wrote, or a hub id."
        )
    return download(source, revision=revision, patterns=files, cache_dir=cache_dir)


def download(repo_id: str, *, revision: str | None, patterns: Sequence[str], cache_dir: Source | None = None) -> Path:
    """The local copy of a hub repository's files that match; works from the cache without a network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    where = None if cache_dir is None else os.fspath(cache_dir)
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns), cache_dir=where)
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{repo_id!r} is neither a local folder nor a repository on the hub; check the spelling, "
            "or log in with 'hf auth login' if it is private."
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"there is no local folder {repo_id!r}, and it could not be downloaded from the hub: {_first_line(error)} "
            "Check the network and the revision, or give the path of a model folder."
        ) from error
    if not any(path.name != CARD_FILE for path in Path(folder).iterdir()):
        raise ValueError(
            f"the hub repository {repo_id!r} holds no {' or '.join(patterns)}. If it holds a PyTorch checkpoint of the "
            "authors, download that file and convert it with the command progresvit import-official."
        )
    return Path(folder)


def read_config_values(folder: Path) -> dict[str, Any]:
    """The object in the config.json of a model folder; errors name the file."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        if (folder / "export.json").is_file():
            raise ValueError(
                f"{folder} is an export, which is for progresvit classify, serve, evaluate, shift, bench and info; "
                "give the model that it was made from."
            )
        pickles = find_pickles(folder)
        if pickles:
            raise ValueError(refuse_pickle(pickles[0]))
        raise ValueError(f"{folder} has no {CONFIG_FILE}; a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}.")
    try:
        return parse_object(read_text(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error}); save the model again.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def find_pickles(folder: Path) -> list[Path]:
    """Files of a folder that look like pickled weights."""
    return sorted(path for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)


def refuse_pickle(path: Path) -> str:
    """Why a pickle is not read, and what to do instead."""
    return (
        f"{path} is a pickle, which can run code when it is read, so it is not loaded; convert a checkpoint of the "
        f"authors with the command progresvit import-official {path}."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else type(error).__name__ + "."
