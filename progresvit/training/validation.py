"""Top-1 of every round and of the near-lossless routed point, while training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from progresvit import compute
from progresvit.data.loader import Batch
from progresvit.distributed import Processes
from progresvit.model import ProgResViT
from progresvit.routing import top10_entropy
from progresvit.routing.frontier import near_lossless

CONVENTION: compute.Convention = "paper"


@torch.no_grad()
def validate(
    model: ProgResViT, batches: Iterable[Batch], *, processes: Processes, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Every process brings its share of the pictures; all get the result."""
    model.eval()
    entropy, correct = [], []
    for images, targets in batches:
        with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
            outputs = model(images)
        entropy.append(torch.stack([top10_entropy(output.logits) for output in outputs], dim=1))  # (B, S)
        correct.append(torch.stack([output.logits.argmax(dim=-1) == targets for output in outputs], dim=1))  # (B, S)
    mine = (torch.cat(entropy).cpu().numpy(), torch.cat(correct).cpu().numpy()) if entropy else None
    shares = [share for share in processes.gather(mine) if share is not None]
    scores, hits = (np.concatenate([share[part] for share in shares]) for part in (0, 1))
    gmacs = compute.cumulative_gmacs(model.config, CONVENTION)
    return {
        "images": len(hits),
        "top1": hits.mean(axis=0).tolist(),
        "near_lossless": asdict(near_lossless(scores, hits, gmacs)),
        "full_gmacs": gmacs[-1],
        "convention": CONVENTION,
    }
