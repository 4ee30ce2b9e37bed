"""Images: reading, cropping, augmenting and batching.

Importing this needs no torch; torch and timm are imported with the names that need them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
