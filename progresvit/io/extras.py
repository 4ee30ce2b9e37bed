"""What an optional feature needs, and the command that installs it wherever progresvit was installed from."""

from __future__ import annotations

import re
import shlex
from importlib import metadata

_EXTRA = re.compile(r"""extra == ['"]([\w-]+)['"]""")
_NAME = re.compile(r"[\w.-]+")


def not_installed(package: str, extra: str | None = None) -> str:
    """One line for an error: a package is missing, and the command that installs it with the rest of its extra.

    Args:
        package: What could not be imported.
        extra: The extra of progresvit that it belongs to; None for what every installation has.
    """
    return f"{package} is not installed; run: {install_command(extra)}"


def install_command(extra: str | None = None) -> str:
    """``pip install`` with the missing requirements of an extra, or with all of them if none is missing.

    It names the packages and not ``progresvit[extra]``, which works only with a clone or a package index.
    """
    try:
        needed = requirements(extra)
    except metadata.PackageNotFoundError:  # run from its sources, without an installation
        needed = []
    if not needed:  # or installed before the extra existed
        return "pip install ." if extra is None else f"pip install '.[{extra}]' in the folder of pyproject.toml"
    missing = [requirement for requirement in needed if not _is_installed(requirement)]
    return shlex.join(["pip", "install", *(missing or needed)])


def requirements(extra: str | None = None) -> list[str]:
    """The requirements of an extra, or by default of every installation, such as ``onnx>=1.19``."""
    matching = []
    for line in metadata.requires("progresvit") or ():
        requirement, _, marker = line.partition(";")
        named = _EXTRA.search(marker)
        if (named[1] if named else None) == extra:
            matching.append(requirement.strip())
    return matching


def _is_installed(requirement: str) -> bool:
    name = _NAME.match(requirement)
    assert name is not None, requirement
    try:
        metadata.distribution(name[0])
    except metadata.PackageNotFoundError:
        return False
    return True
