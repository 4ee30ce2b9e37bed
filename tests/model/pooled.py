"""A second kind of model: each round averages the image to a grid and reads it with a linear layer.

Letters: B images, C channels, g side of a round's grid, d features, K classes.
"""

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import nn

from progresvit.config import BaseConfig, BaseRound, Count
from progresvit.model import RoundOutput, registry


class PooledRound(BaseRound):
    """Resolution, and the side of the grid that the image is averaged to."""

    grid: Count


class PooledConfig(BaseConfig):
    """Round 2 adds its features to the features of round 1."""

    kind: Literal["test_pooled"] = "test_pooled"
    rounds: tuple[PooledRound, ...]
    features: Count = 16


class AlternativesConfig(PooledConfig):
    """The same with rounds that do not depend on each other."""

    kind: Literal["test_alternatives"] = "test_alternatives"
    routable: ClassVar[bool] = False


class PooledModel(nn.Module):
    """One linear layer and one batch norm per round, one head for all."""

    def __init__(self, config, *, drop_path=0.0):
        super().__init__()
        self.config = config
        sizes = [config.in_channels * round_.grid**2 for round_ in config.rounds]
        self.layers = nn.ModuleList(nn.Linear(size, config.features) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(config.features) for _ in sizes)
        self.head = nn.Linear(config.features, config.num_classes)

    def forward(self, images):
        outputs = []
        for s in range(len(self.config.rounds)):
            previous = outputs[-1].tokens if outputs and self.config.routable else None
            outputs.append(self.run_round(s, images, previous))
        return tuple(outputs)

    def run_round(self, s, images, previous=None):
        x = F.adaptive_avg_pool2d(images, self.config.rounds[s].grid).flatten(1)  # (B, C, H, H) -> (B, C * g * g)
        x = F.gelu(self.norms[s](self.layers[s](x)))  # (B, C * g * g) -> (B, d)
        if previous is not None:
            x = x + previous[:, 0]
        return RoundOutput(logits=self.head(x), tokens=x[:, None])  # (B, K), (B, 1, d)

    def gmacs(self, convention="paper"):
        config, total, after = self.config, 0, []
        for round_ in config.rounds:
            macs = config.features * (config.in_channels * round_.grid**2 + config.num_classes)
            total = total + macs if config.routable else macs
            after.append(total / 1e9)
        return after


for kind, name in (("test_pooled", "PooledConfig"), ("test_alternatives", "AlternativesConfig")):
    registry.register(kind, config=f"{__name__}:{name}", model=f"{__name__}:PooledModel")
