import numpy as np
import pytest

from progresvit.evaluation import equal_accuracy_table
from progresvit.evaluation.iso_accuracy import rules
from progresvit.routing import fit_router
from tests.evaluation.made import make_records


@pytest.mark.slow
def test_not_refining_unrecoverable_images_saves_compute_at_equal_accuracy():
    """Images whose logits betray that no round will help: a router can learn that, entropy cannot tell them apart."""

    def made(seed):
        logits = np.random.default_rng(seed).normal(0, 1, (2, 3000, 12))
        base = make_records(3000, seed=seed)
        kind = np.random.default_rng(seed + 100).integers(0, 3, 3000)  # easy, recoverable, unrecoverable
        rows, labels = np.arange(3000), base.labels
        logits[0, rows[kind == 0], labels[kind == 0]] += 9
        logits[:, kind == 2] += 5.0  # the mean betrays them; the entropy does not
        logits[1, rows[kind < 2], labels[kind < 2]] += 9
        return make_records(3000, seed=seed, logits=logits)

    train, test = made(1), made(2)
    unrecoverable, benefit = (
        fit_router(train.statistics, train.correct, target=t) for t in ("unrecoverable", "benefit")
    )
    compared = rules(unrecoverable=unrecoverable, benefit=benefit)
    # A bound of several images: with none allowed, a single image would decide.
    rows = {row["rule"]: row for row in equal_accuracy_table(test, compared, drops=(0.005,)).rows}
    full, plain, rejected = rows["every round"], rows["entropy"], rows["entropy, unrecoverable rejected"]
    assert rejected["saving"] > plain["saving"] + 0.1
    assert rows["benefit router"]["saving"] > plain["saving"] + 0.1
    assert rejected["given_up_wrong"] > 0.8
    for row in rows.values():
        assert row["top1"] > full["top1"] - 0.02
        assert row["saving"] <= rows["oracle"]["saving"] + 0.02
    assert full["saving"] == 0


@pytest.mark.slow
def test_a_larger_allowed_drop_never_costs_more():
    records = make_records(2000)
    unrecoverable = fit_router(records.statistics, records.correct, target="unrecoverable", epochs=1)
    design, _ = records.split(0.5)
    table = equal_accuracy_table(records, rules(unrecoverable=unrecoverable))
    for rule in ("entropy", "entropy, unrecoverable rejected"):
        spent = [row["gmacs_paper"] for row in table.rows if row["rule"] == rule]
        assert len(spent) == 3
        assert spent == sorted(spent, reverse=True)
    row = next(row for row in table.rows if row["rule"] == "entropy" and row["drop"] == 0.01)
    leaving = design.top10_entropy[:, 0] < row["threshold"]
    kept = np.where(leaving, design.correct[:, 0], design.correct[:, 1]).sum()
    assert kept >= design.correct[:, 1].sum() - int(0.01 * len(design))


@pytest.mark.slow
def test_the_oracle_is_more_accurate_and_cheaper_than_every_rule():
    records = make_records(2000, rounds=3)
    unrecoverable = fit_router(records.statistics, records.correct, target="unrecoverable", epochs=1)
    *rows, oracle = equal_accuracy_table(records, rules(unrecoverable=unrecoverable)).rows
    assert oracle["rule"] == "oracle"
    assert all(oracle["top1"] >= row["top1"] for row in rows)
    _, report = records.split(0.5)
    first = [row.tolist().index(True) if row.any() else 0 for row in report.correct]
    assert oracle["gmacs_paper"] == pytest.approx(np.take(records.gmacs(), first).mean())


def test_routers_in_each_others_place_and_broken_records():
    records = make_records(500)
    targets = ("unrecoverable", "benefit")
    unrecoverable, benefit = (fit_router(records.statistics, records.correct, target=target) for target in targets)
    with pytest.raises(
        ValueError, match="target 'unrecoverable' is needed here, and this one was fitted for 'benefit'"
    ):
        rules(unrecoverable=benefit)
    with pytest.raises(
        ValueError, match="target 'benefit' is needed here, and this one was fitted for 'unrecoverable'"
    ):
        rules(unrecoverable=unrecoverable, benefit=unrecoverable)
    broken = make_records(100, logits=np.full((2, 100, 12), np.nan))
    rows = equal_accuracy_table(broken, rules(unrecoverable=unrecoverable)).rows
    assert [row["saving"] for row in rows[:-1]] == pytest.approx([0.0] * (len(rows) - 1))
