"""How uncertain a prediction is: top-10 entropy, full entropy, the entropies of patches for segmentation, the
statistics that a learned router takes, and scores that tell out-of-distribution images.

Importing this needs no torch: arrays are scored with numpy, tensors with torch. Letters: B images, K classes, z logits
and p probabilities in descending order, g side of the patch grid, P patches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from progresvit.io.parse import did_you_mean
from progresvit.metrics.arrays import Bools, Float32s

if TYPE_CHECKING:
    from torch import Tensor


TOP = 10
HIGHEST = math.log(TOP)
"""The upper bound of a top-10 entropy."""
LEADING = 5
UNCERTAIN_SHARE = 0.1
"""The share of the patches, the most uncertain ones, that gives the score of an image in segmentation."""

STATISTICS = (
    "top10_entropy",
    "full_entropy",
    "probability_margin_1_2",  # p1 - p2
    "probability_margin_2_3",
    "logit_margin_1_2",  # z1 - z2
    "logit_margin_2_3",
    "logit_mean",
    "logit_deviation",
    "logit_skewness",
    "logit_kurtosis",
    "log_sum_exp",
    "collision",  # the sum of p squared: the probability that two draws agree
    "top10_mass",
    *(f"probability_{rank}" for rank in range(1, LEADING + 1)),
    *(f"logit_{rank}" for rank in range(1, LEADING + 1)),
)
"""Names of the statistics. The paper names their kinds only (top-10 and full entropy, confidence and logit margins,
distribution moments, leading probabilities and logits); this selection is ours."""

OODScore = Literal["energy", "max-logit", "msp", "entropy"]
OOD_SCORES: tuple[OODScore, ...] = get_args(OODScore)
"""Scores that tell out-of-distribution images: the negative free energy, which is the logsumexp of the logits (Liu et
al. 2020), the maximum logit (Hendrycks et al. 2022), the maximum softmax probability (Hendrycks and Gimpel 2017), and
the negative top-10 entropy for comparison. A higher score means more in-distribution."""
DEFAULT_OOD_SCORE: OODScore = "energy"


@overload
def top10_entropy(logits: Tensor) -> Tensor: ...
@overload
def top10_entropy(logits: NDArray[Any]) -> Float32s: ...
def top10_entropy(logits: Any) -> Any:
    """Entropy of the ten largest class probabilities, renormalised to sum to one: (B, K) -> (B,).

    The entropy is in nats, so between 0 and ln 10. With fewer than ten classes it covers all of them. The result is
    float32 for any input type. It is infinite where a logit is NaN or infinite, so such an image never exits early.
    Arrays and tensors agree to 1e-6.
    """
    count = min(TOP, logits.shape[-1])
    if not isinstance(logits, np.ndarray):
        import torch

        values = logits.float()
        kept = values.topk(count, dim=-1).values.softmax(dim=-1)  # (B, K) -> (B, 10); their softmax sums to one
        entropy = torch.special.entr(kept).sum(dim=-1).clamp(max=_largest_entropy(count))  # (B, 10) -> (B,)
        return entropy.where(values.isfinite().all(dim=-1), math.inf)
    values, finite = finite_rows(logits)
    top = np.partition(values, -count, axis=-1)[:, -count:].astype(np.float64)  # (B, K) -> (B, 10)
    logs = top - top.max(axis=-1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(axis=-1, keepdims=True))
    entropy = 0.0 - (np.exp(logs) * logs).sum(axis=-1)  # (B, 10) -> (B,); 0 and not -0 for a certain prediction
    bounded = np.clip(entropy.astype(np.float32), np.float32(0), np.float32(_largest_entropy(count)))
    return np.where(finite, bounded, np.float32(np.inf))


@overload
def ood_score(name: OODScore, logits: Tensor) -> Tensor: ...
@overload
def ood_score(name: OODScore, logits: NDArray[Any]) -> Float32s: ...
def ood_score(name: OODScore, logits: Any) -> Any:
    """A score of ``OOD_SCORES``, higher for more in-distribution images: (B, K) -> (B,), in float32.

    It is minus infinity where a logit is NaN or infinite, so such an image is out-of-distribution. Arrays and tensors
    agree to rounding.
    """
    check_ood_score(name)
    if name == "entropy":
        return -top10_entropy(logits)
    if not isinstance(logits, np.ndarray):
        values = logits.float()
        if name == "max-logit":
            score = values.amax(dim=-1)
        else:
            score = values.logsumexp(dim=-1) if name == "energy" else values.softmax(dim=-1).amax(dim=-1)
        return score.where(values.isfinite().all(dim=-1), -math.inf)
    values, finite = finite_rows(logits)
    highest = values.max(axis=-1)
    total = np.exp(values - highest[:, None]).sum(axis=-1)  # 1 or more
    score = {"energy": highest + np.log(total), "max-logit": highest, "msp": 1 / total}[name]
    return np.where(finite, score, np.float32(-np.inf)).astype(np.float32, copy=False)


def recorded_ood_score(name: OODScore, statistics: ArrayLike) -> Float32s:
    """The out-of-distribution score from the statistics of records: (…, 23) -> (…,)."""
    check_ood_score(name)
    column = {"energy": "log_sum_exp", "max-logit": "logit_1", "msp": "probability_1", "entropy": "top10_entropy"}[name]
    values = np.asarray(statistics, np.float32)[..., STATISTICS.index(column)]
    return np.where(np.isfinite(values), -values if name == "entropy" else values, np.float32(-np.inf))


def check_ood_score(name: str) -> None:
    """Refuse an unknown name of a score."""
    if name not in OOD_SCORES:
        raise ValueError(f"unknown out-of-distribution score {name!r}; {did_you_mean(name, OOD_SCORES)}")


def full_entropy(logits: Tensor) -> Tensor:
    """Entropy of all class probabilities: (B, K) -> (B,). Kept in records; exits do not depend on it."""
    import torch

    values = logits.float()
    entropy: Tensor = torch.special.entr(values.softmax(dim=-1)).sum(dim=-1)
    return entropy.where(values.isfinite().all(dim=-1), math.inf)


def patch_entropy(logits: Tensor) -> Tensor:
    """Entropy of all class probabilities of every patch: (B, K, g, g) -> (B, g * g).

    The entropy is in nats, so between 0 and ln K. The result is float32 for any input type. It is infinite where a
    logit of the patch is NaN or infinite.
    """
    import torch

    values = logits.float().flatten(2).mT  # (B, K, g, g) -> (B, g * g, K)
    entropy: Tensor = torch.special.entr(values.softmax(dim=-1)).sum(dim=-1)  # (B, g * g, K) -> (B, g * g)
    return entropy.clamp(max=_largest_entropy(values.shape[-1])).where(values.isfinite().all(dim=-1), math.inf)


def uncertain_entropy(entropy: Tensor) -> Tensor:
    """Mean entropy of the most uncertain 10 % of the patches, rounded up: (..., P) -> (...), in float32.

    It is infinite if the entropy of a patch is, so such an image never exits early.
    """
    import torch

    count = max(1, math.ceil(UNCERTAIN_SHARE * entropy.shape[-1] - 1e-9))  # 0.1 * 30 is a little more than 3
    top = entropy.float().topk(count, dim=-1).values  # (..., P) -> (..., count), in descending order
    return torch.minimum(top.mean(dim=-1), top[..., 0])  # rounding must not lift the mean over the largest


def logit_statistics(logits: Tensor) -> Tensor:
    """The statistics of a round's logits, in the order of ``STATISTICS``, in float32: (B, K) -> (B, 23).

    With fewer than five classes the missing probabilities are 0 and the missing logits equal the smallest. All
    statistics of an image are NaN if one of its logits is NaN or infinite.
    """
    import torch

    values = logits.float()
    z = values.sort(dim=-1, descending=True).values  # (B, K)
    p = z.softmax(dim=-1)
    centred = z - z.mean(dim=-1, keepdim=True)
    deviation = centred.square().mean(dim=-1).sqrt()
    scaled = centred / deviation.clamp(min=1e-6).unsqueeze(-1)
    missing = max(0, LEADING - z.shape[-1])
    leading_z = torch.cat([z[:, :LEADING], z[:, -1:].expand(-1, missing)], dim=-1)  # (B, K) -> (B, 5)
    leading_p = torch.cat([p[:, :LEADING], torch.zeros_like(p[:, :1]).expand(-1, missing)], dim=-1)
    columns = [
        top10_entropy(values),
        full_entropy(values),
        leading_p[:, 0] - leading_p[:, 1],
        leading_p[:, 1] - leading_p[:, 2],
        leading_z[:, 0] - leading_z[:, 1],
        leading_z[:, 1] - leading_z[:, 2],
        z.mean(dim=-1),
        deviation,
        scaled.pow(3).mean(dim=-1),
        scaled.pow(4).mean(dim=-1),
        z.logsumexp(dim=-1),
        p.square().sum(dim=-1),
        p[:, :10].sum(dim=-1),
        *leading_p.unbind(dim=-1),
        *leading_z.unbind(dim=-1),
    ]
    statistics = torch.stack(columns, dim=-1)  # 23 times (B,) -> (B, 23)
    return statistics.where(values.isfinite().all(dim=-1, keepdim=True), torch.nan)


def finite_rows(logits: NDArray[Any]) -> tuple[Float32s, Bools]:
    """The logits in float32 with zeros in rows that are not finite throughout, and which rows are finite."""
    values = np.asarray(logits, np.float32)
    finite: Bools = np.asarray(np.isfinite(values).all(axis=-1))
    return np.where(finite[:, None], values, np.float32(0)).astype(np.float32, copy=False), finite


def _largest_entropy(classes: int) -> float:
    """The largest float32 that is not above ln(classes): rounding must not lift an entropy over its bound."""
    nearest = np.float32(math.log(classes))
    above = float(nearest) > math.log(classes)  # as Python floats: numpy would round the logarithm to float32 too
    return float(np.nextafter(nearest, np.float32(0)) if above else nearest)
