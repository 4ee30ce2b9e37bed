import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.routing import (
    OOD_SCORES,
    full_entropy,
    logit_statistics,
    ood_score,
    patch_entropy,
    top10_entropy,
    uncertain_entropy,
)
from progresvit.routing.decide import exit_rounds
from progresvit.routing.scores import recorded_ood_score

LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40)


def many_logits(classes=12, seed=0):
    """Sharp and flat ones, ties, and every kind of broken row."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(400, classes)) * rng.choice([0.0, 1e-3, 0.3, 1, 4, 30, 1e4], size=(400, 1))
    logits[:40] += 1e3
    logits[40:60] = np.round(logits[40:60])
    for row, bad in enumerate([np.nan, np.inf, -np.inf]):
        logits[row, row] = bad
    return logits.astype(np.float32)


@given(LOGITS)
def test_entropy_of_the_renormalised_top_ten(values):
    logits = torch.tensor([values], dtype=torch.float32)
    top = sorted(torch.softmax(logits[0].double(), dim=0).tolist(), reverse=True)[:10]
    shares = [p / sum(top) for p in top]
    expected = -sum(p * math.log(p) for p in shares if p > 0)
    assert abs(top10_entropy(logits).item() - expected) < 1e-4


@given(LOGITS)
def test_entropy_lies_between_zero_and_ln_ten(values):
    entropy = top10_entropy(torch.tensor([values])).item()
    assert 0 <= entropy <= math.log(10)


def test_equal_logits_are_as_unsure_as_can_be():
    assert torch.allclose(top10_entropy(torch.zeros(2, 1000)), torch.tensor(math.log(10)))
    assert torch.allclose(top10_entropy(torch.zeros(2, 4)), torch.tensor(math.log(4)))


def test_entropy_is_float32_whatever_comes_in():
    logits = torch.randn(4, 100)
    assert top10_entropy(logits.bfloat16()).dtype == torch.float32
    assert torch.equal(top10_entropy(logits.bfloat16()), top10_entropy(logits.bfloat16().float()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_image_with_a_broken_logit_never_exits_early(bad):
    logits = torch.randn(3, 40)
    logits[1, 33] = bad
    for entropy in (top10_entropy(logits), full_entropy(logits)):
        assert entropy.isfinite().tolist() == [True, False, True]
        assert not entropy[1] < math.inf


@pytest.mark.parametrize("classes", [1, 2, 9, 10, 11, 1000])
@pytest.mark.parametrize("kind", ["random", "certain", "uniform", "huge", "bf16"])
def test_entropies_equal_scipys(classes, kind):
    logits = torch.randn(5, classes) * 3
    if kind == "certain":
        logits[:, 0] = 200.0
    elif kind == "uniform":
        logits[:] = 0.7
    elif kind == "huge":
        logits = torch.where(torch.rand(5, classes) < 0.5, 1e4, -1e4)
    elif kind == "bf16":
        logits = logits.bfloat16()
    probabilities = scipy.special.softmax(logits.double().numpy(), axis=1)
    top = np.sort(probabilities, axis=1)[:, ::-1][:, :10]  # scipy renormalises
    assert top10_entropy(logits).numpy() == pytest.approx(scipy.stats.entropy(top, axis=1), abs=1e-5)
    assert full_entropy(logits).numpy() == pytest.approx(scipy.stats.entropy(probabilities, axis=1), abs=1e-5)


def test_uniform_logits_reach_ln_ten_and_never_pass_it():
    for value in (0.0, 0.1, -3.3, 1e4):
        for classes in (10, 1000):
            entropy = top10_entropy(torch.full((1, classes), value)).double().item()
            assert math.log(10) - 1e-6 < entropy <= math.log(10)


@pytest.mark.parametrize("classes", [1, 2, 9, 10, 11, 12, 1000])
def test_entropies_of_arrays_are_those_of_tensors(classes):
    logits = many_logits(classes) if classes > 2 else many_logits(12)[:, :classes].copy()
    found, expected = top10_entropy(logits), top10_entropy(torch.from_numpy(logits)).numpy()
    assert found.dtype == np.float32
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    finite = np.isfinite(expected)
    assert np.abs(found[finite] - expected[finite]).max() <= 1e-6
    assert found[finite].min() >= 0
    assert float(found[finite].max()) <= math.log(min(10, classes))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40))
def test_any_entropy_of_an_array_is_that_of_a_tensor(row):
    logits = np.array([row], np.float32)
    found, expected = top10_entropy(logits), top10_entropy(torch.from_numpy(logits)).numpy()
    assert np.abs(found - expected).max() <= 1e-6


def test_flat_logits_do_not_exceed_the_bound():
    for classes in range(1, 30):
        bound = math.log(min(10, classes))
        assert float(top10_entropy(np.zeros((1, classes)))[0]) <= bound
        assert float(top10_entropy(torch.zeros(1, classes))) <= bound


def test_out_of_distribution_scores_are_those_of_the_literature():
    logits = np.random.default_rng(0).normal(size=(50, 12)).astype(np.float32) * 4
    expected = {
        "energy": scipy.special.logsumexp(logits.astype(np.float64), axis=1),
        "max-logit": logits.max(axis=1),
        "msp": scipy.special.softmax(logits.astype(np.float64), axis=1).max(axis=1),
        "entropy": -top10_entropy(logits),
    }
    assert set(expected) == set(OOD_SCORES)
    for name, values in expected.items():
        assert ood_score(name, logits) == pytest.approx(values, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", OOD_SCORES)
def test_out_of_distribution_scores_of_arrays_tensors_and_records_agree(name):
    logits = many_logits()
    array, tensor = ood_score(name, logits), ood_score(name, torch.from_numpy(logits)).numpy()
    recorded = recorded_ood_score(name, logit_statistics(torch.from_numpy(logits)).numpy())
    assert array.dtype == tensor.dtype == recorded.dtype == np.float32
    for values in (tensor, recorded):
        assert np.allclose(array, values, rtol=1e-6, atol=1e-6)
    broken = ~np.isfinite(logits).all(axis=1)
    assert (array[broken] == -np.inf).all()
    assert np.isfinite(array[~broken]).all()
    assert broken.sum() == 3


@pytest.mark.parametrize("name", OOD_SCORES)
def test_a_confident_answer_scores_higher_than_a_flat_one(name):
    flat, confident = np.zeros((1, 12)), np.eye(12)[:1] * 9
    assert ood_score(name, confident) > ood_score(name, flat)


def test_an_unknown_score_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="unknown out-of-distribution score 'enery'; did you mean 'energy'"):
        ood_score("enery", np.zeros((1, 3)))
    with pytest.raises(ValueError, match="did you mean 'max-logit'"):
        recorded_ood_score("max_logit", np.zeros((1, 23)))


# patches, for segmentation


def patch_logits(classes, side=3, images=4, seed=0):
    """Sharp patches, flat ones and ties, (B, K, g, g)."""
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.0, 1e-3, 0.3, 1, 4, 30, 1e4], size=(images, 1, side, side))
    return (rng.normal(size=(images, classes, side, side)) * scale).astype(np.float32)


def slow_patch_entropy(logits):
    """Patch by patch, in float64."""
    images, _, height, width = logits.shape
    entropy = np.zeros((images, height * width))
    for b in range(images):
        for y in range(height):
            for x in range(width):
                p = scipy.special.softmax(logits[b, :, y, x].astype(np.float64))
                entropy[b, y * width + x] = -sum(v * math.log(v) for v in p.tolist() if v > 0)
    return entropy


@pytest.mark.parametrize("classes", [1, 2, 19, 150])
def test_the_entropy_of_every_patch_is_over_all_classes(classes):
    logits = patch_logits(classes)
    found = patch_entropy(torch.from_numpy(logits))
    assert found.dtype == torch.float32
    assert found.shape == (4, 9)
    assert found.numpy() == pytest.approx(slow_patch_entropy(logits), abs=2e-5)
    assert (found >= 0).all()


def test_patches_come_row_by_row():
    logits = torch.zeros(1, 5, 2, 3)
    logits[0, 0, 1, 0] = 100.0  # the only sure patch
    assert (patch_entropy(logits)[0] < 1).tolist() == [False, False, False, True, False, False]


def test_flat_patches_reach_ln_k_and_never_pass_it():
    for classes in range(1, 200):
        for value in (0.0, 0.1, -3.3, 1e4):
            entropy = patch_entropy(torch.full((1, classes, 4, 4), value))
            assert entropy.double().max().item() <= math.log(classes)
            assert entropy.double().min().item() >= math.log(classes) - 2e-6
            assert uncertain_entropy(entropy).double().item() <= math.log(classes)


def test_the_entropy_of_a_patch_is_float32_whatever_comes_in():
    logits = torch.from_numpy(patch_logits(7))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        given_logits = (logits / 10).to(dtype)
        found = patch_entropy(given_logits)
        assert found.dtype == uncertain_entropy(found).dtype == torch.float32
        assert torch.equal(found, patch_entropy(given_logits.float()))
    assert uncertain_entropy(torch.ones(2, 30, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_logit_makes_its_patch_and_its_image_infinite(bad):
    logits = torch.from_numpy(patch_logits(7))
    logits[1, 4, 2, 0] = bad
    entropy = patch_entropy(logits)
    assert entropy.isinf().nonzero().tolist() == [[1, 6]]
    assert not entropy.isnan().any()
    assert uncertain_entropy(entropy).isinf().tolist() == [False, True, False, False]
    assert (exit_rounds(uncertain_entropy(entropy)[:, None].expand(-1, 2).numpy(), math.inf) == [0, 1, 0, 0]).all()


@pytest.mark.parametrize("patches", [*range(1, 26), 30, 70, 100, 196, 784, 1296])
def test_the_most_uncertain_tenth_of_the_patches_is_rounded_up(patches):
    entropy = np.random.default_rng(patches).random((5, patches)).astype(np.float32)
    count = -(-patches // 10)
    expected = np.sort(entropy.astype(np.float64), axis=1)[:, patches - count :].mean(axis=1)
    found = uncertain_entropy(torch.from_numpy(entropy))
    assert found.shape == (5,)
    assert found.numpy() == pytest.approx(expected, abs=1e-6)
    marked = torch.zeros(patches)
    marked[:count] = 1.0
    assert uncertain_entropy(marked).item() == 1.0  # exactly the marked ones, in any number of dimensions
    marked[count - 1] = 0.0
    assert uncertain_entropy(marked).item() < 1.0


def test_the_mean_is_not_above_the_largest():
    for value in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist():
        entropy = torch.full((784,), value)
        assert uncertain_entropy(entropy).item() <= entropy[0].item()
