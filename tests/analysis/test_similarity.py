"""Similarity: the cosine of every block output to the last one, against loops over images, patches and channels."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from progresvit.analysis.similarity import Similarity, similarity, similarity_figure, similarity_table
from progresvit.config import ModelConfig, make_rounds, plain_vit
from progresvit.data.transforms import normalise
from progresvit.metrics.interval import mean_interval
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
    return coloured_sample()


@pytest.fixture
def three_rounds(randomize):
    rounds = make_rounds([16, 24, 32], [1, 2, 2])
    return randomize(ProgResViT(ModelConfig(rounds=rounds, heads=2, **SIZES)))


def cosine(a, b):
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def literal(x, last, d):
    """Cosines of one image's tokens, (N, d) each: of the class token and the mean over the patches."""
    side, g = int((len(x) - 1) ** 0.5), int((len(last) - 1) ** 0.5)
    grid = x[1:].T.reshape(1, -1, side, side)
    grid = F.interpolate(grid, size=(g, g), mode="bilinear", align_corners=False)[0].double().numpy()
    last = last.double().numpy()
    patches = [cosine(grid[:d, row, column], last[1 + row * g + column, :d]) for row in range(g) for column in range(g)]
    return cosine(x[0, :d].double().numpy(), last[0, :d]), float(np.mean(patches))


def test_cosines_equal_loops_over_images_and_patches(small_model, sample):
    result = similarity(small_model, sample)
    points = tokens_at_points(small_model, sample)
    assert result.points == points_of(2, 2)
    assert result.cosines.shape == (2, 6, 6)
    for place, x in enumerate(points):
        for image in range(len(sample)):
            expected = literal(x[image], points[-1][image], 64)
            assert result.cosines[:, place, image] == pytest.approx(expected, abs=1e-5)
    assert result.handover


def test_only_channels_that_all_rounds_have_are_compared(small_model, sample):
    expected = similarity(small_model, sample).cosines
    with torch.no_grad():
        small_model.norm.weight[64:].mul_(9)  # round 1 has 64 channels, and no block reads the last norm
    assert np.array_equal(similarity(small_model, sample).cosines, expected)
    with torch.no_grad():
        small_model.norm.weight[:64].mul_(torch.linspace(0.1, 2, 64))
    assert np.abs(similarity(small_model, sample).cosines - expected).max() > 0.01


def test_three_rounds_are_compared_with_the_third(three_rounds, sample):
    result = similarity(three_rounds, sample)
    assert result.points == points_of(2, 2, 2)
    points = tokens_at_points(three_rounds, sample)
    for place in (2, 3, 5, 7):
        expected = literal(points[place][0], points[-1][0], 64)
        assert result.cosines[:, place, 0] == pytest.approx(expected, abs=1e-5)


def test_a_model_of_one_round_is_compared_with_its_own_end(randomize, sample):
    model = randomize(ProgResViT(plain_vit(resolution=32, heads=1, **SIZES)))
    result = similarity(model, sample)
    assert result.points == points_of(2)
    assert result.cosines[:, -1] == pytest.approx(1, abs=1e-6)
    similarity_figure(result)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_can_be_compared(kind, randomize, sample):
    model = randomize(model_of_kind(kind))
    result = similarity(model, sample)
    assert result.points == (points_of(1, 1) if kind == "early_exit" else points_of(2, 2))
    assert result.cosines[:, -1] == pytest.approx(1, abs=1e-6)
    assert result.handover == (kind in ("progresvit", "thinkingvit", "early_exit"))
    if kind == "early_exit":
        assert np.array_equal(result.cosines[:, 1], result.cosines[:, 2])  # a round continues the one before


def test_merged_patches_count_as_often_as_before(small_config, randomize, sample):
    model = randomize(ProgResViT(small_config.with_merge([0, 5])))
    result = similarity(model, sample)
    first, second = (output.tokens for output in model(normalise(sample.pixels, model.config)))
    for image in range(len(sample)):
        expected = literal(first[image].detach(), second[image].detach(), 64)
        assert result.cosines[:, 2, image] == pytest.approx(expected, abs=1e-5)
    unmerged = ProgResViT(small_config)
    unmerged.load_state_dict(model.state_dict())
    assert np.abs(result.cosines - similarity(unmerged, sample).cosines).max() > 1e-3


