"""Fresh models by name, and trained models from a folder or the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from progresvit.config import ARCHITECTURE, OFFICIAL_MODELS, PRESETS, preset
from progresvit.io.model_folder import (
    BUNDLED,
    CONFIG_FILE,
    DEFAULT_MODEL,
    MODEL_FILES,
    Source,
    bundled_folder,
    find_folder,
    is_foreign,
    is_local,
    may_be_timm_name,
)
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
        source: A model folder, the name of a bundled model, or a hub id. None is the bundled model ``imagenet-tiny``. A
            local folder comes before a bundled model of the same name. Models of timm and of other projects are
            converted: a plain ViT by its name in timm, a folder or hub id in timm's format, and a ``.safetensors`` file
            that is named as timm names the model.
        revision: Branch, tag or commit of the hub repository.
    """
    return load_with_folder(source, revision=revision)[0]


def load_with_folder(source: Source | None = None, *, revision: str | None = None) -> tuple[RoundModel, Path | None]:
    """The model and the folder that may hold its settings; files and names of timm have none."""
    if isinstance(source, str) and source in OFFICIAL_MODELS:
        from progresvit.interop.official import load_official  # with timm, which takes seconds to import

        return load_official(source, revision=revision), None
    if source is not None and not is_local(source):
        if is_weights_file(source):
            from progresvit.interop.official import import_official

            return import_official(source), None
        if is_timm_name(source):
            from progresvit.interop.plain import from_timm

            return from_timm(str(source)), None
    on_hub = source is not None and not is_local(source)
    files = (CONFIG_FILE,) if on_hub else MODEL_FILES  # of a repository first what it is
    folder = bundled_folder() if source is None else find_folder(source, revision=revision, files=files)
    if not is_foreign(folder):
        folder = find_folder(source, revision=revision) if source is not None and on_hub else folder
        return load_folder(folder), folder
    from progresvit.interop.official import find_foreign, load_foreign_folder

    if source is not None and on_hub:
        folder = find_foreign(source, revision=revision)
    return load_foreign_folder(folder), folder


def is_weights_file(source: Source) -> bool:
    """Whether ``source`` is a file of weights that no pickle is needed for."""
    path = Path(os.path.expanduser(source))
    return path.suffix == ".safetensors" and path.is_file()


def is_timm_name(source: Source) -> bool:
    """Whether ``source`` is the name of a model of timm, as far as it may be a plain ViT."""
    if not may_be_timm_name(source) or source in (*PRESETS, ARCHITECTURE):
        return False
    import progresvit._torchvision  # noqa: F401  (ahead of timm)

    # isort: split
    import timm

    return bool(timm.is_model(source))


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
