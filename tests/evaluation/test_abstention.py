import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.evaluation import equal_accuracy_table, risk_coverage, risk_coverage_curves
from progresvit.evaluation.abstention import risk_coverage_table
from progresvit.evaluation.hopeless import rules
from progresvit.routing import fit_router
from tests.evaluation.made import make_records


def test_the_curve_by_hand():
    curve = risk_coverage([0.3, 0.1, 0.2, 0.4], [1, 0, 0, 1])
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.risk == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert curve.area == pytest.approx((0 + 0 + 1 / 3 + 1 / 2) / 4)
    assert curve.coverage_at(0.0) == 0.5
    assert curve.coverage_at(0.4) == 0.75
    assert risk_coverage([0.1], [1]).coverage_at(0.5) == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40), st.randoms())
def test_the_order_among_equally_sure_answers_does_not_matter(pairs, random):
    shuffled = random.sample(pairs, len(pairs))
    curves = [risk_coverage([p[0] for p in order], [p[1] for p in order]) for order in (pairs, shuffled)]
    assert curves[0].risk == pytest.approx(curves[1].risk)
    assert curves[0].risk[-1] == pytest.approx(np.mean([wrong for _, wrong in pairs]))


def test_uncertainty_that_knows_errors_has_less_area_than_one_that_does_not():
    rng = np.random.default_rng(0)
    wrong = rng.random(2000) < 0.3
    assert risk_coverage(wrong + rng.random(2000), wrong).area < risk_coverage(rng.random(2000), wrong).area - 0.05


def test_curves_of_each_round_and_routed():
    records = make_records(800)
    curves = risk_coverage_curves(records, 0.7)
    assert list(curves) == ["round 1", "round 2", "routed"]
    assert curves["round 2"].risk[-1] == pytest.approx(1 - records.correct[:, 1].mean())
    leaving = records.top10_entropy[:, 0] < 0.7
    routed = np.where(leaving, records.correct[:, 0], records.correct[:, 1])
    assert curves["routed"].risk[-1] == pytest.approx(1 - routed.mean())
    rows = risk_coverage_table(curves).rows
    assert [row["area"] for row in rows] == [curve.area for curve in curves.values()]


@pytest.mark.slow
def test_not_refining_the_hopeless_saves_compute_at_equal_accuracy():
    """Images whose logits betray that no round will help: a router can learn that, entropy cannot tell them apart."""

    def made(seed):
        logits = np.random.default_rng(seed).normal(0, 1, (2, 3000, 12))
        base = make_records(3000, seed=seed)
        kind = np.random.default_rng(seed + 100).integers(0, 3, 3000)  # easy, mendable, hopeless
        rows, labels = np.arange(3000), base.labels
        logits[0, rows[kind == 0], labels[kind == 0]] += 9
        logits[:, kind == 2] += 5.0  # the mean betrays them; the entropy does not
        logits[1, rows[kind < 2], labels[kind < 2]] += 9
        return make_records(3000, seed=seed, logits=logits)

    train, test = made(1), made(2)
    hopeless, benefit = (fit_router(train.statistics, train.correct, target=t) for t in ("hopeless", "benefit"))
    compared = rules(hopeless=hopeless, benefit=benefit)
    rows = {row["rule"]: row for row in equal_accuracy_table(test, compared, drops=(0.0003,)).rows}
    full, plain, given_up = rows["every round"], rows["entropy"], rows["entropy, hopeless given up"]
    assert given_up["saving"] > plain["saving"] + 0.05
    assert rows["benefit router"]["saving"] > plain["saving"] + 0.05
    assert given_up["given_up_wrong"] > 0.8
    for row in rows.values():
        assert row["top1"] > full["top1"] - 0.02
        assert row["saving"] <= rows["oracle"]["saving"] + 0.02
    assert full["saving"] == 0


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="one of each per image"):
        risk_coverage([0.1, 0.2], [True])
    with pytest.raises(ValueError, match="one of each per image"):
        risk_coverage([], [])
    with pytest.raises(ValueError, match="have no label"):
        risk_coverage_curves(make_records(labelled=False), 0.5)


def test_a_larger_allowed_drop_never_costs_more():
    records = make_records(2000)
    hopeless = fit_router(records.statistics, records.correct, target="hopeless", epochs=1)
    design, _ = records.split(0.5)
    table = equal_accuracy_table(records, rules(hopeless=hopeless))
    for rule in ("entropy", "entropy, hopeless given up"):
        spent = [row["gmacs_paper"] for row in table.rows if row["rule"] == rule]
        assert len(spent) == 3
        assert spent == sorted(spent, reverse=True)
    row = next(row for row in table.rows if row["rule"] == "entropy" and row["drop"] == 0.01)
    leaving = design.top10_entropy[:, 0] < row["threshold"]
    kept = np.where(leaving, design.correct[:, 0], design.correct[:, 1]).sum()
    assert kept >= design.correct[:, 1].sum() - int(0.01 * len(design))


def test_the_oracle_is_more_accurate_and_cheaper_than_every_rule():
    records = make_records(2000, rounds=3)
    hopeless = fit_router(records.statistics, records.correct, target="hopeless", epochs=1)
    *rows, oracle = equal_accuracy_table(records, rules(hopeless=hopeless)).rows
    assert oracle["rule"] == "oracle"
    assert all(oracle["top1"] >= row["top1"] for row in rows)
    _, report = records.split(0.5)
    first = [row.tolist().index(True) if row.any() else 0 for row in report.correct]
    assert oracle["gmacs_paper"] == pytest.approx(np.take(records.gmacs(), first).mean())


def test_routers_in_each_others_place_and_broken_records():
    records = make_records(500)
    hopeless, benefit = (fit_router(records.statistics, records.correct, target=t) for t in ("hopeless", "benefit"))
    with pytest.raises(ValueError, match="fitted for 'benefit' is given where one for 'hopeless' belongs"):
        rules(hopeless=benefit)
    with pytest.raises(ValueError, match="fitted for 'hopeless' is given where one for 'benefit' belongs"):
        rules(hopeless=hopeless, benefit=hopeless)
    broken = make_records(100, logits=np.full((2, 100, 12), np.nan))
    rows = equal_accuracy_table(broken, rules(hopeless=hopeless)).rows
    assert [row["saving"] for row in rows[:-1]] == pytest.approx([0.0] * (len(rows) - 1))
