"""Declared tests: which seeds and images they use, and what follows from an interval."""

import shutil

import numpy as np
import pytest
import yaml

from repro.compare import CrossedDifference, crossed_difference
from repro.outcomes import Outcome, RoundOutcome, gather_outcomes, is_equivalent, log_loss_verdict, verdict_of
from repro.store import read_results
from repro.study import read_study
from tests.repro.made import change, log_losses, measured


@pytest.fixture
def changed(tested, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(tested, tmp_path / "results")


def outcomes_of(folder):
    return gather_outcomes(read_results(folder), read_study(folder / "study.yaml"), "construction")


def stacked(values, place, seeds=(1, 2, 3)):
    """(K, N)"""
    return np.stack([values(seed)[:, place] for seed in seeds]).astype(float)


def test_a_test_pairs_seeds_and_images_in_both_rounds(tested):
    psg = outcomes_of(tested).measured[0]
    assert (psg.label, psg.seeds, psg.images, psg.margin, psg.paper) == ("PSG", (1, 2, 3), 200, 0.46, 0.46)
    for place, found in ((0, psg.first), (1, psg.last)):
        hits = [stacked(lambda seed, run=run: measured(run, 200, seed)[1], place) for run in ("full", "width")]
        assert found.top1 == crossed_difference(*hits)
        assert found.errors == pytest.approx(1 - hits[1].mean())
        losses = [stacked(lambda seed, run=run: log_losses(run, 200, seed), place) for run in ("full", "width")]
        assert found.log_loss.mean == pytest.approx(crossed_difference(*losses).mean, abs=1e-4)
        assert found.log_loss.error == pytest.approx(crossed_difference(*losses).error, rel=1e-2)


def test_a_model_of_one_round_is_tested_in_its_last_round_alone(tested):
    _, rounds, alternatives = outcomes_of(tested).measured
    assert rounds.first is None
    assert alternatives.first is not None


def test_fewer_than_two_seeds_are_not_measured(changed):
    assert outcomes_of(changed).missing == ("one day",)
    for path in changed.glob("*-[23].json"):
        path.unlink()
    found = outcomes_of(changed)
    assert found.missing == ("PSG", "rounds", "alternatives", "one day")
    assert not found.measured


def test_runs_of_different_seeds_are_not_tested(changed):
    (changed / "width-2.json").unlink()
    with pytest.raises(ValueError, match="the test 'PSG' pairs runs by seed, and width lacks seed 2, which full has"):
        outcomes_of(changed)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values.update(epochs=41), "width-1 was trained for 41 and full-1 for 40"),
        (
            lambda values: values["data"].update(names="others"),
            r"the test 'PSG' compares width-1 and full-1, which differ in data\.names",
        ),
    ],
)
def test_runs_of_different_epochs_or_images_are_not_tested(changed, edit, message):
    for seed in (1, 2, 3):
        change(changed / f"width-{seed}.json", edit)
    with pytest.raises(ValueError, match=message):
        outcomes_of(changed)


@pytest.mark.parametrize(("epochs", "allowed"), [(925, True), (915, False), (1079, True), (1081, False)])
def test_compute_may_differ_by_a_share_of_the_run_that_is_tested_against(changed, epochs, allowed):
    study = yaml.safe_load((changed / "study.yaml").read_text())
    study["comparisons"]["construction"] |= {"equal": "compute", "rows": {"width only": "width", "+ PSG": "full"}}
    study["comparisons"]["construction"]["tests"] = study["comparisons"]["construction"]["tests"][:1]
    (changed / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False, allow_unicode=True))
    for seed in (1, 2, 3):
        gmacs = {"gmacs_paper": [0.561, 1.821]}
        change(changed / f"width-{seed}.json", lambda values: values.update(epochs=1000))
        change(
            changed / f"full-{seed}.json",
            lambda values, gmacs=gmacs: (values.update(epochs=epochs), values["rounds"].update(gmacs)),
        )
    if allowed:
        assert [one.label for one in outcomes_of(changed).measured] == ["PSG"]
    else:
        with pytest.raises(ValueError, match=r"width-1 took .* and full-1 .* differs by more than 8%"):
            outcomes_of(changed)


def test_log_loss_that_a_file_lacks_is_left_out(changed):
    change(changed / "width-2.json", lambda values: values["rounds"].pop("log_loss"))
    psg, rounds, _ = outcomes_of(changed).measured
    assert psg.last.log_loss is None
    assert psg.first.log_loss is None
    assert rounds.last.log_loss is not None


def difference(lowest, highest):
    return CrossedDifference(
        mean=(lowest + highest) / 2,
        lowest=lowest,
        highest=highest,
        error=(highest - lowest) / 4,
        freedom=100.0,
        shift=0.0,
        detectable=0.01,
    )


@pytest.mark.parametrize(
    ("lowest", "highest", "verdict"),
    [
        (0.0001, 0.002, "gain"),
        (0.006, 0.008, "gain"),
        (-0.008, -0.0001, "loss"),
        (-0.002, 0.0045, "no gain of 0.46"),
        (-0.002, 0.0047, "inconclusive"),
        (0.0, 0.002, "no gain of 0.46"),
    ],
)
def test_the_verdict_follows_from_interval_and_margin(lowest, highest, verdict):
    last = RoundOutcome(top1=difference(lowest, highest), errors=0.2, log_loss=None)
    one = Outcome(label="", margin=0.46, paper=None, seeds=(1, 2), images=9, last=last, first=None)
    assert one.verdict == verdict


@pytest.mark.parametrize(
    ("lowest", "highest", "verdict"),
    [
        (0.0001, 0.002, "gain"),
        (0.0, 0.002, "equivalent within 0.5"),
        (-0.0049, 0.0049, "equivalent within 0.5"),
        (-0.005, 0.004, "inconclusive"),
        (-0.004, 0.005, "inconclusive"),
        (-0.004, 0.0, "equivalent within 0.5"),
        (-0.008, 0.0, "inconclusive"),
        (-0.008, -0.0001, "loss"),
    ],
)
def test_equivalence_needs_the_interval_within_the_margin_on_both_sides(lowest, highest, verdict):
    assert verdict_of(difference(lowest, highest), 0.5) == verdict
    assert is_equivalent(difference(lowest, highest), 0.5) == (max(-lowest, highest) < 0.005)


def test_lower_log_loss_is_better():
    assert log_loss_verdict(difference(-0.2, -0.1)) == "better"
    assert log_loss_verdict(difference(0.1, 0.2)) == "worse"
    assert log_loss_verdict(difference(-0.1, 0.2)) == "no difference shown"
