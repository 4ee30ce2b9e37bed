"""YAML files by name: those that ship, such as recipes, or the user's own."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml


def shipped_files(folder: str) -> dict[str, Path]:
    """Names of the files that ship in a folder, and where they are: inside a wheel, or at the top of a checkout."""
    package = Path(__file__).parent.parent
    installed, checkout = package / folder, package.parent / folder
    return {path.stem: path for path in sorted((installed if installed.is_dir() else checkout).glob("*.yaml"))}


def find_file(source: str, shipped: dict[str, Path], what: str) -> Path:
    """The path itself, or the file of that name among those that ship; ``what`` is what they are, for the error."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if source in shipped:
        return shipped[source]
    nearest = difflib.get_close_matches(source, shipped, n=2)
    hint = f"the nearest are {' and '.join(nearest)}" if nearest else f"choose one of {', '.join(shipped)}"
    raise ValueError(f"there is no {what} {source!r}; {hint}, or give the path of a YAML file.")


def read_mapping(path: Path, what: str, sections: str) -> dict[str, Any]:
    """What the file holds, still to be validated; ``sections`` are two that it should have, for the error."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no {what}; it should hold sections such as {sections}.")
    return values


def read_yaml(path: Path) -> Any:
    """Whatever the file holds."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
