import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from progresvit.analysis.routing_figures import frontier_figure
from progresvit.evaluation import class_table, segmentation_frontier_table
from progresvit.metrics.miou import ClassCounts, bootstrap_ends, mean_iou
from progresvit.plots import BAND, render
from progresvit.routing.decide import exit_rounds
from tests.evaluation.made_segmentation import CLASSES, make_maps, make_segmentation_records, naive_iou, naive_miou


def test_the_table_holds_tenths_of_the_images_and_the_near_lossless_point():
    maps = labels, predictions, scores = make_maps(100)
    records = make_segmentation_records(100, maps=maps)
    table = segmentation_frontier_table({"m": records})
    *rows, best = table.rows
    assert [row["exit_share_1"] for row in rows] == pytest.approx(np.arange(11) / 10)
    for row in (rows[0], rows[3], rows[-1]):
        rounds = exit_rounds(scores, row["threshold"])
        assert row["miou"] == pytest.approx(naive_miou(predictions[rounds, np.arange(100)], labels))
        for convention in ("paper", "executed"):
            spent = records.gmacs(convention)[np.arange(100), rounds].mean()
            assert row[f"gmacs_{convention}"] == pytest.approx(spent)
        assert row["saving"] == pytest.approx(1 - row["gmacs_paper"] / records.gmacs()[:, -1].mean())
    point = records.near_lossless()
    assert (best["note"], best["threshold"], best["miou"]) == ("near-lossless", point.threshold, point.miou)
    assert set(next(csv.reader(io.StringIO(table.to_csv())))) == {
        "threshold", "miou", "miou_low", "miou_high", "pixel_accuracy", "gmacs_paper", "gmacs_executed", "saving",
        "exit_share_1", "exit_share_2", "note",
    }  # fmt: skip
    heads, _ = table.cells()
    assert heads[:5] == ["τ", "mIoU (%)", "95 % from", "to", "pixel accuracy (%)"]
    assert [row["miou_low"] for row in rows] == [None] * 11  # a bootstrap for each would take long
    images, exits = np.arange(100), exit_rounds(scores, point.threshold)
    ends = bootstrap_ends(ClassCounts(*(part[images, exits] for part in records.counts)), mean_iou)
    assert (best["miou_low"], best["miou_high"]) == ends
    assert best["miou_low"] < best["miou"] < best["miou_high"]


def test_thresholds_settings_and_models_of_different_rounds():
    two, three = make_segmentation_records(60), make_segmentation_records(60, rounds=3)
    table = segmentation_frontier_table({"two": two, "three": three}, [0.4], {"mine": 0.2})
    assert [row["model"] for row in table.rows] == ["two"] * 3 + ["three"] * 3
    assert [row["note"] for row in table.rows[:3]] == ["", "near-lossless", "mine"]
    assert table.rows[0]["exit_share_3"] is None
    row = segmentation_frontier_table({"m": three}, [[0.3, 0.6]]).rows[0]
    assert row["threshold"] == (0.3, 0.6)
    assert row["exit_share_1"] == (three.scores[:, 0] < 0.3).mean()
    with pytest.raises(ValueError, match="so 2 for 3 rounds, not 1"):
        segmentation_frontier_table({"m": three}, [[0.5]])
    fixed = replace(two, header=replace(two.header, routable=False))
    with pytest.raises(ValueError, match="are alternatives"):
        segmentation_frontier_table({"m": fixed})


def test_images_that_never_exit_and_models_of_one_round_have_a_table_too():
    labels, predictions, scores = make_maps(40)
    scores[:10] = np.inf
    records = make_segmentation_records(40, maps=(labels, predictions, scores))
    rows = segmentation_frontier_table({"m": records}).rows
    assert [row["exit_share_1"] for row in rows[:-1]] == pytest.approx(np.arange(8) / 10)
    one = segmentation_frontier_table({"m": make_segmentation_records(40, rounds=1)})
    assert [row["saving"] for row in one.rows] == [0.0]


def test_the_iou_of_each_class_in_every_round():
    maps = labels, predictions, _ = make_maps(50)
    table = class_table(make_segmentation_records(50, maps=maps))
    assert [row["class"] for row in table.rows] == list(CLASSES)
    for s in range(2):
        expected = naive_iou(predictions[s], labels, 4)
        assert [row[f"iou_{s + 1}"] for row in table.rows[:3]] == pytest.approx(expected[:3])
        assert table.rows[3][f"iou_{s + 1}"] is expected[3] is None
        for row in table.rows[:3]:
            assert row[f"iou_{s + 1}_low"] < row[f"iou_{s + 1}"] < row[f"iou_{s + 1}_high"]
    assert sum(row["pixel_share"] for row in table.rows) == pytest.approx(1)
    assert table.cells()[1][3] == ["tree", "0.000", *"––––––"]


def test_a_class_in_a_single_image_has_the_interval_0_to_1():
    labels, predictions, scores = make_maps(50)
    labels[0, :4], predictions[:, 0, :4] = 3, 3
    row = class_table(make_segmentation_records(50, maps=(labels, predictions, scores))).rows[3]
    assert (row["iou_1"], row["iou_1_low"], row["iou_1_high"]) == (1, 0, 1)


def test_the_figure_goes_from_all_rounds_to_the_first():
    models = {"two": make_segmentation_records(60), "three": make_segmentation_records(60, rounds=3)}
    figure = frontier_figure(models, settings={"mine": 0.4})
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}
    for name, records in models.items():
        ends = np.column_stack([records.gmacs().mean(axis=0), 100 * mean_iou(records.totals)])
        assert lines[f"{name}: single rounds"] == pytest.approx(ends)
        assert lines[name][0] == pytest.approx(ends[-1])
        assert lines[name][-1] == pytest.approx(ends[0])
        point = records.near_lossless()
        assert lines[f"{name}: near-lossless"] == pytest.approx(np.array([[point.gmacs, 100 * point.miou]]))
        assert f"{name}: mine" in lines
    assert "paper" in figure.axes[0].get_xlabel()
    assert figure.axes[0].get_ylabel() == "mIoU (%)"
    assert len(figure.axes[0].collections) == len(models)  # bands
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == BAND
    assert render(figure, ".png")[:4] == b"\x89PNG"


def test_the_interval_of_the_miou_is_that_of_a_bootstrap_over_images():
    records, random = make_segmentation_records(200), np.random.default_rng(0)
    exits = (records.scores[:, 0] >= 0.4).astype(int)
    counts = [part[np.arange(200), exits] for part in records.counts]
    weights = random.multinomial(200, np.full(200, 1 / 200), 2000)  # (draws, N)
    drawn = mean_iou(ClassCounts(*(weights @ part for part in counts)))
    found = records.metric.intervals(records.scores, [0.4], fast=True)[0]
    assert found.mean == pytest.approx(float(mean_iou(ClassCounts(*(part.sum(axis=0) for part in counts)))))
    assert found.highest - found.lowest == pytest.approx(2 * 1.96 * float(drawn.std()), rel=0.1)
