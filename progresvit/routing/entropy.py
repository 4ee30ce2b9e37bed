"""How unsure a prediction is. An image leaves after a round if its entropy is below the threshold (strictly)."""

import math

import numpy as np
import torch
from torch import Tensor

TOP = 10
HIGHEST = math.log(TOP)
"""Entropies lie between 0 and this."""


def top10_entropy(logits: Tensor) -> Tensor:
    """Entropy of the ten largest class probabilities, renormalised to sum to one: (B, K) -> (B,).

    In nats, so between 0 and ln 10; with fewer than ten classes, of all of them. In float32 whatever comes in. An image
    with a NaN or an infinity among its logits is infinitely unsure: no threshold lets it leave early.
    """
    values = logits.float()
    top = values.topk(min(TOP, values.shape[-1]), dim=-1).values  # (B, K) -> (B, 10)
    kept = top.softmax(dim=-1)  # renormalising the largest probabilities is a softmax over their logits
    entropy = torch.special.entr(kept).sum(dim=-1)  # (B, 10) -> (B,)
    return _unsure_unless_finite(values, entropy.clamp(max=_bound(top.shape[-1])))


def full_entropy(logits: Tensor) -> Tensor:
    """Entropy of all class probabilities: (B, K) -> (B,). Not what images are routed by, but kept in records."""
    values = logits.float()
    return _unsure_unless_finite(values, torch.special.entr(values.softmax(dim=-1)).sum(dim=-1))


def _unsure_unless_finite(values: Tensor, entropy: Tensor) -> Tensor:
    return entropy.where(values.isfinite().all(dim=-1), math.inf)


def _bound(classes: int) -> float:
    """The largest float32 that is not above ln(classes): rounding must not lift an entropy over its bound."""
    nearest = np.float32(math.log(classes))
    return float(nearest if nearest <= math.log(classes) else np.nextafter(nearest, np.float32(0)))
