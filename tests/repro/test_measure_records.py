"""Rounds, points and frontiers of made-up records."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from repro.formats import Point
from repro.measure.records import data_of, measure_frontier, measure_near_lossless, measure_point, measure_rounds
from tests.evaluation.made import CLASSES, make_logits, make_records
from tests.model.pooled import AlternativesConfig, PooledConfig


def test_bits_are_the_hits_in_the_order_of_the_names():
    records = make_records(403)
    rounds = measure_rounds(records)
    order = np.argsort(records.ids)
    assert not np.array_equal(order, np.arange(len(records)))
    np.testing.assert_array_equal(rounds.correct(403), records.correct[order])
    assert rounds.right == tuple(records.correct.sum(axis=0))
    assert measure_rounds(records.take(order[::-1])).model_dump_json() == rounds.model_dump_json()
    assert (rounds.resolutions, rounds.heads) == ((24, 32), (2, 3))
    assert rounds.gmacs_executed != rounds.gmacs_paper


def of_kind(records, kind):
    """The same records of another kind of model."""
    rounds = [{"resolution": 16, "grid": 2}, {"resolution": 32, "grid": 8}]
    config = kind(rounds=rounds, num_classes=CLASSES)
    return replace(records, header=replace(records.header, config=config.to_dict(), routable=kind.routable))


def test_rounds_without_heads_are_known_by_their_resolution():
    records = of_kind(make_records(100), PooledConfig)
    rounds = measure_rounds(records)
    assert (rounds.resolutions, rounds.heads) == ((16, 32), None)
    assert len(measure_frontier(records)) > 2
    assert measure_near_lossless(records) is not None


def test_rounds_that_are_alternatives_have_no_thresholds():
    records = of_kind(make_records(100), AlternativesConfig)
    assert measure_rounds(records).right == tuple(records.correct.sum(axis=0))
    assert measure_frontier(records) == ()
    assert measure_near_lossless(records) is None


def test_log_losses_are_those_of_the_logits_in_the_order_of_the_names():
    logits, labels = make_logits(403)
    records = make_records(403)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=-1)) - shifted[:, np.arange(403), labels]  # (S, N)
    order = np.argsort(records.ids)
    assert measure_rounds(records).log_losses(403) == pytest.approx(losses.T[order], rel=2**-10, abs=1e-6)
    assert measure_rounds(replace(records, log_probability=None)).log_loss is None


def test_entropies_are_those_of_every_round_but_the_last_in_the_order_of_the_names():
    logits, _ = make_logits(403)
    logits[0, 3, 0] = np.nan  # and so infinite
    records = make_records(403, logits=logits)
    entropies = measure_rounds(records).entropies(403)
    assert entropies == pytest.approx(records.top10_entropy[np.argsort(records.ids), :-1], rel=2**-10, abs=1e-6)
    assert np.isinf(entropies).sum() == 1
    assert measure_rounds(of_kind(make_records(100), AlternativesConfig)).entropy is None


def test_a_log_loss_that_is_not_finite_is_left_out():
    logits, _ = make_logits(50)
    logits[0, 3, 0] = np.nan
    rounds = measure_rounds(make_records(50, logits=logits))
    assert rounds.log_loss is None
    assert len(rounds.bits) == 2


def test_data_identify_their_images_in_any_order():
    records = make_records(50)
    known = data_of(records, name="made", train=7, learned="all")
    assert known == data_of(records.take(np.arange(50)[::-1]), name="made", train=7, learned="all")
    assert (known.val, known.classes) == (50, 12)
    assert known.names != data_of(records.take(np.arange(49)), name="made").names


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_frontier_goes_from_round_1_to_the_full_path(rounds):
    records = make_records(rounds=rounds)
    found = measure_frontier(records, points=30)
    assert 20 < len(found) <= 30
    first, last = found[0], found[-1]
    assert first.top1 == pytest.approx(records.correct[:, 0].mean())
    assert first.gmacs_paper == pytest.approx(records.gmacs()[0])
    assert last.top1 == pytest.approx(records.correct[:, -1].mean())
    assert last.gmacs_executed == pytest.approx(records.gmacs("executed")[-1])
    costs = np.array([point.gmacs_paper for point in found])
    assert (np.diff(costs) > 0).all()
    assert np.diff(costs).max() < 3 * (costs[-1] - costs[0]) / 29  # spread out
    for point in found[::7]:
        assert measure_point(records, point.threshold) == point


def test_the_near_lossless_point_is_that_of_the_records():
    records = make_records()
    found = measure_near_lossless(records)
    assert found.threshold == records.near_lossless_threshold()
    assert found == measure_point(records, found.threshold)


def test_a_model_of_one_round_has_one_point():
    records = make_records(rounds=1)
    (point,) = measure_frontier(records)
    assert point == measure_near_lossless(records)
    assert point.exit_shares == (1.0,)
    assert point.top1 == pytest.approx(records.correct.mean())


def test_an_infinite_threshold_is_written_as_one_that_does_the_same():
    records = make_records(rounds=3)
    for threshold in (math.inf, (math.inf, 0.3)):
        point = measure_point(records, threshold)
        assert Point.model_validate(json.loads(json.dumps(point.model_dump(), allow_nan=False))) == point
    assert measure_point(records, math.inf).exit_shares == (1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="finite"):
        Point(threshold=math.inf, top1=1, gmacs_paper=1, gmacs_executed=1, exit_shares=(1.0,))


def test_images_whose_logits_are_not_finite_exit_last():
    logits, _ = make_logits(100)
    logits[0, :10, 0] = np.nan
    found = measure_frontier(make_records(100, logits=logits))
    assert found[0].exit_shares == (0.9, 0.1)
    json.dumps([point.model_dump() for point in found], allow_nan=False)
