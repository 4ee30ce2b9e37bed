"""Images: reading, cropping, augmenting and batching.

Importing this needs no torch; torch and timm are imported with the names that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
    from progresvit.data.transforms import evaluation_transform

__all__ = ["evaluation_transform"]

if not TYPE_CHECKING:  # a checker shall see the names above and no others
    __getattr__, __dir__ = lazily(__name__, homes={"evaluation_transform": "transforms"})
