import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.routing import Abstention, Policy, fit_router, logit_statistics, route_records, top10_entropy
from progresvit.routing.router import Router, RouterOrigin

ROUNDS, CLASSES = 3, 12


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
    for s in range(ROUNDS):
        decision = policy.decide(s, logits[staying, s])
        leaves = decision.leaves.numpy()
        assert not (decision.abstains & ~decision.leaves).any()
        rounds[staying[leaves]] = s
        abstained[staying[leaves]] = decision.abstains.numpy()[leaves]
        staying = staying[~leaves]
    assert len(staying) == 0
    return rounds, abstained


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from([None, 0.5, 1.5]))
def test_records_are_routed_as_a_running_model_routes(seed, learned, giving_up, unsure):
    torch.manual_seed(seed)
    logits = torch.randn(50, ROUNDS, CLASSES) * torch.rand(50, 1, 1) * 6
    logits[torch.rand(50, ROUNDS) < 0.05] = torch.nan
    policy = Policy.make(
        ROUNDS,
        tuple(torch.rand(2).tolist()),
        router=made_router("benefit") if learned else None,
        abstain=Abstention(
            entropy=unsure if unsure is not None else float("inf"),
            hopeless=0.7 if giving_up else float("inf"),
            router=made_router("hopeless", seed=1) if giving_up else None,
        ),
    )
    entropy = top10_entropy(logits.flatten(0, 1)).view(50, ROUNDS).numpy()
    statistics = logit_statistics(logits.flatten(0, 1)).view(50, ROUNDS, -1).numpy()
    recorded = route_records(policy, entropy, statistics)
    rounds, abstained = run_rounds(policy, logits)
    assert np.array_equal(recorded.rounds, rounds)
    assert np.array_equal(recorded.abstained, abstained)


def test_a_threshold_is_not_rounded_to_the_precision_of_the_entropies():
    logits = torch.randn(1, CLASSES)
    entropy = top10_entropy(logits).double().item()
    above = np.nextafter(entropy, 9)
    assert np.float32(above) == np.float32(entropy)
    assert Policy.make(2, above).decide(0, logits).leaves.item()
    assert not Policy.make(2, entropy).decide(0, logits).leaves.item()


def test_an_entropy_from_which_on_answers_are_withheld():
    policy = Policy.make(2, 1.0, abstain=1.2)
    sure, unsure = torch.eye(CLASSES)[:1] * 30, torch.zeros(1, CLASSES)
    assert not policy.decide(1, sure).abstains.item()
    assert policy.decide(1, unsure).abstains.item()
    assert not policy.decide(0, unsure).leaves.item()  # there is another round to come
    assert Policy.make(2, 5.0, abstain=1.2).decide(0, unsure).abstains.item()
    broken = torch.full((1, CLASSES), torch.nan)
    assert policy.decide(1, broken).abstains.item()


def test_bad_policies_are_refused():
    benefit, hopeless = made_router("benefit"), made_router("hopeless")
    cases = [
        (lambda: Policy.make(3, -0.1), "0 .* or more"),
        (lambda: Policy.make(3, (0.1, 0.2, 0.3)), "so 2 for 3 rounds, not 3"),
        (lambda: Policy.make(2, 0.1, router=benefit), "a router for 3 rounds cannot serve a model of 2"),
        (lambda: Abstention(entropy=-1), "0 or more, not entropy=-1"),
        (lambda: Abstention(entropy=float("nan")), "0 or more"),
        (lambda: Abstention(hopeless=0.5), "takes both"),
        (lambda: Abstention(router=hopeless), "takes both"),
        (lambda: Abstention(hopeless=0.5, router=benefit), "fitted for 'benefit'"),
        (lambda: route_records(Policy.make(3, 0.1, router=benefit), np.zeros((4, 3))), "needs the statistics"),
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
