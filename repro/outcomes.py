"""The tests that a comparison declares: what was measured of each, and what follows from it.

A test compares two runs on the same seeds and images. Top-1 of the last round decides; top-1 of round 1 and
the log-loss of both rounds stand beside it. Letters: K seeds, N images.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from repro.compare import ComparedRun, CrossedDifference, Difference, crossed_difference, gather
from repro.equal import check_equal, check_seeds
from repro.formats import FULL, Results
from repro.study import DeclaredTest, Equal, Study

POINTS = 100
"""Points in a share of 1."""
GAIN, LOSS, UNKNOWN = "gain", "loss", "inconclusive"


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """Both endpoints in a round."""

    top1: CrossedDifference
    errors: float
    """Error rate of the run that is compared with, mean over seeds."""
    log_loss: CrossedDifference | None
    """None if a results file holds none. Lower is better."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A test whose runs were measured."""

    label: str
    margin: float
    """Margin in points."""
    paper: float | None
    seeds: tuple[int, ...]
    images: int
    last: RoundOutcome
    first: RoundOutcome | None
    """None if a run has one round."""

    @property
    def verdict(self) -> str:
        """Verdict on top-1 of the last round."""
        difference = self.last.top1
        if difference.clear:
            return GAIN if difference.lowest > 0 else LOSS
        return f"no gain of {self.margin:g}" if POINTS * difference.highest < self.margin else UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """The tests of a comparison."""

    title: str
    measured: tuple[Outcome, ...]
    missing: tuple[str, ...]
    """Labels of tests whose runs have fewer than two seeds."""


def is_equivalent(difference: Difference, margin: float) -> bool:
    """Whether the difference is shown to be smaller than the margin, in points, on either side.

    The 95 % interval lies within the margins. These are two one-sided tests, each at 2.5 %, and so a conservative form
    of the usual procedure, which tests each side at 5 % by the 90 % interval.
    """
    return -margin < POINTS * difference.lowest and POINTS * difference.highest < margin


def verdict_of(difference: Difference, margin: float = 0.0) -> str:
    """``gain`` or ``loss`` if the interval excludes 0; if not, whether it shows equivalence within a margin above 0."""
    if difference.clear:
        return GAIN if difference.lowest > 0 else LOSS
    return f"equivalent within {margin:g}" if is_equivalent(difference, margin) else UNKNOWN


def log_loss_verdict(difference: CrossedDifference) -> str:
    """Lower is better."""
    if not difference.clear:
        return "no difference shown"
    return "better" if difference.highest < 0 else "worse"


def gather_outcomes(results: Results, study: Study, name: str) -> Outcomes:
    """The tests of a comparison as far as they were measured; refused if runs differ in images, epochs or seeds."""
    tests, equal = study.comparisons[name].tests, study.comparisons[name].equal
    outcomes = [(test.label, _outcome(results, test, equal)) for test in tests]
    return Outcomes(
        title=study.comparisons[name].title,
        measured=tuple(outcome for _, outcome in outcomes if outcome is not None),
        missing=tuple(label for label, outcome in outcomes if outcome is None),
    )


def _outcome(results: Results, test: DeclaredTest, equal: Equal) -> Outcome | None:
    ours, theirs = gather(results, test.ours), gather(results, test.theirs)
    what = f"the test {test.label!r}"
    check_equal([*theirs.seeds, *ours.seeds], equal, what)  # compute may differ by a share of theirs
    check_seeds([*ours.seeds, *theirs.seeds], what)
    if min(len(ours.seeds), len(theirs.seeds)) < 2:
        return None
    return Outcome(
        label=test.label,
        margin=test.margin,
        paper=test.paper,
        seeds=tuple(result.seed for result in ours.seeds if result.seed is not None),
        images=ours.first.data.val,
        last=_round_outcome(ours, theirs, FULL),
        first=_round_outcome(ours, theirs, 0) if ours.rounds > 1 and theirs.rounds > 1 else None,
    )


def _round_outcome(ours: ComparedRun, theirs: ComparedRun, place: int) -> RoundOutcome:
    losses = [_log_losses(run, place) for run in (ours, theirs)]
    return RoundOutcome(
        top1=crossed_difference(ours.correct_of_seeds(place), theirs.correct_of_seeds(place)),
        errors=1 - theirs.top1(place),
        log_loss=None if losses[0] is None or losses[1] is None else crossed_difference(losses[0], losses[1]),
    )


def _log_losses(run: ComparedRun, place: int) -> NDArray[np.float64] | None:
    """(K, N); None if a seed has none."""
    each = [result.rounds.log_losses(result.data.val) for result in run.seeds]
    of_seeds = [losses[:, place] for losses in each if losses is not None]
    return np.stack(of_seeds) if len(of_seeds) == len(each) else None
