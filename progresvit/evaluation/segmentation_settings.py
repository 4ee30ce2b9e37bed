"""Settings from records of a segmentation model, by the rules of ``settings.py``.

The accuracy is the mIoU of all images together. It is no mean over images, so the guarantee is about the pixel error.
Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from progresvit import compute
from progresvit.evaluation.segmentation_records import SegmentationRecords
from progresvit.evaluation.settings import certificate, make_setting
from progresvit.metrics.miou import mean_iou, pixel_accuracy
from progresvit.routing import (
    NEAR_LOSSLESS_DROP,
    Setting,
    certified_thresholds,
    threshold_for_budget,
    threshold_for_exit_share,
)
from progresvit.routing.segmentation import near_lossless_miou, segmentation_frontier


def calibrate_segmentation_near_lossless(
    records: SegmentationRecords,
    *,
    max_drop: float = NEAR_LOSSLESS_DROP,
    convention: compute.Convention = "paper",
) -> Setting:
    """Lowest compute with mIoU within ``max_drop`` of the full path on these images. An observation, no guarantee."""
    records.header.check_routable()
    point = near_lossless_miou(records.scores, records.counts, records.gmacs(convention), max_drop)
    return _setting(records, point.threshold, convention, rule="near-lossless")


def calibrate_segmentation_budget(
    records: SegmentationRecords, budget: float, *, convention: compute.Convention = "paper"
) -> Setting:
    """The most refinement that an average of ``budget`` GMACs per image, of all its windows, allows."""
    records.header.check_routable()
    threshold = threshold_for_budget(records.scores, records.gmacs(convention), budget)
    return _setting(records, threshold, convention, rule="budget")


def calibrate_segmentation_exit_share(
    records: SegmentationRecords, share: float, *, convention: compute.Convention = "paper"
) -> Setting:
    """At least this share of the images exits before the last round."""
    records.header.check_routable()
    return _setting(records, threshold_for_exit_share(records.scores, share), convention, rule="exit-share")


def calibrate_segmentation_guarantee(
    records: SegmentationRecords,
    *,
    epsilon: float,
    delta: float,
    convention: compute.Convention = "paper",
    seed: int = 0,
) -> Setting:
    """Early exits add at most ``epsilon`` to the mean pixel error, with probability 1 - ``delta`` over the draw of
    these images.

    Args:
        records: Images that the model was not fitted on.
        epsilon: The largest increase of the mean pixel error of an image.
        delta: The probability that the guarantee fails.
        convention: Convention of the GMACs.
        seed: Seed of the part that orders the thresholds of three rounds and more.
    """
    records.header.check_routable()
    certified = certified_thresholds(
        records.scores,
        added_pixel_error(records),
        list(records.header.gmacs[convention]),  # of a window; any order of the thresholds is valid
        epsilon,
        delta,
        highest=math.log(records.classes),
        seed=seed,
        fractional=True,
    )
    evidence = {**certificate(certified, "pixel-error"), "mean_loss": certified.mean_loss}
    return _setting(records, certified.threshold, convention, rule="guarantee", **evidence)


def added_pixel_error(records: SegmentationRecords) -> NDArray[np.float64]:
    """The loss of an exit after each round: the increase of the image's pixel error over the last round's, (N, S).

    It is 0 where the error decreases, so its mean bounds the increase of the mean pixel error.
    """
    error = records.pixel_error
    return np.maximum(error - error[:, -1:], 0.0)


def _setting(
    records: SegmentationRecords,
    threshold: float | tuple[float, ...],
    convention: compute.Convention,
    **known: Any,
) -> Setting:
    gmacs = records.gmacs(convention)
    point = segmentation_frontier(records.scores, records.counts, gmacs, [threshold])[0]
    full = float(gmacs[:, -1].mean())
    expected = {
        "miou": point.miou,
        "full_miou": float(mean_iou(records.totals)[-1]),
        "pixel_accuracy": point.pixel_accuracy,
        "full_pixel_accuracy": float(pixel_accuracy(records.totals)[-1]),
        "gmacs": point.gmacs,
        "full_gmacs": full,
        "saving": 1 - point.gmacs / full,
        "exit_shares": list(point.exit_shares),
        "convention": convention,
    }
    return make_setting(records.header, threshold, **{"expected": expected, "n": len(records), **known})
