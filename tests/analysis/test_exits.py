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
from progresvit.model import ProgResViT, registry
from progresvit.plots import DPI, render
from progresvit.routing import near_lossless
from progresvit.routing.decide import exit_rounds
from tests.analysis.made import assert_apart, assert_on_page, rows_of, sample_of
from tests.model.pooled import AlternativesConfig, PooledModel

IMAGES = BATCH + 10


def make_sample(*, images=IMAGES, classes=12, channels=3, side=32, seed=0):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (images, channels, side, side), dtype=np.uint8)
    return sample_of(pixels, np.arange(images) % classes, min(classes, images), name="name {}")


def made(*, images=40, classes=5, rounds=2, threshold=1.0, seed=0, **fields):
    """Random answers without a model."""
    rng = np.random.default_rng(seed)
    sample = make_sample(images=images, classes=classes, **fields)
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
    """Labels that the model often gets right, in round 1 or in round 2, so that there is something to route."""
    sample = make_sample()
    with torch.no_grad():
        outputs = small_model(normalise(sample.pixels, small_model.config))
    answers = torch.stack([output.logits.argmax(dim=-1) for output in outputs])
    labels = answers[torch.arange(IMAGES) % 2, torch.arange(IMAGES)]
    return replace(sample, labels=torch.where(torch.arange(IMAGES) % 5 == 0, torch.arange(IMAGES) % 12, labels))


def reference(model, sample):
    """Predictions and entropies of one image after another: both (N, S)."""
    answers, entropies = [], []
    for image in normalise(sample.pixels, model.config):
        with torch.no_grad():
            logits = [output.logits[0] for output in model(image[None])]
        answers.append([int(one.argmax()) for one in logits])
        shares = [one.topk(10).values.softmax(dim=0) for one in logits]
        entropies.append([float(-(share * share.log()).sum()) for share in shares])
    return np.array(answers), np.array(entropies)


