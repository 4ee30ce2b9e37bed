"""The precisions that a model runs in: weights stay float32, autocast lowers the rest."""

from __future__ import annotations

import torch

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """A context in which the model runs in the named precision."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; choose {', '.join(PRECISIONS)}.")
    if precision == "fp16" and device.type != "cuda":
        raise ValueError("fp16 needs a CUDA device; use bf16 or fp32.")
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)
