"""Learned routers against entropy at matched continuation rates, with intervals. Letters: N images, F fits, R rates."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from progresvit.evaluation import Records
from progresvit.evaluation.routers import fit_on, matched_outcomes
from progresvit.routing import HIGHEST, TENTHS
from progresvit.routing.calibrate import OutOfReachError
from progresvit.routing.router import Target
from repro.formats import MatchedResult

TARGETS: tuple[Target, ...] = ("benefit", "error")
"""What routers learn: the paper's, and the plainest."""
FITS = 5
FOLDS = 5
DRAWS = 1000
REJECTED = (0.005, 0.01, 0.02, 0.05)
"""Shares of the images that are rejected after round 1."""
TRAINING, HELD_OUT = "training pictures", "other held-back pictures"
"""What routers are fitted on, as results files of format 1 call it."""

Scores = NDArray[np.float32]


def measure_matched(
    val: Records, learned: Records | None, *, fits: int = FITS, rates: Sequence[float] = TENTHS, seed: int = 0
) -> list[MatchedResult]:
    """Routers of each target: fitted on the model's training images, and cross-fitted on others.

    The first is the paper's way and needs ``learned``. Routers without examples are left out: a model that has every
    training image right shows no error. Only models of two rounds have a rate to match.
    """
    if val.rounds != 2:
        return []
    sources: dict[str, Records | None] = {HELD_OUT: None}
    if learned is not None:
        sources = {TRAINING: learned, **sources}
    found = []
    for target in TARGETS:
        for words, fitting in sources.items():
            try:
                scores = [_scores(val, fitting, target=target, seed=number) for number in range(seed, seed + fits)]
            except OutOfReachError:
                continue
            found.append(compare(val, scores, router=target, fitted_on=words, rates=rates, seed=seed))
    return found


def measure_rejection(
    val: Records, *, fits: int = FITS, rates: Sequence[float] = TENTHS, seed: int = 0
) -> list[MatchedResult]:
    """Entropy that rejects unrecoverable images, against entropy alone when the same share of images continues.

    Every image's probability of being unrecoverable comes from a router that was fitted on other held-out images. A
    share of the images, those with the highest probability, continues only after all others.
    """
    if val.rounds != 2:
        return []
    try:
        chances = [cross_fitted_scores(val, target="unrecoverable", seed=number) for number in range(seed, seed + fits)]
    except OutOfReachError:
        return []
    found = []
    for share in REJECTED:
        scores = [reject(val.top10_entropy[:, 0], fit, share) for fit in chances]
        name = f"entropy, {100 * share:g} % rejected"
        found.append(compare(val, scores, router=name, fitted_on=HELD_OUT, rates=rates, seed=seed))
    return found


def reject(entropy: Scores, chances: Scores, share: float) -> Scores:
    """Entropies, with the images that are likeliest to be unrecoverable moved below all others: (N,)."""
    rejected = np.argsort(-chances, kind="stable")[: round(share * len(chances))]
    scores = entropy.copy()
    scores[rejected] -= 2 * HIGHEST
    return scores


def _scores(val: Records, fitting: Records | None, *, target: Target, seed: int) -> Scores:
    if fitting is None:
        return cross_fitted_scores(val, target=target, seed=seed)
    return fit_on(fitting, target=target, seed=seed).scores(val.statistics)[:, 0]


def cross_fitted_scores(records: Records, *, target: Target, seed: int, folds: int = FOLDS) -> Scores:
    """Round 1's score of every image by a router that was fitted on the other folds: (N,).

    All scores are probabilities of the same event, so scores of different routers are comparable.
    """
    numbers = folds_of(records.ids.tolist(), seed=seed, folds=folds)
    scores = np.zeros(len(records), np.float32)
    for fold in np.unique(numbers):
        inside = numbers == fold
        router = fit_on(records.take(~inside), target=target, seed=seed)
        assert not router.count_seen(records.ids[inside])
        scores[inside] = router.scores(records.statistics[inside])[:, 0]
    return scores


def folds_of(names: Sequence[str], *, seed: int, folds: int = FOLDS) -> NDArray[np.int64]:
    """The fold of each name, (N,). It depends on the name alone."""
    digests = [hashlib.sha256(f"fold {seed}\n{name}".encode()).digest()[:8] for name in names]
    return np.array([int.from_bytes(digest, "big") % folds for digest in digests], np.int64)


def compare(
    val: Records, scores: Sequence[Scores], *, router: str, fitted_on: str, rates: Sequence[float], seed: int
) -> MatchedResult:
    """Top-1 when exactly the same number of images continues, by entropy and by each fit's scores, (N,) each."""
    entropy, spent = matched_outcomes(val, val.top10_entropy[:, 0], rates)  # (N, R)
    routed = np.stack([matched_outcomes(val, of_fit, rates)[0] for of_fit in scores])  # (F, N, R)
    lowest, highest = gain_interval(routed.astype(np.float32) - entropy, seed=seed)
    return MatchedResult(
        router=router,
        fitted_on=fitted_on,
        fits=len(scores),
        shares=tuple(rates),
        gmacs_paper=tuple(spent),
        entropy_top1=tuple(entropy.mean(axis=0).tolist()),
        router_top1=tuple(routed.mean(axis=(0, 1)).tolist()),
        lowest=tuple(lowest.tolist()),
        highest=tuple(highest.tolist()),
    )


def gain_interval(
    gains: NDArray[np.float32], *, seed: int, draws: int = DRAWS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """95 % interval of the mean gain over fits and images: (F, N, R) -> (R,) twice.

    A gain of top-1 is 1 where the router alone is right, -1 where entropy alone is. Each draw resamples N images and F
    fits, independently and with replacement, and averages over both; the interval lies between the 2.5th and the 97.5th
    percentile of these averages. The images that continue are not chosen again within a draw.
    """
    fits, images, rates = gains.shape
    rng = np.random.default_rng(seed)
    means = np.zeros((draws, rates))
    for number in range(draws):
        weights = np.bincount(rng.integers(0, images, images), minlength=images).astype(np.float32)
        fit_weights = np.bincount(rng.integers(0, fits, fits), minlength=fits).astype(np.float32)
        means[number] = fit_weights @ (weights @ gains) / (fits * images)  # (N,) @ (F, N, R) -> (F, R) -> (R,)
    lowest, highest = np.percentile(means, [2.5, 97.5], axis=0)
    return lowest, highest
