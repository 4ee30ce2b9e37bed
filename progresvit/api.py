"""The two functions that give a model: a fresh one by name, a trained one from a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from progresvit import checkpoint
from progresvit.config import preset
from progresvit.interop.official import OFFICIAL_MODELS, load_official
from progresvit.io.model_folder import SHIPPED, Source, find_folder, shipped_folder
from progresvit.model import ProgResViT

__all__ = ["SHIPPED", "create_model", "load", "load_with_folder", "shipped_folder"]


def create_model(name: str, *, drop_path: float = 0.0, **fields: Any) -> ProgResViT:
    """A fresh model of a preset, with any field of its config changed: ``num_classes=20``, ``psg=False``."""
    return ProgResViT(preset(name, **fields), drop_path=drop_path)


def load(source: Source | None = None, *, revision: str | None = None) -> ProgResViT:
    """A trained model, in evaluation mode, from a folder, a hub id, or one of the authors' hub ids.

    Without a source it is the model that ships; its name is ``shipped``, unless a folder of that name is here.
    """
    return load_with_folder(source, revision=revision)[0]


def load_with_folder(source: Source | None = None, *, revision: str | None = None) -> tuple[ProgResViT, Path | None]:
    """The same, and the folder where its settings may lie; the authors' checkpoints have none."""
    if isinstance(source, str) and source in OFFICIAL_MODELS:
        return load_official(source, revision=revision), None
    folder = shipped_folder() if source is None else find_folder(source, revision=revision)
    return checkpoint.load_folder(folder), folder
