"""The fused round against the folded one. Without a GPU the kernels run in Triton's interpreter, in a fresh process."""

import importlib.util

import pytest
import torch

from progresvit.config import ModelConfig, make_rounds, plain_vit
from progresvit.data.transforms import normalise
from progresvit.engine.fold import fold
from progresvit.model import ProgResViT
from tests.engine.conftest import SMALL
from tests.interpreter import interpret, report

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TINY = {"heads": 2, "depth": 1, "patch_size": 8, "num_classes": 12}  # the interpreter is slow
TINY_CONFIGS = {
    "three rounds": ModelConfig(rounds=make_rounds([8, 16, 24], [1, 1, 2]), **TINY),
    "same resolution": ModelConfig(rounds=make_rounds([16, 16], [1, 2]), **TINY),
    "patches of 6": ModelConfig(rounds=make_rounds([12, 18], [1, 2]), heads=2, depth=1, patch_size=6, num_classes=12),
}
CONFIGS = {
    "two rounds": ModelConfig(rounds=make_rounds([16, 32], [1, 3]), **SMALL),
    "three rounds": ModelConfig(rounds=make_rounds([16, 24, 32], [1, 2, 3]), **SMALL),
    "same resolution": ModelConfig(rounds=make_rounds([32, 32], [2, 3]), **SMALL),
    "one patch, then many": ModelConfig(rounds=make_rounds([8, 32], [1, 3]), **SMALL),
    "patches of 14": ModelConfig(rounds=make_rounds([14, 28], [1, 2]), heads=2, depth=1, patch_size=14, num_classes=12),
    "a plain ViT": plain_vit(resolution=32, heads=3, depth=2, patch_size=8, num_classes=12),
}


def random_model(config, device="cpu"):
    torch.manual_seed(3)
    model = ProgResViT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device)


@torch.no_grad()
def largest_differences(config, side, device, dtype, fp8=False, images=3, way="auto"):
    """Of the logits and tokens of each round, fused and folded."""
    from progresvit.engine.fused import FusedRound

    model = random_model(config, device)
    pixels = torch.randint(0, 256, (images, 3, side, side), dtype=torch.uint8).to(device)
    expected = found = None
    for folded in fold(model):
        before, found_before = (None if one is None else one.tokens for one in (expected, found))
        expected = folded(normalise(pixels, config), before)
        found = FusedRound(folded, config, side=side, dtype=dtype, fp8=fp8, way=way)(pixels, found_before)
        yield max(
            (found.logits.float() - expected.logits).abs().max().item(),
            (found.tokens.float() - expected.tokens).abs().max().item(),
        )


@pytest.fixture(scope="module")
def interpreted():
    return interpret(__name__)


def run_checks():
    """In the interpreter's process."""
    checks = {name: lambda name=name: check_rounds(TINY_CONFIGS[name]) for name in TINY_CONFIGS}
    report({**checks, "attention": check_attention, "gelu": check_gelu})


def check_rounds(config):
    worst = max(largest_differences(config, 29, "cpu", torch.float32, images=2))
    assert worst < 1e-4, worst


def check_attention():
    from progresvit.engine import kernels

    for tokens, heads in ((5, 1), (70, 2), (145, 1)):
        qkv = torch.randn(2, tokens, 3 * heads * 64)
        q, k, v = qkv.view(2, tokens, 3, heads, 64).permute(2, 0, 3, 1, 4)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        assert torch.allclose(kernels.attend(qkv, heads), expected, atol=1e-5)


def check_gelu():
    from progresvit.engine import kernels

    x = torch.linspace(-9, 9, 5000)
    y = torch.empty_like(x)
    kernels.gelu(x, y, 4.0)
    assert torch.allclose(y, torch.nn.functional.gelu(x, approximate="tanh").clamp(-4, 4), atol=1e-6)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_kernels_in_the_interpreter_equal_the_folded_round(interpreted, name):
    assert interpreted[name] == ""


@pytest.mark.slow
@needs_triton
def test_attention_in_the_interpreter_equals_torchs(interpreted):
    assert interpreted["attention"] == ""


@pytest.mark.slow
@needs_triton
def test_gelu_in_the_interpreter_is_torchs_tanh_form_and_clamped(interpreted):
    assert interpreted["gelu"] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_round_equals_the_folded_one_on_a_gpu(name):
    for side in (32, 41):
        assert max(largest_differences(CONFIGS[name], side, "cuda", torch.float32)) < 1e-4
        assert max(largest_differences(CONFIGS[name], side, "cuda", torch.float16, images=33)) < 0.1
        assert max(largest_differences(CONFIGS[name], side, "cuda", torch.bfloat16, images=33)) < 0.5
