"""Precisions that a machine lacks are refused, and TF32 is on only where it was asked for."""

import pytest
import torch

import progresvit
from progresvit.model import precision


def test_tf32_is_on_within_the_context_alone_and_off_after_an_error():
    before = torch.get_float32_matmul_precision()
    seen = []

    def fail():
        with precision.matrix_products("tf32"):
            seen.append(torch.get_float32_matmul_precision())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == before
    with precision.matrix_products("bf16"):
        assert torch.get_float32_matmul_precision() == before


def test_a_gpu_that_is_too_old_for_tf32_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(ValueError, match=r"compute capability 8\.0 \(A100\) or newer; use fp32"):
        precision.check_precision(torch.device("cuda"), "tf32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    precision.check_precision(torch.device("cuda"), "tf32")


def test_an_engine_has_no_tf32():
    with pytest.raises(ValueError, match="tf32 is for training and evaluation; an engine runs in fp32, bf16, fp16"):
        progresvit.Engine(threshold=0.5, precision="tf32")
