import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import confusion_matrix

from progresvit.evaluation import (
    is_segmentation,
    read_records,
    read_segmentation_records,
    write_records,
    write_segmentation_records,
)
from progresvit.metrics.miou import ClassCounts, mean_iou, pixel_accuracy
from progresvit.routing.decide import exit_rounds
from tests.evaluation.made import make_records
from tests.evaluation.made_segmentation import CLASSES, IGNORE, make_maps, make_segmentation_records, naive_miou


def same(a, b):
    assert a.header == b.header
    for name in ("ids", "windows", "scores"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
        assert getattr(a, name).dtype == getattr(b, name).dtype
    for mine, other in zip(a.confusion, b.confusion, strict=True):
        assert mine.dtype == np.int64
        assert np.array_equal(mine.toarray(), other.toarray())


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_records_come_back_from_their_file(tmp_path, rounds):
    records = make_segmentation_records(40, rounds)
    write_segmentation_records(records, tmp_path / "deep" / "r.parquet")
    assert is_segmentation(tmp_path / "deep" / "r.parquet")
    back = read_segmentation_records(tmp_path / "deep" / "r.parquet")
    same(back, records)
    assert back.config.task == "segmentation"
    assert (back.rounds, back.classes, back.labels, len(back)) == (rounds, 4, CLASSES, 40)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.parquet"]


def test_other_programs_can_read_the_table_and_its_header(tmp_path):
    records = make_segmentation_records(5)
    write_segmentation_records(records, tmp_path / "r.parquet")
    table = pq.read_table(tmp_path / "r.parquet")
    rounds = [f"round{s}_{name}" for s in (1, 2) for name in ("score", "cells", "counts")]
    assert table.column_names == ["image", "windows", *rounds]
    cells, counts = table["round2_cells"][3].as_py(), table["round2_counts"][3].as_py()
    row = np.zeros(16, int)
    row[cells] = counts
    assert np.array_equal(row, records.confusion[1].toarray()[3])
    assert min(counts) > 0
    header = json.loads(table.schema.metadata[b"progresvit_segmentation"])["header"]
    assert header["preprocessing"]["task"] == "segmentation"
    assert header["masks"] == {"values": [0, 1, 2, 3], "ignored": [255]}


def test_counts_and_errors_agree_with_the_maps():
    labels, predictions, scores = make_maps(60, rounds=3)
    labels[7] = IGNORE  # an image without labelled pixels
    records = make_segmentation_records(60, 3, maps=(labels, predictions, scores))
    for s in range(3):
        for image in (0, 7, 59):
            kept = labels[image] != IGNORE
            wanted, found = labels[image][kept], predictions[s, image][kept]
            expected = confusion_matrix(wanted, found, labels=range(4)) if kept.any() else np.zeros((4, 4))
            assert np.array_equal(records.confusion[s].toarray()[image].reshape(4, 4), expected)
            counts = ClassCounts(*(part[image, s] for part in records.counts))
            for got, want in zip(counts, ClassCounts.of(expected)):
                assert np.array_equal(got, want)
            wrong = (wanted != found).mean() if kept.any() else 0
            assert records.pixel_error[image, s] == pytest.approx(wrong)
        assert np.array_equal(records.confusion_matrix(s).sum(axis=1), [(labels == k).sum() for k in range(4)])
    assert records.counts.labelled.dtype == np.int64


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.6, 5.0, (0.2, 0.6)])
def test_the_miou_of_any_routed_mixture_is_computed_from_its_label_maps(threshold):
    maps = labels, predictions, scores = make_maps(200, rounds=3)
    records = make_segmentation_records(200, 3, maps=maps)
    rounds = exit_rounds(scores, threshold)
    routed = predictions[rounds, np.arange(200)]
    matrix = records.confusion_matrix(rounds)
    assert mean_iou(ClassCounts.of(matrix)) == pytest.approx(naive_miou(routed, labels))
    kept = labels != IGNORE
    assert pixel_accuracy(ClassCounts.of(matrix)) == pytest.approx((routed == labels)[kept].mean())
    assert np.array_equal(matrix, confusion_matrix(labels[kept], routed[kept], labels=range(4)))


def test_parts_add_up_to_the_whole():
    records = make_segmentation_records(200)
    first, second = records.split(0.3, seed=2)
    assert not set(first.ids) & set(second.ids)
    assert len(first) + len(second) == 200
    for s in range(2):
        assert np.array_equal(first.confusion_matrix(s) + second.confusion_matrix(s), records.confusion_matrix(s))
    turned = records.take(np.arange(200)[::-1])
    assert set(turned.split(0.3, seed=2)[0].ids) == set(first.ids)
    assert np.array_equal(turned.counts.predicted, records.counts.predicted[::-1])
    some = records.take(np.arange(200) < 3)
    assert np.array_equal(some.gmacs(), records.gmacs()[:3])
    with pytest.raises(ValueError, match="between 0 and 1"):
        records.split(1.0)


def test_an_image_costs_as_much_as_its_windows():
    records = make_segmentation_records(50)
    for convention in ("paper", "executed"):
        spent = records.gmacs(convention)
        assert spent.shape == (50, 2)
        assert spent[17] == pytest.approx([records.windows[17] * each for each in records.header.gmacs[convention]])


def test_broken_images_are_counted():
    labels, predictions, scores = make_maps(20)
    scores[3, 0] = scores[5, 1] = np.inf
    assert make_segmentation_records(20, maps=(labels, predictions, scores)).broken == 2


def test_classes_without_names_are_numbers():
    records = make_segmentation_records(5)
    unnamed = {key: value for key, value in records.header.config.items() if key not in ("labels", "class_ids")}
    records = replace(records, header=replace(records.header, config=unnamed))
    assert records.labels == ("0", "1", "2", "3")


def test_records_without_labelled_pixels_are_refused(tmp_path):
    labels, predictions, scores = make_maps(10)
    empty = make_segmentation_records(10, maps=(np.full_like(labels, IGNORE), predictions, scores))
    with pytest.raises(ValueError, match=r"no pixel .* has a label; check the masks and .* \(ignore=…\)"):
        write_segmentation_records(empty, tmp_path / "r.parquet")
    assert list(tmp_path.iterdir()) == []


def test_each_kind_of_records_is_read_by_its_own_function(tmp_path):
    target = tmp_path / "s.parquet"
    write_segmentation_records(make_segmentation_records(10), target)
    with pytest.raises(
        ValueError, match=r"s\.parquet holds records of a segmentation model; progresvit frontier and .* calibrate take"
    ):
        read_records(target)
    write_records(make_records(10), tmp_path / "c.parquet")
    assert not is_segmentation(tmp_path / "c.parquet")
    assert "masks" not in json.loads(pq.read_schema(tmp_path / "c.parquet").metadata[b"progresvit"])["header"]
    with pytest.raises(ValueError, match="no records of a segmentation model"):
        read_segmentation_records(tmp_path / "c.parquet")
