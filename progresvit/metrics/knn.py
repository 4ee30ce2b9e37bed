"""Weighted k-nearest-neighbour votes from features, by cosine similarity.

The similarities of all queries to all images of the bank are never in memory at once: the bank is read block by block,
and each query keeps the k nearest images so far. Besides its inputs, ``knn_votes`` needs memory for the normalised
queries (N d), for one block of similarities (``QUERY_BLOCK`` times ``BANK_BLOCK``) and for the votes (N K).

Letters: N queries, M images of the bank, d channels, K classes, n and m a block of queries and of the bank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 4096
BANK_BLOCK = 16384
"""Queries and images of the bank that are compared at a time: 256 MiB of similarities."""

VOTE_FLOOR = 1e-12
"""Share of a class without votes, so that its logarithm is finite. A thousand such classes add 3e-8 to an entropy and
1e-9 to the sum of the shares, less than float32 resolves next to 1."""


@torch.no_grad()
def knn_votes(
    queries: Tensor,
    bank: Tensor,
    targets: Tensor,
    *,
    classes: int,
    k: int = 20,
    temperature: float = 0.07,
    query_block: int = QUERY_BLOCK,
    bank_block: int = BANK_BLOCK,
) -> Tensor:
    """Share of the votes of each class, in float32, on the device of the queries: (N, d), (M, d), (M,) -> (N, K).

    Each of the k nearest images of the bank votes for its class with the weight exp(similarity / temperature). The
    votes of a query sum to 1; they are NaN for a query whose features are not finite.

    Args:
        queries: Features of the images to classify.
        bank: Features of the labelled images. They may be on another device and are moved block by block.
        targets: Classes of the labelled images.
        classes: Number of classes.
        k: Number of neighbours.
        temperature: A lower one gives the nearest of them more weight.
        query_block: Queries that are compared at a time.
        bank_block: Images of the bank that are compared at a time.
    """
    check_knn(len(bank), k=k, temperature=temperature)
    if queries.shape[1:] != bank.shape[1:] or targets.shape != bank.shape[:1]:
        raise ValueError(
            f"queries {tuple(queries.shape)}, bank {tuple(bank.shape)} and targets {tuple(targets.shape)} do not fit; "
            "give (N, d), (M, d) and (M,), with features of one model and one round."
        )
    lowest, highest = targets.aminmax()
    if lowest < 0 or highest >= classes:
        raise ValueError(
            f"the targets of the bank go from {int(lowest)} to {int(highest)}, and classes from 0 to {classes - 1}; "
            "leave out images without a label, or raise the number of classes."
        )
    similarities, neighbours = nearest(queries, bank, k, query_block, bank_block)  # (N, k) each
    weights = ((similarities - similarities[:, :1]) / temperature).exp()  # the largest is 1, so none overflows
    weights /= weights.sum(dim=1, keepdim=True)
    labels = targets.to(queries.device, torch.int64)[neighbours]  # (M,) -> (N, k)
    votes = torch.zeros(len(queries), classes, device=queries.device)
    for rank in range(k):  # one class of each row at a time: the sum has the same order on every device
        votes.scatter_add_(1, labels[:, rank : rank + 1], weights[:, rank : rank + 1])
    return votes.where(similarities.isfinite().all(dim=1, keepdim=True), torch.nan)


def vote_logits(votes: Tensor) -> Tensor:
    """Shares of votes as logits, whose softmax they are: (N, K) -> (N, K)."""
    return votes.clamp(min=VOTE_FLOOR).log()


def check_knn(images: int, *, k: int, temperature: float) -> None:
    """Refuse numbers that give no vote; ``images`` is the size of the bank."""
    if k < 1 or not temperature > 0:
        raise ValueError(f"k is at least 1 and the temperature above 0, not {k} and {temperature:g}.")
    if images < k:
        raise ValueError(
            f"the bank has {images} images, fewer than k = {k}; add images to it, or use a k of at most {images}."
        )


def nearest(
    queries: Tensor, bank: Tensor, k: int, query_block: int = QUERY_BLOCK, bank_block: int = BANK_BLOCK
) -> tuple[Tensor, Tensor]:
    """The highest cosine similarities and the indices of their images, in descending order: (N, k) twice.

    If images of different blocks have equal similarities, the earlier block comes first. Within a block torch's topk
    decides.
    """
    device = queries.device
    rows = F.normalize(queries.float(), dim=1)  # (N, d)
    best = torch.full((len(rows), k), -torch.inf, device=device)
    index = torch.zeros((len(rows), k), dtype=torch.int64, device=device)
    for start in range(0, len(bank), bank_block):
        columns = F.normalize(bank[start : start + bank_block].to(device).float(), dim=1)  # (m, d)
        if not columns.isfinite().all():
            raise ValueError("features of the bank are NaN or infinite; compute them in fp32, or check the model.")
        for first in range(0, len(rows), query_block):
            block = slice(first, first + query_block)
            similarity = rows[block] @ columns.mT  # (n, d), (d, m) -> (n, m)
            values, indices = similarity.topk(min(k, len(columns)), dim=1)  # (n, m) -> (n, k) twice
            values = torch.cat([best[block], values], dim=1)  # (n, k) twice -> (n, 2k)
            indices = torch.cat([index[block], indices + start], dim=1)
            order = values.argsort(dim=1, descending=True, stable=True)[:, :k]  # (n, 2k) -> (n, k)
            best[block], index[block] = values.gather(1, order), indices.gather(1, order)
    return best, index
