"""Compute of routing rules at equal accuracy, and the saving from not refining unrecoverable images.

An image is unrecoverable if this round and all later ones are wrong. The paper names it as a limit that the entropy
rule refines such images. Two remedies are compared with that rule: stop at images that a router predicts to be
unrecoverable (the target ``unrecoverable``), and refine only images that a router predicts to benefit.
Letters: N images, S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from progresvit import table
from progresvit.evaluation.records import Records
from progresvit.metrics.arrays import Float32s, Floats, Ints
from progresvit.routing import NEAR_LOSSLESS_DROP, Router
from progresvit.routing.decide import at_exit, exit_or_reject
from progresvit.table import Column, Row, Table

CANDIDATES = 200
"""Number of thresholds that are tried, at quantiles of the scores. A quarter as many limits are tried for the
probability of being unrecoverable, spaced geometrically from the highest thousandth on."""

DROPS = (NEAR_LOSSLESS_DROP, 0.005, 0.01)
"""Shares of the images by which top-1 may drop: the near-lossless bound, half a point, a point."""


@dataclass(frozen=True, kw_only=True)
class RefinementRule:
    """Which scores the threshold is compared with, and which router may stop refinement."""

    name: str
    router: Router | None = None
    unrecoverable: Router | None = None


def rules(*, unrecoverable: Router, benefit: Router | None = None) -> list[RefinementRule]:
    """Entropy with and without stopping at unrecoverable images; the same for a benefit router if there is one."""
    for router, target in ((unrecoverable, "unrecoverable"), (benefit, "benefit")):
        if router is not None and router.origin.target != target:
            raise ValueError(
                f"a router with the target {target!r} is needed here, and this one was fitted for "
                f"{router.origin.target!r}."
            )
    scored = [RefinementRule(name="entropy")]
    if benefit is not None:
        scored.append(RefinementRule(name="benefit router", router=benefit))
    stopping = [
        RefinementRule(name=f"{rule.name}, unrecoverable rejected", router=rule.router, unrecoverable=unrecoverable)
        for rule in scored
    ]
    return [rule for pair in zip(scored, stopping) for rule in pair]


def equal_accuracy_table(
    records: Records,
    compared: Sequence[RefinementRule],
    *,
    drops: Sequence[float] = DROPS,
    share: float = 0.5,
    seed: int = 0,
) -> Table:
    """GMACs of each rule when it keeps the full path's accuracy up to an allowed drop.

    A rule's thresholds are the cheapest within the drop on one part of the images, and its results are those on the
    other part, so that a rule with two thresholds has no advantage. Accuracy is over all images: an image at which
    refinement stops keeps its prediction. The oracle exits after the first correct round, or after the first round if
    none is correct: no rule is more accurate, nor cheaper at that accuracy.

    Args:
        records: Labelled records.
        compared: The rules, such as :func:`rules` gives.
        drops: Allowed drops of top-1, as shares of the images.
        share: Share of the images that thresholds are chosen on.
        seed: Seed of the split.
    """
    design, report = records.split(share, seed)
    gmacs = np.asarray(records.gmacs())
    last = report.rounds - 1
    rows = [_row("every round", report, np.full(len(report), last), gmacs)]
    cheapest = {rule.name: _cheapest(design, rule, gmacs, drops) for rule in compared}
    for number, drop in enumerate(drops):
        for rule in compared:
            threshold, limit = cheapest[rule.name][number]
            rounds, stopped = exit_or_reject(*_scores(report, rule), threshold, limit)
            row = _row(rule.name, report, rounds, gmacs)
            row |= {"drop": drop, "threshold": threshold, "unrecoverable_from": None if np.isinf(limit) else limit}
            if stopped.any():
                row["given_up_wrong"] = float((~report.correct[stopped].any(axis=1)).mean())
            if rule.unrecoverable is not None:
                row["given_up_share"] = float(stopped.mean())
            rows.append(row)
    first_correct = report.correct.argmax(axis=1)  # 0 if none is
    rows.append(_row("oracle", report, first_correct, gmacs))
    columns = [
        Column("drop", "allowed drop (points)", table.percent),
        Column("rule", "rule"),
        Column("threshold", "τ", table.threshold),
        Column("unrecoverable_from", "unrecoverable from", table.threshold),
        Column("top1", "top-1 (%)", table.percent),
        Column("gmacs_paper", "GMACs (paper)", table.decimals),
        Column("saving", "saving (%)", table.rough_percent),
        Column("given_up_share", "rejected (%)", table.rough_percent),
        Column("given_up_wrong", "of these wrong in all rounds (%)", table.rough_percent),
    ]
    title = f"Compute at equal accuracy; thresholds from {len(design)} images, results on {len(report)} others"
    return Table(title, columns, rows)


def _cheapest(
    records: Records, rule: RefinementRule, gmacs: Floats, drops: Sequence[float]
) -> list[tuple[float, float]]:
    """The threshold and the limit of lowest compute within each drop."""
    scores, probabilities = _scores(records, rule)
    correct = records.correct
    quantiles = np.linspace(0, 1, CANDIDATES + 1)
    thresholds = np.unique([0.0, *_quantiles(scores[:, :-1], quantiles)])
    limits = [np.inf]
    if probabilities is not None:
        limits += [*_quantiles(probabilities, 1 - np.geomspace(1e-3, 1, CANDIDATES // 4))]
    tried = []
    for limit in limits:
        for threshold in thresholds:
            rounds, _ = exit_or_reject(scores, probabilities, threshold, limit)
            tried.append(
                (float(gmacs[rounds].mean()), int(at_exit(correct, rounds).sum()), float(threshold), float(limit))
            )
    needed = [correct[:, -1].sum() - np.floor(drop * len(records) + 1e-9) for drop in drops]
    cheapest = [min((trial for trial in tried if trial[1] >= hits), key=_cost) for hits in needed]  # τ = 0 is there
    return [(threshold, limit) for _, _, threshold, limit in cheapest]


def _cost(trial: tuple[float, int, float, float]) -> tuple[float, int, float]:
    """Less compute, then more hits, then fewer stops."""
    gmacs, hits, _, limit = trial
    return gmacs, -hits, -limit


def _scores(records: Records, rule: RefinementRule) -> tuple[Float32s, Float32s | None]:
    """Scores for the threshold, and probabilities of being unrecoverable: (N, S) each."""
    probabilities = None if rule.unrecoverable is None else rule.unrecoverable.scores(records.statistics)
    return records.exit_scores(rule.router), probabilities


def _quantiles(values: Float32s, levels: Floats) -> Floats:
    finite = values[np.isfinite(values)]
    return np.quantile(finite, levels).astype(np.float64) if len(finite) else np.zeros(0)


def _row(name: str, records: Records, rounds: Ints, gmacs: Floats) -> Row:
    spent = float(gmacs[rounds].mean())
    return {
        "drop": None,
        "rule": name,
        "threshold": None,
        "unrecoverable_from": None,
        "top1": float(at_exit(records.correct, rounds).mean()),
        "gmacs_paper": spent,
        "saving": 1 - spent / float(gmacs[-1]),
        "given_up_share": None,
        "given_up_wrong": None,
    }
