"""The network, readable beside the paper, and the interface and registry of all kinds of models.

Importing this is light: torch comes with the first model, and timm where it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
    from progresvit.model.interface import RoundModel
    from progresvit.model.outputs import RoundFeatures, RoundOutput
    from progresvit.model.psg import BlockGates, FusionGates, RoundGates
    from progresvit.model.registry import build, register
    from progresvit.model.vit import ProgResViT

__all__ = [
    "BlockGates",
    "FusionGates",
    "ProgResViT",
    "RoundFeatures",
    "RoundGates",
    "RoundModel",
    "RoundOutput",
    "build",
    "register",
]

if not TYPE_CHECKING:  # type checkers see the names above and no others
    __getattr__, __dir__ = lazily(
        __name__,
        homes={
            "BlockGates": "psg",
            "FusionGates": "psg",
            "ProgResViT": "vit",
            "RoundFeatures": "outputs",
            "RoundGates": "psg",
            "RoundModel": "interface",
            "RoundOutput": "outputs",
            "build": "registry",
            "register": "registry",
        },
    )
