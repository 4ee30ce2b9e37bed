"""Names of a package that are imported on first use, so that importing the package is light."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(
    package: str, *, homes: Mapping[str, str], modules: Sequence[str] = (), more: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    A name must not be that of one of the package's modules: once imported, the module would hide it.

    Args:
        package: The package's ``__name__``.
        homes: The module that defines each name.
        modules: Modules to list as names of the package.
        more: Names that the package defines itself.
    """
    clash = sorted(set(homes) & (set(homes.values()) | set(modules)))
    assert not clash, f"{package}: {clash} would be hidden by modules of the same name"

    def look_up(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")  # as if it had been imported with the package
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*homes, *modules, *more})

    return look_up, names
