"""The pictures that come along, to try a model on; whose they are is in ``progresvit/samples/CREDITS.md``."""

from __future__ import annotations

from pathlib import Path


def samples_folder() -> Path:
    """Where they lie."""
    return Path(__file__).parent.parent / "samples"
