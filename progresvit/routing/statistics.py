"""What a learned router sees of a round: 23 numbers that sum up the logits.

The paper names them in kind only (top-10 and full entropy, confidence and logit margins, distribution moments, leading
probabilities and logits); these are ours. Letters: B images, K classes, z logits and p probabilities in falling order.
"""

import torch
from torch import Tensor

from progresvit.routing.scores import full_entropy, top10_entropy

LEADING = 5

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
    "collision",  # the sum of p squared: how likely two draws agree
    "top10_mass",
    *(f"probability_{rank}" for rank in range(1, LEADING + 1)),
    *(f"logit_{rank}" for rank in range(1, LEADING + 1)),
)
"""What a learned router sees of a round, by name."""


def logit_statistics(logits: Tensor) -> Tensor:
    """The statistics of a round's logits, in the order of ``STATISTICS``, in float32: (B, K) -> (B, 23).

    With fewer than five classes the missing probabilities are 0 and the missing logits equal the smallest. Where a
    logit is NaN or infinite, so is every statistic: NaN.
    """
    values = logits.float()
    z = values.sort(dim=-1, descending=True).values  # (B, K)
    p = z.softmax(dim=-1)
    centred = z - z.mean(dim=-1, keepdim=True)
    deviation = centred.square().mean(dim=-1).sqrt()
    scaled = centred / deviation.clamp(min=1e-6).unsqueeze(-1)
    leading_z, leading_p = _leading(z, fill=z[:, -1:]), _leading(p, fill=torch.zeros_like(p[:, :1]))  # (B, 5) each
    numbers = [
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
    statistics = torch.stack(numbers, dim=-1)  # 23 times (B,) -> (B, 23)
    return statistics.where(values.isfinite().all(dim=-1, keepdim=True), torch.nan)


def _leading(falling: Tensor, fill: Tensor) -> Tensor:
    """The first five of each row, filled up where there are fewer: (B, K) -> (B, 5)."""
    missing = max(0, LEADING - falling.shape[-1])
    return torch.cat([falling[:, :LEADING], fill.expand(-1, missing)], dim=-1)
