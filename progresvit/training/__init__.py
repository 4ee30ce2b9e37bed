"""Training: one loop, and one task per method."""

import progresvit._torchvision  # noqa: F401  (ahead of timm)
