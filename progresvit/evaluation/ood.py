"""Out-of-distribution (OOD) detection: does a score tell images of the model's classes from images of none of them?

Known images are in-distribution, unknown ones belong to none of the model's classes. A higher score means more
in-distribution. Letters: N known images, M unknown ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from progresvit import table
from progresvit.evaluation.records import ROUTED, Records
from progresvit.metrics.arrays import Floats
from progresvit.routing import Router, Setting, route_records
from progresvit.routing.calibrate import OutOfReachError
from progresvit.routing.decide import at_exit
from progresvit.routing.scores import OOD_SCORES, recorded_ood_score
from progresvit.table import Column, Table

OOD_SHARE = 0.05
"""The share of known images that a limit rejects by default."""
REJECTED = 0.05
"""The share of known images that FPR95 rejects."""


def ood_limit(known: ArrayLike, share: float = OOD_SHARE) -> float:
    """The limit below which images are rejected, from scores of known images: (N,).

    It is the k-th lowest score, k = floor(share (N + 1)), so that an image from the same distribution is rejected with
    a probability of at most ``share`` over the draw of these images (split conformal prediction). This holds if the
    scores do not depend on these images, as with an exit threshold that was calibrated on others.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share of rejected images is between 0 and 1 (0.05 for 5 %), not {share:g}.")
    scores = _scores(known, "known")
    k = math.floor(share * (len(scores) + 1) + 1e-9)
    if k == 0:
        needed = math.ceil(1 / share - 1 - 1e-9)
        raise OutOfReachError(
            f"{len(scores)} images are too few for a limit that rejects {share:g} of them; evaluate on {needed} or "
            "more, or allow a larger share."
        )
    limit = float(np.sort(scores)[k - 1])
    if limit == -math.inf:
        raise OutOfReachError(
            f"{int(np.isinf(scores).sum())} of {len(scores)} images have NaN or infinite logits and are rejected "
            f"anyway, which is more than {share:g}; check the model, or allow a larger share."
        )
    return limit


def auroc(known: ArrayLike, unknown: ArrayLike) -> float:
    """Area under the ROC curve: the probability that a known image scores higher than an unknown one; ties count half.

    0.5 is chance, 1 is perfect.
    """
    high, low = np.sort(_scores(known, "known")), _scores(unknown, "unknown")
    below, below_or_equal = (np.searchsorted(high, low, side=side) for side in ("left", "right"))
    wins = len(high) - below_or_equal + 0.5 * (below_or_equal - below)  # (M,)
    return float(wins.sum() / (len(high) * len(low)))


def fpr95(known: ArrayLike, unknown: ArrayLike) -> float:
    """The share of unknown images that is accepted when at least 95 % of the known ones are; lower is better."""
    high, low = np.sort(_scores(known, "known")), _scores(unknown, "unknown")
    limit = high[math.floor(REJECTED * len(high) + 1e-9)]
    return float((low >= limit).mean())


@dataclass(frozen=True, kw_only=True)
class OODResult:
    """How well a score tells known images from unknown ones."""

    answers: str
    """``routed``, or the last round alone."""
    score: str
    auroc: float
    fpr95: float
    known: int
    unknown: int


def measure_ood(
    known: Records,
    unknown: Records,
    threshold: float | Sequence[float] | None = None,
    router: Router | None = None,
) -> list[OODResult]:
    """Every score, in the round after which an image exits, and in the last round alone.

    Args:
        known: Records of images of the model's classes.
        unknown: Records of the same model on images of other classes; labels are not used.
        threshold: The exit threshold; by default the near-lossless one of the known images.
        router: Compare thresholds with its probabilities instead of entropies.
    """
    _check_pair(known, unknown)
    if threshold is None:
        threshold = known.near_lossless_threshold(router)
    rounds = [(records, records.answer_rounds(threshold, router)) for records in (known, unknown)]
    results = []
    for answers in (ROUTED, f"round {known.rounds}"):
        statistics = [at_exit(records.statistics, exits[answers]) for records, exits in rounds]
        for name in OOD_SCORES:
            high, low = (recorded_ood_score(name, values) for values in statistics)
            results.append(
                OODResult(
                    answers=answers,
                    score=name,
                    auroc=auroc(high, low),
                    fpr95=fpr95(high, low),
                    known=len(known),
                    unknown=len(unknown),
                )
            )
    return results


def rejected_share(records: Records, setting: Setting, router: Router | None = None) -> float:
    """The share of the images that a setting rejects as out-of-distribution."""
    routed = route_records(setting.policy(router), records.top10_entropy, records.statistics)
    return float(routed.out_of_distribution.mean())


def ood_table(results: Sequence[OODResult]) -> Table:
    """One row per score and answers."""
    columns = [
        Column("answers", "answers"),
        Column("score", "score"),
        Column("auroc", "AUROC (%)", table.rough_percent),
        Column("fpr95", "FPR95 (%)", table.rough_percent),
        Column("known", "known images"),
        Column("unknown", "unknown images"),
    ]
    return Table("Out-of-distribution detection", columns, [asdict(result) for result in results])


def _scores(values: ArrayLike, name: str) -> Floats:
    """(N,), with NaN as minus infinity."""
    scores = np.asarray(values)
    if scores.ndim != 1 or not len(scores):
        raise ValueError(f"scores of {name} images are one for each of at least one image, not {scores.shape}.")
    return np.where(np.isnan(scores), -np.inf, scores)


def _check_pair(known: Records, unknown: Records) -> None:
    for name, records in (("known", known), ("unknown", unknown)):
        if not len(records):
            raise ValueError(f"there are no {name} images; evaluate on at least one.")
    header, other = known.header, unknown.header
    for name in ("weights_sha256", "preprocessing_sha256", "precision"):
        if getattr(header, name) != getattr(other, name):
            what = name.removesuffix("_sha256")
            raise ValueError(
                f"the two records are of models with other {what} ({header.model} and {other.model}); evaluate one "
                "model on both sets of images, with the same options."
            )
    if (header.data, header.split, header.names_sha256, header.corruption) == (
        other.data,
        other.split,
        other.names_sha256,
        other.corruption,
    ):
        raise ValueError(
            "known and unknown images are the same; evaluate on images of other classes, "
            "with unlabelled=True (progresvit evaluate)."
        )
