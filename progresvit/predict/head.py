"""Predictions of a model's classification head: every round of a batch, as columns.

Letters: B images, S rounds, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from progresvit.model.interface import RoundModel
from progresvit.routing import full_entropy, logit_statistics, top10_entropy

TOP5 = 5

MakeColumns = Callable[..., dict[str, Tensor]]
"""Makes columns, (B, S, …) each, from the logits of every round, S times (B, K), and the labels, (B,) or None."""


class Predictor(Protocol):
    """Predicts images in every round. The validation of a training and an evaluation keep the columns of all batches.

    The head, nearest neighbours, a linear probe and a segmentation decoder are predictors.
    """

    def columns(self, images: Any, targets: Any) -> dict[str, Any]:
        """Arrays or tensors by name, one row per image.

        Args:
            images: A batch as the predictor takes it, such as normalised images (B, C, H, W).
            targets: Their labels, such as classes (B,); None without labels.
        """
        ...


class Head:
    """The predictor of a model's own head.

    Args:
        model: It is in evaluation mode.
        dtype: Precision of autocast; None: float32.
        make: Makes the columns from the logits.
    """

    def __init__(self, model: RoundModel, *, dtype: torch.dtype | None = None, make: MakeColumns) -> None:
        self.model, self.dtype, self.make = model, dtype, make

    def columns(self, images: Tensor, targets: Tensor | None) -> dict[str, Tensor]:
        with torch.autocast(images.device.type, self.dtype, enabled=self.dtype is not None):
            logits = [output.logits for output in self.model(images)]
        return self.make(logits, targets=targets)


def score_columns(rounds: Sequence[Tensor], targets: Tensor) -> dict[str, Tensor]:
    """The columns that a validation needs: entropies and whether predictions are correct, (B, S) each."""
    return {
        "top10_entropy": torch.stack([top10_entropy(logits) for logits in rounds], dim=1),
        "correct": torch.stack([logits.argmax(dim=-1) == targets for logits in rounds], dim=1),
    }


def record_columns(
    rounds: Sequence[Tensor],
    classes: Sequence[int] | None = None,
    targets: Tensor | None = None,
    *,
    keep_logits: bool = False,
) -> dict[str, Tensor]:
    """The columns of records: S tensors of logits (B, K) -> columns by name, each (B, S, ...).

    With ``classes``, predictions choose only among them, and the probability of the label is one among them; entropies
    and statistics are of all classes. ``targets`` are the labels (B,), if there are any.
    """
    columns: dict[str, list[Tensor]] = {}
    for logits in rounds:
        values = logits.float()
        labels, probabilities = _top5(values, classes)
        round_columns = {
            "top5_labels": labels,
            "top5_probabilities": probabilities,
            "top10_entropy": top10_entropy(values),
            "entropy": full_entropy(values),
            "statistics": logit_statistics(values),
        }
        if targets is not None:
            round_columns["log_probability"] = _log_probability(values, classes, targets)
        if keep_logits:
            round_columns["logits"] = values
        for name, column in round_columns.items():
            columns.setdefault(name, []).append(column)
    return {name: torch.stack(parts, dim=1) for name, parts in columns.items()}  # S times (B, ...) -> (B, S, ...)


def _top5(logits: Tensor, classes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """The likeliest classes and their probabilities: (B, K) -> (B, 5) twice, padded with -1 and NaN."""
    numbers = torch.arange(logits.shape[-1]) if classes is None else torch.tensor(classes)
    numbers = numbers.to(logits.device)
    candidates = logits[:, numbers]
    probabilities, ranks = candidates.softmax(dim=-1).topk(min(TOP5, len(numbers)), dim=-1)
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    missing = (0, TOP5 - ranks.shape[1])
    return (
        F.pad(numbers[ranks].where(finite, -1), missing, value=-1),
        F.pad(probabilities.where(finite, torch.nan), missing, value=torch.nan),
    )


def _log_probability(logits: Tensor, classes: Sequence[int] | None, targets: Tensor) -> Tensor:
    """Natural logarithm of the label's probability: (B, K), (B,) -> (B,), NaN where logits are not finite."""
    finite = logits.isfinite().all(dim=-1)
    if classes is not None:
        excluded = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
        excluded[list(classes)] = False
        logits = logits.masked_fill(excluded, -torch.inf)
    of_label = logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]  # (B, K) -> (B,)
    return of_label.where(finite, torch.nan)
