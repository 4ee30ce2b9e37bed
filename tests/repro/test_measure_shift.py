"""A model under made-up corruption."""

import json
from dataclasses import replace

import numpy as np
import pytest

from progresvit.evaluation.shift import plan
from repro.formats import ShiftResult
from repro.measure.records import measure_frontier, measure_point
from repro.measure.shift import measure_shift, shift_settings
from tests.evaluation.made import make_logits, make_records
from tests.repro.test_measure_routing import COMMON

SETS = plan("generated", "made", corruptions=("fog", "snow"), severities=(1, 3))


def make_shifted(rounds=2, count=500):
    """Clean records, and of each set the same pictures with noise upon the logits."""
    clean = make_records(count, rounds)
    logits, _ = make_logits(count, rounds)
    found = {}
    for number, one in enumerate(SETS):
        noise = np.random.default_rng(number).normal(0, one.severity, logits.shape)
        found[one.name] = make_records(count, rounds, logits=logits + noise)
    return clean, found


def test_sets_and_severities_are_measured_beside_the_clean_images():
    clean, found = make_shifted()
    fields = measure_shift(clean, found, SETS)
    first, *others = fields["sets"]
    assert (first.corruption, first.severity, first.pictures) == (None, 0, 500)
    assert first.top1 == tuple(clean.correct.mean(axis=0).tolist())
    assert [(one.corruption, one.severity) for one in others] == [("fog", 1), ("fog", 3), ("snow", 1), ("snow", 3)]
    for one, planned in zip(others, SETS):
        assert one.top1 == tuple(found[planned.name].correct.mean(axis=0).tolist())
    assert [(one.severity, one.pictures) for one in fields["severities"]] == [(0, 500), (1, 1000), (3, 1000)]
    assert fields["severities"][0].frontier == measure_frontier(clean)
    last = fields["severities"][2].frontier[-1]
    assert last.top1 == pytest.approx(np.mean([others[1].top1[-1], others[3].top1[-1]]))


def test_thresholds_are_those_of_the_clean_images():
    clean, found = make_shifted()
    settings = shift_settings(clean)
    assert list(settings) == ["near-lossless", "drop-1"]
    for one, records in zip(measure_shift(clean, found, SETS)["sets"], [clean, *found.values()]):
        assert [at.setting for at in one.at] == list(settings)
        for at in one.at:
            point = measure_point(records, settings[at.setting])
            assert (at.top1, at.gmacs_paper, at.exit_shares) == (point.top1, point.gmacs_paper, point.exit_shares)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_what_is_measured_is_a_result_and_survives_json(rounds):
    clean, found = make_shifted(rounds)
    result = ShiftResult(**COMMON | {"kind": "shift"}, **measure_shift(clean, found, SETS))
    text = json.dumps(result.model_dump(mode="json"), allow_nan=False)
    assert ShiftResult.model_validate(json.loads(text)) == result
    assert len(result.gmacs_paper) == rounds
    if rounds == 1:
        assert {one.at for one in result.sets} == {()}
        assert {len(one.frontier) for one in result.severities} == {1}


def test_sets_that_do_not_belong_to_the_clean_images_are_refused():
    clean, found = make_shifted(count=60)
    other = replace(found["fog_1"], header=replace(clean.header, weights="v"))
    with pytest.raises(ValueError, match="fog_1 are of other weights"):
        measure_shift(clean, {**found, "fog_1": other}, SETS)
    with pytest.raises(ValueError, match="fog_3 are of other images"):
        measure_shift(clean, {**found, "fog_3": found["fog_3"].take(np.arange(59))}, SETS)