def median_entropy(found):
    """Between two of them, with about half of the images below."""
    ordered = np.sort(found.entropy[:, 0])
    return float((ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2)


def test_answers_entropies_and_exits_are_those_of_the_model(small_model, sample):
    found = exits(small_model, sample, 0.0)
    answers, entropies = reference(small_model, sample)
    assert np.array_equal(found.predictions, answers)
    assert found.entropy == pytest.approx(entropies, abs=1e-4)
    assert np.array_equal(found.correct, answers == sample.labels.numpy()[:, None])
    assert set(found.exit_round) == {1}
    limit = median_entropy(found)
    half = exits(small_model, sample, limit)
    assert half.exit_round.tolist() == [0 if value < limit else 1 for value in found.entropy[:, 0]]
    assert (half.exit_round == 0).sum() == IMAGES // 2


def test_without_a_threshold_the_near_lossless_one_of_the_images_is_chosen(small_model, sample):
    found = exits(small_model, sample)
    point = near_lossless(found.entropy, found.correct, small_model.gmacs())
    assert found.threshold == (point.threshold,)
    assert found.near_lossless
    assert not exits(small_model, sample, point.threshold).near_lossless
    assert 0 < (found.exit_round == 0).sum() < IMAGES
    assert found.correct[np.arange(IMAGES), found.exit_round].sum() >= found.correct[:, -1].sum()


def test_three_rounds_exit_by_their_own_thresholds(small_config, randomize):
    config = small_config.replace(rounds=make_rounds([16, 24, 32], [1, 1, 2]))
    model, sample = randomize(ProgResViT(config)), make_sample()
    every = exits(model, sample, 0.0).entropy
    limits = tuple(np.quantile(every[:, :2], 0.4, axis=0).tolist())
    found = exits(model, sample, limits)
    assert found.threshold == limits
    expected = [0 if a < limits[0] else 1 if b < limits[1] else 2 for a, b, _ in every]
    assert found.exit_round.tolist() == expected
    assert len(set(expected)) == 3
    assert [(group.continues, group.earlier, group.later) for group in repairs(found)] == [
        (True, 0, 1),
        (True, 1, 2),
        (False, 0, 2),
        (False, 1, 2),
    ]
    exits_figure(found).draw_without_rendering()


def test_repairs_are_those_of_a_loop_over_the_images():
    found = made(images=200, rounds=3, threshold=(0.9, 1.2))
    for group in repairs(found):
        counts = dict.fromkeys(group.counts, 0)
        for image in range(200):
            reaches = found.exit_round[image] > group.earlier
            if reaches != group.continues or (not reaches and found.exit_round[image] < group.earlier):
                continue
            before, after = (found.predictions[image, s] == image % 5 for s in (group.earlier, group.later))
            key = ("repaired" if after else "stays wrong") if not before else ("stays right" if after else "broken")
            counts[key] += 1
        assert group.counts == counts
        assert group.images == sum(counts.values())
        assert min(counts.values()) > 0
    early = [group for group in repairs(found) if not group.continues]
    assert sum(group.images for group in early) == (found.exit_round < 2).sum()
    assert all(group.later == 2 for group in early)


def test_the_table_of_repairs_has_counts_and_intervals():
    found = made()
    rows = rows_of(repair_table(found))
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
    found = made(threshold=threshold)
    empty = [row for row in repair_table(found).rows if row["of"] == 0]
    assert len(empty) == 4
    assert {row["share"] for row in empty} == {None}
    assert repair_table(found).to_json()
    exits_figure(found).draw_without_rendering()


def test_classes_are_sorted_by_their_share_of_exits():
    found = made(images=60)
    shares = exit_shares(found)
    for one in shares:
        rounds = [found.exit_round[image] for image in range(60) if image % 5 == one.number]
        assert (one.images, one.exits) == (12, rounds.count(0))
    assert len({one.exits for one in shares}) > 1
    assert [one.exits for one in shares] == sorted((one.exits for one in shares), reverse=True)
    rows = exit_share_table(found).rows
    assert [row["share"] for row in rows] == [one.exits / 12 for one in shares]
    assert all(row["share_low"] <= row["share"] <= row["share_high"] for row in rows)
    assert rows[0]["class_id"] == f"n{shares[0].number:03d}"


def test_the_table_has_a_row_for_each_image(small_model, sample):
    found = exits(small_model, sample)
    rows = rows_of(exits_table(found))
    assert list(rows[0])[:4] == ["id", "class", "exit_round", "entropy_round1"]
    assert [row["id"] for row in rows] == list(sample.ids)
    for image, row in enumerate(rows):
        assert int(row["exit_round"]) == found.exit_round[image] + 1
        assert row["class"] == f"name {sample.labels[image]}"
        for s in range(2):
            assert float(row[f"entropy_round{s + 1}"]) == found.entropy[image, s]
            assert row[f"prediction_round{s + 1}"] == f"name {found.predictions[image, s]}"
            assert row[f"correct_round{s + 1}"] == str(bool(found.correct[image, s]))


def test_predicted_classes_that_the_sample_lacks_have_the_names_of_the_model(small_config, randomize):
    labels = tuple(f"label {number}" for number in range(12))
    sample = make_sample(images=20, classes=1)
    named = exits(randomize(ProgResViT(small_config.replace(labels=labels))), sample, 0.0)
    other = next(number for number in named.predictions.flat if number != 0)
    assert named.class_names[int(other)] == f"label {other}"
    assert named.class_names[0] == "name 0"
    unnamed = exits(randomize(ProgResViT(small_config)), sample, 0.0)
    assert all(unnamed.class_names[int(n)] == f"class {n}" for n in unnamed.predictions.flat if n != 0)


def test_images_without_finite_logits_are_wrong_and_never_exit_early(small_model):
    with torch.no_grad():
        small_model.head.bias[3] = torch.nan
    found = exits(small_model, make_sample(images=12), 9.0)
    assert set(found.predictions.flat) == {-1}
    assert set(found.exit_round) == {1}
    assert not found.correct.any()
    assert exits_table(found).rows[0]["prediction_round1"] == "none (not finite)"
    exits_figure(found).draw_without_rendering()


def test_the_gallery_begins_with_the_most_certain_and_the_most_uncertain_image():
    found = made(images=100)
    certain, uncertain = gallery(found)
    ordered = sorted(range(100), key=lambda image: found.entropy[image, 0])
    assert certain.tolist() == ordered[:8]
    assert uncertain.tolist() == ordered[:-9:-1]


@pytest.mark.parametrize(("images", "shown"), [(1, (1, 0)), (5, (3, 2)), (15, (8, 7)), (16, (8, 8))])
def test_a_small_gallery_shows_no_image_twice(images, shown):
    found = made(images=images)
    certain, uncertain = gallery(found)
    assert (len(certain), len(uncertain)) == shown
    assert not set(certain.tolist()) & set(uncertain.tolist())
    assert len(panels_of(exits_figure(found))) == images


def panels_of(figure):
    """The panels with an image, in the order of the gallery."""
    return [axes for axes in figure.axes if axes.images]


def test_the_figure_shows_the_gallery_and_marks_wrong_answers():
    found = made(images=100)
    panels = panels_of(exits_figure(found))
    for panel, image in zip(panels, np.concatenate(gallery(found)).tolist(), strict=True):
        text = panel.get_xlabel()
        answer = found.predictions[image, found.exit_round[image]]
        assert text.startswith(f"{found.entropy[image, 0]:.3f} nats")
        assert f"name {answer}" in text
        assert ("✗" in text) == (answer != image % 5)
        assert (f"is name {image % 5}" in text) == (answer != image % 5)
        assert np.array_equal(panel.images[0].get_array(), thumbnail(found.sample.pixels[image]))
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


def test_of_many_classes_those_that_exit_most_and_least_are_shown():
    found = made(images=100, classes=48)  # 4 classes have three images, the others two
    shares = exit_shares(found)
    chosen = [*shares[:10], None, *shares[-10:]]
    expected = ["…" if one is None else f"{one.name} ({one.images})" for one in chosen]
    assert class_labels(exits_figure(found)) == expected


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


def test_a_model_in_training_is_left_as_it_was(small_config, randomize):
    model, sample = randomize(ProgResViT(small_config, drop_path=0.9)), make_sample(images=12)
    expected = exits(model.eval(), sample, 0.5)
    assert np.array_equal(exits(model.train(), sample, 0.5).entropy, expected.entropy)
    assert model.training


def test_progress_counts_the_images(small_model):
    calls = []
    exits(small_model, make_sample(), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(BATCH, IMAGES), (IMAGES, IMAGES)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounds": make_rounds([32], [2])}, "this model has one round; give a model of two or more"),
        ({"num_classes": 0}, "this model has no head; give a classifier"),
        ({"task": "segmentation"}, "this model segments images; give a classifier"),
    ],
)
def test_models_that_do_not_classify_in_rounds_are_refused(small_config, fields, message):
    with pytest.raises(ValueError, match=message):
        exits(ProgResViT(small_config.replace(**fields)), make_sample())


