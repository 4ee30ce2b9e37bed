"""A model under made-up corruption."""

from dataclasses import replace

import numpy as np
import pytest

from progresvit.evaluation.shift import plan
from repro.formats import ShiftedSet, ShiftResult, to_json
from repro.measure.records import measure_frontier, measure_point
from repro.measure.shift import has_budget, measure_shift, shift_settings
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
            point = measure_point(records, settings[at.setting].threshold)
            assert (at.top1, at.gmacs_paper, at.exit_shares) == (point.top1, point.gmacs_paper, point.exit_shares)


def test_every_certificate_within_reach_is_measured_with_its_bound():
    clean, found = make_shifted(count=3000)
    for one in measure_shift(clean, found, SETS)["sets"]:
        assert [(at.setting, at.epsilon) for at in one.at] == [
            ("near-lossless", None),
            ("drop-0.5", 0.005),
            ("drop-1", 0.01),
        ]


def plain_routing(records, threshold):
    """The name of each image with what the last round and the routed answer have right, image by image."""
    limits = threshold if isinstance(threshold, tuple) else [threshold] * records.rounds
    answers = []
    for number, name in enumerate(records.ids.tolist()):
        s = 0
        while s < records.rounds - 1 and not records.top10_entropy[number, s] < limits[s]:
            s += 1
        right = [records.top5_labels[number, place, 0] == records.labels[number] for place in (-1, s)]
        answers.append((name, *map(bool, right)))
    return answers


@pytest.mark.parametrize("rounds", [2, 3])
def test_harm_and_bits_are_those_of_a_plain_loop_over_the_records(rounds):
    clean, found = make_shifted(rounds)
    settings = shift_settings(clean)
    harmed = 0
    for one, records in zip(measure_shift(clean, found, SETS)["sets"], [clean, *found.values()]):
        assert [at.setting for at in one.at] == list(settings)
        for at, bits in zip(one.at, one.bits[1:]):
            answers = sorted(plain_routing(records, settings[at.setting].threshold))
            harmed += sum(last and not routed for _, last, routed in answers)
            assert at.harm == sum(last and not routed for _, last, routed in answers) / len(answers)
            assert one.bits[0].tolist() == [last for _, last, _ in answers]
            assert bits.tolist() == [routed for _, _, routed in answers]
    assert harmed > 10


def test_a_budget_is_kept_at_each_severity_without_labels():
    clean, found = make_shifted()
    first, last = clean.gmacs()
    budget = round((first + last) / 2, 5)
    name = f"budget-{budget:g}"
    fields = measure_shift(clean, found, SETS, budget)
    for severity in (0, 1, 3):
        sets = [one for one in fields["sets"] if one.severity == severity]
        spent = [next(at for at in one.at if at.setting == name) for one in sets]
        mean = np.mean([at.gmacs_paper for at in spent])
        images = sum(one.pictures for one in sets)
        assert budget - 1.01 * (last - first) / images < mean <= budget  # one more image would not fit
        assert {at.harm for at in spent} == {None}
    labels = np.zeros_like(clean.labels)
    blind = measure_shift(
        replace(clean, labels=labels), {key: replace(one, labels=labels) for key, one in found.items()}, SETS, budget
    )
    assert [one.at[-1].gmacs_paper for one in blind["sets"]] == [one.at[-1].gmacs_paper for one in fields["sets"]]
    with pytest.raises(ValueError, match="a budget of 99 GMACs is out of reach"):
        measure_shift(clean, found, SETS, 99)


def test_a_result_of_another_budget_is_recognised():
    clean, found = make_shifted(count=60)
    budget = float(np.mean(clean.gmacs()))
    with_budget, without, plain = (
        ShiftResult(**COMMON | {"kind": "shift"}, **fields)
        for fields in (
            measure_shift(clean, found, SETS, budget),
            measure_shift(clean, found, SETS),
            measure_shift(*make_shifted(1, 60), SETS, budget),
        )
    )
    assert has_budget(with_budget, budget)
    assert not has_budget(with_budget, budget / 2)
    assert not has_budget(with_budget, None)
    assert has_budget(without, None)
    assert not has_budget(without, budget)
    assert has_budget(plain, budget)  # one round: nothing to route


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_what_is_measured_is_a_result_and_survives_json(rounds):
    clean, found = make_shifted(rounds)
    result = ShiftResult(**COMMON | {"kind": "shift"}, **measure_shift(clean, found, SETS))
    text = to_json(result)
    assert to_json(ShiftResult.model_validate_json(text)) == text
    assert len(result.gmacs_paper) == rounds
    with pytest.raises(ValueError, match="top1 and bits disagree"):
        ShiftedSet.model_validate(result.sets[1].model_dump() | {"bits": result.sets[2].bits})
    if rounds == 1:
        assert {one.at for one in result.sets} == {()}
        assert {len(one.frontier) for one in result.severities} == {1}


def test_sets_that_do_not_belong_to_the_clean_images_are_refused():
    clean, found = make_shifted(count=60)
    other = replace(found["fog_1"], header=replace(clean.header, weights_sha256="v"))
    with pytest.raises(ValueError, match="fog_1 are of other weights"):
        measure_shift(clean, {**found, "fog_1": other}, SETS)
    with pytest.raises(ValueError, match="fog_3 are of other images"):
        measure_shift(clean, {**found, "fog_3": found["fog_3"].take(np.arange(59))}, SETS)
