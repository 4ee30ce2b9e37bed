import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.routing import Abstention, Policy, arrays, top10_entropy
from progresvit.routing.router import Router, RouterOrigin


def many_logits(classes=12, seed=0):
    """Sharp and flat ones, ties, and every kind of broken row."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(400, classes)) * rng.choice([0.0, 1e-3, 0.3, 1, 4, 30, 1e4], size=(400, 1))
    logits[:40] += 1e3
    logits[40:60] = np.round(logits[40:60])
    for row, bad in enumerate([np.nan, np.inf, -np.inf]):
        logits[row, row] = bad
    return logits.astype(np.float32)


def made_router(target):
    torch.manual_seed(0)
    router = Router(3, RouterOrigin(target=target, images=1, epochs=1, seed=0))
    for network in router.after:
        torch.nn.init.normal_(network.layers[-1].weight, std=2.0)
    return router.eval().requires_grad_(False)


@pytest.mark.parametrize("classes", [1, 2, 9, 10, 11, 12, 1000])
def test_entropies_are_those_of_torch(classes):
    logits = many_logits(classes) if classes > 2 else many_logits(12)[:, :classes].copy()
    found, expected = arrays.top10_entropy(logits), top10_entropy(torch.from_numpy(logits)).numpy()
    assert found.dtype == np.float32
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    assert np.abs(found[finite] - expected[finite]).max() <= 1e-6
    assert found[finite].min() >= 0
    assert float(found[finite].max()) <= math.log(min(10, classes))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40))
def test_any_entropy_is_that_of_torch(row):
    logits = np.array([row], np.float32)
    found, expected = arrays.top10_entropy(logits), top10_entropy(torch.from_numpy(logits)).numpy()
    assert np.abs(found - expected).max() <= 1e-6


def test_flat_logits_do_not_exceed_the_bound():
    for classes in range(1, 30):
        bound = math.log(min(10, classes))
        assert float(arrays.top10_entropy(np.zeros((1, classes)))[0]) <= bound
        assert float(top10_entropy(torch.zeros(1, classes))) <= bound


@pytest.mark.parametrize("thresholds", [(0.0, 0.0), (0.7, 1.9), (float("inf"), 0.3)])
@pytest.mark.parametrize("abstain", [None, 0.5, 1.5])
@pytest.mark.parametrize("s", [0, 1, 2])
def test_decisions_are_the_policys(thresholds, abstain, s):
    policy, logits = Policy.make(3, thresholds, abstain=abstain), many_logits()
    expected, found = policy.decide(s, torch.from_numpy(logits)), arrays.decide(policy, s, logits)
    assert np.array_equal(found.leaves, expected.leaves.numpy())
    assert np.array_equal(found.abstains, expected.abstains.numpy())
    assert found.leaves.dtype == found.abstains.dtype == bool
    assert np.array_equal(np.isinf(found.entropy), torch.isinf(expected.entropy).numpy())


def test_an_entropy_that_equals_the_threshold_stays_and_abstains():
    logits = many_logits()[5:6]
    entropy = float(arrays.top10_entropy(logits)[0])
    for shift, leaves in ((0.0, False), (1e-12, True), (-1e-12, False)):
        assert arrays.decide(Policy.make(2, entropy + shift), 0, logits).leaves[0] == leaves
    policy = Policy.make(2, float("inf"), abstain=entropy)
    assert arrays.decide(policy, 0, logits).abstains[0]
    assert arrays.decide(policy, 1, logits).abstains[0]
    assert not arrays.decide(Policy.make(2, 0.0, abstain=entropy), 0, logits).abstains[0]


@pytest.mark.parametrize("temperature", [1.0, 0.4, 2.5])
def test_answers_are_those_of_a_softmax(temperature):
    logits = many_logits()
    found = arrays.decide(Policy.make(3, 0.5), 0, logits, temperature)
    probability, index = (torch.from_numpy(logits) / temperature).softmax(dim=-1).max(dim=-1)
    good = np.isfinite(logits).all(axis=1)
    assert found.index.dtype == np.int64
    assert found.probability.dtype == np.float32
    assert np.array_equal(found.index[good], index.numpy()[good])
    assert np.abs(found.probability[good] - probability.numpy()[good]).max() <= 1e-6
    assert (found.index[~good] == -1).all()
    assert np.isnan(found.probability[~good]).all()
    assert (~good).sum() == 3


@pytest.mark.parametrize("s", [0, 1, 2])
def test_learned_routers_are_asked(s):
    logits = many_logits()
    giving_up = Abstention(entropy=1.5, hopeless=0.6, router=made_router("hopeless"))
    for policy in (
        Policy.make(3, 0.5, router=made_router("benefit")),
        Policy.make(3, 0.5, router=made_router("benefit"), abstain=giving_up),
        Policy.make(3, 0.5, abstain=giving_up),
    ):
        expected, found = policy.decide(s, torch.from_numpy(logits)), arrays.decide(policy, s, logits)
        assert np.array_equal(found.leaves, expected.leaves.numpy())
        assert np.array_equal(found.abstains, expected.abstains.numpy())
        assert np.array_equal(found.entropy, expected.entropy.numpy())


def test_a_learned_router_without_torch_is_refused_with_the_remedy(monkeypatch):
    policy = Policy.make(3, 0.5, router=made_router("benefit"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="install torch, or route by entropy"):
        arrays.decide(policy, 0, many_logits())
