"""Routed answers by class: every number recomputed image by image."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from progresvit.evaluation.answers import class_names, route
from progresvit.evaluation.class_report import (
    accuracy_table,
    class_accuracy_table,
    class_summary,
    confusion_table,
    error_table,
    exit_table,
)
from progresvit.metrics.interval import share_interval
from progresvit.routing.decide import exit_rounds
from tests.evaluation.made import CLASSES, make_logits, make_records


def labelled_records(labels, **options):
    """Records whose images have these labels; the logits stay as they are."""
    return replace(make_records(len(labels), **options), labels=np.asarray(labels))


def test_answers_are_those_of_the_exit_rounds_and_near_lossless_by_default():
    records = make_records(rounds=3)
    answers = route(records, (0.5, 0.8))
    exits = exit_rounds(records.top10_entropy, (0.5, 0.8))
    for image, s in enumerate(exits):
        assert answers.prediction[image] == records.top5_labels[image, s, 0]
        assert answers.probability[image] == records.top5_probabilities[image, s, 0]
        assert answers.correct[image] == (answers.prediction[image] == records.labels[image])
    assert not answers.near_lossless
    assert route(records).near_lossless
    assert route(records).threshold == records.near_lossless_threshold()


def test_the_accuracy_of_rounds_and_of_routing_has_intervals():
    records = make_records()
    answers = route(records, 0.6)
    rows = accuracy_table(answers).rows
    assert [row["answers"] for row in rows] == ["round 1", "round 2", "routed"]
    for row, right in zip(rows, [*records.correct.T, answers.correct], strict=True):
        expected = share_interval(int(right.sum()), 400)
        assert (row["top1"], row["top1_low"], row["top1_high"]) == (expected.mean, expected.lowest, expected.highest)
    spent = np.asarray(records.gmacs())[answers.exit_round].mean()
    assert [row["gmacs"] for row in rows] == pytest.approx([*records.gmacs(), spent])


def test_every_number_of_a_class_is_that_of_its_images():
    records = make_records()
    answers = route(records, 0.6)
    rows = class_accuracy_table(answers).rows
    assert [row["top1_routed"] for row in rows] == sorted(row["top1_routed"] for row in rows)
    assert sum(row["images"] for row in rows) == 400
    for row in rows:
        number = int(row["class"].removeprefix("class "))
        images = records.labels == number
        for key, right in (
            ("round1", records.correct[:, 0]),
            ("round2", records.correct[:, 1]),
            ("routed", answers.correct),
        ):
            expected = share_interval(int(right[images].sum()), int(images.sum()))
            found = [row[f"top1_{key}{end}"] for end in ("", "_low", "_high")]
            assert found == [expected.mean, expected.lowest, expected.highest]
        exits = answers.exit_round[images]
        assert [row["exit_1"], row["exit_2"]] == [(exits == 0).mean(), (exits == 1).mean()]
        assert row["gmacs"] == pytest.approx(np.asarray(records.gmacs())[exits].mean())
        wrong = Counter(answers.prediction[images & ~answers.correct].tolist())
        if wrong:
            assert row["confused"] == max(wrong.values())
            assert wrong[int(row["confused_with"].removeprefix("class "))] == row["confused"]
        else:
            assert row["confused_with"] is row["confused"] is None


def test_the_summary_of_a_page_shows_intervals_beside_shares():
    answers = route(make_records(), 0.6)
    worst = answers.by_class[0]
    heads, (cells,) = class_summary(answers, [worst], "worst").cells()
    top1 = worst.top1
    shown = f"{100 * top1.mean:.1f} ({100 * top1.lowest:.1f} to {100 * top1.highest:.1f})"
    assert cells[heads.index("routed top-1 (%)")] == shown
    assert heads[2:5] == ["round 1 top-1 (%)", "round 2 top-1 (%)", "routed top-1 (%)"]


def test_exit_shares_of_classes_have_intervals():
    answers = route(make_records(rounds=3), 0.6)
    rows = exit_table(answers).rows
    assert [row["exit_1"] for row in rows] == sorted(row["exit_1"] for row in rows)
    for row in rows:
        assert row["exit_1"] + row["exit_2"] + row["exit_3"] == pytest.approx(1)
        assert row["exit_3_low"] <= row["exit_3"] <= row["exit_3_high"]


def test_pairs_are_counted_and_the_most_frequent_is_first():
    records = make_records()
    answers = route(records, 0.6)
    table = confusion_table(answers)
    wrong = ~answers.correct
    expected = Counter(zip(records.labels[wrong].tolist(), answers.prediction[wrong].tolist()))
    found = {tuple(int(row[key].split()[-1]) for key in ("class", "prediction")): row["count"] for row in table.rows}
    assert found == expected
    counts = [row["count"] for row in table.rows]
    assert counts == sorted(counts, reverse=True)
    for row in table.rows:
        assert row["share"] == row["count"] / (records.labels == int(row["class"].split()[-1])).sum()
    short = confusion_table(answers, 3)
    assert list(short.rows) == list(table.rows[:3])
    assert short.title == f"Confused classes: the 3 most frequent of {len(table.rows)} pairs"


def test_errors_are_wrong_answers_by_probability_with_what_each_round_said():
    records = make_records()
    answers = route(records, 0.6)
    rows = error_table(answers, 10).rows
    wrong = sorted(answers.probability[~answers.correct].tolist(), reverse=True)
    assert [row["probability"] for row in rows] == wrong[:10]
    for row in rows:
        image = records.ids.tolist().index(row["image"])
        assert row["class"] == f"class {records.labels[image]}" != row["prediction"]
        assert row["prediction"] == row[f"round{row['exit_round']}"]
        assert row["round2_probability"] == records.top5_probabilities[image, 1, 0]


def test_answers_that_are_not_finite_are_wrong_and_come_last():
    logits, _ = make_logits()
    logits[:, 7] = np.nan
    answers = route(make_records(logits=logits), 0.6)
    rows = error_table(answers, 400).rows
    assert rows[-1]["image"].endswith("-7")
    assert (rows[-1]["prediction"], rows[-1]["probability"]) == ("none (not finite)", None)


def test_a_class_with_one_image_has_an_interval_that_says_how_little_that_is():
    records = make_records(60)
    lone = int(records.labels[0])
    chosen = records.take(np.flatnonzero((records.labels != lone) | (np.arange(60) == 0)))
    answers = route(chosen, 0.6)
    (row,) = [row for row in class_accuracy_table(answers).rows if row["class"] == f"class {lone}"]
    assert row["images"] == 1
    assert row["top1_routed"] in (0, 1)
    assert row["top1_routed_high"] - row["top1_routed_low"] == pytest.approx(0.793, abs=1e-3)


def test_classes_without_images_are_named_and_have_no_accuracy():
    records = make_records(60)
    answers = route(records.take(records.labels > 2), 0.6)
    assert answers.without_images == [0, 1, 2]
    rows = class_accuracy_table(answers).rows
    assert [row["class"] for row in rows[-3:]] == ["class 0", "class 1", "class 2"]
    for row in rows[-3:]:
        assert row["images"] == 0
        assert {value for key, value in row.items() if key not in ("class", "class_id", "images")} == {None}
    assert {one.number for one in answers.by_class} == set(range(3, CLASSES))
    among = tuple(range(2, CLASSES))
    restricted = replace(records, header=replace(records.header, classes=among)).take(records.labels > 2)
    assert route(restricted, 0.6).without_images == [2]


def test_names_are_those_of_the_model_or_of_the_probe_and_unique():
    header = make_records(5).header
    names = [f"name {number}" for number in range(CLASSES)]
    names[3] = names[8] = "crane"
    labelled = replace(header, config={**header.config, "labels": names})
    assert class_names(labelled)[2:4] == ["name 2", "crane (3)"]
    assert class_names(labelled)[8] == "crane (8)"
    ids = replace(header, config={**header.config, "class_ids": [f"n{number}" for number in range(CLASSES)]})
    assert class_names(ids)[11] == "n11"
    assert class_names(header)[11] == "class 11"
    assert class_names(replace(labelled, probe={"task": "knn", "classes": ["a", "b"]})) == ["a", "b"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_alternatives_and_single_rounds_are_not_routed(rounds):
    records = make_records(rounds=rounds)
    records = replace(records, header=replace(records.header, routable=rounds == 1))
    answers = route(records)
    assert answers.threshold is None
    assert np.array_equal(answers.prediction, records.predictions[:, -1])
    assert [row["answers"] for row in accuracy_table(answers).rows] == [f"round {n + 1}" for n in range(rounds)]
    assert not any(key.startswith("exit_") for key in class_accuracy_table(answers).rows[0])


def test_records_without_labels_are_refused_with_the_remedy():
    with pytest.raises(
        ValueError, match=r"400 of 400 images in these records have no label.*leave out unlabelled=True"
    ):
        route(make_records(labelled=False))
    with pytest.raises(ValueError, match="1 of 400 images"):
        route(labelled_records([*make_records().labels[:-1], -1]))
