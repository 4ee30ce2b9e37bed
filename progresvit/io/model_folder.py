"""A model is a folder with config.json and model.safetensors: finding it, here or on the hub, and reading what it is.

No torch: ``progresvit info`` answers from the config alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from progresvit.config import ModelConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SETTINGS = "settings"
"""The folder inside that one, if there is one, of calibrated thresholds by name (see routing/settings.py)."""
BUDGETS_FILE = "budgets.json"
"""What thresholds spend, if it is known (see routing/settings.py)."""
SHIPPED = "shipped"
"""The name of the model that ships inside the package, wherever a model folder is asked for."""
PICKLE_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".pkl", ".pickle")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

Source = str | os.PathLike[str]
"""A folder's path, ``shipped``, or a Hugging Face hub id such as ``organisation/model``."""


def shipped_folder() -> Path:
    """The folder of the model that ships inside the package."""
    return Path(__file__).parent.parent / "shipped"


def find_folder(
    source: Source,
    *,
    revision: str | None = None,
    files: Sequence[str] = (CONFIG_FILE, WEIGHTS_FILE, f"{SETTINGS}/*.json", BUDGETS_FILE),
    cache_dir: Source | None = None,
) -> Path:
    """The folder that ``source`` names; from the hub, ``files`` of it are downloaded unless they are cached.

    A folder that is here wins over the name ``shipped`` as it does over a hub id: a path means what lies there.
    """
    folder = Path(os.path.expanduser(source))
    if folder.is_dir():
        return folder
    if source == SHIPPED:
        return shipped_folder()
    if folder.exists():
        raise ValueError(_file_is_no_folder(folder))
    if not is_hub_id(source):
        raise ValueError(
            f"there is no model folder {str(source)!r}; give a folder that progresvit.save wrote, "
            f"or {SHIPPED!r} for the model that ships."
        )
    return download(str(source), revision=revision, patterns=files, cache_dir=cache_dir)


def is_hub_id(source: Source) -> bool:
    """Whether ``source`` is spelled like a hub id."""
    return isinstance(source, str) and _HUB_ID.fullmatch(source) is not None


def download(repo_id: str, *, revision: str | None, patterns: Sequence[str], cache_dir: Source | None = None) -> Path:
    """The local copy of a hub repository's files that match; works from the cache without a network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    where = None if cache_dir is None else os.fspath(cache_dir)
    try:
        folder = snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns), cache_dir=where)
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{repo_id!r} is neither a folder here nor a repository on the hub; check the spelling, "
            "or log in with 'hf auth login' if it is private."
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"there is no folder {repo_id!r} here, and it could not be had from the hub: {_first_line(error)} "
            "Check the network and the revision, or give the path of a model folder."
        ) from error
    if not any(Path(folder).glob("*")):
        raise ValueError(
            f"the hub repository {repo_id!r} holds no {' or '.join(patterns)}. If it holds a PyTorch checkpoint of the "
            "authors, download that file and convert it with: progresvit import-official FILE --out DIR"
        )
    return Path(folder)


def read_config(folder: Path) -> ModelConfig:
    """The config of a model folder; errors name the file."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        if (folder / "export.json").is_file():
            raise ValueError(
                f"{folder} is an export, which is for progresvit classify; give the model that it was made of."
            )
        pickles = find_pickles(folder)
        if pickles:
            raise ValueError(refuse_pickle(pickles[0]))
        raise ValueError(f"{folder} has no {CONFIG_FILE}; a model folder holds {CONFIG_FILE} and {WEIGHTS_FILE}.")
    try:
        return ModelConfig.from_json(path.read_text(encoding="utf-8"))
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
        f"authors with: progresvit import-official {path} --out DIR"
    )


def _file_is_no_folder(path: Path) -> str:
    if path.suffix in PICKLE_SUFFIXES:
        return refuse_pickle(path)
    return f"{path} is a file; give the folder that holds {CONFIG_FILE} and {WEIGHTS_FILE}."


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else type(error).__name__ + "."
