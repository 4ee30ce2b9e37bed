import numpy as np
import pytest
import scipy.stats
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from progresvit.routing import STATISTICS, fit_router, load_router, logit_statistics, save_router
from progresvit.routing.router import Router, RouterMLP, RouterOrigin, default_epochs, router_targets


def records(count=4000, seed=0, rounds=2):
    """Logits whose margin says how likely the round is right, and rounds that mend what is middling."""
    rng = np.random.default_rng(seed)
    ease = rng.normal(0, 1.5, count)
    logits = rng.normal(0, 1, (count, 12))
    logits[:, 0] += 2 + 2 * ease
    middling = np.abs(ease) < 0.7
    correct = np.column_stack([ease > 0, *[(ease > 0) | middling] * (rounds - 1)])
    statistics = logit_statistics(torch.tensor(logits, dtype=torch.float32)).numpy()
    return np.repeat(statistics[:, None], rounds, axis=1), correct


def test_the_network_has_the_papers_number_of_parameters():
    assert sum(parameter.numel() for parameter in RouterMLP().parameters()) == 39_681


def test_there_are_23_statistics_and_each_is_what_its_name_says():
    logits = torch.randn(6, 50) * 2
    found = dict(zip(STATISTICS, logit_statistics(logits).double().T.numpy()))
    assert len(STATISTICS) == len(set(STATISTICS)) == 23
    z = np.sort(logits.double().numpy(), axis=1)[:, ::-1]
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    top = p[:, :10] / p[:, :10].sum(axis=1, keepdims=True)
    expected = {
        "top10_entropy": scipy.stats.entropy(top, axis=1),
        "full_entropy": scipy.stats.entropy(p, axis=1),
        "probability_margin_1_2": p[:, 0] - p[:, 1],
        "probability_margin_2_3": p[:, 1] - p[:, 2],
        "logit_margin_1_2": z[:, 0] - z[:, 1],
        "logit_margin_2_3": z[:, 1] - z[:, 2],
        "logit_mean": z.mean(axis=1),
        "logit_deviation": z.std(axis=1),
        "logit_skewness": scipy.stats.skew(z, axis=1),
        "logit_kurtosis": scipy.stats.kurtosis(z, axis=1, fisher=False),
        "log_sum_exp": np.log(np.exp(z).sum(axis=1)),
        "collision": (p**2).sum(axis=1),
        "top10_mass": p[:, :10].sum(axis=1),
        **{f"probability_{k}": p[:, k - 1] for k in range(1, 6)},
        **{f"logit_{k}": z[:, k - 1] for k in range(1, 6)},
    }
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, abs=2e-5), name


@pytest.mark.parametrize("classes", [1, 2, 4, 9])
def test_few_classes_have_statistics_too(classes):
    statistics = logit_statistics(torch.randn(3, classes))
    assert statistics.shape == (3, 23)
    assert statistics.isfinite().all()
    assert (statistics[:, STATISTICS.index("probability_5")] == 0).all() == (classes < 5)


def test_broken_logits_give_no_statistics_and_never_exit():
    logits = torch.randn(3, 12)
    logits[1, 4] = torch.inf
    assert logit_statistics(logits).isnan().all(dim=1).tolist() == [False, True, False]
    router = Router(2, RouterOrigin(target="benefit", images=1, epochs=1, seed=0))
    assert router.score(0, logits).isinf().tolist() == [False, True, False]
    statistics = np.repeat(logit_statistics(logits)[:, None].numpy(), 2, axis=1)
    assert np.isinf(router.scores(statistics)[:, 0]).tolist() == [False, True, False]


