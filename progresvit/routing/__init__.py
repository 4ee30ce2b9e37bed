"""When to exit: scores, the exit rule, thresholds, and learned routers.

Importing this needs no torch; it is imported with the names that need it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
