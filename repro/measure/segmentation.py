"""What the results file of a segmentation model takes from its records: counts of pixels and scores, image by image.

Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from progresvit.config import BackboneConfig
from progresvit.evaluation import SegmentationRecords
from repro.formats import SegmentedImages
from repro.measure.records import hash_names


def measure_segmentation(val: SegmentationRecords, test: SegmentationRecords) -> dict[str, Any]:
    """The model's classes, the cost of its rounds, and the images of both splits."""
    config = test.config
    assert isinstance(config, BackboneConfig)
    rounds = config.rounds
    return {
        "labels": test.labels,
        "resolutions": tuple(round_.resolution for round_ in rounds),
        "heads": tuple(getattr(round_, "heads", config.heads) for round_ in rounds),
        "gmacs_paper": tuple(test.header.gmacs["paper"]),
        "gmacs_executed": tuple(test.header.gmacs["executed"]),
        "val": images_of(val),
        "test": images_of(test),
    }


def images_of(records: SegmentationRecords) -> SegmentedImages:
    """The images of a split in the order of their names."""
    order = np.argsort(records.ids, kind="stable")
    intersection, labelled, predicted = (part[order] for part in records.counts)  # (N, S, K)
    if records.broken:
        raise ValueError(f"{records.broken} images have NaN or infinite logits; train again.")
    return SegmentedImages(
        split=records.header.split or "",
        images=len(records),
        names=hash_names(records.ids.tolist()),
        windows=records.windows[order],
        scores=tuple(records.scores[order, :-1].T),
        labelled=labelled[:, 0].ravel(),
        intersection=tuple(intersection[:, s].ravel() for s in range(records.rounds)),
        predicted=tuple(predicted[:, s].ravel() for s in range(records.rounds)),
    )
