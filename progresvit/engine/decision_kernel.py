"""The decisions and answers of a round in one Triton kernel, for policies of entropies only.

It computes what ``Policy.decide`` and the reported classes give in about thirty small kernels of torch. It runs on a
GPU, or on a CPU with ``TRITON_INTERPRET=1``. Letters: B images, K classes, k reported classes, s a round from 0.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from progresvit.routing import Policy
from progresvit.routing.scores import TOP, _largest_entropy

MOST_CLASSES = 4096
"""A program holds all logits of an image in registers."""
NUM_WARPS = 2


@triton.jit
def _decide(
    logits, packed, images, classes, stride, inverse_temperature, threshold, limit, largest,
    last: tl.constexpr, top: tl.constexpr, top_k: tl.constexpr, lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The column of an image: exits, entropy, abstains, out-of-distribution, its score, k classes, k probabilities."""
    image = tl.program_id(0)
    c = tl.arange(0, block)
    lowest = float("-inf")
    real = c < classes
    z = tl.load(logits + image.to(tl.int64) * stride + c, real, other=0).to(tl.float32)
    finite = tl.min((tl.abs(z) < float("inf")).to(tl.int32), 0) == 1  # false for NaN too
    scaled = z * inverse_temperature
    reported = tl.min((tl.abs(scaled) < float("inf")).to(tl.int32), 0) == 1

    held = tl.where(real & finite, z, lowest)  # without the logits that were taken
    lane = tl.arange(0, lanes)
    taken = tl.full((lanes,), lowest, tl.float32)  # the largest logits
    for rank in tl.static_range(top):
        value, index = tl.max(held, 0, return_indices=True)
        taken = tl.where(lane == rank, value, taken)
        held = tl.where(c == index, lowest, held)
    power = tl.where(finite & (lane < top), tl.exp(taken - tl.max(taken, 0)), 0.0)
    kept = power / tl.sum(power, 0)  # their probabilities, renormalised
    entropy = tl.sum(tl.where(kept > 0, -kept * tl.log(tl.where(kept > 0, kept, 1.0)), 0.0), 0)
    entropy = tl.where(finite, tl.minimum(tl.maximum(entropy, 0.0), largest), float("inf"))

    exits = (entropy < threshold) | last
    abstains = exits & (entropy >= limit)
    tl.store(packed + image, exits.to(tl.float32))
    tl.store(packed + images + image, entropy)
    tl.store(packed + 2 * images + image, abstains.to(tl.float32))
    tl.store(packed + 3 * images + image, 0.0)
    tl.store(packed + 4 * images + image, float("nan"))

    scaled = tl.where(real & reported, scaled, lowest)
    power = tl.where(real & reported, tl.exp(scaled - tl.max(scaled, 0)), 0.0)
    probability = tl.where(real, power / tl.sum(power, 0), -1.0)
    for rank in tl.static_range(top_k):
        value, index = tl.max(probability, 0, return_indices=True)  # of equals, the first
        probability = tl.where(c == index, -1.0, probability)
        tl.store(packed + (5 + rank) * images + image, tl.where(reported, index, -1).to(tl.float32))
        tl.store(packed + (5 + top_k + rank) * images + image, tl.where(reported, value, float("nan")))


def can_decide(policy: Policy, classes: int, top_k: int) -> bool:
    """Whether the kernel covers the policy: no routers, no out-of-distribution score, and not too many classes."""
    return not policy.routers and policy.ood is None and classes <= MOST_CLASSES and top_k <= min(TOP, classes)


def pack_decisions(policy: Policy, s: int, logits: Tensor, *, temperature: float, top_k: int = 1) -> Tensor:
    """Everything that the host needs after round s, in one tensor: (B, K) -> (5 + 2k, B)."""
    assert can_decide(policy, logits.shape[1], top_k)
    assert logits.stride(1) == 1
    images, classes = logits.shape
    packed = torch.empty(5 + 2 * top_k, images, device=logits.device, dtype=torch.float32)
    last, top = s == len(policy.thresholds), min(TOP, classes)
    _decide[(images,)](
        logits, packed, images, classes, logits.stride(0), float(np.float32(1) / np.float32(temperature)),
        0.0 if last else as_float32_limit(policy.thresholds[s]), as_float32_limit(policy.abstention.entropy),
        _largest_entropy(top), last, top, top_k, 16, triton.next_power_of_2(classes), num_warps=NUM_WARPS,
    )  # fmt: skip
    return packed


def as_float32_limit(limit: float) -> float:
    """The smallest float32 that is not below the limit: a float32 is below both, or below neither."""
    with np.errstate(over="ignore"):
        nearest = np.float32(limit)
    return float(np.nextafter(nearest, np.float32(np.inf)) if float(nearest) < limit else nearest)
