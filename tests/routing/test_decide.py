import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.routing import (
    OOD_SCORES,
    Abstention,
    OODRule,
    Policy,
    fit_router,
    logit_statistics,
    ood_score,
    route_records,
    top10_entropy,
)
from progresvit.routing.decide import decide, exits, is_unrecoverable, is_withheld
from progresvit.routing.router import Router, RouterOrigin
from tests.routing.test_scores import many_logits

ROUNDS, CLASSES = 3, 12
OOD_LIMITS = {"energy": 5.0, "max-logit": 4.0, "msp": 0.6, "entropy": -1.0}
"""About the middle of the scores of random logits."""


def made_router(target, seed=0):
    """Random weights that spread the probabilities."""
    torch.manual_seed(seed)
    router = Router(ROUNDS, RouterOrigin(target=target, images=1, epochs=1, seed=0))
    for network in router.after:
        torch.nn.init.normal_(network.layers[-1].weight, std=2.0)
    return router.eval().requires_grad_(False)


def run_rounds(policy, logits):
    """As a running model does: round by round, only with those who stay."""
    count = logits.shape[0]
    rounds, abstained, staying = np.full(count, -1), np.zeros(count, bool), np.arange(count)
    unknown = np.zeros(count, bool)
    for s in range(ROUNDS):
        decision = policy.decide(s, logits[staying, s])
        exiting = decision.exits.numpy()
        assert not (decision.abstains & ~decision.exits).any()
        rounds[staying[exiting]] = s
        abstained[staying[exiting]] = decision.abstains.numpy()[exiting]
        unknown[staying[exiting]] = decision.out_of_distribution.numpy()[exiting]
        staying = staying[~exiting]
    assert len(staying) == 0
    return rounds, abstained, unknown


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.5, 1.5]),
    st.sampled_from([None, *OOD_SCORES]),
)
def test_records_are_routed_as_a_running_model_routes(seed, learned, giving_up, unsure, score):
    torch.manual_seed(seed)
    logits = torch.randn(50, ROUNDS, CLASSES) * torch.rand(50, 1, 1) * 6
    logits[torch.rand(50, ROUNDS) < 0.05] = torch.nan
    policy = Policy.make(
        ROUNDS,
        tuple(torch.rand(2).tolist()),
        router=made_router("benefit") if learned else None,
        abstain=Abstention(
            entropy=unsure if unsure is not None else float("inf"),
            unrecoverable=0.7 if giving_up else float("inf"),
            router=made_router("unrecoverable", seed=1) if giving_up else None,
        ),
        ood=None if score is None else OODRule(score=score, limit=OOD_LIMITS[score], share=0.05),
    )
    entropy = top10_entropy(logits.flatten(0, 1)).view(50, ROUNDS).numpy()
    statistics = logit_statistics(logits.flatten(0, 1)).view(50, ROUNDS, -1).numpy()
    recorded = route_records(policy, entropy, statistics)
    rounds, abstained, unknown = run_rounds(policy, logits)
    assert np.array_equal(recorded.rounds, rounds)
    assert np.array_equal(recorded.abstained, abstained)
    assert np.array_equal(recorded.out_of_distribution, unknown)
    assert not (unknown & ~abstained).any()


def test_a_threshold_is_not_rounded_to_the_precision_of_the_entropies():
    logits = torch.randn(1, CLASSES)
    entropy = top10_entropy(logits).double().item()
    above = np.nextafter(entropy, 9)
    assert np.float32(above) == np.float32(entropy)
    assert Policy.make(2, above).decide(0, logits).exits.item()
    assert not Policy.make(2, entropy).decide(0, logits).exits.item()