def test_the_table_has_means_intervals_and_quantiles(small_model, sample):
    result = similarity(small_model, sample)
    rows = rows_of(similarity_table(result))
    assert list(rows[0])[:8] == ["round", "block", "tokens", "similarity", "low", "high", "q10", "q90"]
    assert [(row["round"], row["block"], row["tokens"]) for row in rows[:3]] == [
        ("1", "0", "class"),
        ("1", "0", "patch"),
        ("1", "1", "class"),
    ]
    assert len(rows) == 12
    patch = result.cosines[1, 3]
    row, mean = rows[7], mean_interval(patch)
    assert (row["round"], row["block"], row["tokens"]) == ("2", "0", "patch")
    expected = [mean.mean, mean.lowest, mean.highest, np.quantile(patch, 0.1), np.quantile(patch, 0.9)]
    assert [float(row[key]) for key in ("similarity", "low", "high", "q10", "q90")] == pytest.approx(expected)


def test_the_change_at_a_transition_is_from_the_last_block_of_the_round_before(small_model, sample):
    result = similarity(small_model, sample)
    assert result.change(0, 0) is None
    assert result.change(3, 0) is None
    for tokens in (0, 1):
        cosines = result.cosines[tokens]
        assert result.change(4, tokens) == mean_interval(cosines[4] - cosines[2])
        assert result.change(5, tokens) == mean_interval(cosines[5] - cosines[4])
        assert result.change(1, tokens) == mean_interval(cosines[1] - cosines[0])
    rows = similarity_table(result).rows
    assert rows[8]["change"] == mean_interval(result.cosines[0, 4] - result.cosines[0, 2]).mean
    assert rows[6]["change"] is None


def test_rounds_that_are_alternatives_have_no_transition():
    alternatives = made(1, 1, handover=False)
    assert alternatives.change(3, 1) == mean_interval(alternatives.cosines[1, 3] - alternatives.cosines[1, 2])
    for result, dotted in ((alternatives, 0), (made(1, 1), 2)):
        lines = similarity_figure(result).axes[0].lines
        assert [line.get_linestyle() for line in lines].count(":") == dotted


def made(*blocks, images=7, handover=True):
    """Similarities of rounds with these numbers of blocks, without a model."""
    points = points_of(*blocks)
    cosines = np.random.default_rng(0).random((2, len(points), images))
    return Similarity(points=points, cosines=cosines, handover=handover)


def test_the_figure_shows_the_means_of_both_kinds_of_tokens():
    result = made(3, 2)
    axes = similarity_figure(result).axes[0]
    curves = [line for line in axes.lines if line.get_linestyle() != ":"]
    shown = [line.get_ydata() for line in curves]
    means = result.cosines.mean(axis=2)
    expected = [means[0, :4], means[0, 4:], means[1, :4], means[1, 4:]]
    assert all(np.allclose(a, b) for a, b in zip(shown, expected, strict=True))
    assert len({(line.get_linestyle(), line.get_marker()) for line in curves}) == 2
    assert [text.get_text() for text in axes.texts] == ["round 1", "round 2"]
    assert [label.get_text() for label in axes.get_xticklabels()] == list("0123012")


def test_the_title_gives_the_cosines_where_the_last_round_begins():
    result = made(3, 2)
    means = result.cosines.mean(axis=2)  # points: inputs and outputs of three blocks, then of two
    first, second = similarity_figure(result).axes[0].get_title().split("\n")
    assert first == "Cosine from the end of round 1 to block 1 of round 2:"
    expected = [
        f"{name} {means[k, 3]:.2f} → {means[k, 5]:.2f}" for k, name in enumerate(("class token", "patch tokens"))
    ]
    assert second == ", ".join(expected)
    alone = similarity_figure(made(3)).axes[0].get_title()
    assert alone.startswith("Cosine from the first to the last block:")


@pytest.mark.parametrize("blocks", [[2], [12, 12], [24, 24, 24], [1] * 12, [32]])
def test_nothing_of_the_figure_is_cut_off_or_overlaps(blocks):
    figure = similarity_figure(made(*blocks))
    assert_whole_figure_on_page(figure)
    (axes,) = figure.axes
    for texts in (axes.texts, axes.get_xticklabels()):
        boxes = [text.get_window_extent() for text in texts]
        assert all(a.x1 < b.x0 for a, b in pairwise(boxes))
    assert axes.get_xticklabels()[0].get_text() == "0"
