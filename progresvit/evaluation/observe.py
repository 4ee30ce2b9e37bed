"""From the logits of all rounds to one batch of records.

Letters: B images, S rounds, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from progresvit.evaluation.records import TOP
from progresvit.routing import full_entropy, logit_statistics, top10_entropy

Observed = dict[str, Tensor]
"""Columns of records by name, each (B, S, ...)."""


def observe(rounds: Sequence[Tensor], classes: Sequence[int] | None = None, *, keep_logits: bool = False) -> Observed:
    """Everything that records keep of a batch: S tensors of logits (B, K) -> columns.

    With ``classes`` given, predictions choose among them alone; entropies and statistics see all classes.
    """
    columns: dict[str, list[Tensor]] = {}
    for logits in rounds:
        values = logits.float()
        labels, probabilities = _top5(values, classes)
        found = {
            "top5_labels": labels,
            "top5_probabilities": probabilities,
            "top10_entropy": top10_entropy(values),
            "entropy": full_entropy(values),
            "statistics": logit_statistics(values),
        }
        if keep_logits:
            found["logits"] = values
        for name, column in found.items():
            columns.setdefault(name, []).append(column)
    return {name: torch.stack(parts, dim=1) for name, parts in columns.items()}  # S times (B, ...) -> (B, S, ...)


def _top5(logits: Tensor, classes: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """The likeliest classes and their probabilities: (B, K) -> (B, 5) twice, filled up with -1 and NaN."""
    numbers = torch.arange(logits.shape[-1]) if classes is None else torch.tensor(classes)
    numbers = numbers.to(logits.device)
    candidates = logits[:, numbers]
    probabilities, ranks = candidates.softmax(dim=-1).topk(min(TOP, len(numbers)), dim=-1)
    finite = logits.isfinite().all(dim=-1, keepdim=True)
    labels = numbers[ranks].where(finite, -1)
    probabilities = probabilities.where(finite, torch.nan)
    missing = TOP - labels.shape[1]
    return (
        torch.nn.functional.pad(labels, (0, missing), value=-1),
        torch.nn.functional.pad(probabilities, (0, missing), value=torch.nan),
    )
