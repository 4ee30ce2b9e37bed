"""The two functions that give a model: a fresh one by name, a trained one from a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from progresvit import checkpoint
from progresvit.config import preset
from progresvit.folders import Source, find_folder
from progresvit.interop.official import OFFICIAL_MODELS, load_official
from progresvit.model import ProgResViT

SHIPPED = "shipped"
"""The name of the model that ships inside the package, wherever a model folder is asked for."""


def shipped_folder() -> Path:
    """The folder of the model that ships inside the package."""
    return Path(__file__).parent / "shipped"


def create_model(name: str, *, drop_path: float = 0.0, **fields: Any) -> ProgResViT:
    """A fresh model of a preset, with any field of its config changed: ``num_classes=20``, ``psg=False``."""
    return ProgResViT(preset(name, **fields), drop_path=drop_path)


def load(source: Source, *, revision: str | None = None) -> ProgResViT:
    """A trained model, in evaluation mode, from a folder, a hub id, or one of the authors' hub ids."""
    if isinstance(source, str) and source in OFFICIAL_MODELS:
        return load_official(source, revision=revision)
    return checkpoint.load_folder(find_folder(source, revision=revision))
