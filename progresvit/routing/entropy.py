"""How unsure a prediction is. An image leaves after a round if its entropy is below the threshold (strictly)."""

import torch
from torch import Tensor

TOP = 10


def top10_entropy(logits: Tensor) -> Tensor:
    """Entropy of the ten largest class probabilities, renormalised to sum to one: (B, K) -> (B,).

    In nats, so between 0 and ln 10; with fewer than ten classes, of all of them. In float32 whatever comes in.
    """
    top = logits.float().topk(min(TOP, logits.shape[-1]), dim=-1).values  # (B, K) -> (B, 10)
    kept = top.softmax(dim=-1)  # renormalising the largest probabilities is a softmax over their logits
    entropy: Tensor = torch.special.entr(kept).sum(dim=-1)  # (B, 10) -> (B,)
    return entropy