def test_an_entropy_from_which_on_answers_are_withheld():
    policy = Policy.make(2, 1.0, abstain=1.2)
    sure, unsure = torch.eye(CLASSES)[:1] * 30, torch.zeros(1, CLASSES)
    assert not policy.decide(1, sure).abstains.item()
    assert policy.decide(1, unsure).abstains.item()
    assert not policy.decide(0, unsure).exits.item()  # there is another round to come
    assert Policy.make(2, 5.0, abstain=1.2).decide(0, unsure).abstains.item()
    broken = torch.full((1, CLASSES), torch.nan)
    assert policy.decide(1, broken).abstains.item()


def test_bad_policies_are_refused():
    benefit, unrecoverable = made_router("benefit"), made_router("unrecoverable")
    cases = [
        (lambda: Policy.make(3, -0.1), "0 .* or more"),
        (lambda: Policy.make(3, (0.1, 0.2, 0.3)), "so 2 for 3 rounds, not 3"),
        (lambda: Policy.make(2, 0.1, router=benefit), "a router for 3 rounds cannot serve a model of 2"),
        (lambda: Abstention(entropy=-1), "0 or more, not entropy=-1"),
        (lambda: Abstention(entropy=float("nan")), "0 or more"),
        (lambda: Abstention(unrecoverable=0.5), "takes both"),
        (lambda: Abstention(router=unrecoverable), "takes both"),
        (lambda: Abstention(unrecoverable=0.5, router=benefit), "fitted for 'benefit'"),
        (lambda: route_records(Policy.make(3, 0.1, router=benefit), np.zeros((4, 3))), "router needs statistics"),
        (
            lambda: route_records(
                Policy.make(3, 0.1, ood=OODRule(score="msp", limit=0.5, share=0.05)), np.zeros((4, 3))
            ),
            "score needs statistics",
        ),
        (lambda: OODRule(score="energy", limit=math.nan, share=0.05), "finite"),
        (lambda: OODRule(score="energy", limit=0.0, share=1.0), "less than 1"),
        (lambda: OODRule(score="other", limit=0.0, share=0.5), "energy"),
    ]
    for make, match in cases:
        with pytest.raises(ValueError, match=match):
            make()


def test_a_fitted_router_fits_a_policy():
    rng = np.random.default_rng(0)
    statistics = logit_statistics(torch.randn(300, CLASSES)).numpy()[:, None].repeat(2, axis=1)
    router = fit_router(statistics, rng.random((300, 2)) < 0.5, epochs=1)
    routed = route_records(Policy.make(2, 0.3, router=router), np.zeros((300, 2)), statistics)
    assert np.array_equal(routed.rounds == 0, router.scores(statistics)[:, 0] < 0.3)


def policies():
    """Every kind: by entropy, with abstention, with learned routers, and with each out-of-distribution score."""
    for thresholds in ((0.0, 0.0), (0.7, 1.9), (math.inf, 0.3)):
        for abstain in (None, 0.5, 1.5):
            yield Policy.make(3, thresholds, abstain=abstain)
    rejecting = Abstention(entropy=1.5, unrecoverable=0.6, router=made_router("unrecoverable"))
    yield Policy.make(3, 0.5, abstain=rejecting)
    for abstain in (None, rejecting):
        yield Policy.make(3, 0.5, router=made_router("benefit"), abstain=abstain)
    for score in OOD_SCORES:
        rule = OODRule(score=score, limit=OOD_LIMITS[score], share=0.05)
        yield Policy.make(3, 0.9, ood=rule)
        yield Policy.make(3, 0.5, router=made_router("benefit"), ood=rule)


