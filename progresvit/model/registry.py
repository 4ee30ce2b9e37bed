"""Kinds of models: from the name of a kind to its classes."""

from __future__ import annotations

import importlib
from typing import Any

from progresvit.io.parse import did_you_mean

MODELS = {"progresvit": "progresvit.model.vit:ProgResViT"}
CONFIGS = {"progresvit": "progresvit.config:ModelConfig"}


def config_class(kind: str) -> Any:
    """The class of the configs of a kind."""
    if kind not in CONFIGS:
        raise ValueError(f"unknown kind of model {kind!r}; {did_you_mean(kind, CONFIGS)}")
    return _load(CONFIGS[kind])


def build(config: Any, drop_path: float = 0.0) -> Any:
    """A new model of the config's kind."""
    return _load(MODELS[getattr(config, "kind", "progresvit")])(config, drop_path=drop_path)


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
