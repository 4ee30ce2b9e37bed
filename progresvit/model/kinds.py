"""The table of all kinds of models: where the config class and the model class of each are imported from.

It imports nothing, so that kinds are registered before any of their classes is needed.
"""

from typing import NamedTuple

DEFAULT_KIND = "progresvit"
"""The kind of a config.json without one, as version 0.1.0 wrote it."""


class ModelKind(NamedTuple):
    """Import strings of a kind, written ``package.module:Class``."""

    config: str
    """A subclass of BaseConfig."""
    model: str
    """An ``nn.Module`` that satisfies RoundModel, built as ``Model(config, drop_path=0.0)``."""


KINDS = {DEFAULT_KIND: ModelKind(config="progresvit.config:ModelConfig", model="progresvit.model.vit:ProgResViT")}


def register(kind: str, *, config: str, model: str) -> None:
    """Make a kind of model known to ``load``, ``save`` and recipes.

    Args:
        kind: The name that ``config.json`` stores; the default of the config's ``kind`` field.
        config: Import string of the config class, such as ``"my_package.config:MyConfig"``.
        model: Import string of the model class.
    """
    new = ModelKind(config=config, model=model)
    if KINDS.setdefault(kind, new) != new:
        raise ValueError(f"the model kind {kind!r} is already registered as {KINDS[kind].model}; choose another name.")
