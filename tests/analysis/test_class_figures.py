from dataclasses import replace

import numpy as np
import pytest

from progresvit.analysis.class_figures import (
    ENDS,
    MOST_CLASSES,
    class_accuracy_figure,
    class_exit_figure,
    selection_note,
    shown_classes,
)
from progresvit.analysis.confusion import MOST_CLASSES as MOST_CONFUSED
from progresvit.analysis.confusion import OTHER, confusion_counts, confusion_figure, matrix_classes
from progresvit.evaluation.answers import route
from tests.analysis.made import assert_on_page
from tests.evaluation.made import make_records

FIGURES = (class_accuracy_figure, class_exit_figure, confusion_figure)


def made(classes=12, images=400, rounds=2, name="name {}", threshold=0.6):
    """Routed answers on images of some classes; predictions move with the labels."""
    records = make_records(images, rounds)
    shift = np.arange(images) % max(1, classes // 12) * 12
    labels, top5 = records.labels + shift, records.top5_labels + shift[:, None, None]
    if classes < 12:
        labels, top5 = labels % classes, top5 % classes
    config = {**records.header.config, "num_classes": classes, "labels": [name.format(n) for n in range(classes)]}
    header = replace(records.header, config=config)
    return route(replace(records, header=header, labels=labels, top5_labels=top5), threshold)


def bars(axes):
    """Mean and ends of the intervals of a panel, in the order in which they were drawn."""
    for container in axes.containers:
        if hasattr(container, "has_xerr"):
            (ends,) = container.lines[2][0].get_segments()
            yield container.lines[0].get_xdata()[0], ends[0][0], ends[1][0]


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_each_class_has_the_answers_and_round_1_with_intervals_the_lowest_on_top():
    answers = made()
    figure = class_accuracy_figure(answers)
    (axes,) = figure.axes
    drawn = iter(bars(axes))
    for result in answers.by_class:
        for name in ("routed", "round 1"):
            share = result.share(name)
            assert next(drawn) == pytest.approx((100 * share.mean, 100 * share.lowest, 100 * share.highest))
    assert names(axes) == [f"{result.name} ({result.images})" for result in answers.by_class]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first row is on top
    title = figure.get_suptitle().replace("\n", " ")
    assert title.startswith(f"Top-1 is {100 * answers.correct.mean():.1f}\u00a0% (")
    assert f"classes from {100 * answers.by_class[0].top1.mean:.0f}\u00a0% ({answers.by_class[0].name})" in title


def test_bars_of_exits_add_up_and_have_intervals_of_round_1():
    answers = made(rounds=3, threshold=(0.5, 0.8))
    figure = class_exit_figure(answers)
    (axes,) = figure.axes
    shares = {result.name: [count / result.images for count in result.exits] for result in answers.by_class}
    order = sorted(shares, key=lambda name: shares[name][0])
    assert sorted(names(axes)) == sorted(f"{result.name} ({result.images})" for result in answers.by_class)
    widths = [[patch.get_width() for patch in c] for c in axes.containers if not hasattr(c, "has_xerr")]
    assert [row[0] for row in widths] == pytest.approx([100 * shares[name][0] for name in order])
    assert [sum(row) for row in widths] == pytest.approx([100] * 12)
    assert len(list(bars(axes))) == 12
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert entries[:3] == ["after round 1", "after round 2", "after round 3"]


def test_of_many_classes_the_surely_worst_and_best_are_shown_and_the_note_says_so():
    answers = made(classes=600, images=3000)
    shown = shown_classes(answers.by_class, lambda result: result.top1)
    assert len(shown) == 2 * ENDS + 1
    assert shown[ENDS] is None
    worst, best = shown[:ENDS], shown[ENDS + 1 :]
    others = [result for result in answers.by_class if result not in worst]
    assert max(result.top1.highest for result in worst) <= min(result.top1.highest for result in others)
    assert min(result.top1.lowest for result in best) >= max(
        result.top1.lowest for result in others if result not in best
    )
    assert f"30 of {len(answers.by_class)} classes" in selection_note(len(answers.by_class))
    assert names(class_accuracy_figure(answers).axes[0])[ENDS] == "…"
    few = made(classes=36)
    assert len(few.by_class) <= MOST_CLASSES
    assert shown_classes(few.by_class, lambda result: result.top1) == few.by_class
    assert selection_note(MOST_CLASSES) is None


def test_a_class_with_one_image_is_at_neither_end_of_many_classes():
    answers = made(classes=600, images=3000)
    single = replace(answers.by_class[0], number=9999, name="single", images=1, correct={"routed": 0, "round 1": 0})
    shown = shown_classes([single, *answers.by_class], lambda result: result.top1)
    assert single not in shown


def test_the_matrix_counts_every_answer():
    answers = made()
    classes = matrix_classes(answers)
    counts = confusion_counts(answers, classes)
    assert counts.shape == (12, 12)
    for label in range(12):
        for prediction in range(12):
            both = (answers.records.labels == label) & (answers.prediction == prediction)
            assert counts[label, prediction] == both.sum()
    figure = confusion_figure(answers)
    shares = figure.axes[0].images[0].get_array()
    assert shares.sum(axis=1).tolist() == pytest.approx([100] * 12)
    shown = {(round(t.get_position()[1]), round(t.get_position()[0])): int(t.get_text()) for t in figure.axes[0].texts}
    assert shown == {tuple(cell): counts[tuple(cell)] for cell in np.argwhere(counts).tolist()}
    worst = answers.confusions[0]
    assert f"({worst.count} of {worst.images})" in figure.get_suptitle().replace("\n", " ")


def test_of_many_classes_the_matrix_holds_the_most_frequent_confusions_and_a_column_for_other_answers():
    answers = made(classes=600, images=3000)
    classes = matrix_classes(answers)
    assert len(classes) == MOST_CONFUSED
    worst = answers.confusions[0]
    assert classes[:2] == [worst.label, worst.prediction]
    counts = confusion_counts(answers, classes)
    assert counts.shape == (MOST_CONFUSED, MOST_CONFUSED + 1)
    assert counts.sum(axis=1).tolist() == [(answers.records.labels == number).sum() for number in classes]
    axes = confusion_figure(answers).axes[0]
    assert axes.get_xticklabels()[-1].get_text() == OTHER


def test_answers_that_are_all_right_are_drawn_too():
    answers = made()
    right = replace(
        answers.records, top5_labels=np.repeat(answers.records.labels[:, None, None], 2, axis=1).repeat(5, 2)
    )
    answers = route(right, 0.6)
    assert confusion_figure(answers).get_suptitle() == "All 400 answers are right"
    assert "the same in 12 classes" in class_accuracy_figure(answers).get_suptitle().replace("\n", " ")


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize(
    "fields",
    [
        {"classes": 1, "images": 3, "name": "only $one$ {}"},
        {"classes": 3, "name": "a class of a name that is longer than the space beside an axis {}"},
        {"classes": 24, "name": "kind of animal {}", "rounds": 3},
        {"classes": 600, "images": 1500, "name": "kind of animal {}"},
    ],
)
def test_nothing_is_cut_off(figure, fields):
    drawn = figure(made(**fields))
    drawn.draw_without_rendering()
    boxes = [*(axes.get_tightbbox() for axes in drawn.axes), drawn._suptitle.get_window_extent()]
    boxes += [legend.get_window_extent() for legend in drawn.legends]
    assert_on_page(drawn, boxes, beyond=1)
