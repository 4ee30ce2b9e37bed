"""The precisions that a model runs in: weights stay float32, autocast and TF32 lower the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of autocast, or None without it."""


def check_precision(device: torch.device, precision: str) -> None:
    """Refuse an unknown precision, and one that the device does not have."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; choose {', '.join(PRECISIONS)}.")
    if precision == "fp16" and device.type != "cuda":
        raise ValueError("fp16 needs a CUDA device; use bf16 or fp32.")
    if precision == "tf32" and not has_tf32(device):
        raise ValueError("tf32 needs an NVIDIA GPU of compute capability 8.0 (A100) or newer; use fp32.")


def has_tf32(device: torch.device) -> bool:
    """Whether the device has TF32: elsewhere torch computes in float32 and does not say so."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """A context in which the model runs in the named precision. Engines use it, several at a time in one process.

    TF32 is a setting of the whole process, so engines do not have it.
    """
    if precision == "tf32":
        raise ValueError("tf32 is for training and evaluation; an engine runs in fp32, bf16, fp16 or fp8.")
    check_precision(device, precision)
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """Within this context, float32 matrix products run in TF32 if the precision is tf32; others are not changed."""
    before = torch.get_float32_matmul_precision()
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
