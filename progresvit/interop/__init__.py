"""Models from elsewhere: timm's registry, plain ViTs of timm, pretrained starts, and checkpoints of other projects.

Importing this package registers every preset with timm.
"""

import progresvit._torchvision  # noqa: F401  (ahead of timm)
from progresvit.config import OFFICIAL_MODELS
from progresvit.interop.official import import_official
from progresvit.interop.plain import from_timm
from progresvit.interop.start import start_from, start_from_timm
from progresvit.interop.timm_registry import TimmProgResViT

__all__ = ["OFFICIAL_MODELS", "TimmProgResViT", "from_timm", "import_official", "start_from", "start_from_timm"]
