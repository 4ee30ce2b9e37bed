"""YAML files by name or path: bundled ones, such as recipes, or the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from progresvit.io.parse import MAX_NESTING, TOO_DEEP, check_digits, did_you_mean, read_text

MAX_BYTES = 100_000
"""Of a YAML file; the longest bundled recipe has 2,000."""
MAX_VALUES = 10_000
"""Of a YAML file, aliases counted as what they stand for."""


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
        values = parse_yaml(read_text(path, MAX_BYTES))
    except ValueError as error:
        raise ValueError(f"{path} is not a {what} ({error}); correct the file.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a {what}; it should have sections such as {sections}.")
    return values


def parse_yaml(text: str) -> Any:
    """The value in YAML. Nesting, numbers and what aliases expand to are limited."""
    try:
        _check_size(text)
        return yaml.load(text, _Loader)  # a safe loader
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # a tag with a value of another kind
        raise ValueError(f"it has a value that its tag does not allow ({error})") from error


def _check_size(text: str) -> None:
    """Refuse deep nesting, and aliases that expand to many values ("billion laughs")."""
    sizes: dict[str | None, int] = {}  # number of values by anchor
    opened: list[tuple[str | None, int]] = [(None, 0)]  # lists and mappings that have not ended: anchor, values so far
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1))
            if len(opened) > MAX_NESTING:
                raise ValueError(TOO_DEEP)
            continue
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in opened):
                raise ValueError(f"the alias *{event.anchor} is within what it stands for")
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
            sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = size = 1
        else:
            continue
        anchor, before = opened[-1]
        opened[-1] = (anchor, before + size)
        if before + size > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values, aliases included, which is the limit")


class _Loader(yaml.SafeLoader):
    """The safe loader, with limited numbers."""


def _parse_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    check_digits(node.value)
    return int(yaml.SafeLoader.construct_yaml_int(loader, node))


_Loader.add_constructor("tag:yaml.org,2002:int", _parse_int)
