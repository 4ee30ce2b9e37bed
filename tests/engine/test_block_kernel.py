"""The kernels of a 16-bit round's blocks. Without a GPU they run in Triton's interpreter, in a fresh process."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from progresvit.config import ModelConfig, make_rounds
from progresvit.model.blocks import NORM_EPS
from tests.engine.test_kernels import largest_differences, needs_triton
from tests.interpreter import interpret, report

CASES = {  # width, rows, whether a block follows, type, tolerance; the interpreter cannot multiply bfloat16
    "64 channels": (64, 20, True, torch.float32, 1e-4),
    "128 channels, the last block": (128, 16, False, torch.float32, 1e-4),
    "192 channels": (192, 21, True, torch.float32, 1e-4),
    "192 channels in float16": (192, 5, True, torch.float16, 2e-2),
    "384 channels": (384, 3, True, torch.float32, 1e-4),
}
NARROW = ModelConfig(rounds=make_rounds([8, 16], [1, 2]), heads=2, depth=2, patch_size=8, num_classes=12)
WAYS = ("block kernel", "few rows", "auto")
REAL = ModelConfig(rounds=make_rounds([192, 240], [3, 6]), heads=6, depth=3, num_classes=100)


def random_layers(d, device="cpu"):
    """Weight (outputs, inputs) and bias by name, and the gate."""
    shapes = {"proj": (d, d), "fc1": (4 * d, d), "fc2": (d, 4 * d), "qkv": (3 * d, d)}
    layers = {
        name: (torch.randn(*shape, device=device) * shape[1] ** -0.5, torch.randn(shape[0], device=device) * 0.3)
        for name, shape in shapes.items()
    }
    return layers, 1 + 0.3 * torch.randn(d, device=device)


def expected_block(layers, gate, x, attended):
    """The stream after the block, and the next block's qkv, in float32."""
    d = (len(gate),)
    x = x.float() + F.linear(attended.float(), *layers["proj"])
    hidden = F.gelu(F.linear(F.layer_norm(x, d, eps=NORM_EPS), *layers["fc1"]), approximate="tanh")
    x = gate * x + F.linear(hidden, *layers["fc2"])
    return x, F.linear(F.layer_norm(x, d, eps=NORM_EPS), *layers["qkv"])


def block_differences(d, rows, follows, dtype, device="cpu", tiles=None):
    """The largest of the stream and of qkv; of few rows in the sequence of few launches too."""
    from progresvit.engine.block_kernel import BlockKernel, rows_linear

    layers, gate = random_layers(d, device)
    if dtype != torch.float32:
        layers = {name: (weight.to(dtype).float(), bias) for name, (weight, bias) in layers.items()}
    x, attended = torch.randn(2, rows, d, device=device).to(dtype)
    expected = expected_block(layers, gate, x, attended)
    chosen = {**layers, "qkv": layers["qkv"] if follows else None}
    stream, few = x.clone(), x.clone()
    qkv = BlockKernel(**chosen, gate=gate, dtype=dtype)(stream, attended, tiles)
    yield (stream.float() - expected[0]).abs().max().item()
    assert (qkv is None) != follows
    if qkv is not None:
        yield (qkv.float() - expected[1]).abs().max().item()
    w = {name: (weight.to(dtype).t(), bias) for name, (weight, bias) in layers.items()}
    rows_linear(attended, *w["proj"], into=few)
    hidden = rows_linear(few, *w["fc1"], eps=NORM_EPS, gelu=True)
    rows_linear(hidden, *w["fc2"], into=few, gate=gate)
    yield (few.float() - expected[0]).abs().max().item()
    yield (rows_linear(few, *w["qkv"], eps=NORM_EPS).float() - expected[1]).abs().max().item()


def check_block(d, rows, follows, dtype, tolerance):
    from progresvit.engine.block_kernel import tiles_for

    for described in (False, True):
        tiles = replace(tiles_for(rows, d), described=described, tanh=False)
        worst = max(block_differences(d, rows, follows, dtype, tiles=tiles))
        assert worst < tolerance, (described, worst)


def check_rounds(way):
    """Whole models in float16, each round in this way; the last round of a single block has none before its last."""
    for config in (NARROW, NARROW.model_copy(update={"depth": 1})):
        worst = max(largest_differences(config, 16, "cpu", torch.float16, images=2, way=way))
        assert worst < 0.1, worst


def run_checks():
    """In the interpreter's process."""
    checks = {name: lambda case=case: check_block(*case) for name, case in CASES.items()}
    report(checks | {way: lambda way=way: check_rounds(way) for way in WAYS})


@pytest.fixture(scope="module")
def interpreted():
    return interpret(__name__)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_a_block_in_the_interpreter_equals_its_layers(interpreted, name):
    assert interpreted[name] == ""


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("way", WAYS)
def test_a_round_in_the_interpreter_equals_the_folded_one_in_each_way(interpreted, way):
    assert interpreted[way] == ""


@needs_triton
def test_a_width_is_the_sum_of_two_powers():
    from progresvit.engine.block_kernel import two_powers

    assert [two_powers(width) for width in (64, 128, 192, 320, 384)] == [
        (64, 0), (128, 0), (128, 64), (256, 64), (256, 128)
    ]  # fmt: skip
    with pytest.raises(AssertionError):
        two_powers(448)


@needs_triton
def test_rows_that_do_not_keep_all_processors_busy_have_smaller_tiles():
    from progresvit.engine.block_kernel import divide_rows

    (first, last, large), (begin, end, small) = divide_rows(74_240, 192, 132)
    assert (first, last, begin, end) == (0, 4 * 132 * 128, 4 * 132 * 128, 74_240)
    assert (large.many, small.many) == (128, 64)
    for rows in (145, 33_000, 132 * 128 * 3, 132 * 128 * 4 - 500, 74_240):
        parts = divide_rows(rows, 192, 132)
        assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])]
        assert parts[-1][1] == rows
    assert len(divide_rows(132 * 128 * 4 - 500, 192, 132)) == 1
    assert not any(tiles.described for *_, tiles in divide_rows(74_240, 64, 132))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("rows", [145, 20_003, 74_240])
def test_a_block_on_a_gpu_equals_its_layers(d, rows):
    for dtype, tolerance in ((torch.float16, 0.03), (torch.bfloat16, 0.3)):
        assert max(block_differences(d, rows, True, dtype, "cuda")) < tolerance
        assert max(block_differences(d, rows, False, dtype, "cuda")) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("images", [1, 2, 33])
def test_a_round_of_real_size_equals_the_folded_one(images):
    """One image takes the way of few rows, 33 the block kernel in round 1."""
    assert max(largest_differences(REAL, 240, "cuda", torch.float16, images=images)) < 0.1
    assert max(largest_differences(REAL, 240, "cuda", torch.bfloat16, images=images)) < 0.5
