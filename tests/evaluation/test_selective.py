import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from progresvit.evaluation import risk_coverage, risk_coverage_curves
from progresvit.evaluation.selective import risk_coverage_table
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


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="one per image"):
        risk_coverage([0.1, 0.2], [True])
    with pytest.raises(ValueError, match="one per image"):
        risk_coverage([], [])
    with pytest.raises(ValueError, match="have no label"):
        risk_coverage_curves(make_records(labelled=False), 0.5)
