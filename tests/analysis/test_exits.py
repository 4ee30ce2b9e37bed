"""Exits: which images exit after which round, and what the later rounds repair and break."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from progresvit.analysis.exits import (
    THUMBNAIL,
    Exits,
    exit_share_table,
    exit_shares,
    exits,
    exits_figure,
    exits_table,
    gallery,
    repair_table,
    repairs,
    thumbnail,
)
from progresvit.analysis.sample import BATCH
from progresvit.config import make_rounds
from progresvit.data.transforms import normalise
from progresvit.model import ProgResViT
from progresvit.plots import DPI, render
from progresvit.routing import near_lossless
from progresvit.routing.decide import exit_rounds
from tests.analysis.made import (
    answered_sample,
    assert_apart,
    assert_on_page,
    model_of_kind,
    random_sample,
    rows_of,
)

IMAGES = BATCH + 10


def made(*, images=40, classes=5, rounds=2, threshold=1.0, seed=0, **fields):
    """Random answers without a model."""
    rng = np.random.default_rng(seed)
    sample = random_sample(images=images, classes=classes, name="name {}", **fields)
    labels = sample.labels.numpy()[:, None]
    entropy = rng.uniform(0, 2.3, (images, rounds)).astype(np.float32)
    predictions = np.where(rng.random((images, rounds)) < 0.6, labels, rng.integers(0, classes, (images, rounds)))
    limits = threshold if isinstance(threshold, tuple) else (threshold,) * (rounds - 1)
    return Exits(
        sample=sample,
        predictions=predictions,
        entropy=entropy,
        threshold=limits,
        near_lossless=False,
        exit_round=exit_rounds(entropy, limits),
        class_names={number: f"name {number}" for number in range(classes)},
    )


@pytest.fixture
def sample(small_model):
    """A fifth of the labels is arbitrary, so that images of low entropy are wrong too."""
    sample, number = answered_sample(small_model, images=IMAGES), torch.arange(IMAGES)
    return replace(sample, labels=torch.where(number % 5 == 0, number % 12, sample.labels))


def reference(model, sample):
    """Predictions and entropies of one image after another: both (N, S)."""
    answers, entropies = [], []
    for image in normalise(sample.pixels, model.config):
        with torch.no_grad():
            logits = [output.logits[0] for output in model(image[None])]
        answers.append([int(values.argmax()) for values in logits])
        shares = [values.topk(10).values.softmax(dim=0) for values in logits]
        entropies.append([float(-(share * share.log()).sum()) for share in shares])
    return np.array(answers), np.array(entropies)


def median_entropy(result):
    """Between two of them, with about half of the images below."""
    ordered = np.sort(result.entropy[:, 0])
    return float((ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2)


def test_answers_entropies_and_exits_equal_the_model(small_model, sample):
    result = exits(small_model, sample, 0.0)
    answers, entropies = reference(small_model, sample)
    assert np.array_equal(result.predictions, answers)
    assert result.entropy == pytest.approx(entropies, abs=1e-4)
    assert np.array_equal(result.correct, answers == sample.labels.numpy()[:, None])
    assert set(result.exit_round) == {1}
    limit = median_entropy(result)
    half = exits(small_model, sample, limit)
    assert half.exit_round.tolist() == [0 if value < limit else 1 for value in result.entropy[:, 0]]
    assert (half.exit_round == 0).sum() == IMAGES // 2


def test_without_a_threshold_the_near_lossless_one_of_the_images_is_chosen(small_model, sample):
    result = exits(small_model, sample)
    point = near_lossless(result.entropy, result.correct, small_model.gmacs())
    assert result.threshold == (point.threshold,)
    assert result.near_lossless
    assert not exits(small_model, sample, point.threshold).near_lossless
    assert 0 < (result.exit_round == 0).sum() < IMAGES
    assert result.correct[np.arange(IMAGES), result.exit_round].sum() >= result.correct[:, -1].sum()


def test_three_rounds_exit_by_their_own_thresholds(small_config, randomize):
    config = small_config.replace(rounds=make_rounds([16, 24, 32], [1, 1, 2]))
    model, sample = randomize(ProgResViT(config)), random_sample()
    every = exits(model, sample, 0.0).entropy
    limits = tuple(np.quantile(every[:, :2], 0.4, axis=0).tolist())
    result = exits(model, sample, limits)
    assert result.threshold == limits
    expected = [0 if a < limits[0] else 1 if b < limits[1] else 2 for a, b, _ in every]
    assert result.exit_round.tolist() == expected
    assert len(set(expected)) == 3
    assert [(group.continues, group.earlier, group.later) for group in repairs(result)] == [
        (True, 0, 1),
        (True, 1, 2),
        (False, 0, 2),
        (False, 1, 2),
    ]
    exits_figure(result).draw_without_rendering()


def test_repairs_equal_a_loop_over_the_images():
    result = made(images=200, rounds=3, threshold=(0.9, 1.2))
    for group in repairs(result):
        counts = dict.fromkeys(group.counts, 0)
        for image in range(200):
            reaches = result.exit_round[image] > group.earlier
            if reaches != group.continues or (not reaches and result.exit_round[image] < group.earlier):
                continue
            before, after = (result.predictions[image, s] == image % 5 for s in (group.earlier, group.later))
            key = ("repaired" if after else "stays wrong") if not before else ("stays right" if after else "broken")
            counts[key] += 1
        assert group.counts == counts
        assert group.images == sum(counts.values())
        assert min(counts.values()) > 0
    early = [group for group in repairs(result) if not group.continues]
    assert sum(group.images for group in early) == (result.exit_round < 2).sum()
    assert all(group.later == 2 for group in early)


def test_the_table_of_repairs_has_counts_and_intervals():
    result = made()
    rows = rows_of(repair_table(result))
    assert len(rows) == 2 * 4
    for row in rows:
        share, low, high = (float(row[key]) for key in ("share", "share_low", "share_high"))
        assert share == int(row["count"]) / int(row["of"])
        assert 0 <= low <= share <= high <= 1
    assert {(row["images"], row["from_round"], row["to_round"]) for row in rows} == {
        ("continue", "1", "2"),
        ("exit", "1", "2"),
    }


@pytest.mark.parametrize("threshold", [0.0, 9.0], ids=["every image continues", "every image exits"])
def test_a_group_without_images_is_empty_in_the_table(threshold):
    result = made(threshold=threshold)
    empty = [row for row in repair_table(result).rows if row["of"] == 0]
    assert len(empty) == 4
    assert {row["share"] for row in empty} == {None}
    assert repair_table(result).to_json()
    exits_figure(result).draw_without_rendering()


def test_classes_are_sorted_by_their_share_of_exits():
    result = made(images=60)
    shares = exit_shares(result)
    for entry in shares:
        rounds = [result.exit_round[image] for image in range(60) if image % 5 == entry.number]
        assert (entry.images, entry.exits) == (12, rounds.count(0))
    assert len({entry.exits for entry in shares}) > 1
    assert [entry.exits for entry in shares] == sorted((entry.exits for entry in shares), reverse=True)
    rows = exit_share_table(result).rows
    assert [row["share"] for row in rows] == [entry.exits / 12 for entry in shares]
    assert all(row["share_low"] <= row["share"] <= row["share_high"] for row in rows)
    assert rows[0]["class_id"] == f"n{shares[0].number:03d}"


def test_the_table_has_a_row_for_each_image(small_model, sample):
    result = exits(small_model, sample)
    rows = rows_of(exits_table(result))
    assert list(rows[0])[:4] == ["image", "class", "exit_round", "entropy_round1"]
    assert [row["image"] for row in rows] == list(sample.ids)
    for image, row in enumerate(rows):
        assert int(row["exit_round"]) == result.exit_round[image] + 1
        assert row["class"] == f"name {sample.labels[image]}"
        for s in range(2):
            assert float(row[f"entropy_round{s + 1}"]) == result.entropy[image, s]
            assert row[f"prediction_round{s + 1}"] == f"name {result.predictions[image, s]}"
            assert row[f"correct_round{s + 1}"] == str(bool(result.correct[image, s]))


def test_predicted_classes_that_the_sample_lacks_have_the_names_of_the_model(small_config, randomize):
    labels = tuple(f"label {number}" for number in range(12))
    sample = random_sample(images=20, classes=1, name="name {}")
    named = exits(randomize(ProgResViT(small_config.replace(labels=labels))), sample, 0.0)
    other = next(number for number in named.predictions.flat if number != 0)
    assert named.class_names[int(other)] == f"label {other}"
    assert named.class_names[0] == "name 0"
    unnamed = exits(randomize(ProgResViT(small_config)), sample, 0.0)
    assert all(unnamed.class_names[int(n)] == f"class {n}" for n in unnamed.predictions.flat if n != 0)


def test_images_without_finite_logits_are_wrong_and_never_exit_early(small_model):
    with torch.no_grad():
        small_model.head.bias[3] = torch.nan
    result = exits(small_model, random_sample(images=12), 9.0)
    assert set(result.predictions.flat) == {-1}
    assert set(result.exit_round) == {1}
    assert not result.correct.any()
    assert exits_table(result).rows[0]["prediction_round1"] == "none (not finite)"
    exits_figure(result).draw_without_rendering()


def test_the_gallery_begins_with_the_most_certain_and_the_most_uncertain_image():
    result = made(images=100)
    certain, uncertain = gallery(result)
    ordered = sorted(range(100), key=lambda image: result.entropy[image, 0])
    assert certain.tolist() == ordered[:8]
    assert uncertain.tolist() == ordered[:-9:-1]


@pytest.mark.parametrize(("images", "shown"), [(1, (1, 0)), (5, (3, 2)), (15, (8, 7)), (16, (8, 8))])
def test_a_small_gallery_shows_no_image_twice(images, shown):
    result = made(images=images)
    certain, uncertain = gallery(result)
    assert (len(certain), len(uncertain)) == shown
    assert not set(certain.tolist()) & set(uncertain.tolist())
    assert len(panels_of(exits_figure(result))) == images


def panels_of(figure):
    """The panels with an image, in the order of the gallery."""
    return [axes for axes in figure.axes if axes.images]


def test_the_figure_shows_the_gallery_and_marks_wrong_answers():
    result = made(images=100)
    panels = panels_of(exits_figure(result))
    for panel, image in zip(panels, np.concatenate(gallery(result)).tolist(), strict=True):
        text = panel.get_xlabel()
        answer = result.predictions[image, result.exit_round[image]]
        assert text.startswith(f"{result.entropy[image, 0]:.3f} nats")
        assert f"name {answer}" in text
        assert ("✗" in text) == (answer != image % 5)
        assert (f"is name {image % 5}" in text) == (answer != image % 5)
        assert np.array_equal(panel.images[0].get_array(), thumbnail(result.sample.pixels[image]))
    assert 0 < sum("✗" in panel.get_xlabel() for panel in panels) < 12


@pytest.mark.parametrize(("side", "channels"), [(28, 3), (97, 3), (224, 1)])
def test_no_image_of_the_figure_is_larger_than_a_thumbnail(side, channels):
    figure = exits_figure(made(images=4, side=side, channels=channels))
    shapes = {panel.images[0].get_array().shape for panel in panels_of(figure)}
    h = min(side, THUMBNAIL)
    assert shapes == {(h, h) if channels == 1 else (h, h, 3)}
    assert max(max(shape[:2]) for shape in shapes) <= 96
    assert not any(axes.images for axes in figure.axes if axes not in panels_of(figure))
    render(figure, ".png")
    figure.set_dpi(DPI)
    drawn = [panel.images[0].get_window_extent() for panel in panels_of(figure)]
    assert max(max(box.width, box.height) for box in drawn) <= THUMBNAIL  # nor is it enlarged in a .png


def class_labels(figure):
    (axes,) = (axes for axes in figure.axes if axes.get_xlabel().startswith("share of the class"))
    return [label.get_text() for label in axes.get_yticklabels()]


def test_of_many_classes_the_ends_of_the_order_are_shown():
    result = made(images=100, classes=48)  # 4 classes have three images, the others two
    shares = exit_shares(result)
    shown = [*shares[:10], None, *shares[-10:]]
    expected = ["…" if entry is None else f"{entry.name} ({entry.images})" for entry in shown]
    assert class_labels(exits_figure(result)) == expected


def test_of_many_classes_those_with_a_single_image_are_left_out():
    labels = class_labels(exits_figure(made(images=35, classes=30)))
    assert sorted(labels) == sorted(f"name {number} (2)" for number in range(5))
    assert len(class_labels(exits_figure(made(images=20, classes=20)))) == 20
    assert len(class_labels(exits_figure(made(images=30, classes=30)))) == 21  # all have a single image


@pytest.mark.parametrize("fields", [{"rounds": 5, "classes": 3}, {"images": 100, "classes": 40}])
def test_nothing_is_cut_off_and_panels_do_not_overlap(fields):
    figure = exits_figure(made(**fields))
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert_on_page(figure, boxes, beyond=1)
    assert_apart(boxes, overlap=1)


def test_thresholds_are_checked_before_any_round_runs(small_model, monkeypatch):
    monkeypatch.setattr(small_model, "run_round", lambda *_: pytest.fail("a round ran"))
    with pytest.raises(ValueError, match="so 1 for 2 rounds"):
        exits(small_model, random_sample(), (0.1, 0.2))
    with pytest.raises(ValueError, match="0 \\(every round runs\\) or more"):
        exits(small_model, random_sample(), -1.0)


def test_another_kind_of_model_whose_rounds_build_on_each_other_works(randomize):
    result = exits(randomize(model_of_kind("thinkingvit", num_classes=12)), random_sample(images=12))
    assert result.predictions.shape == (12, 2)
    assert render(exits_figure(result), ".png").startswith(b"\x89PNG")


def test_the_title_says_how_many_exit_and_what_round_2_repairs():
    result = made(images=40)
    first = repairs(result)[0]
    title = " ".join(exits_figure(result).get_suptitle().split())
    early = 100 * (result.exit_round == 0).mean()
    repaired, broken = (100 * first.counts[outcome] / first.images for outcome in ("repaired", "broken"))
    assert title.startswith(f"{early:.0f} % of 40 images exit after round 1; round 2 repairs {repaired:.0f} %")
    assert f"breaks {broken:.0f} %" in title
