"""YAML files by name or path: bundled ones, such as recipes, or the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from progresvit.io.parse import did_you_mean


def bundled_files(folder: str) -> dict[str, Path]:
    """The bundled files of a folder by name: in the package of a wheel, or at the top of a checkout."""
    package = Path(__file__).parent.parent
    installed, checkout = package / folder, package.parent / folder
    return {path.stem: path for path in sorted((installed if installed.is_dir() else checkout).glob("*.yaml"))}


def find_file(source: str, bundled: dict[str, Path], what: str) -> Path:
    """The path itself, or the bundled file of that name; ``what`` is the kind of file, for the error."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if source in bundled:
        return bundled[source]
    raise ValueError(f"there is no {what} {source!r}; {did_you_mean(source, bundled)} Or give the path of a YAML file.")


def read_mapping(path: Path, what: str, sections: str) -> dict[str, Any]:
    """The mapping in a file, not validated yet; ``sections`` names two that it should have, for the error."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a {what}; it should have sections such as {sections}.")
    return values
