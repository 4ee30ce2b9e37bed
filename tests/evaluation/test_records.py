import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from progresvit.evaluation import (
    is_segmentation,
    read_records,
    read_routed_records,
    read_segmentation_records,
    write_records,
)
from progresvit.predict.head import record_columns
from progresvit.routing import full_entropy, logit_statistics, top10_entropy
from tests.evaluation.made import make_logits, make_records
from tests.evaluation.made_segmentation import make_segmentation_records


def same(a, b):
    assert a.header == b.header
    for name in ("ids", "labels", "top5_labels", "top5_probabilities", "top10_entropy", "entropy", "statistics"):
        assert np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name not in ("ids",)), name


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_records_come_back_from_their_file(tmp_path, rounds):
    records = make_records(rounds=rounds, keep_logits=rounds == 2)
    write_records(records, tmp_path / "deep" / "r.parquet")
    back = read_records(tmp_path / "deep" / "r.parquet")
    same(back, records)
    assert (back.logits is None) == (records.logits is None)
    if rounds == 2:
        assert np.array_equal(back.logits, records.logits)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.parquet"]


def test_other_programs_can_read_the_table_and_its_header(tmp_path):
    records = make_records(5)
    write_records(records, tmp_path / "r.parquet")
    table = pq.read_table(tmp_path / "r.parquet")
    assert table["image"].to_pylist() == records.ids.tolist()
    assert table["label"].to_pylist() == records.labels.tolist()
    assert table["round2_top5_labels"][3].as_py() == records.top5_labels[3, 1].tolist()
    assert len(table["round1_statistics"][0].as_py()) == 23
    header = json.loads(table.schema.metadata[b"progresvit"])["header"]
    assert {"weights", "preprocessing", "precision", "data", "date"} <= set(header)


def test_every_column_follows_from_the_logits():
    logits, labels = make_logits(50)
    records = make_records(50)
    for s in range(2):
        tensor = torch.tensor(logits[s], dtype=torch.float32)
        order = np.argsort(-logits[s], axis=1)[:, :5]
        assert np.array_equal(records.top5_labels[:, s], order)
        probabilities = torch.softmax(tensor, dim=1).numpy()
        assert records.top5_probabilities[:, s] == pytest.approx(np.take_along_axis(probabilities, order, axis=1))
        assert np.array_equal(records.top10_entropy[:, s], top10_entropy(tensor).numpy())
        assert np.array_equal(records.entropy[:, s], full_entropy(tensor).numpy())
        assert np.array_equal(records.statistics[:, s], logit_statistics(tensor).numpy())
        chosen = probabilities[np.arange(50), labels]
        assert records.log_probability[:, s] == pytest.approx(np.log(chosen), rel=1e-4, abs=1e-6)
        assert np.array_equal(records.correct[:, s], logits[s].argmax(axis=1) == labels)
        assert np.array_equal(records.correct5[:, s], (order == labels[:, None]).any(axis=1))


def test_restricted_classes_change_predictions_and_not_entropies():
    free, restricted = make_records(200), make_records(200, classes=(1, 4, 7))
    logits, _ = make_logits(200)
    best = np.array([1, 4, 7])[logits[0][:, [1, 4, 7]].argmax(axis=1)]
    assert np.array_equal(restricted.predictions[:, 0], best)
    assert restricted.top5_labels[0, 0, 3:].tolist() == [-1, -1]
    assert restricted.top5_probabilities[:, 0, :3].sum(axis=1) == pytest.approx(1)
    inside = np.isin(restricted.labels, [1, 4, 7])
    among = torch.tensor(logits[0][inside][:, [1, 4, 7]]).log_softmax(dim=1).numpy()
    labels = np.searchsorted([1, 4, 7], restricted.labels[inside])
    assert restricted.log_probability[inside, 0] == pytest.approx(among[np.arange(len(among)), labels], abs=1e-5)
    assert np.array_equal(restricted.top10_entropy, free.top10_entropy)
    assert np.array_equal(restricted.statistics, free.statistics)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_images_with_broken_logits_are_counted_and_neither_correct_nor_exit_early(tmp_path, bad):
    logits, _ = make_logits(30)
    logits[0, 7, 3] = bad
    write_records(make_records(30, logits=logits), tmp_path / "r.parquet")
    records = read_records(tmp_path / "r.parquet")
    assert records.broken == 1
    assert len(records) == 30
    assert not records.top10_entropy[7, 0] < np.inf
    assert records.top5_labels[7, 0].tolist() == [-1] * 5
    assert not records.correct5[7, 0]
    assert np.isnan(records.log_probability[7, 0])
    assert np.isfinite(np.delete(records.log_probability, 7, axis=0)).all()
    assert np.isfinite(records.top10_entropy[7, 1])


def test_fewer_classes_than_five():
    columns = record_columns([torch.randn(4, 3)])
    assert columns["top5_labels"][:, 0, 3:].eq(-1).all()
    assert columns["top5_probabilities"][:, 0, 3:].isnan().all()


def test_missing_labels_are_an_error_only_where_needed(tmp_path):
    write_records(make_records(20, labelled=False), tmp_path / "r.parquet")
    records = read_records(tmp_path / "r.parquet")
    assert not records.labelled
    assert records.log_probability is None
    assert records.scores().shape == (20, 2)
    with pytest.raises(ValueError, match=r"20 of 20 images in these records have no label; .*\(unlabelled=True"):
        records.correct  # noqa: B018


