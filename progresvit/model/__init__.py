"""The network, readable beside the paper, and the interface and registry of all kinds of models.

Importing this is light: torch comes with the first model, and timm where it is needed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
