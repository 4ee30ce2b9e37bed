"""Objects by import string, ``my_module:name``: a user's own tasks, routers, corruptions, models and backends.

A string is resolved where the object is needed and not in the command: recipes, records and settings contain strings,
Python accepts them (``Engine(model, backend="my_module:MyBackend")``), and worker processes resolve them again.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from progresvit.io.parse import did_you_mean

_PATTERN = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def is_import_string(text: object) -> bool:
    """Whether this is ``module:name`` or ``package.module:name``."""
    return isinstance(text, str) and _PATTERN.fullmatch(text) is not None


def check_name(name: str, built_in: Collection[str], *, what: str, example: str) -> None:
    """Refuse a name that is neither built in nor an import string, of a module whatever its name."""
    if name not in built_in and ":" not in name:
        raise ValueError(f"unknown {what} {name!r}; {did_you_mean(name, built_in)} Your own is {example}.")


def resolve(
    where: str, *, what: str, kind: str = "function or class", accepts: Callable[[Any], bool] = callable
) -> Any:
    """The object that an import string names.

    Args:
        where: The import string.
        what: What it is for; errors begin with it.
        kind: What is looked for in the module.
        accepts: Which objects of the module are of that kind.
    """
    module_name, _, name = where.partition(":")
    module = import_module(module_name, what=what)
    value = getattr(module, name, None)
    if not accepts(value):
        names = [key for key, value in vars(module).items() if accepts(value) and not key.startswith("_")]
        raise ValueError(f"{what}: {module_name} has no {kind} {name!r}; {did_you_mean(name, names)}")
    return value


def check_call(function: Callable[..., Any], *arguments: Any, what: str, example: str) -> None:
    """Refuse a function that does not take these arguments; ``example`` is a definition that does."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        raise ValueError(f"{name_of(function)} is not a {what}; define it as {example}.") from None


def make(cls: Callable[..., Any], *arguments: Any, what: str, example: str) -> Any:
    """The object of a class, or what a function returns; ``example`` is a definition that takes the arguments."""
    try:
        return cls(*arguments)
    except TypeError as error:
        raise ValueError(f"the {what} {name_of(cls)} cannot be made ({error}); define it as {example}.") from error


def import_module(name: str, *, what: str) -> Any:
    """A module by name, which is also looked for in the working directory; errors begin with ``what``."""
    if name.startswith("progresvit."):  # a package that it lacks is reported by the command
        return importlib.import_module(name)
    if os.getcwd() not in sys.path:  # the installed command does not look there
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedy = f"run the command in the folder of {name.partition('.')[0]}.py, or add that folder to PYTHONPATH."
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            remedy = f"install or correct what {name} imports."
        raise ValueError(f"{what}: {name} cannot be imported ({error}); {remedy}") from error


def name_of(named_object: Any) -> str:
    """The import string of a function, a class, or the class of an object."""
    named = named_object if hasattr(named_object, "__qualname__") else type(named_object)
    return f"{named.__module__}:{named.__qualname__}"


def source_hash(named_object: Any) -> str:
    """SHA-256 of the file that defines a function, a class or the class of an object; empty if there is no file."""
    named = named_object if hasattr(named_object, "__qualname__") else type(named_object)
    path = getattr(sys.modules.get(named.__module__), "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
