"""Every round learns the labels and what a frozen teacher says of the very images that the student sees.

Hard, as the paper's: per round, (1 - w) CE(z, y) + w CE(z, argmax of the teacher), w = 1/2.

Soft: the teacher's whole answer, softened by a temperature t, (1 - w) CE(z, y) + w t² KL(teacher || student). With a
map, patch tokens learn too what the teacher sees at their place; they are asked through the same head as the class
token, so nothing is added to the model.

Letters: B images, K classes of the head, Y classes of the data, S rounds, d channels, g side of the patch grid, T side
of the teacher's map, P its places (T * T).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from progresvit.model import RoundOutput, slicing
from progresvit.training.supervised import soft_cross_entropy


class HardDistillation:
    """Labels and the label that a teacher gives."""

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


class SoftDistillation:
    """Labels and the whole answer of a teacher, for the image and, with ``map_weight``, for each place in it.

    ``head`` is the model's; ``rows`` are those of its rows that the data's labels are for, where the teacher tells more
    classes apart than the data has.
    """

    def __init__(
        self,
        teacher: nn.Module,
        head: nn.Linear,
        *,
        weight: float = 0.5,
        temperature: float = 1.0,
        map_weight: float = 0.0,
        rows: Tensor | None = None,
    ) -> None:
        self.teacher, self.head, self.rows = teacher.eval().requires_grad_(False), head, rows
        self.weight, self.temperature, self.map_weight = weight, temperature, map_weight

    @torch.no_grad()
    def targets(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The labels, the teacher's probabilities (B, K), and with a map those of its places (B, P, K)."""
        answer = self.teacher(images)  # (B, K), or with a map (B, P, K)
        if not self.map_weight:
            return labels, self._soften(answer)
        return labels, self._soften(answer.float().mean(dim=1)), self._soften(answer)

    def losses(self, outputs: Sequence[RoundOutput], *targets: Tensor) -> Tensor:
        """One loss per round: (S,)."""
        labels, taught, *places = targets
        losses = []
        for output in outputs:
            among = output.logits if self.rows is None else output.logits[:, self.rows]  # (B, K) -> (B, Y)
            loss = (1 - self.weight) * soft_cross_entropy(among, labels)
            loss = loss + self.weight * self._divergence(output.logits, taught)
            for place in places:
                loss = loss + self.map_weight * self._divergence(self.map_logits(output.tokens, place.shape[1]), place)
            losses.append(loss)
        return torch.stack(losses)

    def map_logits(self, tokens: Tensor, places: int) -> Tensor:
        """What the patch tokens say on the grid of the teacher's map: (B, 1 + g * g, d) -> (B, P, K)."""
        patches, side = tokens[:, 1:], math.isqrt(places)
        grid = math.isqrt(patches.shape[1])
        pooled = F.adaptive_avg_pool2d(patches.mT.unflatten(2, (grid, grid)), side)  # -> (B, d, T, T)
        return slicing.linear(pooled.flatten(2).mT, self.head)  # (B, d, T, T) -> (B, P, d) -> (B, P, K)

    def _soften(self, logits: Tensor) -> Tensor:
        return (logits.float() / self.temperature).softmax(dim=-1)

    def _divergence(self, logits: Tensor, taught: Tensor) -> Tensor:
        """t² KL(teacher || student), a mean over images and places; t² keeps its gradient's size at any temperature."""
        said = (logits.float() / self.temperature).log_softmax(dim=-1)
        divergence = F.kl_div(said.flatten(0, -2), taught.flatten(0, -2), reduction="batchmean")
        return self.temperature**2 * divergence
