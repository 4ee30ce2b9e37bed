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

from progresvit.metrics.miou import ClassCounts, confusion_matrix, iou, mean_iou, pixel_accuracy

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
def test_everything_is_what_scikit_learn_and_torchmetrics_say(case):
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
