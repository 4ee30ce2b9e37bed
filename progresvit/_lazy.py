"""Names of a package that are looked up when they are first used, so that importing the package is light."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazily(
    package: str, *, homes: Mapping[str, str], modules: Sequence[str] = (), more: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package.

    ``homes`` says in which of its modules each name lives, ``modules`` are names of modules themselves, and ``more``
    are names that the package has already. A name must not be that of a module with another meaning: once the module
    is imported it would be found instead.
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
