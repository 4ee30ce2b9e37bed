"""mIoU, IoU and pixel accuracy against scikit-learn and torchmetrics."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, jaccard_score
from sklearn.metrics import confusion_matrix as sklearn_confusion_matrix
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from torchmetrics.segmentation import MeanIoU

from progresvit.metrics.interval import mean_interval
from progresvit.metrics.miou import ClassCounts, bootstrap_ends, confusion_matrix, iou, mean_iou, pixel_accuracy

IGNORE = 255


@st.composite
def maps(draw):
    """Two maps of equal shape, the classes, and which pixels are ignored; some classes are in neither map."""
    classes = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    shape = tuple(draw(st.lists(st.integers(1, 20), min_size=2, max_size=3)))
    used = rng.choice(classes, draw(st.integers(1, classes)), replace=False)
    target, prediction = rng.choice(used, shape), rng.choice(used, shape)
    prediction = np.where(rng.random(shape) < draw(st.floats(0, 1)), target, prediction)
    target = np.where(rng.random(shape) < draw(st.sampled_from([0.0, 0.1, 0.9])), IGNORE, target)
    return torch.tensor(prediction), torch.tensor(target), classes


def counts_of(prediction, target, classes):
    return ClassCounts.of(confusion_matrix(prediction, target, classes=classes, ignore=IGNORE).numpy())


@pytest.mark.filterwarnings("ignore:A single label")
@settings(deadline=None, max_examples=60)
@given(maps())
def test_metrics_agree_with_scikit_learn_and_torchmetrics(case):
    prediction, target, classes = case
    kept = target != IGNORE
    found, wanted = prediction[kept].numpy(), target[kept].numpy()
    confusion = confusion_matrix(prediction, target, classes=classes, ignore=IGNORE)
    assert confusion.dtype == torch.int64
    counts = counts_of(prediction, target, classes)
    if not kept.any():
        assert not confusion.any()
        assert np.isnan(iou(counts)).all()
        assert np.isnan([mean_iou(counts), pixel_accuracy(counts)]).all()
        return
    assert np.array_equal(confusion, sklearn_confusion_matrix(wanted, found, labels=range(classes)))
    present = np.union1d(found, wanted)
    each = jaccard_score(wanted, found, labels=present, average=None)
    assert iou(counts)[present] == pytest.approx(each)
    assert np.isnan(np.delete(iou(counts), present)).all()
    assert mean_iou(counts) == pytest.approx(jaccard_score(wanted, found, labels=present, average="macro"))
    assert pixel_accuracy(counts) == pytest.approx(accuracy_score(wanted, found))
    if classes > 1:
        each = MulticlassJaccardIndex(classes, average="none", ignore_index=IGNORE)(prediction, target)
        assert iou(counts)[present] == pytest.approx(each[present].numpy())
        macro = MulticlassJaccardIndex(classes, average="macro", ignore_index=IGNORE)(prediction, target)
        assert mean_iou(counts) == pytest.approx(macro.item())
        accuracy = MulticlassAccuracy(classes, average="micro", ignore_index=IGNORE)(prediction, target)
        assert pixel_accuracy(counts) == pytest.approx(accuracy.item())


@pytest.mark.parametrize("seed", range(3))
def test_the_iou_of_one_image_is_that_of_torchmetrics_for_segmentation(seed):
    rng = np.random.default_rng(seed)
    target, prediction = (torch.tensor(rng.integers(0, 6, (1, 20, 30))) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = MeanIoU(8, per_class=True, input_format="index")(prediction, target)
    found = iou(counts_of(prediction, target, 8))
    assert found[:6] == pytest.approx(expected[:6].numpy())
    assert np.isnan(found[6:]).all()


def test_counts_add_up_over_images_and_a_mean_over_images_is_something_else():
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 5, (7, 10, 10))
    predictions = np.where(rng.random(targets.shape) < 0.6, targets, rng.integers(0, 5, targets.shape))
    metric, each = MulticlassJaccardIndex(5, ignore_index=IGNORE), []
    for prediction, target in zip(torch.tensor(predictions), torch.tensor(targets)):
        metric.update(prediction, target)
        each.append(confusion_matrix(prediction, target, classes=5, ignore=IGNORE).numpy())
    total = mean_iou(ClassCounts.of(np.sum(each, axis=0)))
    assert total == pytest.approx(metric.compute().item())
    stacked = ClassCounts.of(each)
    assert stacked.intersection.shape == (7, 5)
    assert np.array_equal(ClassCounts(*(part.sum(axis=0) for part in stacked)).predicted, np.sum(each, axis=(0, 1)))
    assert mean_iou(stacked).mean() != pytest.approx(total)


def made_counts(images, seed=0, classes=4):
    """Of images that differ in how well they are segmented; the last class is in none."""
    rng = np.random.default_rng(seed)
    chance = rng.beta(4, 2, images)[:, None]
    labels = rng.integers(0, classes - 1, (images, 50))
    found = np.where(rng.random((images, 50)) < chance, labels, rng.integers(0, classes - 1, (images, 50)))
    return ClassCounts.of([sklearn_confusion_matrix(a, b, labels=range(classes)) for a, b in zip(labels, found)])


def test_the_interval_of_the_pixel_accuracy_is_the_normal_one_and_shrinks_with_the_images():
    """Images of equal size: the pixel accuracy is a mean over images, whose interval is known."""
    widths = []
    for images in (100, 400):
        counts = made_counts(images)
        shares = counts.intersection.sum(axis=-1) / 50
        low, high = bootstrap_ends(counts, pixel_accuracy)
        expected = mean_interval(shares)
        assert (low, high) == pytest.approx((expected.lowest, expected.highest), abs=0.15 * (high - low))
        widths.append(high - low)
    assert widths[1] == pytest.approx(widths[0] / 2, rel=0.25)


def test_about_95_percent_of_intervals_hold_the_miou_of_many_images():
    many = made_counts(4000, seed=99)
    truth = mean_iou(ClassCounts(*(part.sum(axis=0) for part in many)))
    ends = [
        bootstrap_ends(ClassCounts(*(part[first : first + 40] for part in many)), mean_iou, draws=200)
        for first in range(0, 4000, 40)
    ]
    held = sum(low <= truth <= high for low, high in ends)
    assert 86 <= held <= 100


def test_the_draws_are_the_same_each_time_and_a_class_that_is_nowhere_has_no_interval():
    counts = made_counts(30)
    low, high = bootstrap_ends(counts, iou)
    assert np.array_equal([low, high], bootstrap_ends(counts, iou), equal_nan=True)
    assert not np.array_equal([low, high], bootstrap_ends(counts, iou, seed=1), equal_nan=True)
    assert np.isnan([low[3], high[3]]).all()
    assert (low[:3] < high[:3]).all()


def test_one_image_says_nothing_about_others():
    one = ClassCounts(*(part[:1] for part in made_counts(2)))
    assert bootstrap_ends(one, mean_iou) == (0, 1)


def test_a_class_of_one_image_has_an_interval_though_some_draws_lack_it():
    matrices = np.zeros((20, 2, 2), int)
    matrices[:, 0, 0] = 10
    matrices[0] = [[10, 0], [2, 8]]
    low, high = bootstrap_ends(ClassCounts.of(matrices), iou)
    assert (low[1], high[1]) == pytest.approx((0.8, 0.8))
