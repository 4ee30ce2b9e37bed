import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from progresvit.evaluation import LinearProbe, train_linear_probe
from progresvit.evaluation.linear_probe import count_correct


@pytest.fixture(scope="module")
def toy():
    """Three classes that overlap, with 4 and with 6 channels."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, 240)
    centres = rng.normal(0, 1, (3, 6))
    wide = torch.tensor(centres[targets] + rng.normal(0, 1, (240, 6)), dtype=torch.float32)
    return [wide[:, :4].contiguous(), wide], torch.tensor(targets)


def losses(probe, features, targets):
    with torch.no_grad():
        return [[F.cross_entropy(logits, targets).item() for logits in of_round] for of_round in probe(features)]


def test_the_loss_is_that_of_scikit_learns_logistic_regression(toy):
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    features, targets = toy
    probe = train_linear_probe(features, targets, classes=3, learning_rates=[0.01, 0.5], epochs=300, batch=240)
    for tokens, (slow, fast) in zip(features, losses(probe, features, targets)):
        reference = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(tokens.numpy(), targets.numpy())
        best = log_loss(targets.numpy(), reference.predict_proba(tokens.numpy()))
        assert fast == pytest.approx(best, abs=1e-3)
        assert slow > best


def test_classifiers_do_not_influence_each_other(toy):
    features, targets = toy
    settings = {"classes": 3, "epochs": 2, "batch": 60}
    together = train_linear_probe(features, targets, learning_rates=[0.01, 0.3, 1e30], **settings)
    alone = train_linear_probe(features, targets, learning_rates=[0.3], **settings)
    for of_all, of_one in zip(together.classifiers, alone.classifiers):
        assert torch.equal(of_all[1].weight, of_one[0].weight)
    assert together.classifiers[0][2].weight.nan_to_num(1e30).abs().max() > 1e20  # this one diverges


def test_a_step_is_sgd_with_momentum_on_a_cosine_that_scales_with_the_batch(toy):
    features, targets = toy
    tokens = features[1]
    probe = LinearProbe([6], 3, learning_rates=[0.2], steps=4, batch=128)
    linear = probe.classifiers[0][0]
    assert linear.weight.std().item() == pytest.approx(0.01, rel=0.5)
    assert linear.bias.tolist() == [0, 0, 0]
    weight, velocity = linear.weight.detach().clone().requires_grad_(), torch.zeros(3, 6)
    bias, bias_velocity = torch.zeros(3, requires_grad=True), torch.zeros(3)
    for step in range(4):
        probe.train_step([tokens], targets)
        grads = torch.autograd.grad(F.cross_entropy(tokens @ weight.T + bias, targets), [weight, bias])
        velocity, bias_velocity = 0.9 * velocity + grads[0], 0.9 * bias_velocity + grads[1]
        rate = 0.2 * 128 / 256 * (1 + math.cos(math.pi * step / 4)) / 2
        with torch.no_grad():
            weight -= rate * velocity
            bias -= rate * bias_velocity
        assert torch.allclose(linear.weight, weight, atol=1e-6)
        assert torch.allclose(linear.bias, bias, atol=1e-6)


def test_a_restored_probe_continues_exactly(toy):
    features, targets = toy
    settings = {"learning_rates": [0.1, 0.3], "steps": 6, "batch": 240}
    whole, first, second = (LinearProbe([4, 6], 3, **settings, seed=seed) for seed in (0, 0, 1))
    for step in range(6):
        whole.train_step(features, targets)
        (first if step < 3 else second).train_step(features, targets)
        if step == 2:
            second.restore({name: tensor.clone() for name, tensor in first.tensors().items()}, 3)
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, second.tensors()[name])


def test_correct_predictions_are_counted_by_round_and_learning_rate():
    probe = LinearProbe([2, 2], 2, learning_rates=[0.1, 0.2], steps=1, batch=4)
    with torch.no_grad():
        for of_round in probe.classifiers:
            for linear in of_round:
                linear.weight.copy_(torch.eye(2))
        probe.classifiers[1][0].weight.copy_(torch.eye(2).flip(0))
        probe.classifiers[1][1].weight.fill_(torch.nan)
    features = torch.eye(2)[[0, 1, 1]]
    assert count_correct(probe, [features, features], torch.tensor([0, 1, 0])).tolist() == [[2, 2], [1, 0]]


def test_learning_rates_are_distinct_positive_numbers():
    for rates, match in [([], "above 0"), ([0.1, 0.0], "above 0"), ([math.nan], "above 0"), ([1.0, 1.0], "twice")]:
        with pytest.raises(ValueError, match=match):
            LinearProbe([2], 2, learning_rates=rates, steps=1, batch=1)
