"""Fresh models by name, and trained models from a folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from progresvit.config import OFFICIAL_MODELS, preset
from progresvit.io.model_folder import BUNDLED, DEFAULT_MODEL, Source, bundled_folder, find_folder
from progresvit.model.interface import RoundModel
from progresvit.model.saving import load_folder
from progresvit.model.vit import ProgResViT

__all__ = ["BUNDLED", "DEFAULT_MODEL", "as_progresvit", "bundled_folder", "create_model", "load", "load_with_folder"]


def create_model(name: str, *, drop_path: float = 0.0, **fields: Any) -> ProgResViT:
    """A fresh model of a preset, with any field of its config changed: ``num_classes=20``, ``psg=False``."""
    return ProgResViT(preset(name, **fields), drop_path=drop_path)


def load(source: Source | None = None, *, revision: str | None = None) -> RoundModel:
    """A trained model, in evaluation mode. ``config.kind`` names its model class.

    Args:
        source: A model folder, the name of a bundled model, a hub id, or a hub id of the authors, whose files
            themselves have not been seen. None is the bundled model ``imagenet-tiny``. A local folder comes before a
            bundled model of the same name.
        revision: Branch, tag or commit of the hub repository.
    """
    return load_with_folder(source, revision=revision)[0]


def load_with_folder(source: Source | None = None, *, revision: str | None = None) -> tuple[RoundModel, Path | None]:
    """The model and the folder that may hold its settings; the authors' checkpoints have none."""
    if isinstance(source, str) and source in OFFICIAL_MODELS:
        from progresvit.interop.official import load_official  # with timm, which takes seconds to import

        return load_official(source, revision=revision), None
    folder = bundled_folder() if source is None else find_folder(source, revision=revision)
    return load_folder(folder), folder


def as_progresvit(model: RoundModel, what: str, remedy: str | None = None) -> ProgResViT:
    """Return the model; raise ``ValueError`` with a remedy if it is not a ProgResViT, which ``what`` requires."""
    if not isinstance(model, ProgResViT):
        config = getattr(model, "config", None)
        kind = type(model).__name__ if config is None else config.kind
        default = "call the model itself, or run progresvit evaluate"
        if config is not None and not config.routable:
            default = "its rounds are alternatives without routing among them, so call model.run_round(s, images)"
        raise ValueError(f"{what} runs models of kind 'progresvit' only, not {kind!r}; {remedy or default}.")
    return model