def test_a_model_whose_rounds_are_alternatives_is_refused():
    rounds = [{"resolution": 16, "grid": 2}, {"resolution": 32, "grid": 4}]
    with pytest.raises(ValueError, match="rounds of a model of kind 'test_alternatives' are alternatives"):
        exits(PooledModel(AlternativesConfig(rounds=rounds, num_classes=4)), make_sample())


def test_thresholds_are_checked_before_any_round_runs(small_model, monkeypatch):
    monkeypatch.setattr(small_model, "run_round", lambda *_: pytest.fail("a round ran"))
    with pytest.raises(ValueError, match="so 1 for 2 rounds"):
        exits(small_model, make_sample(), (0.1, 0.2))
    with pytest.raises(ValueError, match="0 \\(every round runs\\) or more"):
        exits(small_model, make_sample(), -1.0)


def test_another_kind_of_model_whose_rounds_build_on_each_other_works(randomize):
    rounds = [{"resolution": 32, "heads": 1}, {"resolution": 32, "heads": 2}]
    config = registry.config_class("thinkingvit")(heads=2, depth=2, patch_size=8, num_classes=12, rounds=rounds)
    found = exits(randomize(registry.build(config)), make_sample(images=12))
    assert found.predictions.shape == (12, 2)
    assert render(exits_figure(found), ".png").startswith(b"\x89PNG")


def test_the_title_says_how_many_exit_and_what_round_2_repairs():
    found = made(images=40)
    first = repairs(found)[0]
    title = " ".join(exits_figure(found).get_suptitle().split())
    early = 100 * (found.exit_round == 0).mean()
    repaired, broken = (100 * first.counts[outcome] / first.images for outcome in ("repaired", "broken"))
    assert title.startswith(f"{early:.0f} % of 40 images exit after round 1; round 2 repairs {repaired:.0f} %")
    assert f"breaks {broken:.0f} %" in title
