"""Two made-up models under corruption, over seeds."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from progresvit.routing import frontier
from repro.compare import crossed_difference
from repro.page import GENERIC, PAGES, build
from repro.shift import differences_table, gather_shift, gather_shift_tests, harm_table, mean_at
from repro.store import read_results
from repro.study import Study
from tests.repro.made import CORRUPTIONS, MEASUREMENT, RUNS, change, data, measured, write_result
from tests.repro.test_tables import table

IMAGES, SEEDS, BUDGET = 150, (1, 2, 3), 0.9
THRESHOLDS = {"near-lossless": 0.1, "drop-1": 0.4}
STUDY = {
    "title": "A study of corruption",
    "data": "Made-up images",
    "recipe": "digits",
    "runs": {"full": {"seeds": [1, 2, 3]}, "plain": {"seeds": [1, 2, 3]}},
    "shift": {"corrupted": {"models": ["full", "plain"], "seeds": [1, 2, 3], "severities": [1, 5], "budget": BUDGET}},
}


def scores_and_right(run, seed, severity, number):
    """(N, S), (N, S)"""
    return measured(run, IMAGES, seed + 10 * number, hardness=0.3 * severity + 0.2 * number * bool(severity))


def routed(scores, right, threshold):
    return np.array([row[0] if score[0] < threshold else row[-1] for score, row in zip(scores, right)])


def budget_threshold(run, seed, severity):
    """The lowest threshold of a few at which the pooled images keep to the budget."""
    sets = [scores_and_right(run, seed, severity, number) for number in range(len(CORRUPTIONS) if severity else 1)]
    scores, right = (np.concatenate(parts) for parts in zip(*sets))
    points = frontier(scores, right, RUNS[run][2], np.linspace(0, 3, 61).tolist())
    return min(point.threshold for point in points if point.gmacs <= BUDGET)


def make_set(run, seed, severity, number):
    scores, right = scores_and_right(run, seed, severity, number)
    at, bits = [], [right[:, -1]]
    thresholds = THRESHOLDS | {f"budget-{BUDGET}": budget_threshold("full", seed, severity)} if run == "full" else {}
    for name, threshold in thresholds.items():
        point = frontier(scores, right, RUNS[run][2], [threshold])[0]
        answers = routed(scores, right, threshold)
        kept = {"setting": name, "top1": point.top1, "gmacs_paper": point.gmacs, "exit_shares": point.exit_shares}
        if name in THRESHOLDS:
            kept["harm"] = float((right[:, -1] & ~answers).mean())
        at.append(kept | ({"epsilon": 0.01} if name == "drop-1" else {}))
        bits.append(answers)
    kind, top1 = CORRUPTIONS[number] if severity else None, right.mean(axis=0).tolist()
    return {"corruption": kind, "severity": severity, "pictures": IMAGES, "top1": top1, "at": at, "bits": bits}


def make_result(run, seed):
    sets = [make_set(run, seed, 0, 0)]
    sets += [make_set(run, seed, severity, number) for severity in (1, 5) for number in range(len(CORRUPTIONS))]
    point = {"threshold": 0, "top1": 0.5, "gmacs_paper": 1, "gmacs_executed": 1, "exit_shares": [0.5, 0.5]}
    return MEASUREMENT | {
        "kind": "shift",
        "name": f"corrupted-{run}-{seed}",
        "commands": ["progresvit shift …"],
        "seed": seed,
        "data": data(IMAGES),
        "model": run,
        "weights": f"{run} {seed}",
        "gmacs_paper": RUNS[run][2],
        "sets": sets,
        "severities": [{"severity": s, "pictures": IMAGES, "frontier": [point]} for s in (0, 1, 5)],
    }


@pytest.fixture(scope="module")
def made():
    return [make_result(run, seed) for run in ("full", "plain") for seed in SEEDS]


@pytest.fixture(scope="module")
def written(made, tmp_path_factory):
    """Results of the study; no test may change them."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
    for result in made:
        write_result(folder, result)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(written, tmp_path / "results")


def gather(folder, ours="full", theirs="plain", study=STUDY):
    return gather_shift_tests(read_results(folder), Study.model_validate(study), "corrupted", ours, theirs)


def test_tests_are_crossed_differences_of_means_over_corruptions(folder):
    tests = gather(folder)
    assert [one.severity for one in tests] == [0, 1, 5]
    for one in tests:
        full, plain, at_budget = (np.zeros((3, IMAGES)) for _ in range(3))
        spent = []
        kinds = range(len(CORRUPTIONS) if one.severity else 1)
        for place, seed in enumerate(SEEDS):
            threshold = budget_threshold("full", seed, one.severity)
            for number in kinds:
                scores, right = scores_and_right("full", seed, one.severity, number)
                early = scores[:, 0] < threshold
                full[place] += right[:, 1] / len(kinds)
                at_budget[place] += np.where(early, right[:, 0], right[:, 1]) / len(kinds)
                spent.append(np.where(early, *RUNS["full"][2]).mean())
                plain[place] += scores_and_right("plain", seed, one.severity, number)[1][:, 0] / len(kinds)
        for found, expected in (
            (one.full_difference, crossed_difference(full, plain)),
            (one.budget_difference, crossed_difference(at_budget, plain)),
        ):
            assert (found.mean, found.lowest, found.highest) == pytest.approx(
                (expected.mean, expected.lowest, expected.highest)
            )
        assert (one.full.top1, one.theirs.top1, one.budget.top1) == pytest.approx(
            (full.mean(), plain.mean(), at_budget.mean())
        )
        assert one.budget.gmacs_paper == pytest.approx(np.mean(spent))
        assert one.budget.gmacs_paper <= BUDGET
        assert (one.full.gmacs_paper, one.theirs.gmacs_paper) == (1.546, 1.26)
        assert (one.seeds, one.images) == (3, IMAGES)


