"""Every round learns the labels: the plain mean over rounds of the soft-target cross entropy, with no early exit.

Letters: B images, K classes, S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from progresvit.model import RoundOutput


class Supervised:
    """Labels alone."""

    def targets(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """What ``losses`` compares with; made without gradients and outside of the compiled step."""
        return (labels,)

    def losses(self, outputs: Sequence[RoundOutput], *targets: Tensor) -> Tensor:
        """One loss per round: (S,). Labels are (B, K), mixed and smoothed."""
        (labels,) = targets
        return torch.stack([soft_cross_entropy(output.logits, labels) for output in outputs])


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of -sum_k y_k log p_k, in float32."""
    return F.cross_entropy(logits.float(), labels)
