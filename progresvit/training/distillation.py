"""Every round learns the labels and what a frozen teacher says, on the same logits.

Hard distillation as the paper's: per round, (1 - w) CE(z, y) + w CE(z, argmax of the teacher), w = 1/2.

Letters: B images, K classes, S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from progresvit.model import RoundOutput
from progresvit.training.supervised import soft_cross_entropy


class Distillation:
    """Labels and a teacher's hard label."""

    def __init__(self, teacher: nn.Module, *, weight: float = 0.5) -> None:
        self.teacher, self.weight = teacher.eval().requires_grad_(False), weight

    @torch.no_grad()
    def targets(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The labels, and the teacher's label for the very images that the student sees: (B,)."""
        return labels, self.teacher(images).argmax(dim=-1)

    def losses(self, outputs: Sequence[RoundOutput], *targets: Tensor) -> Tensor:
        """One loss per round: (S,)."""
        labels, teacher_labels = targets
        return torch.stack(
            [
                (1 - self.weight) * soft_cross_entropy(output.logits, labels)
                + self.weight * F.cross_entropy(output.logits.float(), teacher_labels)
                for output in outputs
            ]
        )
