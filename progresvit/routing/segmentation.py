"""Segmentation in rounds: the windows of an image run a round together, and one score decides for all of them.

Accuracy is the mIoU of all routed predictions together, so a threshold changes the counts of pixels and not a mean over
images.

Letters: C channels, H and W height and width of the image, r side of a window, V windows of an image, K classes, g side
of the patch grid, N images, S rounds, T thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from progresvit.data.windows import ImageWindows, label_map
from progresvit.metrics.miou import ClassCounts, mean_iou, pixel_accuracy
from progresvit.model.interface import RoundModel
from progresvit.routing.decide import Threshold, as_scores
from progresvit.routing.frontier import NEAR_LOSSLESS_DROP, every_threshold, exit_counts, routed_sums
from progresvit.routing.scores import patch_entropy, uncertain_entropy


class RoundMap(NamedTuple):
    """What a round says of an image."""

    labels: Tensor
    """(H, W) uint8"""
    score: Tensor
    """Uncertainty of the image, a scalar (float32)."""


def image_score(logits: Tensor) -> Tensor:
    """Mean entropy of the most uncertain 10 % of the patches of all windows: (V, K, g, g) -> a scalar."""
    return uncertain_entropy(patch_entropy(logits).flatten())


def image_labels(logits: Tensor, image: ImageWindows) -> Tensor:
    """The class of every pixel, from the logits of all windows: (V, K, g, g) -> (H, W) uint8."""
    return label_map(logits.split([view.count for view in image.views]), image.views, image.size)


def segment_rounds(model: RoundModel, images: Sequence[ImageWindows], *, batch: int) -> list[list[RoundMap]]:
    """Every round on every image, with no early exit; at most ``batch`` windows at a time. By image, then by round."""
    windows = torch.cat([image.windows for image in images])
    parts = [model(part) for part in windows.split(batch)]
    rounds = [torch.cat([outputs[s].logits for outputs in parts]) for s in range(len(model.config.rounds))]
    counts = [len(image.windows) for image in images]
    by_round = [logits.split(counts) for logits in rounds]
    return [
        [RoundMap(image_labels(logits[index], image), image_score(logits[index])) for logits in by_round]
        for index, image in enumerate(images)
    ]


@dataclass(frozen=True, kw_only=True)
class SegmentationPoint:
    """A threshold and what it gives."""

    threshold: Threshold
    miou: float
    """Mean intersection over union of the routed predictions, over all images together."""
    pixel_accuracy: float
    gmacs: float
    """Average over the images, of all their windows."""
    exit_shares: tuple[float, ...]


def segmentation_frontier(
    scores: ArrayLike, counts: ClassCounts, gmacs: ArrayLike, thresholds: ArrayLike
) -> list[SegmentationPoint]:
    """mIoU and compute at each threshold.

    Args:
        scores: Uncertainty of each image after each round, (N, S).
        counts: Pixels of each class, (N, S, K).
        gmacs: Cumulative GMACs of each image after each round, (N, S); more windows cost more.
        thresholds: (T,), or (T, S - 1) for one per round.
    """
    values = as_scores(scores)
    asked = np.asarray(thresholds, np.float64)
    routed = ClassCounts(*(routed_sums(values, part, asked) for part in counts))  # (T, K) each
    miou, accuracy = mean_iou(routed), pixel_accuracy(routed)
    spent = routed_sums(values, np.asarray(gmacs, np.float64), asked) / len(values)
    shares = exit_counts(values, asked) / len(values)
    return [
        SegmentationPoint(
            threshold=float(asked[t]) if asked.ndim == 1 else tuple(asked[t].tolist()),
            miou=float(miou[t]),
            pixel_accuracy=float(accuracy[t]),
            gmacs=float(spent[t]),
            exit_shares=tuple(shares[t].tolist()),
        )
        for t in range(len(asked))
    ]


def near_lossless_miou(
    scores: ArrayLike, counts: ClassCounts, gmacs: ArrayLike, max_drop: float = NEAR_LOSSLESS_DROP
) -> SegmentationPoint:
    """The threshold of lowest compute whose mIoU stays within ``max_drop`` of the full path."""
    values = as_scores(scores)
    thresholds = every_threshold(values)  # the first is 0, the full path
    miou = mean_iou(ClassCounts(*(routed_sums(values, part, thresholds) for part in counts)))
    spent = routed_sums(values, np.asarray(gmacs, np.float64), thresholds)
    good = np.flatnonzero(miou >= miou[0] - max_drop - 1e-12)
    chosen = thresholds[good[np.argmin(spent[good])]]
    return segmentation_frontier(values, counts, gmacs, [float(chosen)])[0]
