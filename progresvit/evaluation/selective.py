"""Selective prediction: the error rate when uncertain predictions are withheld.

Coverage is the share of images that are answered, risk the error rate among them. Letters: N images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from progresvit import table
from progresvit.evaluation.records import Records
from progresvit.metrics.arrays import Bools, Floats, Ints
from progresvit.routing import Router
from progresvit.routing.calibrate import OutOfReachError
from progresvit.routing.decide import at_exit
from progresvit.table import Column, Row, Table

RISKS = (0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True)
class RiskCoverage:
    """Risk when the k most confident of N predictions are given, for k from 1 to N."""

    coverage: Floats
    risk: Floats

    @property
    def area(self) -> float:
        """Area under the curve: the mean risk over all coverages."""
        return float(self.risk.mean())

    def coverage_at(self, risk: float) -> float:
        """The largest coverage with at most this risk; 0 if there is none."""
        good = np.flatnonzero(self.risk <= risk)
        return float(self.coverage[good[-1]]) if len(good) else 0.0


def risk_coverage(uncertainty: ArrayLike, wrong: ArrayLike) -> RiskCoverage:
    """The curve of predictions ordered by uncertainty; ties share their mean risk."""
    scores, errors = np.asarray(uncertainty, np.float64), np.asarray(wrong, np.float64)
    if scores.ndim != 1 or scores.shape != errors.shape or not len(scores):
        raise ValueError(f"uncertainties {scores.shape} and errors {errors.shape} must be one per image.")
    order = np.argsort(scores, kind="stable")
    _, first, counts = np.unique(scores[order], return_index=True, return_counts=True)
    means = np.add.reduceat(errors[order], first) / counts
    smooth = np.repeat(means, counts)  # the order among ties must not matter
    count = np.arange(1, len(errors) + 1)
    return RiskCoverage(coverage=count / len(errors), risk=smooth.cumsum() / count)


def abstain_entropy(uncertainty: ArrayLike, wrong: ArrayLike, max_error: float) -> float | None:
    """The entropy from which on predictions are withheld, for an error rate of at most ``max_error`` among the others.

    It withholds as few as possible; None withholds none. The value is one of the entropies, so that rounding does not
    change the outcome.
    """
    if not 0 < max_error < 1:
        raise ValueError(f"an error rate is between 0 and 1 (0.05 for 5 %), not {max_error:g}.")
    scores, errors = np.asarray(uncertainty, np.float64), np.asarray(wrong, np.float64)
    order = np.argsort(scores, kind="stable")
    sorted_, risk = scores[order], errors[order].cumsum() / np.arange(1, len(errors) + 1)
    ends = np.flatnonzero(np.append(sorted_[1:] > sorted_[:-1], True))  # ties are answered together
    good = ends[risk[ends] <= max_error]
    if not len(good):
        raise OutOfReachError(
            f"even the most confident predictions have an error rate above {max_error:g}; allow more errors, or train "
            "longer."
        )
    return None if good[-1] == len(sorted_) - 1 else float(sorted_[good[-1] + 1])


def routed_answers(records: Records, rounds: Ints) -> tuple[Floats, Bools]:
    """Entropy of each image's prediction and whether it is wrong, given the rounds of exit: (N,) twice."""
    return at_exit(records.top10_entropy, rounds).astype(np.float64), ~at_exit(records.correct, rounds)


def risk_coverage_curves(
    records: Records, threshold: float | Sequence[float] | None = None, router: Router | None = None
) -> dict[str, RiskCoverage]:
    """Curves of each round alone and routed; the threshold is near-lossless by default."""
    rounds = records.answer_rounds(threshold, router)
    return {name: risk_coverage(*routed_answers(records, exits)) for name, exits in rounds.items()}


def risk_coverage_table(curves: Mapping[str, RiskCoverage]) -> Table:
    """Area under each curve, risk at full coverage, and the coverage at given risks."""
    rows: list[Row] = [
        {
            "answers": name,
            "error": float(curve.risk[-1]),
            "area": curve.area,
            **{f"coverage_at_{risk:g}": curve.coverage_at(risk) for risk in RISKS},
        }
        for name, curve in curves.items()
    ]
    columns = [
        Column("answers", "answers"),
        Column("error", "error (%)", table.percent),
        Column("area", "area under risk–coverage (%)", table.percent),
        *(Column(f"coverage_at_{r:g}", f"coverage at {r:.0%} risk (%)", table.rough_percent) for r in RISKS),
    ]
    return Table("Risk and coverage", columns, rows)
