"""Images in."""

import progresvit._torchvision  # noqa: F401  (ahead of timm)
from progresvit.data.preprocess import evaluation_transform

__all__ = ["evaluation_transform"]