def test_a_split_has_no_image_twice_and_depends_on_ids_alone():
    records = make_records(500)
    first, second = records.split(0.3)
    assert set(first.ids) | set(second.ids) == set(records.ids)
    assert not set(first.ids) & set(second.ids)
    assert 100 < len(first) < 200
    turned = records.take(np.arange(500)[::-1]).split(0.3)[0]
    assert set(turned.ids) == set(first.ids)
    assert set(records.split(0.3, seed=1)[0].ids) != set(first.ids)
    row = list(records.ids).index(second.ids[5])
    assert np.array_equal(second.statistics[5], records.statistics[row])
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            records.split(share)
    with pytest.raises(ValueError, match="too few to split"):
        records.take(np.array([0])).split(0.5)


BOTH = pytest.mark.parametrize("make", [make_records, make_segmentation_records])


@BOTH
def test_bad_records_are_refused_and_nothing_is_written(tmp_path, make):
    records, target = make(10), tmp_path / "r.parquet"
    for bad, match in (
        (records.take(np.zeros(0, int)), "the dataset is empty"),
        (records.take(np.array([0, 0, 1, 2, 2])), "2 ids occur more than once, such as"),
        (replace(records, header=make(10, rounds=3).header), "records of 2 rounds for a model of 3"),
    ):
        with pytest.raises(ValueError, match=match):
            write_records(bad, target)
    assert list(tmp_path.iterdir()) == []


@BOTH
def test_foreign_and_damaged_files_are_refused(tmp_path, make):
    target, records = tmp_path / "r.parquet", make(100)
    segments = make is make_segmentation_records
    read, key = (read_segmentation_records, b"progresvit_segmentation") if segments else (read_records, b"progresvit")

    def refused(match):
        with pytest.raises(ValueError, match=match):
            read(target)

    refused(r"no records at .*progresvit evaluate")
    target.write_bytes(b"PAR1 or not")
    refused("not a complete Parquet file")
    pq.write_table(pa.table({"x": [1, 2]}), target)
    refused("no records of this library")
    assert not is_segmentation(target)
    write_records(records, target)
    table = pq.read_table(target)
    target.write_bytes(target.read_bytes()[:-200])
    refused("not a complete Parquet file")
    assert not is_segmentation(target)
    about = {key: json.dumps(json.loads(table.schema.metadata[key]) | {"format": 99})}
    column = "round2_counts" if segments else "round2_entropy"
    for damaged, match in (
        (table.drop_columns(column), rf"lacks .*{column}"),
        (pa.concat_tables([table, table]), "100 ids occur more than once"),
        (table.replace_schema_metadata(about), "another version"),
    ):
        pq.write_table(damaged, target)
        refused(match)


@BOTH
def test_files_of_many_row_groups_are_read(tmp_path, make):
    write_records(make(50), tmp_path / "r.parquet")
    pq.write_table(pq.read_table(tmp_path / "r.parquet"), tmp_path / "groups.parquet", row_group_size=7)
    read = read_routed_records(tmp_path / "groups.parquet")
    assert np.array_equal(read.ids, make(50).ids)
    assert np.array_equal(read.losses(read.default_loss), make(50).losses(read.default_loss))


@pytest.mark.parametrize(("label", "number"), [(12, 12), (-2, -2), (10**6, 10**6)])
def test_labels_outside_the_classes_are_refused_with_the_first(tmp_path, label, number):
    """With such labels every round is wrong, so an early exit harms nothing."""
    records = make_records(30)
    write_records(records, tmp_path / "r.parquet")
    table = pq.read_table(tmp_path / "r.parquet")
    labels = table["label"].to_pylist()
    labels[4] = labels[9] = label
    place = table.schema.get_field_index("label")
    pq.write_table(table.set_column(place, "label", pa.array(labels, pa.int32())), tmp_path / "r.parquet")
    match = rf"2 of 30 labels are not among the 12 classes, such as {number} of {records.ids[4]};.* harmless"
    with pytest.raises(ValueError, match=match):
        read_records(tmp_path / "r.parquet")
    with pytest.raises(ValueError, match=match):
        write_records(replace(records, labels=np.array(labels)), tmp_path / "other.parquet")


def test_pixels_of_labels_outside_the_classes_are_refused_with_the_first(tmp_path):
    write_records(make_segmentation_records(10), tmp_path / "r.parquet")
    table = pq.read_table(tmp_path / "r.parquet")
    cells = table["round1_cells"].to_pylist()
    cells[3][0] = 4 * 5 + 1  # label 5
    place, kind = table.schema.get_field_index("round1_cells"), table["round1_cells"].type
    pq.write_table(table.set_column(place, "round1_cells", pa.array(cells, kind)), tmp_path / "r.parquet")
    with pytest.raises(ValueError, match=r"labels that are not among the 4 classes, such as 5 of images/val/0-3\.jpg"):
        read_segmentation_records(tmp_path / "r.parquet")


def test_records_of_the_version_before_are_read(tmp_path):
    """They have ``pictures`` for ``images``, no kind of model, no GMACs and no log-probability of the label."""
    records = replace(make_records(20), log_probability=None)
    write_records(records, tmp_path / "r.parquet")
    table = pq.read_table(tmp_path / "r.parquet")
    about = json.loads(table.schema.metadata[b"progresvit"])
    header = about["header"]
    header["pictures"] = header.pop("images")
    del header["gmacs"], header["routable"], header["config"]["kind"]
    pq.write_table(table.replace_schema_metadata({b"progresvit": json.dumps(about)}), tmp_path / "old.parquet")
    same(read_records(tmp_path / "old.parquet"), records)
