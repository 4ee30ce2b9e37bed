"""The decision after a round for logits that are plain arrays, as hosts without torch have them.

The same rules as ``Policy.decide`` and the same numbers as ``routing.entropy``. Letters: B images, K classes, s a round
from 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from progresvit.routing.decide import Policy

Floats = NDArray[np.float32]
Marks = NDArray[np.bool_]

TOP = 10
HIGHEST = math.log(TOP)
"""Entropies lie between 0 and this."""


class Answers(NamedTuple):
    """What a round says of each image, and what happens to it; all (B,) but the classes, of which k are named."""

    leaves: Marks
    classes: NDArray[np.int64]
    """(B, k), the likeliest first; -1 where logits are not finite."""
    probabilities: Floats
    """(B, k), theirs; NaN where logits are not finite."""
    entropy: Floats
    """Top-10 entropy."""
    abstains: Marks
    """Leaves without an answer; never true where ``leaves`` is not."""

    @property
    def index(self) -> NDArray[np.int64]:  # type: ignore[override]  # nobody asks where in the tuple a value is
        """The likeliest class: (B,)."""
        return self.classes[:, 0]

    @property
    def probability(self) -> Floats:
        """Its probability: (B,)."""
        return self.probabilities[:, 0]


def top10_entropy(logits: NDArray[Any]) -> Floats:
    """As ``routing.top10_entropy``: (B, K) -> (B,), infinite where a logit is not finite."""
    values, finite = _finite(logits)
    count = min(TOP, values.shape[-1])
    top = np.partition(values, -count, axis=-1)[:, -count:].astype(np.float64)  # (B, K) -> (B, 10)
    logs = top - top.max(axis=-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=-1, keepdims=True))
    entropy = 0.0 - (np.exp(logs) * logs).sum(axis=-1)  # (B, 10) -> (B,); 0 and not -0 where all is sure
    bounded = np.clip(entropy.astype(np.float32), np.float32(0), np.float32(highest_entropy(count)))
    return np.where(finite, bounded, np.float32(np.inf))


def decide(policy: Policy, s: int, logits: NDArray[Any], temperature: float = 1.0, top_k: int = 1) -> Answers:
    """After round s: (B, K) -> answers. The temperature divides the logits of the reported probabilities alone."""
    if policy.router is None and policy.abstention.router is None:
        entropy = top10_entropy(logits)
        unsure = entropy >= np.float32(policy.abstention.entropy)  # in float32, as torch compares with a number
        if s == len(policy.thresholds):
            leaves = np.ones(len(entropy), bool)
        else:
            leaves = entropy.astype(np.float64) < policy.thresholds[s]  # the threshold must not be rounded
        abstains = leaves & unsure
    else:
        leaves, abstains, entropy = _decide_in_torch(policy, s, logits)
    classes, probabilities = _answers(logits, temperature, top_k)
    return Answers(leaves, classes, probabilities, entropy, abstains)


def highest_entropy(classes: int) -> float:
    """The largest float32 that is not above ln(classes): rounding must not lift an entropy over its bound."""
    nearest = np.float32(math.log(classes))
    above = float(nearest) > math.log(classes)  # as Python's numbers: numpy would round the logarithm to float32 too
    return float(np.nextafter(nearest, np.float32(0)) if above else nearest)


def _answers(logits: NDArray[Any], temperature: float, top_k: int) -> tuple[NDArray[np.int64], Floats]:
    """The likeliest classes and their probabilities: (B, K) -> (B, k) twice."""
    values, finite = _finite(logits)
    values = values / np.float32(temperature)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    probabilities = powers / powers.sum(axis=-1, keepdims=True)  # (B, K)
    classes = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]  # of equals, the first comes first
    found = np.take_along_axis(probabilities, classes, axis=-1)
    return np.where(finite[:, None], classes, -1), np.where(finite[:, None], found, np.float32(np.nan))


def _finite(logits: NDArray[Any]) -> tuple[Floats, Marks]:
    """In float32, zeros in the rows that are not finite throughout, and which rows are."""
    values = np.asarray(logits, np.float32)
    finite: Marks = np.asarray(np.isfinite(values).all(axis=-1))
    return np.where(finite[:, None], values, np.float32(0)).astype(np.float32, copy=False), finite


def _decide_in_torch(policy: Policy, s: int, logits: NDArray[Any]) -> tuple[Marks, Marks, Floats]:
    """Learned routers are torch modules."""
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            "a learned router needs torch, which is not installed; install torch, or route by entropy: "
            "a policy without routers."
        ) from error
    router = policy.router or policy.abstention.router
    assert router is not None
    found = policy.decide(s, torch.tensor(np.asarray(logits), device=next(router.parameters()).device))
    leaves, abstains, entropy = (one.cpu().numpy() for one in (found.leaves, found.abstains, found.entropy))
    return leaves, abstains, entropy
