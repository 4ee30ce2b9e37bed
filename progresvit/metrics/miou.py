"""Metrics of semantic segmentation, from confusion matrices: counts of pixels, which add up exactly over images,
processes and runs.

Letters: K classes, N images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

Counts = NDArray[np.int64]
Floats = NDArray[np.float64]


class ClassCounts(NamedTuple):
    """Pixels of each class, (..., K) each. Intersection over union needs no more of a confusion matrix."""

    intersection: Counts
    """Labelled and predicted as the class."""
    labelled: Counts
    predicted: Counts

    @classmethod
    def of(cls, confusion: ArrayLike) -> ClassCounts:
        """From confusion matrices: (..., K, K) -> 3 x (..., K)."""
        counts = np.asarray(confusion, np.int64)
        return cls(np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(axis=-1), counts.sum(axis=-2))


def confusion_matrix(prediction: Tensor, target: Tensor, *, classes: int, ignore: int) -> Tensor:
    """Pixels by label (row) and prediction (column): two maps of equal shape -> (K, K) int64.

    Pixels with the label ``ignore`` are left out. Every other label is a class.
    """
    import torch  # readers of records do without

    counted = target != ignore
    cells = target[counted].long() * classes + prediction[counted].long()
    return torch.bincount(cells, minlength=classes**2).view(classes, classes)


def iou(counts: ClassCounts) -> Floats:
    """Intersection over union of each class: (..., K); NaN for a class that is neither labelled nor predicted."""
    union = counts.labelled + counts.predicted - counts.intersection
    return np.where(union > 0, counts.intersection / np.maximum(union, 1), np.nan)


def mean_iou(counts: ClassCounts) -> Floats:
    """Mean IoU of the classes that are labelled or predicted anywhere: (...,); NaN without any."""
    values = iou(counts)
    present = ~np.isnan(values)
    total = np.where(present, values, 0).sum(axis=-1)
    return np.where(present.any(axis=-1), total / np.maximum(present.sum(axis=-1), 1), np.nan)


def pixel_accuracy(counts: ClassCounts) -> Floats:
    """Share of the labelled pixels that are predicted correctly: (...,); NaN without any."""
    pixels = counts.labelled.sum(axis=-1)
    return np.where(pixels > 0, counts.intersection.sum(axis=-1) / np.maximum(pixels, 1), np.nan)


def influence_values(counts: ClassCounts) -> Floats:
    """The mIoU plus the influence of each image on it: (N, K) each -> (N,), whose mean is the mIoU.

    To first order, the mIoU changes with the weight of an image by that image's influence, so the spread of these
    values gives the interval of the mIoU over images.
    """
    total = ClassCounts(*(part.sum(axis=0).astype(np.float64) for part in counts))
    union = total.labelled + total.predicted - total.intersection
    present = union > 0
    squared = np.where(present, union, 1) ** 2
    of_intersection = np.where(present, (union + total.intersection) / squared, 0)
    of_others = np.where(present, -total.intersection / squared, 0)
    change = counts.intersection @ of_intersection + (counts.labelled + counts.predicted) @ of_others
    values: Floats = float(mean_iou(total)) + len(change) / present.sum() * change
    return values
