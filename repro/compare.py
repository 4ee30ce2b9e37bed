"""Runs side by side: the seeds of a run as one, and the difference of two runs, image by image.

Letters: K seeds, N images, S rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from progresvit.metrics.interval import LIKELY, Interval, mean_interval
from repro.equal import check_equal
from repro.formats import FULL, Point, Results, RunResult
from repro.study import Study

POWER = 0.84
"""Standard errors beyond the end of an interval at which a normal estimate lies above that end 80 % of the time."""
CHUNK = 256
"""Bootstrap draws that are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Difference(Interval):
    """A difference of two shares, with its 95 % interval."""

    @property
    def half_width(self) -> float:
        """Half of the width of the interval."""
        return (self.highest - self.lowest) / 2

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.lowest > 0 or self.highest < 0


def paired_difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Difference:
    """Mean of the differences on the same images: (N,), (N,).

    Images that both have right or both have wrong do not widen the interval. It is a normal interval. It covers the
    sampling of the images and the flips of single images from seed to seed, but not a shift of a whole run, which
    ``RunShift`` adds.
    """
    interval = mean_interval(ours - theirs)
    return Difference(mean=interval.mean, lowest=interval.lowest, highest=interval.highest)


@dataclass(frozen=True, kw_only=True)
class CrossedDifference(Difference):
    """A difference of two means over seeds and images, with its 95 % interval over both."""

    error: float
    """Standard error of the bootstrap."""
    freedom: float
    """Degrees of freedom of that error."""
    shift: float
    """Standard deviation of the shift of a whole seed; 0 if flips of images explain all."""
    detectable: float
    """The smallest true difference that the test finds 80 % of the time, at two-sided 5 %, by the observed error."""

    def power(self, difference: float) -> float:
        """How often the test would find this true difference, by the observed error."""
        return float(stats.norm.cdf((difference - self.detectable) / self.error + POWER)) if self.error else 1.0


def crossed_difference(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], draws: int = 10_000, seed: int = 0
) -> CrossedDifference:
    """Mean of the differences on the same seeds and images, by a bootstrap over both: (K, N), (K, N).

    A difference is taken as a mean, a shift of its seed (variance A), a shift of its image (B) and a flip of this seed
    on this image (E). The variance of the mean is A / K + B / N + E / KN.

    - The mean over seeds of an image varies by B + E / K. Resampling these N means gives B / N + E / KN, with flips.
    - The mean over images of a seed varies by A + E / N. Resampling it as it is would count flips twice, and resampling
      rows and columns of the table at once three times: intervals up to 1.7 times too wide where flips prevail. So the
      deviations of the seeds are scaled to the variance A, as the analysis of variance estimates it, at least 0.
    - A resample of K values has (K - 1) / K of the variance that they estimate, so a percentile interval understates
      the part of the seeds by sqrt((K - 1) / K), 6 % for 8 seeds. Deviations are scaled by sqrt(K / (K - 1)) first,
      those of the images by sqrt(N / (N - 1)).
    - The variance of a few seeds is itself uncertain. The distances of both percentiles from the mean are multiplied by
      t / 1.96, with t of Satterthwaite's degrees of freedom: 1.2 at most for 8 seeds, 1.0 if A is estimated as 0.

    On simulated tables (normal effects, 100 images) intervals of 8 seeds cover the truth in 94 to 97 %, those of 2 or 3
    seeds in 88 to 97 %; with binary outcomes of 3,932 images and 8 seeds in 92 to 98 %. A difference is detectable with
    80 % power if it is t + 0.84 standard errors: 2.8 if A is estimated as 0, up to 3.2 as soon as it is above 0.
    """
    between = ours - theirs
    seeds, images = between.shape
    if seeds < 2 or images < 2:
        raise ValueError(f"a bootstrap over {seeds} seeds and {images} images; compare at least two of each.")
    mean = float(between.mean())
    of_seeds = between.mean(axis=1) - mean  # (K,)
    of_images = between.mean(axis=0) - mean  # (N,)
    seed_variance = float(of_seeds.var(ddof=1))  # A + E / N
    shift_variance = max(0.0, _shift_variance(between))  # A
    of_seeds *= (shift_variance / seed_variance * seeds / (seeds - 1)) ** 0.5 if shift_variance else 0.0
    of_images *= (images / (images - 1)) ** 0.5
    means = _resampled_means(of_seeds, of_images, draws, seed)
    error, image_variance = float(means.std()), float(of_images.var())
    uncertain = (seed_variance / seeds) ** 2 / (seeds - 1) * bool(shift_variance)
    uncertain += (image_variance / images) ** 2 / (images - 1)
    freedom = (shift_variance / seeds + image_variance / images) ** 2 / uncertain if uncertain else float("inf")
    reach = float(stats.t.ppf(0.975, freedom))
    lowest, highest = (mean + reach / LIKELY * float(end) for end in np.quantile(means, [0.025, 0.975]))
    return CrossedDifference(
        mean=mean,
        lowest=lowest,
        highest=highest,
        error=error,
        freedom=freedom,
        shift=shift_variance**0.5,
        detectable=(reach + POWER) * error,
    )


