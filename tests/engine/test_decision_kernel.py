"""Decisions in one kernel against the torch path. Without a GPU it runs in Triton's interpreter, in a fresh process."""

import math

import numpy as np
import pytest
import torch

from progresvit.engine.torch_backend import TorchBackend
from progresvit.routing import OODRule, Policy, top10_entropy
from tests.engine.test_engine import made_router
from tests.engine.test_kernels import needs_triton
from tests.interpreter import interpret, report

CHECKS = ("answers", "bad logits", "ties", "thresholds", "few classes", "half precision")


def backend(policy, temperatures, top_k):
    """What ``pack_answers`` takes of a backend, without a model."""
    made = TorchBackend.__new__(TorchBackend)
    made.policy, made.temperatures, made.top_k = policy, temperatures, top_k
    return made


def compare(logits, policy, temperature=1.0, top_k=1, rounds=(0, 1)):
    """Flags and classes are equal, entropies and probabilities close."""
    from progresvit.engine.decision_kernel import pack_decisions

    for s in rounds:
        expected = backend(policy, (temperature,) * 2, top_k).pack_answers(s, logits)
        found = pack_decisions(policy, s, logits, temperature=temperature, top_k=top_k)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        flags = [0, 2, 3, *range(5, 5 + top_k)]
        assert torch.equal(found[flags], expected[flags]), (found[flags], expected[flags])
        assert torch.allclose(found, expected, rtol=0, atol=1e-6, equal_nan=True), (found - expected).abs().max()


def middle(logits):
    """A threshold between two entropies, so that rounding does not decide."""
    values = top10_entropy(logits).double().sort().values
    return float(values[len(values) // 2 - 1 : len(values) // 2 + 1].mean())


def check_answers(device="cpu", images=6, classes=1000):
    logits = torch.randn(images, classes, device=device) * torch.linspace(0.5, 12, images, device=device)[:, None]
    for top_k, temperature, abstain in ((1, 1.0, None), (1, 1.7, 1.0), (5, 0.6, 0.3), (10, 1.0, 0.0)):
        compare(logits, Policy.make(2, middle(logits), abstain=abstain), temperature, top_k)


def check_bad_logits(device="cpu"):
    logits = torch.randn(6, 40, device=device)
    logits[0, 3], logits[1, 0], logits[2, 39], logits[3] = math.nan, math.inf, -math.inf, math.nan
    logits[4, 7] = 3e38  # finite, but not after a temperature below 1
    for abstain in (None, 0.5):
        for threshold in (0.0, 1.0, math.inf):
            compare(logits, Policy.make(2, threshold, abstain=abstain))
            compare(logits, Policy.make(2, threshold, abstain=abstain), temperature=0.5)


def check_ties(device="cpu"):
    logits = torch.zeros(3, 50, device=device)
    logits[1, [4, 9, 30]] = 2.0
    logits[2, 20], logits[2, 21] = 1e-9, 2e-9  # different logits of equal probability
    compare(logits, Policy.make(2, 1.0))


def check_thresholds(device="cpu"):
    """Entropies are compared with thresholds in float64, and exits are strict."""
    from progresvit.engine.decision_kernel import pack_decisions

    logits = torch.randn(1, 30, device=device) * 3
    entropy = pack_decisions(Policy.make(2, 1.0), 0, logits, temperature=1.0)[1].item()
    for threshold, exits in ((entropy, 0), (entropy + 1e-12, 1), (entropy - 1e-12, 0)):
        assert pack_decisions(Policy.make(2, threshold), 0, logits, temperature=1.0)[0].item() == exits
        limit = Policy.make(2, math.inf, abstain=threshold)
        assert pack_decisions(limit, 0, logits, temperature=1.0)[2].item() == (1 - exits if threshold != entropy else 1)


def check_few_classes(device="cpu"):
    for classes in (1, 2, 9, 10, 11):
        logits = torch.randn(3, classes, device=device)
        logits[0] = 0  # the largest entropy that these classes can have
        compare(logits, Policy.make(2, 5.0, abstain=float(np.float32(math.log(classes)))))


def check_half_precision(device="cpu"):
    logits = torch.randn(4, 2 * 21, device=device).half()[:, :21]  # rows that are not adjacent
    compare(logits, Policy.make(2, middle(logits)))


def run_checks():
    """In the interpreter's process."""
    report({name: globals()[f"check_{name.replace(' ', '_')}"] for name in CHECKS})


@pytest.fixture(scope="module")
def interpreted():
    return interpret(__name__)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("name", CHECKS)
def test_decisions_in_the_interpreter_equal_the_torch_paths(interpreted, name):
    assert interpreted[name] == ""


@needs_triton
def test_a_float32_limit_separates_the_same_floats():
    from progresvit.engine.decision_kernel import as_float32_limit

    for limit in (0.0, 0.1, 0.35, 1 / 3, 2.302585092994046, 1e300, math.inf):
        rounded = as_float32_limit(limit)
        near = np.float32(min(limit, 1e30))
        for value in (np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(9)), np.float32(np.inf)):
            assert (float(value) < limit) == (value < np.float32(rounded))


@needs_triton
def test_routers_scores_and_many_classes_take_the_torch_path():
    from progresvit.engine.decision_kernel import can_decide

    plain = Policy.make(2, 0.5, abstain=1.0)
    assert can_decide(plain, 1000, 1)
    assert can_decide(plain, 20, 10)
    assert not can_decide(plain, 1000, 11)
    assert not can_decide(plain, 100_000, 1)
    assert not can_decide(Policy.make(2, 0.5, router=made_router()), 20, 1)
    assert not can_decide(Policy.make(2, 0.5, ood=OODRule(score="energy", limit=1.0, share=0.95)), 20, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_decisions_on_a_gpu_equal_the_torch_paths(name):
    globals()[f"check_{name.replace(' ', '_')}"]("cuda")


@pytest.mark.gpu
def test_decisions_of_a_whole_batch_on_a_gpu_equal_the_torch_paths():
    check_answers("cuda", images=512)
