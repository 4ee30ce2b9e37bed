"""How unsure a prediction is. An image leaves after a round if its entropy is below the threshold (strictly)."""

import math

import torch
from torch import Tensor

from progresvit.routing.arrays import TOP, highest_entropy


def top10_entropy(logits: Tensor) -> Tensor:
    """Entropy of the ten largest class probabilities, renormalised to sum to one: (B, K) -> (B,).

    In nats, so between 0 and ln 10; with fewer than ten classes, of all of them. In float32 whatever comes in. An image
    with a NaN or an infinity among its logits is infinitely unsure: no threshold lets it leave early.
    """
    values = logits.float()
    top = values.topk(min(TOP, values.shape[-1]), dim=-1).values  # (B, K) -> (B, 10)
    kept = top.softmax(dim=-1)  # renormalising the largest probabilities is a softmax over their logits
    entropy = torch.special.entr(kept).sum(dim=-1)  # (B, 10) -> (B,)
    return _unsure_unless_finite(values, entropy.clamp(max=highest_entropy(top.shape[-1])))


def full_entropy(logits: Tensor) -> Tensor:
    """Entropy of all class probabilities: (B, K) -> (B,). Not what images are routed by, but kept in records."""
    values = logits.float()
    return _unsure_unless_finite(values, torch.special.entr(values.softmax(dim=-1)).sum(dim=-1))


def _unsure_unless_finite(values: Tensor, entropy: Tensor) -> Tensor:
    return entropy.where(values.isfinite().all(dim=-1), math.inf)
