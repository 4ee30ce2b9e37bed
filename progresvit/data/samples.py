"""The sample images in the package, to try a model on; credits are in ``progresvit/samples/CREDITS.md``."""

from __future__ import annotations

from pathlib import Path


def samples_folder() -> Path:
    """The folder of the sample images."""
    return Path(__file__).parent.parent / "samples"
