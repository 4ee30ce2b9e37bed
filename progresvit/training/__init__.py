"""One loop, and one objective per method."""

import progresvit._torchvision  # noqa: F401  (ahead of timm)
