"""Evaluation: one pass over the data gives records, from which everything else is computed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
