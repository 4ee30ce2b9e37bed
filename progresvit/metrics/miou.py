"""Metrics of semantic segmentation, from confusion matrices: counts of pixels, which add up exactly over images,
processes and runs.

Letters: K classes, N images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from progresvit.metrics.arrays import Floats, Ints

if TYPE_CHECKING:
    from torch import Tensor

DRAWS = 1000
"""Draws of a bootstrap."""
BLOCK = 100
"""Draws that are in memory at a time."""


class ClassCounts(NamedTuple):
    """Pixels of each class, (..., K) each. Intersection over union needs no more of a confusion matrix."""

    intersection: Ints
    """Labelled and predicted as the class."""
    labelled: Ints
    predicted: Ints

    @classmethod
    def of(cls, confusion: ArrayLike) -> ClassCounts:
        """Count the pixels in confusion matrices: (..., K, K) -> 3 x (..., K)."""
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


def bootstrap_ends(
    counts: ClassCounts, metric: Callable[[ClassCounts], Floats], *, draws: int = DRAWS, seed: int = 0
) -> tuple[Floats, Floats]:
    """Ends of the 95 % intervals of a metric, by the percentiles of a bootstrap over images: twice the metric's shape.

    The draws are the same each time. Images count as independent, which frames of a video are not. A single image says
    nothing about others, so its interval is 0 to 1. A class that no image has stays NaN.

    Args:
        counts: Pixels of each image, (N, ...) each.
        metric: Shares of all images together, such as :func:`mean_iou`.
        draws: Number of bootstrap draws.
        seed: Seed of the draws.
    """
    images = len(counts.labelled)
    defined = ~np.isnan(metric(ClassCounts(*(part.sum(axis=0) for part in counts))))
    if images == 1:
        return np.where(defined, 0.0, np.nan), np.where(defined, 1.0, np.nan)
    rng, even, drawn = np.random.default_rng(seed), np.full(images, 1 / images), []
    for _ in range(0, draws, BLOCK):
        weights = rng.multinomial(images, even, size=BLOCK).astype(np.float64)  # (R, N); products are exact below 2^53
        sums = (np.tensordot(weights, part, axes=1).astype(np.int64) for part in counts)  # (R, ...) each
        drawn.append(metric(ClassCounts(*sums)))
    values = np.where(defined, np.concatenate(drawn), 0)
    lowest, highest = np.nanquantile(values, (0.025, 0.975), axis=0)
    return np.where(defined, lowest, np.nan), np.where(defined, highest, np.nan)


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
