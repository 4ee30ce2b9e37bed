"""HydraViT: one ViT that holds narrower ViTs, each the leading heads of the next wider one.

A round of h heads runs the first 64 * h channels of every layer. The rounds are alternatives: one of them is chosen
before inference, and no image goes from one to another. Training draws one round at random for every batch
(:mod:`progresvit.training.tasks.subnetworks`).

Letters: B images, C image channels, H side of the images, N tokens, d active channels of a round, s a round counted
from 0.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from progresvit.config import BackboneConfig, Round
from progresvit.model.backbone import Backbone
from progresvit.model.interface import RoundOutput


class HydraViTConfig(BackboneConfig):
    """Rounds that differ in heads, in resolution, or in both."""

    kind: Literal["hydravit"] = "hydravit"
    rounds: tuple[Round, ...]
    """Rounds in any order; the accuracy of the last one selects the best checkpoint."""

    routable: ClassVar[bool] = False


class HydraViT(Backbone):
    """A ViT that contains narrower ViTs: any number of its leading heads is one."""

    config: HydraViTConfig

    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0, on its own; it takes no ``previous``."""
        self.check_round(s, images, previous)
        x = self.embed(images, resolution=self.resolutions[s], width=self.widths[s])  # (B, C, H, H) -> (B, N, d)
        return self.run_ungated(x)
