"""Images that no round gets right: what it saves not to refine them, at equal accuracy.

The paper names this limit: an unsure image is refined even if nothing will come of it. Two remedies are compared with
the entropy rule: to give up images that a router believes hopeless, and to refine only those that a router believes
mendable. Letters: N images, S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from progresvit.evaluation import table
from progresvit.evaluation.records import Records
from progresvit.evaluation.table import Column, Row, Table
from progresvit.routing import NEAR_LOSSLESS_DROP, Router
from progresvit.routing.decide import Floats, exit_or_reject

CANDIDATES = 200
"""Thresholds that are tried, at quantiles of the scores; of the chances of being hopeless, a quarter as many, the
closer together the higher: from the most hopeless thousandth on."""

DROPS = (NEAR_LOSSLESS_DROP, 0.005, 0.01)
"""Shares of the images by which top-1 may fall: the near-lossless bound, half a point, a point."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which scores are compared with the threshold, and which chances are given up at."""

    name: str
    router: Router | None = None
    hopeless: Router | None = None


def rules(*, hopeless: Router, benefit: Router | None = None) -> list[Rule]:
    """Entropy with and without giving up; the same for a benefit router if there is one."""
    for router, target in ((hopeless, "unrecoverable"), (benefit, "benefit")):
        if router is not None and router.origin.target != target:
            raise ValueError(f"a router fitted for {router.origin.target!r} is given where one for {target!r} belongs.")
    scored = [Rule(name="entropy")]
    if benefit is not None:
        scored.append(Rule(name="benefit router", router=benefit))
    giving_up = [Rule(name=f"{rule.name}, hopeless given up", router=rule.router, hopeless=hopeless) for rule in scored]
    return [rule for pair in zip(scored, giving_up) for rule in pair]


def equal_accuracy_table(
    records: Records,
    compared: Sequence[Rule],
    *,
    drops: Sequence[float] = DROPS,
    share: float = 0.5,
    seed: int = 0,
) -> Table:
    """GMACs of each rule when it keeps the full path's accuracy but for an allowed drop.

    A rule's thresholds are the cheapest that stay within the drop on one part of the images; what they give is reported
    on the other part, so that a rule with two thresholds has no head start. Accuracy is of all images: one that is
    given up keeps the answer it has. The oracle leaves after the first round that is right, or after the first of all:
    no rule can be more accurate, nor cheaper at that accuracy.
    """
    design, report = records.split(share, seed)
    gmacs = np.asarray(records.gmacs())
    last = report.rounds - 1
    rows = [_row("every round", report, np.full(len(report), last), gmacs)]
    found = {rule.name: _cheapest(design, rule, gmacs, drops) for rule in compared}
    for number, drop in enumerate(drops):
        for rule in compared:
            threshold, chance = found[rule.name][number]
            rounds, given_up = exit_or_reject(*_scores(report, rule), threshold, chance)
            row = _row(rule.name, report, rounds, gmacs)
            row |= {"drop": drop, "threshold": threshold, "hopeless_from": None if np.isinf(chance) else chance}
            if given_up.any():
                row["given_up_wrong"] = float((~report.correct[given_up].any(axis=1)).mean())
            if rule.hopeless is not None:
                row["given_up_share"] = float(given_up.mean())
            rows.append(row)
    first_right = report.correct.argmax(axis=1)  # 0 if none is
    rows.append(_row("oracle", report, first_right, gmacs))
    columns = [
        Column("drop", "allowed drop (points)", table.percent),
        Column("rule", "rule"),
        Column("threshold", "τ", table.threshold),
        Column("hopeless_from", "hopeless from", table.threshold),
        Column("top1", "top-1 (%)", table.percent),
        Column("gmacs_paper", "GMACs (paper)", table.decimals),
        Column("saving", "saving (%)", table.rough_percent),
        Column("given_up_share", "given up (%)", table.rough_percent),
        Column("given_up_wrong", "of these wrong in all rounds (%)", table.rough_percent),
    ]
    title = f"Compute at equal accuracy; thresholds from {len(design)} images, figures of {len(report)} others"
    return Table(title, columns, rows)


def _cheapest(records: Records, rule: Rule, gmacs: Floats, drops: Sequence[float]) -> list[tuple[float, float]]:
    """Threshold and chance of lowest compute within each drop."""
    scores, chances = _scores(records, rule)
    correct, rows = records.correct, np.arange(len(records))
    quantiles = np.linspace(0, 1, CANDIDATES + 1)
    thresholds = np.unique([0.0, *_quantiles(scores[:, :-1], quantiles)])
    limits = [np.inf] if chances is None else [np.inf, *_quantiles(chances, 1 - np.geomspace(1e-3, 1, CANDIDATES // 4))]
    tried = []
    for chance in limits:
        for threshold in thresholds:
            rounds, _ = exit_or_reject(scores, chances, threshold, chance)
            tried.append(
                (float(gmacs[rounds].mean()), int(correct[rows, rounds].sum()), float(threshold), float(chance))
            )
    needed = [correct[:, -1].sum() - np.floor(drop * len(records) + 1e-9) for drop in drops]
    cheapest = [min((one for one in tried if one[1] >= hits), key=_cost) for hits in needed]  # τ = 0 is among them
    return [(threshold, chance) for _, _, threshold, chance in cheapest]


def _cost(tried: tuple[float, int, float, float]) -> tuple[float, int, float]:
    """Less compute, then more hits, then giving up less."""
    gmacs, hits, _, chance = tried
    return gmacs, -hits, -chance


def _scores(records: Records, rule: Rule) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    chances = None if rule.hopeless is None else rule.hopeless.scores(records.statistics)
    return records.scores(rule.router), chances


def _quantiles(values: NDArray[np.float32], wanted: Floats) -> Floats:
    known = values[np.isfinite(values)]
    return np.quantile(known, wanted).astype(np.float64) if len(known) else np.zeros(0)


def _row(name: str, records: Records, rounds: NDArray[np.int64], gmacs: Floats) -> Row:
    spent = float(gmacs[rounds].mean())
    return {
        "drop": None,
        "rule": name,
        "threshold": None,
        "hopeless_from": None,
        "top1": float(records.correct[np.arange(len(rounds)), rounds].mean()),
        "gmacs_paper": spent,
        "saving": 1 - spent / float(gmacs[-1]),
        "given_up_share": None,
        "given_up_wrong": None,
    }
