"""The network, readable beside the paper."""

import progresvit._torchvision  # noqa: F401  (ahead of timm)
from progresvit.model.outputs import RoundOutput
from progresvit.model.psg import BlockGates, FusionGates, RoundGates
from progresvit.model.vit import ProgResViT

__all__ = ["BlockGates", "FusionGates", "ProgResViT", "RoundGates", "RoundOutput"]