def test_targets():
    correct = np.array([[1, 1, 1], [0, 1, 1], [0, 1, 0], [0, 0, 1], [0, 0, 0], [1, 0, 0]], bool)
    assert router_targets(correct, "benefit").astype(int).tolist() == [[0, 0], [1, 0], [0, 0], [1, 1], [0, 0], [0, 0]]
    assert router_targets(correct, "error").astype(int).tolist() == [[0, 0], [1, 0], [1, 0], [1, 1], [1, 1], [0, 1]]
    never = router_targets(correct, "unrecoverable").astype(int).tolist()
    assert never == [
        [0, 0],
        [0, 0],
        [0, 0],
        [0, 0],
        [1, 1],
        [0, 1],
    ]


@pytest.mark.parametrize("target", ["benefit", "error", "unrecoverable"])
def test_a_fitted_router_ranks_unseen_images_far_better_than_chance(target):
    router = fit_router(*records(), target=target)
    statistics, correct = records(seed=1)
    wanted = router_targets(correct, target)[:, 0]
    scores = router.scores(statistics)[:, 0]
    ranks = scipy.stats.rankdata(scores)
    positives = wanted.sum()
    auc = (ranks[wanted].sum() - positives * (positives + 1) / 2) / (positives * (~wanted).sum())
    assert auc > 0.7
    assert np.abs(scores.mean() - wanted.mean()) < 0.05  # probabilities, not just an order


def test_fitting_is_repeatable_and_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    first, second, other = (fit_router(*records(600), epochs=1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    statistics, _ = records(50, seed=9)
    assert np.array_equal(first.scores(statistics), second.scores(statistics))
    assert not np.array_equal(first.scores(statistics), other.scores(statistics))


def test_a_router_comes_back_from_its_file_with_its_origin(tmp_path):
    router = fit_router(*records(600, rounds=3), target="error", epochs=1, model="abc", ids=np.arange(600))
    loaded = load_router(save_router(router, tmp_path / "beside" / "router.safetensors"))
    statistics, _ = records(40, seed=2, rounds=3)
    assert np.array_equal(loaded.scores(statistics), router.scores(statistics))
    assert loaded.origin == router.origin
    assert loaded.origin.images == 600
    assert loaded.count_seen(np.arange(590, 700)) == 10
    assert [path.name for path in (tmp_path / "beside").iterdir()] == ["router.safetensors"]


def test_a_file_that_is_no_router_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no router at"):
        load_router(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load_router(tmp_path / "cut.safetensors")
    save_router(fit_router(*records(200), epochs=1), tmp_path / "whole.safetensors")
    with safe_open(tmp_path / "whole.safetensors", framework="pt") as file:
        about, weights = file.metadata(), {key: file.get_tensor(key) for key in list(file.keys())[1:]}
    save_file(weights, tmp_path / "lacking.safetensors", metadata=about)
    with pytest.raises(ValueError, match="damaged or of another version"):
        load_router(tmp_path / "lacking.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a router"):
        load_router(tmp_path / "other.safetensors")


def test_bad_records_are_refused():
    statistics, correct = records(100)
    with pytest.raises(ValueError, match="0 of 100 images are examples of 'error'"):
        fit_router(statistics, np.ones_like(correct), target="error")
    with pytest.raises(ValueError, match="unknown target 'luck'"):
        fit_router(statistics, correct, target="luck")
    with pytest.raises(ValueError, match="of 100 images with hits of 50"):
        fit_router(statistics, correct[:50])
    router = fit_router(statistics, correct, epochs=1)
    with pytest.raises(ValueError, match=r"a router for 2 rounds .* not \(100, 3, 23\)"):
        router.scores(np.zeros((100, 3, 23)))
    with pytest.raises(ValueError, match="nothing to route"):
        Router(1, router.origin)


def test_the_former_name_of_a_target_is_read():
    assert np.array_equal(router_targets([[False, False]], "hopeless"), [[True]])
    with pytest.raises(ValueError, match="did you mean 'benefit'"):
        router_targets([[False, False]], "benefits")


def test_few_images_get_more_epochs_than_the_papers_six():
    assert [default_epochs(images) for images in (50_000, 8_704, 8_703, 4_000, 600)] == [6, 6, 7, 15, 100]
    assert fit_router(*records(1500)).origin.epochs == 50
