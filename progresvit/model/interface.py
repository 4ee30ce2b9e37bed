"""RoundModel: what training, evaluation, records, routing and analysis require of a model.

Letters: B images, C image channels, H side of the images, K classes, N tokens, d channels, S rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from progresvit.compute import Convention
from progresvit.config import BaseConfig
from progresvit.model.outputs import RoundOutput


class RoundModel(nn.Module, ABC):
    """A model that predicts in rounds.

    A subclass is built from its config, ``Model(config, drop_path=0.1)``, on ``torch.device("meta")`` as on any other.
    The config and the ``state_dict`` are all that a model folder holds. Register the kind of a model to save and load
    it: :func:`progresvit.model.registry.register`.

    It is an ``nn.Module`` and not a ``Protocol`` because optimizers, averages and checkpoints need a module. Training
    uses ``no_weight_decay()``, ``set_grad_checkpointing()`` and ``blocks`` of models that have them.
    """

    config: BaseConfig

    @abstractmethod
    def forward(self, images: Tensor) -> tuple[RoundOutput, ...]:
        """Every round, first to last, with no early exit: (B, C, H, H) -> S outputs."""

    @abstractmethod
    def run_round(self, s: int, images: Tensor, previous: Tensor | None = None) -> RoundOutput:
        """Round s, counted from 0.

        ``previous`` holds the tokens of round s - 1. Round 0 takes none, and neither do rounds that are alternatives
        of each other (``config.routable`` is false).
        """

    @abstractmethod
    def gmacs(self, convention: Convention = "paper") -> list[float]:
        """GMACs spent on an image that exits after each round, one number per round."""