@pytest.mark.parametrize("s", [0, 1, 2])
def test_decisions_on_arrays_are_those_on_tensors(s):
    logits = many_logits()
    for policy in policies():
        expected, found = policy.decide(s, torch.from_numpy(logits)), decide(policy, s, logits)
        for name in ("exits", "abstains", "out_of_distribution"):
            assert np.array_equal(getattr(found, name), getattr(expected, name).numpy()), name
            assert getattr(found, name).dtype == bool
        assert np.array_equal(np.isinf(found.entropy), torch.isinf(expected.entropy).numpy())
        assert np.allclose(found.ood_score, expected.ood_score.numpy(), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_an_entropy_that_equals_the_threshold_continues_or_abstains():
    logits = many_logits()[5:6]
    entropy = float(top10_entropy(logits)[0])
    for shift, exits_early in ((0.0, False), (1e-12, True), (-1e-12, False)):
        assert decide(Policy.make(2, entropy + shift), 0, logits).exits[0] == exits_early
    policy = Policy.make(2, float("inf"), abstain=entropy)
    assert decide(policy, 0, logits).abstains[0]
    assert decide(policy, 1, logits).abstains[0]
    assert not decide(Policy.make(2, 0.0, abstain=entropy), 0, logits).abstains[0]


@pytest.mark.parametrize("temperature", [1.0, 0.4, 2.5])
def test_answers_are_those_of_a_softmax(temperature):
    logits = many_logits()
    found = decide(Policy.make(3, 0.5), 0, logits, temperature)
    probability, index = (torch.from_numpy(logits) / temperature).softmax(dim=-1).max(dim=-1)
    good = np.isfinite(logits).all(axis=1)
    assert found.index.dtype == np.int64
    assert found.probability.dtype == np.float32
    assert np.array_equal(found.index[good], index.numpy()[good])
    assert np.abs(found.probability[good] - probability.numpy()[good]).max() <= 1e-6
    assert (found.index[~good] == -1).all()
    assert np.isnan(found.probability[~good]).all()
    assert (~good).sum() == 3


def test_a_learned_router_without_torch_is_refused_with_the_remedy(monkeypatch):
    policy = Policy.make(3, 0.5, router=made_router("benefit"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="install torch, or route by entropy"):
        decide(policy, 0, many_logits())


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 3, width=32) | st.sampled_from([math.nan, math.inf]), min_size=1, max_size=20),
    st.floats(0, 3) | st.just(math.inf),
)
def test_the_rules_are_the_same_for_arrays_and_tensors(scores, limit):
    array = np.array(scores, np.float32)
    tensor = torch.from_numpy(array)
    for rule in (exits, is_withheld, is_unrecoverable):
        assert np.array_equal(rule(array, limit), rule(tensor, limit).numpy())
    assert exits(array, limit).tolist() == [float(score) < limit for score in array]
    assert not (exits(array, limit) & is_withheld(array, limit)).any()


def test_the_former_name_of_unrecoverable_is_still_taken():
    router = made_router("hopeless")
    assert router.origin.target == "unrecoverable"
    assert Abstention(hopeless=0.5, router=router) == Abstention(unrecoverable=0.5, router=router)


@pytest.mark.parametrize("score", OOD_SCORES)
def test_out_of_distribution_answers_are_withheld(score):
    rule, logits = OODRule(score=score, limit=OOD_LIMITS[score], share=0.05), many_logits()
    for s in (0, 2):
        found = decide(Policy.make(3, 0.9, ood=rule), s, logits)
        assert np.array_equal(found.out_of_distribution, found.exits & ~(ood_score(score, logits) >= rule.limit))
        assert np.array_equal(found.abstains, found.out_of_distribution)
    assert 0 < found.out_of_distribution.sum() < len(logits)
    assert found.out_of_distribution[:3].all()  # NaN and infinite logits


def test_without_a_rule_nothing_is_out_of_distribution():
    found = decide(Policy.make(2, 0.5), 1, many_logits())
    assert not found.out_of_distribution.any()
    assert np.isnan(found.ood_score).all()


def test_a_score_that_equals_the_limit_is_in_distribution():
    logits = many_logits()[5:6]
    score = float(ood_score("energy", logits)[0])
    for limit, unknown in ((score, False), (np.nextafter(score, math.inf), True)):
        policy = Policy.make(2, 0.5, ood=OODRule(score="energy", limit=limit, share=0.05))
        assert decide(policy, 1, logits).out_of_distribution[0] == unknown