def test_the_table_gives_both_differences_with_their_verdicts(folder):
    tests = gather(folder)
    rows, heads = table(differences_table(tests, "full", "plain"))
    assert [row["severity"] for row in rows] == ["clean", "1", "5"]
    assert rows[0]["seeds × images"] == "3 × 150"
    assert rows[2]["full, full path"] == f"{100 * tests[2].full.top1:.2f} at 1.546"
    assert rows[2]["full, at the budget"].endswith(f" at {tests[2].budget.gmacs_paper:.3f}")
    for row, one in zip(rows, tests):
        for name, found in (("full path", one.full_difference), ("at the budget", one.budget_difference)):
            expected = "gain" if found.lowest > 0 else "loss" if found.highest < 0 else "inconclusive"
            assert row[name] == expected
    assert {"full path, difference (points)", "at the budget, difference (points)"} < set(heads)
    backwards, _ = table(differences_table(gather(folder, "plain", "full"), "plain", "full"))
    assert "plain, at the budget" not in backwards[0]
    opposite = {"gain": "loss", "loss": "gain", "inconclusive": "inconclusive"}
    assert [row["full path"] for row in backwards] == [opposite[row["full path"]] for row in rows]


def test_tables_show_means_over_seeds_and_harm_beside_its_bound(folder, made):
    measured_models, missing = gather_shift(read_results(folder), Study.model_validate(STUDY), "corrupted")
    assert missing == []
    sets = [[one for one in result["sets"] if one["severity"] == 5] for result in made[:3]]
    assert mean_at(measured_models["full"], 5, "drop-1").top1 == pytest.approx(
        np.mean([[s["at"][1]["top1"] for s in one] for one in sets])
    )
    rows, heads = table(harm_table(measured_models))
    assert heads == ["severity", "model", "near-lossless", "drop-1, bound 1 %"]
    assert [(row["severity"], row["model"]) for row in rows] == [("clean", "full"), ("1", "full"), ("5", "full")]
    harms = np.array([[one["at"][1]["harm"] for one in seed] for seed in sets]).mean(axis=0)  # by corruption
    worst = CORRUPTIONS[int(harms.argmax())].replace("_", " ")
    assert rows[2]["drop-1, bound 1 %"] == f"{100 * harms.mean():.2f}, {100 * harms.max():.2f} ({worst})"
    clean = np.mean([result["sets"][0]["at"][1]["harm"] for result in made[:3]])
    assert rows[0]["drop-1, bound 1 %"] == f"{100 * clean:.2f}"


def test_the_page_of_a_study_with_seeds_has_every_block(folder):
    made = build(folder, folder, {Path("results.md"): PAGES / GENERIC})
    page = made.texts[Path("results.md")]
    assert "full minus plain: top-1 (%) at average GMACs" in page
    assert "Harm by severity (%)" in page
    assert "corrupted-full-1-severities.png" in made.plots
    (folder / "corrupted-plain-2.json").unlink()
    (folder / "results.md.j2").write_text('{{ severities("corrupted") }}')
    built = build(folder, folder, {Path("out.md"): folder / "results.md.j2"})
    assert "Not measured: seed 2 of plain." in built.texts[Path("out.md")]


@pytest.mark.parametrize(
    ("file", "edit", "match"),
    [
        ("plain-2", None, "the shift entry corrupted lacks seed 2 of plain; measure every seed"),
        ("full-3", lambda values: values["sets"].pop(), "compares models under different corruptions: full, plain"),
        ("plain-1", lambda values: values["data"].update(names="others"), "which differ in data.names"),
        ("full-2", lambda values: values.update(precision="bf16"), "which differ in precision"),
        (
            "full-2",
            lambda values: values.update(seed=1),
            "corrupted-full-2 is of seed 1 of full, not of seed 2 of full",
        ),
        ("full-2", lambda values: values.update(model="plain"), "is of seed 2 of plain, not of seed 2 of full"),
        ("full-2", lambda values: values.update(weights="full 1"), "two seeds of full with the same weights"),
        (
            "full-1",
            lambda values: values["sets"][2].pop("bits"),
            "corrupted-full-1 does not say which images are right",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(folder, file, edit, match):
    path = folder / f"corrupted-{file}.json"
    path.unlink() if edit is None else change(path, edit)
    with pytest.raises(ValueError, match=match):
        gather(folder)


def test_tests_need_seeds_of_both_models(folder):
    with pytest.raises(ValueError, match="corrupted has no seeds of nettewoof-tiny"):
        gather(folder, theirs="nettewoof-tiny")
    shift = {"models": ["full", "plain"], "severities": [1, 5]}
    with pytest.raises(ValueError, match="corrupted has no seeds of full; give the entry seeds"):
        gather(folder, study=STUDY | {"shift": {"corrupted": shift}})
