"""Validation of features without a classifier: labelled training images vote on the validation images.

Letters: N images, K classes, d channels, S rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from progresvit import compute
from progresvit.data.augment.classification import Batch
from progresvit.distributed import Processes
from progresvit.metrics.knn import knn_votes, vote_logits
from progresvit.model.interface import RoundModel
from progresvit.routing import top10_entropy
from progresvit.routing.frontier import near_lossless
from progresvit.training.tasks.task import Metrics

CONVENTION: compute.Convention = "paper"


@torch.no_grad()
def knn_metrics(
    model: RoundModel,
    bank: Iterator[Batch],
    val: Iterator[Batch],
    *,
    processes: Processes,
    dtype: torch.dtype | None,
    k: int,
    temperature: float,
) -> Metrics:
    """Top-1 of the vote in each round, and of its near-lossless routed point; the last round's selects the best model.

    The vote's top-10 entropy is the uncertainty.

    Args:
        model: The model, whose class tokens are compared.
        bank: This process's share of the images that vote.
        val: This process's share of the validation images.
        processes: The processes of the run.
        dtype: Precision of autocast; None: float32.
        k: Number of neighbours.
        temperature: Of their weights.
    """
    cast(nn.Module, model).eval()
    known, targets = _features(model, bank, processes, dtype)
    asked, labels = _features(model, val, processes, dtype)
    classes = int(max(targets.max(), labels.max())) + 1
    entropies, hits = [], []
    for bank_tokens, tokens in zip(known, asked):
        votes = knn_votes(tokens, bank_tokens, targets, classes=classes, k=k, temperature=temperature)  # (N, K)
        entropies.append(top10_entropy(vote_logits(votes)))
        hits.append(votes.argmax(dim=1) == labels)
    scores, correct = (torch.stack(parts, dim=1).cpu().numpy() for parts in (entropies, hits))  # (N, S)
    gmacs, top1 = model.gmacs(CONVENTION), correct.mean(axis=0).tolist()
    values: dict[str, Any] = {
        "images": len(correct),
        "knn": top1,
        "near_lossless": asdict(near_lossless(scores, correct, gmacs)),
        "full_gmacs": gmacs[-1],
        "convention": CONVENTION,
    }
    return Metrics(primary=top1[-1], values=values)


def _features(
    model: RoundModel, batches: Iterator[Batch], processes: Processes, dtype: torch.dtype | None
) -> tuple[list[Tensor], Tensor]:
    """Class tokens of every round, and labels, of the images of all processes: S times (N, d), and (N,)."""
    tokens: list[list[Tensor]] = [[] for _ in model.config.rounds]
    targets = []
    for batch in batches:
        with torch.autocast(batch.images.device.type, dtype, enabled=dtype is not None):
            features = cast(Any, model).features(batch.images)
        for kept, round_ in zip(tokens, features):
            kept.append(round_.class_token.float())
        targets.append(batch.targets)
    mine = None
    if targets:
        mine = [torch.cat(kept).cpu().numpy() for kept in tokens], torch.cat(targets).cpu().numpy()
    shares = [share for share in processes.gather(mine) if share is not None]
    rounds = [np.concatenate([share[0][s] for share in shares]) for s in range(len(tokens))]
    labels = np.concatenate([share[1] for share in shares])
    device = processes.device
    return [torch.from_numpy(values).to(device) for values in rounds], torch.from_numpy(labels).to(device)
