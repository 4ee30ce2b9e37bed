"""Inference: the engine, its backends and exports.

Importing this needs no torch; an export runs without it, a model imports it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
