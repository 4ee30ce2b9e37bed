"""From a kind of model to its config class and its model class; kinds.py lists all kinds.

Classes are imported when a model needs them: the config of a ProgResViT is read without importing torch. A baseline
keeps its config beside its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from progresvit.config import BaseConfig
from progresvit.io.imports import resolve
from progresvit.io.model_folder import CONFIG_FILE, is_foreign, read_config_values
from progresvit.io.parse import did_you_mean
from progresvit.model.kinds import DEFAULT_KIND as DEFAULT_KIND
from progresvit.model.kinds import KINDS as KINDS
from progresvit.model.kinds import ModelKind as ModelKind
from progresvit.model.kinds import register as register

if TYPE_CHECKING:
    from progresvit.model.interface import RoundModel


def config_class(kind: str) -> type[BaseConfig]:
    """The config class of a kind."""
    config: type[BaseConfig] = resolve(_registered(kind).config, what=f"model kind {kind}", kind="class")
    return config


def parse_config(values: Mapping[str, Any]) -> BaseConfig:
    """The config that a dict describes, of the class that its ``kind`` names."""
    return config_class(values.get("kind", DEFAULT_KIND)).from_dict(values)


def read_config(folder: Path) -> BaseConfig:
    """The config of a model folder; errors name the file."""
    values = read_config_values(folder)
    if is_foreign(folder):
        raise ValueError(
            f"{folder} holds a model of timm or of another project, which is not read here; convert it with the "
            f"command progresvit import-official {folder}, and give the new folder."
        )
    try:
        return parse_config(values)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from error


def build(config: BaseConfig, *, drop_path: float = 0.0, **options: Any) -> RoundModel:
    """A fresh model of the config's kind; ``options`` are more keywords of its class."""
    model: RoundModel = model_class(config.kind)(config, drop_path=drop_path, **options)
    return model


def model_class(kind: str) -> Any:
    """The model class of a kind."""
    return resolve(_registered(kind).model, what=f"model kind {kind}", kind="class")


def _registered(kind: str) -> ModelKind:
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(
            f"this version knows no model of kind {kind!r}; {did_you_mean(kind, KINDS)} "
            "Install a newer version of progresvit, or import the module that registers this kind (an option of the "
            "command progresvit names it)."
        )
    return KINDS[kind]
