"""SortedNet: the nested ViTs of HydraViT, trained another way.

A step draws several different rounds and accumulates their gradients, where HydraViT draws one: ``per_step`` of
:mod:`progresvit.training.tasks.subnetworks`.
"""

from __future__ import annotations

from typing import Literal

from progresvit.baselines.hydravit import HydraViT, HydraViTConfig


class SortedNetConfig(HydraViTConfig):
    """Rounds that differ in heads, in resolution, or in both."""

    kind: Literal["sortednet"] = "sortednet"  # type: ignore[assignment]


class SortedNet(HydraViT):
    """A ViT that contains narrower ViTs: any number of its leading heads is one."""

    config: SortedNetConfig
