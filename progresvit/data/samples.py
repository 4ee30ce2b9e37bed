"""The sample images in the package, to try a model on; credits are in ``progresvit/samples/CREDITS.md``."""

from __future__ import annotations

import json
from pathlib import Path


def samples_folder() -> Path:
    """The folder of the sample images."""
    return Path(__file__).parent.parent / "samples"


def sample_labels() -> dict[str, list[str]]:
    """The accepted ImageNet class ids of each sample image, by file name."""
    labels: dict[str, list[str]] = json.loads((samples_folder() / "labels.json").read_text(encoding="utf-8"))
    return labels