def _shift_variance(values: NDArray[np.float64]) -> float:
    """Variance of the shifts of whole seeds, by an analysis of variance; an estimate may be below 0: (K, N)."""
    seeds, images = values.shape
    of_seeds = values.mean(axis=1, keepdims=True)  # (K, 1)
    flips = values - of_seeds - values.mean(axis=0) + values.mean()  # (K, N)
    flip_variance = float((flips**2).sum()) / ((seeds - 1) * (images - 1))
    variance: float = of_seeds.var(ddof=1) - flip_variance / images
    return variance


def _resampled_means(
    of_seeds: NDArray[np.float64], of_images: NDArray[np.float64], draws: int, seed: int
) -> NDArray[np.float64]:
    """Mean of resampled seeds plus mean of resampled images, both with replacement: (K,), (N,) -> (draws,)."""
    means = np.zeros(draws)
    for values, counts in zip((of_seeds, of_images), _resamples(len(of_seeds), len(of_images), draws, seed)):
        for start in range(0, draws, CHUNK):
            means[start : start + CHUNK] += counts[start : start + CHUNK] @ values / len(values)
    return means


@lru_cache(maxsize=2)
def _resamples(seeds: int, images: int, draws: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """How often each seed and each image is in each resample: (draws, K), (draws, N).

    Kept, because a page asks for many intervals over as many seeds and images.
    """
    rng = np.random.default_rng(seed)
    counts = np.zeros((draws, seeds), np.uint8), np.zeros((draws, images), np.uint8)
    for start in range(0, draws, CHUNK):
        for kind in counts:
            part = kind[start : start + CHUNK]
            places = rng.integers(0, part.shape[1], part.shape) + part.shape[1] * np.arange(len(part))[:, None]
            part[:] = np.bincount(places.ravel(), minlength=part.size).reshape(part.shape)
    return counts


def is_clear_among(difference: Difference, intervals: int) -> bool:
    """Whether the interval excludes zero if this many intervals hold together at 95 %; a width of 0 says nothing.

    Bonferroni's correction. It is careful: intervals of one page are correlated.
    """
    freedom = difference.freedom if isinstance(difference, CrossedDifference) else float("inf")
    wider = float(stats.t.ppf(1 - 0.025 / max(1, intervals), freedom) / stats.t.ppf(0.975, freedom))
    return difference.lowest < difference.highest and abs(difference.mean) > wider * difference.half_width


@dataclass(frozen=True, kw_only=True)
class PointRow:
    """A point of a run over all seeds, and ours at the same GMACs."""

    label: str
    run: str
    point: str
    gmacs: float
    """Mean over seeds."""
    compute: float | None
    """Training compute divided by the training compute of ours; None if ours was not measured."""
    ours_gmacs: float | None
    """GMACs of ours where it is compared, at most this point's; None for ours, and below the GMACs of its round 1."""
    difference: CrossedDifference | None
    """Ours minus this run, paired by seed and image; None if it is not compared, and for one seed."""
    verdict: str | None
    """Verdict on the difference."""


AnyRow = TypeVar("AnyRow", bound=PointRow)


def find_row(rows: Sequence[AnyRow], run: str, point: str, title: str) -> AnyRow:
    """A row by its run or label and its point."""
    for row in rows:
        if run in (row.run, row.label) and row.point == point:
            return row
    choices = "; ".join(f"{row.run}, {row.point}" for row in rows)
    raise ValueError(f"{title} has no row {run}, {point}; it has {choices or 'none'}.")


def marginal_rows(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Rows whose gain or loss is not clear once intervals are corrected for the number of all of them (Bonferroni)."""
    compared = [(row, row.difference) for row in rows if row.difference is not None]
    return [row for row, difference in compared if difference.clear and not is_clear_among(difference, len(compared))]


@dataclass(frozen=True)
class ComparedRun:
    """A run with all of its seeds. ``place`` is the index of a round; the default is the full path."""

    label: str
    run: str
    seeds: tuple[RunResult, ...]

    @property
    def first(self) -> RunResult:
        """The first seed; all seeds share rounds, parameters and epochs."""
        return self.seeds[0]

    @property
    def rounds(self) -> int:
        return len(self.first.rounds.resolutions)

    @cached_property
    def correct(self) -> NDArray[np.float64]:
        """Share of the seeds that have each image right: (N, S)."""
        return np.mean([result.rounds.correct(result.data.val) for result in self.seeds], axis=0)  # type: ignore[no-any-return]

    def correct_of_seeds(self, place: int = FULL) -> NDArray[np.float64]:
        """Whether each seed has each image right in a round, as 1 and 0: (K, N)."""
        return np.stack([result.rounds.correct(result.data.val)[:, place] for result in self.seeds]).astype(np.float64)

    def gmacs(self, place: int = FULL) -> float:
        """GMACs of an image that exits after a round, earlier rounds included."""
        return self.first.rounds.gmacs_paper[place]

    def top1_of_seeds(self, place: int = FULL) -> tuple[float, ...]:
        """Top-1 of a round, by seed."""
        return tuple(result.rounds.right[place] / result.data.val for result in self.seeds)

    def top1(self, place: int = FULL) -> float:
        """Top-1 of a round, mean over the seeds."""
        return float(np.mean(self.top1_of_seeds(place)))

    def spread(self, place: int = FULL) -> float:
        """Distance between the best and the worst seed."""
        each = self.top1_of_seeds(place)
        return max(each) - min(each)

    def deviation(self, place: int = FULL) -> float | None:
        """Standard deviation over the seeds; None for one seed."""
        each = self.top1_of_seeds(place)
        return float(np.std(each, ddof=1)) if len(each) > 1 else None

    @property
    def near_lossless(self) -> tuple[Point, ...]:
        """The near-lossless point of each seed; empty if rounds are alternatives, which cannot be routed."""
        return tuple(result.near_lossless for result in self.seeds if result.near_lossless is not None)

    @property
    def saving(self) -> float:
        """Compute that the near-lossless threshold saves, mean over the seeds."""
        return float(np.mean([1 - point.gmacs_paper / self.gmacs() for point in self.near_lossless]))

    def mean(self, value: Callable[[RunResult], float]) -> float:
        """The mean of a value over the seeds."""
        return float(np.mean([value(result) for result in self.seeds]))

    def gmacs_at(self, top1: float) -> float:
        """GMACs from which on the frontier is nowhere below an accuracy, mean over the seeds."""

        def cheapest(result: RunResult) -> float:
            low = [place for place, point in enumerate(result.frontier) if point.top1 < top1]
            reached = result.frontier[low[-1] + 1 :] if low else result.frontier
            if not reached:
                raise ValueError(f"{result.name} never reaches a top-1 of {top1:.4f}.")
            return reached[0].gmacs_paper

        return self.mean(cheapest)

    def less(self, other: ComparedRun, place: int = FULL) -> Difference:
        """How much better this run is than the other in a round."""
        return paired_difference(self.correct[:, place], other.correct[:, place])


@dataclass(frozen=True, kw_only=True)
class RunShift:
    """How much top-1 of a whole run shifts from seed to seed, beyond flips of single images."""

    deviation: float
    """Standard deviation."""
    freedom: int
    """Degrees of freedom of its estimate."""

    def widen(self, difference: Difference, ours: int, theirs: int) -> Difference:
        """A difference over images with the shifts added to its interval, for the numbers of seeds on either side.

        Variances add. The interval is 1.96 or, with Satterthwaite's degrees of freedom, t standard errors wide.
        """
        of_images = (difference.half_width / LIKELY) ** 2
        of_shifts = self.deviation**2 * (1 / ours + 1 / theirs)
        freedom = self.freedom * ((of_images + of_shifts) / of_shifts) ** 2 if of_shifts else float("inf")
        reach = float(stats.t.ppf(0.975, freedom)) * (of_images + of_shifts) ** 0.5
        return Difference(mean=difference.mean, lowest=difference.mean - reach, highest=difference.mean + reach)


def run_shift(runs: Iterable[ComparedRun], place: int = FULL) -> RunShift:
    """The shift of the runs with several seeds, averaged by degrees of freedom; at least 0.

    A few seeds give a rough value.
    """
    total, freedom = 0.0, 0
    for run in runs:
        if len(run.seeds) > 1:
            total += (len(run.seeds) - 1) * _shift_variance(run.correct_of_seeds(place))
            freedom += len(run.seeds) - 1
    if not freedom:
        raise ValueError("no run has two seeds, so the shift of a whole run cannot be estimated; measure more seeds.")
    return RunShift(deviation=float(max(0.0, total / freedom) ** 0.5), freedom=freedom)


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """A comparison as far as it was measured."""

    title: str
    rows: tuple[ComparedRun, ...]
    missing: tuple[str, ...]
    """Labels of rows that were not measured, and missing seeds of measured rows."""
    against: ComparedRun | None
    """The base of all differences; None: the row above."""
    unmeasured_base: str | None
    """The base of all differences, if it was not measured."""

    def base_of(self, number: int) -> ComparedRun | None:
        """The base of a row's difference; None if it has none."""
        if self.unmeasured_base is not None:
            return None
        if self.against is not None:
            return None if self.rows[number].run == self.against.run else self.against
        return self.rows[number - 1] if number else None


def gather(results: Results, run: str, label: str | None = None) -> ComparedRun:
    """The seeds of a run, possibly none; refused if they differ in more than the seed."""
    seeds = sorted((result for result in results.runs.values() if result.run == run), key=lambda one: one.seed or 0)
    for other in seeds[1:]:
        ours, theirs = _apart_from_seed(seeds[0]), _apart_from_seed(other)
        for what in sorted(ours.keys() | theirs.keys()):
            if ours.get(what) != theirs.get(what):
                raise ValueError(
                    f"{seeds[0].name} and {other.name} are seeds of one run and differ in {what}: {ours.get(what)} and "
                    f"{theirs.get(what)}. Measure one of them again."
                )
    return ComparedRun(label or run, run, tuple(seeds))


def _apart_from_seed(result: RunResult) -> dict[str, object]:
    """All but the seed, and how the training was run and its images read."""
    recipe = {f"recipe.{key}": value for key, value in result.recipe.items() if key not in ("seed", "run", "data")}
    return {
        **recipe,
        "recipe.run.precision": result.recipe.get("run", {}).get("precision"),
        "resolutions": result.rounds.resolutions,
        "heads": result.rounds.heads,
        "parameters": result.parameters,
        "epochs": result.epochs,
        "precision": result.precision,
    }


def line_up(results: Results, study: Study, name: str) -> LineUp:
    """The runs of a comparison; refused if they differ in images, in epochs or compute, or lack a seed of others."""
    comparison = study.comparisons[name]
    rows = [gather(results, run, label) for label, run in comparison.rows.items()]
    against = None
    if comparison.against is not None:
        labels = {row.run: row.label for row in rows}
        against = gather(results, comparison.against, labels.get(comparison.against))
    measured = tuple(row for row in rows if row.seeds)
    everyone = [*measured, *([against] if against else [])]
    check_equal([result for row in everyone for result in row.seeds], comparison.equal, f"the comparison {name}")
    _check_declared_seeds([row for row in everyone if row.seeds], study, f"the comparison {name}")
    return LineUp(
        title=comparison.title,
        rows=measured,
        missing=tuple(label for row in rows for label in _missing(row, study)),
        against=against if against and against.seeds else None,
        unmeasured_base=against.label if against and not against.seeds else None,
    )


def _check_declared_seeds(rows: Sequence[ComparedRun], study: Study, what: str) -> None:
    """Refuse a run that lacks a seed of its own which another run has. Runs may have different numbers of seeds."""
    holders = {result.seed: result.name for row in rows for result in row.seeds}
    for row in rows:
        for seed in _missing_seeds(row, study):
            if seed in holders:
                raise ValueError(
                    f"{what}: {row.run} lacks seed {seed}, which the study declares and {holders[seed]} has. Measure "
                    f"{row.run}-{seed}, or take the seed out of the run in the study."
                )


def _missing(row: ComparedRun, study: Study) -> list[str]:
    return [f"seed {seed} of {row.label}" for seed in _missing_seeds(row, study)] if row.seeds else [row.label]


def _missing_seeds(row: ComparedRun, study: Study) -> list[int]:
    measured = {result.seed for result in row.seeds}
    return [seed for seed in study.trained_run(row.run).seeds or () if seed not in measured]
