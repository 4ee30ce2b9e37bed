"""Progressive vision transformers: process an image in rounds, exit early when the prediction is confident.

Importing this is light: torch comes with the first model, and timm where it is needed.
"""

import lazy_loader

import progresvit.baselines  # noqa: F401  (registers its kinds of models; it imports none of them)

__version__ = "0.2.0.dev0"

_look_up, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name):
    if name in ("create_model", "load"):
        import progresvit.interop  # noqa: F401  (adds the presets to timm's registry, as docs/models.md says)

    return _look_up(name)
