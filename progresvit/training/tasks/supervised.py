"""Supervised training: every round learns the labels.

Letters: S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from progresvit.data.loader import Batch
from progresvit.model import RoundOutput
from progresvit.training.tasks.classification import Classification, soft_cross_entropy


class Supervised(Classification):
    """The cross entropy of every round with the mixed and smoothed labels, without early exit."""

    def losses(self, outputs: Sequence[RoundOutput], batch: Batch) -> Tensor:
        """(S,)"""
        return torch.stack([soft_cross_entropy(output.logits, batch.targets) for output in outputs])
