"""Trajectories: principal components of class means and the separation of classes, against literal computations."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from progresvit.analysis.separation import separation
from progresvit.analysis.trajectories import (
    Trajectories,
    class_style,
    principal_plane,
    trajectories,
    trajectories_figure,
    trajectories_table,
)
from progresvit.config import ModelConfig, make_rounds, plain_vit
from progresvit.model import ProgResViT
from tests.analysis.made import (
    KINDS,
    SIZES,
    assert_whole_figure_on_page,
    coloured_sample,
    model_of_kind,
    points_of,
    rows_of,
    tokens_at_points,
)


@pytest.fixture
def sample():
    return coloured_sample((3, 4, 3))


def class_tokens(model, sample):
    """Class tokens at every point, in the channels that all rounds have: (N, P, 64)."""
    return torch.stack([x[:, 0, :64] for x in tokens_at_points(model, sample)], dim=1).double().numpy()


def same_up_to_sign(result, expected, tolerance=1e-4):
    signs = np.sign((result * expected).reshape(-1, 2).sum(axis=0))
    return np.allclose(result * signs, expected, atol=tolerance)


def literal_separation(groups):
    """Separation of classes at one point, with loops: K times (n, d) -> a ratio."""
    means = [sum(group) / len(group) for group in groups]
    centre = sum(means) / len(means)
    spreads = [
        sum(float((x - mean) @ (x - mean)) for x in group) / (len(group) - 1) for group, mean in zip(groups, means)
    ]
    between = sum(float((mean - centre) @ (mean - centre)) for mean in means) / len(means)
    noise = sum(spread / len(group) for spread, group in zip(spreads, groups)) / len(groups)
    between -= noise * (len(groups) - 1) / len(groups)
    return max(0, between / (sum(spreads) / len(spreads))) ** 0.5


def test_paths_are_the_principal_components_of_class_means(small_model, sample):
    result = trajectories(small_model, sample)
    tokens = class_tokens(small_model, sample)
    means = np.stack([tokens[sample.labels.numpy() == number].mean(axis=0) for number in range(3)])
    pca = PCA(n_components=2).fit(means.reshape(-1, 64))
    assert same_up_to_sign(result.paths, pca.transform(means.reshape(-1, 64)).reshape(3, 6, 2))
    assert result.explained == pytest.approx(pca.explained_variance_ratio_, abs=1e-5)
    assert result.points == points_of(2, 2)
    assert result.classes == ("class 0", "class 1", "class 2")


def test_components_have_a_fixed_sign():
    means = np.random.default_rng(0).normal(size=(3, 4, 8))
    plane, explained = principal_plane(means)
    mirrored, _ = principal_plane(-means)
    assert np.allclose(mirrored, -plane)
    assert 1 > explained[0] > explained[1] > 0


def test_separation_equals_loops_over_classes_and_images(small_model, sample):
    result = trajectories(small_model, sample)
    tokens = class_tokens(small_model, sample)
    for place in range(1, 6):
        groups = [tokens[sample.labels.numpy() == number, place] for number in range(3)]
        assert result.separations[place] == pytest.approx(literal_separation(groups), rel=1e-3)
    assert result.separations[1:].min() > 0


def test_ahead_of_the_first_block_classes_are_not_separate(small_model, sample):
    result = trajectories(small_model, sample)
    assert result.separations[0] == 0
    assert not result.draws[:, 0].any()
    assert np.ptp(result.paths[:, 0], axis=0) == pytest.approx(0, abs=1e-5)
    assert result.separations[3] > 0  # round 2 begins with what round 1 hands on


def random_groups(rng, means, images):
    """Images of classes in noise of few dimensions: K times (n, 1, d)."""
    noise = np.random.default_rng(9).normal(size=(20, 20)) * np.exp(-np.arange(20) / 6)
    return [(mean + rng.normal(size=(images, 20)) @ noise.T)[:, None] for mean in means], float((noise**2).sum())


def test_noise_of_class_means_does_not_count_as_separation():
    rng, squared, naive = np.random.default_rng(0), [], []
    for _ in range(60):
        groups, _ = random_groups(rng, np.zeros((4, 20)), images=4)
        squared.append(separation(groups, draws=2)[0][0] ** 2)
        naive.append(np.stack([group.mean(axis=0)[0] for group in groups]).var(axis=0).sum())
    assert np.median(squared) < 0.05
    assert np.median(naive) / random_groups(rng, np.zeros((4, 20)), images=4)[1] > 0.1


def test_intervals_hold_the_true_separation():
    rng, means = np.random.default_rng(0), np.random.default_rng(5).normal(size=(4, 20)) * 1.5
    held, values = 0, []
    for _ in range(60):
        groups, within = random_groups(rng, means, images=5)
        (value,), draws = separation(groups)
        low, high = np.quantile(draws[:, 0], (0.025, 0.975))
        truth = (means.var(axis=0).sum() / within) ** 0.5
        held += low <= truth <= high
        values.append(value)
    assert held >= 54
    assert np.mean(values) == pytest.approx(truth, rel=0.1)


def test_the_bootstrap_is_the_same_each_time_and_pairs_the_points():
    rng = np.random.default_rng(0)
    groups = [np.repeat(group, 2, axis=1) for group in random_groups(rng, rng.normal(size=(3, 20)), images=6)[0]]
    _, draws = separation(groups)
    assert draws.shape == (200, 2)
    assert np.array_equal(draws[:, 0], draws[:, 1])  # equal tokens at two points: equal draws
    assert draws[:, 0].std() > 0
    assert np.array_equal(separation(groups)[1], draws)
    assert not np.array_equal(separation(groups, seed=1)[1], draws)


def test_two_images_of_each_class_are_enough():
    rng = np.random.default_rng(0)
    groups, _ = random_groups(rng, 3 * rng.normal(size=(2, 20)), images=2)
    values, draws = separation(groups)
    assert np.isfinite(values).all()
    assert np.isfinite(draws).all()
    assert 100 < len(draws) < 200  # without draws of copies only


def test_gains_are_paired_differences_of_the_ends_of_rounds(small_model, sample):
    result = trajectories(small_model, sample)
    assert result.ends == (2, 5)
    gain, change = result.gain(1), result.draws[:, 5] - result.draws[:, 2]
    assert gain.mean == result.separations[5] - result.separations[2]
    assert [gain.lowest, gain.highest] == pytest.approx(np.quantile(change, (0.025, 0.975)))


@pytest.mark.parametrize(
    ("images", "shown"),
    [
        ((3,) * 20, [0, 5, 10, 14, 19]),
        ((2, 9, 2, 2, 8, 2, 2), [0, 1, 3, 4, 6]),
        ((3, 2), [0, 1]),
        ((2, 3, 4, 5, 6, 7), [1, 2, 3, 4, 5]),
    ],
    ids=["ties", "some ties", "few classes", "no ties"],
)
def test_by_default_the_most_frequent_classes_are_shown(small_model, images, shown):
    result = trajectories(small_model, coloured_sample(images))
    assert result.classes == tuple(f"class {number}" for number in shown)


def test_classes_have_names_and_folders_and_others_do_not_matter(small_model, sample):
    result = trajectories(small_model, sample, ["n002", "Class 0", "class 2"])
    assert result.classes == ("class 2", "class 0")
    alone = trajectories(small_model, sample.of_classes([0, 2]), ["class 2", "class 0"])
    assert np.allclose(result.paths, alone.paths, atol=1e-5)
    assert np.allclose(result.draws, alone.draws, atol=1e-5)


def test_classes_that_cannot_be_shown_are_refused(small_model, sample):
    with pytest.raises(ValueError, match=r"no class 'klass 1'; .*class 1"):
        trajectories(small_model, sample, ["klass 1", "class 0"])
    with pytest.raises(ValueError, match="at least two classes, not 1; name another class"):
        trajectories(small_model, sample, ["class 1", "n001"])
    with pytest.raises(ValueError, match="at least two classes, not 1; give images of more classes"):
        trajectories(small_model, coloured_sample((4,)))
    with pytest.raises(ValueError, match="too few images per class: 'class 1' has 1; give more images \\(images=…\\)"):
        trajectories(small_model, coloured_sample((3, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_has_trajectories(kind, randomize, sample):
    model = randomize(model_of_kind(kind))
    result = trajectories(model, sample)
    assert result.paths.shape == (3, 4 if kind == "early_exit" else 6, 2)
    dashed = [line for line in trajectories_figure(result).axes[0].lines if line.get_linestyle() == "--"]
    assert len(dashed) == (3 if kind in ("progresvit", "thinkingvit", "early_exit") else 0)
    if not model.config.routable:
        assert result.separations[3] == 0  # round 2 begins with the image alone


def test_three_rounds_and_merged_tokens(randomize, sample):
    config = ModelConfig(rounds=make_rounds([16, 24, 32], [1, 2, 2]), heads=2, **SIZES).with_merge([0, 2, 4])
    result = trajectories(randomize(ProgResViT(config)), sample)
    assert result.ends == (2, 5, 8)
    assert np.isfinite(result.draws).all()
    assert "ends of rounds 3 − 2" in trajectories_figure(result).axes[1].get_title()


def test_one_round_and_no_head(randomize, sample):
    model = randomize(ProgResViT(plain_vit(resolution=32, heads=1, **{**SIZES, "num_classes": 0})))
    result = trajectories(model, sample)
    assert result.paths.shape == (3, 3, 2)
    labels = [text.get_text() for text in trajectories_figure(result).legends[0].get_texts()]
    assert labels == ["class 0", "class 1", "class 2", "start of round 1", "round 1, filled: its end", "95 % interval"]


def test_only_images_of_the_chosen_classes_run(small_model, sample):
    calls = []
    trajectories(small_model, sample, ["class 0", "class 1"], lambda done, total: calls.append((done, total)))
    assert calls == [(7, 7)]


def test_the_table_has_a_row_for_each_class_and_point(small_model, sample):
    result = trajectories(small_model, sample)
    rows = rows_of(trajectories_table(result))
    keys = ["class", "round", "block", "pc1", "pc2", "separation", "separation_low", "separation_high"]
    assert list(rows[0])[:8] == keys
    assert len(rows) == 3 * 6
    row, low = rows[6 + 4], np.quantile(result.draws[:, 4], 0.025)
    assert [row["class"], row["round"], row["block"]] == ["class 1", "2", "1"]
    assert [float(row["pc1"]), float(row["pc2"])] == pytest.approx(result.paths[1, 4])
    assert [float(row["separation"]), float(row["separation_low"])] == pytest.approx([result.separations[4], low])
    changes = [row["separation_change"] for row in rows]
    assert [bool(change) for change in changes] == ([False] * 5 + [True]) * 3
    assert float(changes[5]) == result.gain(1).mean


def made(classes, *blocks, name="class {}"):
    """Trajectories of rounds with these numbers of blocks, without a model."""
    rng = np.random.default_rng(0)
    points = points_of(*blocks)
    return Trajectories(
        points=points,
        classes=tuple(name.format(number) for number in range(classes)),
        paths=rng.normal(size=(classes, len(points), 2)).cumsum(axis=1),
        explained=(0.4, 0.2),
        separations=np.ones(len(points)),
        draws=1 + rng.random((50, len(points))) - 0.5,
        handover=True,
    )


def test_the_figure_shows_every_path_with_its_ends():
    result = made(3, 4, 4)
    plane, below = trajectories_figure(result).axes
    ends = [line for line in plane.lines if line.get_markersize() == 8]
    assert [tuple(line.get_xydata()[0]) for line in ends] == [
        tuple(result.paths[number, place]) for number in range(3) for place in (4, 9)
    ]
    assert [line.get_markerfacecolor() == "white" for line in ends] == [True, False] * 3
    assert plane.get_xlabel() == "PC1 (40 % of the variance)"
    assert plane.get_ylabel() == "PC2 (20 % of the variance)"
    assert [len(line.get_ydata()) for line in below.lines] == [5, 5]


def test_classes_can_be_told_apart_by_colour_and_marker():
    assert len({class_style(number) for number in range(49)}) == 49


@pytest.mark.parametrize(
    ("classes", "blocks", "name"),
    [
        (2, [2], "{}"),
        (5, [12, 12], "Old English sheepdog {}"),
        (20, [24, 24, 24], "x{}" + "o" * 60),
        (3, [1] * 12, "{}"),
    ],
    ids=["small", "common", "large", "early exits"],
)
def test_nothing_of_the_figure_is_cut_off(classes, blocks, name):
    assert_whole_figure_on_page(trajectories_figure(made(classes, *blocks, name=name)))


def test_the_title_says_whether_the_last_round_separates_further():
    result = made(3, 2, 2)
    first, last = result.ends
    for change, words in ((0.3, "further than"), (-0.3, "less than"), (0.0, "not clearly further than")):
        separations, draws = result.separations.copy(), np.ones_like(result.draws)
        separations[[first, last]] = 0.5, 0.5 + change
        draws[:, last] += change + np.linspace(-0.1, 0.1, len(draws))
        title = trajectories_figure(replace(result, separations=separations, draws=draws)).axes[0].get_title()
        expected = f"Round 2 separates 3 classes {words} round 1: 0.50 → {0.5 + change:.2f}"
        assert " ".join(title.split()) == expected
