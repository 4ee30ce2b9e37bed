"""Images in.

Importing this is light, and so is reading and cropping a picture: torch and timm come with what needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
    from progresvit.data.preprocess import evaluation_transform

__all__ = ["evaluation_transform"]

if not TYPE_CHECKING:  # a checker shall see the names above and no others
    __getattr__, __dir__ = lazily(__name__, homes={"evaluation_transform": "preprocess"})
