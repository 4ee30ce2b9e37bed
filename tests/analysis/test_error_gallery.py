"""Thumbnails of errors: what the model saw, small, and text that lies over no image."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from progresvit.analysis.error_gallery import DRAWN, Gallery, find_errors, gallery_figure
from progresvit.config import ModelConfig, make_rounds
from progresvit.data.augment.corruption import Corruption
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, EvalOptions, evaluate
from progresvit.evaluation.answers import route
from progresvit.model import ProgResViT
from progresvit.plots import DPI
from tests.analysis.made import assert_apart, assert_on_page
from tests.evaluation.made import make_records


def gallery_of(count, shape=(96, 96, 3), name="a class of a long name {}", **options):
    """A gallery of made records with grey thumbnails."""
    records = make_records(**options)
    config = {**records.header.config, "labels": [name.format(number) for number in range(12)]}
    answers = route(replace(records, header=replace(records.header, config=config)), 0.6)
    rows = answers.errors[:count].tolist()
    return Gallery(answers=answers, rows=rows, thumbnails={row: np.full(shape, 128, np.uint8) for row in rows})


def test_lines_give_the_class_and_what_each_round_said():
    gallery = gallery_of(5)
    records, row = gallery.answers.records, gallery.rows[0]
    label, *rounds = gallery.lines(row)
    assert label == f"is a class of a long name {records.labels[row]}"
    for s, line in enumerate(rounds):
        said = f"{s + 1}: a class of a long name {records.predictions[row, s]}"
        assert line.startswith(f"{said} {100 * records.top5_probabilities[row, s, 0]:.1f} %")
        assert line.endswith("(exit)") == (s == gallery.answers.exit_round[row])
    assert gallery.lines(row, 8)[0] == "is a class…"
    (card, *_) = gallery.cards()
    assert (card.title, card.lines, card.note) == (label, rounds, records.ids[row])
    assert card.marked == gallery.answers.exit_round[row]
    assert card.filters == {
        "class": f"a class of a long name {records.labels[row]}",
        "answer": f"a class of a long name {gallery.answers.prediction[row]}",
        "exit": f"after round {gallery.answers.exit_round[row] + 1}",
    }
    assert card.image[:3] == b"\xff\xd8\xff"


@pytest.mark.parametrize(("count", "shape", "rounds"), [(1, (96, 96, 3), 2), (30, (96, 96), 2), (7, (32, 32, 3), 3)])
def test_no_thumbnail_is_enlarged_and_no_text_lies_over_another_or_outside(count, shape, rounds):
    gallery = gallery_of(count, shape, name="a class of a long name that does not fit {}", rounds=rounds)
    figure = gallery_figure(gallery)
    figure.set_dpi(DPI)
    figure.draw_without_rendering()
    assert len(figure.axes) == min(count, DRAWN)
    boxes = [axes.get_window_extent() for axes in figure.axes]
    assert all(box.width <= shape[0] + 0.01 for box in boxes)
    boxes += [text.get_window_extent() for text in (*figure.texts, figure._suptitle)]
    boxes = list({box.bounds: box for box in boxes}.values())  # the title is among the texts
    assert_on_page(figure, boxes, beyond=1)
    assert_apart(boxes, overlap=2)


def test_thumbnails_are_of_the_corrupted_image_if_the_records_are(digits, tmp_path):
    torch.manual_seed(0)
    config = ModelConfig(
        rounds=make_rounds([112, 224], [1, 2]), heads=2, depth=1, patch_size=16, num_classes=4, class_ids=tuple("0123")
    )
    model, galleries = ProgResViT(config), []
    for corruption in (None, Corruption.parse("fog/5")):
        source, options = DataSource(data=str(digits), corruption=corruption), EvalOptions(workers=0)
        processes = Processes(0, 1, torch.device("cpu"))
        out = tmp_path / f"{corruption is None}.parquet"
        records = evaluate(model, source, out, name="m", processes=processes, options=options)
        galleries.append(find_errors(route(records), 24, DataSource(data=str(digits))))
        assert {pixels.shape for pixels in galleries[-1].thumbnails.values()} == {(96, 96, 3)}
        assert galleries[-1].missing == []
    clean, fog = (gallery.thumbnails for gallery in galleries)
    assert any(not np.array_equal(clean[row], fog[row]) for row in clean if row in fog)


def test_no_errors_need_no_images(tmp_path):
    records = make_records()
    labels = np.repeat(records.labels[:, None, None], 2, axis=1).repeat(5, axis=2)
    gallery = find_errors(route(replace(records, top5_labels=labels), 0.6), 24, DataSource(data=str(tmp_path / "none")))
    assert gallery.rows == []
