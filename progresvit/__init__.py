"""Progressive vision transformers: process an image in rounds, exit early when the prediction is confident.

Importing this is light: torch comes with the first model, and timm where it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
    from progresvit import compute, config, data, engine, evaluation, interop, model, routing
    from progresvit.api import create_model, load
    from progresvit.config import ModelConfig, Round, make_rounds, plain_vit, preset
    from progresvit.engine import Embedding, EmbeddingEngine, Engine, Prediction, Segmentation, SegmentationEngine
    from progresvit.model import ProgResViT, RoundModel, RoundOutput
    from progresvit.model.saving import push_to_hub, save

__version__ = "0.2.0.dev0"

_MODULES = ("compute", "config", "data", "engine", "evaluation", "interop", "model", "routing")
_HOME_OF = {
    "create_model": "api",
    "load": "api",
    "push_to_hub": "model.saving",
    "save": "model.saving",
    "ModelConfig": "config",
    "Round": "config",
    "make_rounds": "config",
    "plain_vit": "config",
    "preset": "config",
    "Embedding": "engine",
    "EmbeddingEngine": "engine",
    "Engine": "engine",
    "Prediction": "engine",
    "Segmentation": "engine",
    "SegmentationEngine": "engine",
    "ProgResViT": "model",
    "RoundModel": "model",
    "RoundOutput": "model",
}

__all__ = [
    "Embedding",
    "EmbeddingEngine",
    "Engine",
    "ModelConfig",
    "Prediction",
    "ProgResViT",
    "Round",
    "RoundModel",
    "RoundOutput",
    "Segmentation",
    "SegmentationEngine",
    "compute",
    "config",
    "create_model",
    "data",
    "engine",
    "evaluation",
    "interop",
    "load",
    "make_rounds",
    "model",
    "plain_vit",
    "preset",
    "push_to_hub",
    "routing",
    "save",
]

if not TYPE_CHECKING:  # type checkers see the names above and no others
    _look_up, __dir__ = lazily(__name__, homes=_HOME_OF, modules=_MODULES, more=["__version__"])

    def __getattr__(name):
        if name in ("create_model", "load"):
            import progresvit.interop  # noqa: F401  (adds the presets to timm's registry, as docs/models.md says)

        return _look_up(name)
