"""The frontier of several runs: points, ours at the same GMACs, tables, plots and what is refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats

from progresvit.routing import per_round_frontier
from progresvit.routing.decide import exit_rounds
from progresvit.training.tasks.subnetworks import SubnetworksOptions
from repro import frontier_figures, page
from repro.blocks import Page
from repro.compare import LineUp, crossed_difference, gather, line_up, marginal_rows
from repro.equal import PER_STEP, training_pmacs
from repro.figures import comparison_figure
from repro.frontier import (
    at_budget,
    costs_of,
    curve_of,
    frontier_rows,
    line_up_frontier,
    near_lossless_per_round,
    per_round_points,
    points_of,
)
from repro.store import read_results
from repro.study import read_study
from repro.tables import exit_table
from tests.repro.made import RUNS, change, measured, run_result, write_result
from tests.repro.made_frontier import FRONTIER, SEEDS, TRAININGS, entropies, write_frontier

IMAGES = 200


@pytest.fixture
def changed(frontier_folder, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(frontier_folder, tmp_path / "results")


def rows_of(folder):
    return frontier_rows(read_results(folder), read_study(folder / "study.yaml"), "all")


def row_of(folder, run, point):
    return next(row for row in rows_of(folder) if (row.run, row.point) == (run, point))


def routed_by_hand(run, seed, threshold):
    """Average GMACs, and the images that are right, of two rounds with a threshold."""
    gmacs, (_, right) = RUNS[run][2], measured(run, IMAGES, seed)
    after_first = [float(np.float16(value)) for value in entropies(run, IMAGES, seed)[:, 0]]
    spent, correct = 0.0, []
    for image in range(IMAGES):
        place = 0 if after_first[image] < threshold else 1
        spent += gmacs[place] / IMAGES
        correct.append(bool(right[image, place]))
    return spent, correct


def best_by_hand(run, seed, budget):
    """The most expensive threshold within the budget."""
    after_first = {float(np.float16(value)) for value in entropies(run, IMAGES, seed)[:, 0]}
    outcomes = [routed_by_hand(run, seed, threshold) for threshold in (0.0, 3.0, *after_first)]
    return max((outcome for outcome in outcomes if outcome[0] <= budget + 1e-9), key=lambda outcome: outcome[0])


@pytest.mark.parametrize("budget", [0.2861, 0.5, 0.7771, 1.1, 1.5459, 1.546, 9.0])
def test_a_budget_takes_the_most_expensive_threshold_that_it_allows(frontier_folder, budget):
    result = read_results(frontier_folder).runs["full-2"]
    point = at_budget(result, budget)
    spent, correct = best_by_hand("full", 2, budget)
    assert point.gmacs == pytest.approx(spent, rel=1e-9)
    assert point.correct.tolist() == correct
    assert routed_by_hand("full", 2, point.threshold) == (pytest.approx(spent), correct)


def test_a_budget_below_round_1_is_refused(frontier_folder):
    with pytest.raises(ValueError, match=r"full-1 takes 0\.286 GMACs or more, not 0\.2"):
        at_budget(read_results(frontier_folder).runs["full-1"], 0.2)


def test_alternatives_take_the_most_expensive_round_of_a_budget(frontier_folder):
    result = read_results(frontier_folder).runs["widths-1"]
    assert [at_budget(result, budget).name for budget in (0.561, 1.2, 1.26, 2)] == [
        "round 1",
        "round 1",
        "round 2",
        "round 2",
    ]


def test_points_of_a_routed_model_are_parts_of_the_way_to_the_full_path(frontier_folder):
    points = points_of(read_results(frontier_folder).runs["full-1"])
    assert [point.name for point in points] == ["round 1", "25 %", "50 %", "75 %", "every round"]
    first, last = RUNS["full"][2]
    for point, fraction in zip(points, (0, 0.25, 0.5, 0.75, 1)):
        assert point.gmacs == pytest.approx(first + fraction * (last - first), abs=(last - first) * 2 / IMAGES)
        assert point.round is None
    right = measured("full", IMAGES, 1)[1]
    assert points[0].correct.tolist() == right[:, 0].tolist()
    assert points[-1].correct.tolist() == right[:, 1].tolist()


def test_other_models_are_points_without_threshold(frontier_folder):
    runs = read_results(frontier_folder).runs
    assert [(point.name, point.round, point.threshold) for point in points_of(runs["widths-1"])] == [
        ("round 1", 0, None),
        ("round 2", 1, None),
    ]
    (alone,) = points_of(runs["plain-1"])
    assert (alone.name, alone.round, alone.gmacs) == ("the model", 0, 1.26)


def test_thresholds_do_not_depend_on_labels(changed):
    before = points_of(read_results(changed).runs["full-1"])

    def all_right(values):
        values["rounds"].update(bits=["ff" * 25] * 2, right=[IMAGES] * 2)

    change(changed / "full-1.json", all_right)
    after = points_of(read_results(changed).runs["full-1"])
    assert [point.threshold for point in after] == [point.threshold for point in before]


def test_an_image_without_finite_entropy_runs_every_round(changed):
    values = entropies("full", IMAGES, 1)[:, 0]
    values[7] = np.inf
    change(changed / "full-1.json", lambda file: file["rounds"].update(entropy=[values.tolist()]))
    result = read_results(changed).runs["full-1"]
    first, last = RUNS["full"][2]
    assert points_of(result)[0].gmacs == pytest.approx(first + (last - first) / IMAGES)
    assert curve_of(result, [0.0])[0].gmacs == points_of(result)[0].gmacs


def with_three_rounds(folder):
    """The folder with a run of three rounds among the others."""
    values = yaml.safe_load((folder / "study.yaml").read_text())
    values["runs"]["three"] = {"seeds": list(SEEDS)}
    values["frontiers"]["all"]["rows"]["three rounds"] = "three"
    (folder / "study.yaml").write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    for seed in SEEDS:
        result = run_result("three", seed, IMAGES)
        result |= {"epochs": 37, "recipe": {"seed": seed, "task": "supervised", "task_options": {}}}
        result["rounds"]["entropy"] = list(entropies("three", IMAGES, seed).T)
        write_result(folder, result)
    return folder


def test_three_rounds_also_have_points_with_a_threshold_for_each(changed):
    result = read_results(with_three_rounds(changed)).runs["three-1"]
    points = per_round_points(result)
    assert [point.name for point in points] == ["25 %, per round", "50 %, per round", "75 %, per round"]
    scores = np.pad(entropies("three", IMAGES, 1).astype(np.float16).astype(float), ((0, 0), (0, 1)))
    right, gmacs = measured("three", IMAGES, 1)[1], RUNS["three"][2]
    odd = np.arange(IMAGES) % 2 == 1
    for point, fraction in zip(points, (0.25, 0.5, 0.75)):
        budget = gmacs[0] + fraction * (gmacs[-1] - gmacs[0])
        for design, report in ((odd, ~odd), (~odd, odd)):
            thresholds = per_round_frontier(scores[design], right[design], gmacs).within(budget)
            assert point.exit_after[report].tolist() == exit_rounds(scores[report], thresholds).tolist()
        assert point.correct.tolist() == right[np.arange(IMAGES), point.exit_after].tolist()
        assert point.threshold is None
    page_ = Page(changed, {})
    seeds = [per_round_points(read_results(changed).runs[f"three-{seed}"])[0] for seed in SEEDS]
    assert page_.point_top1("three", "25 %, per round") == np.mean([point.correct.mean() for point in seeds])
    with pytest.raises(ValueError, match="three-1 has no point 30 %; it has round 1, 25 %"):
        page_.point_top1("three", "30 %")
    lossless = near_lossless_per_round(result)
    assert lossless.gmacs < gmacs[-1]
    two = read_results(changed).runs["full-1"]
    assert (per_round_points(two), near_lossless_per_round(two)) == ([], None)


def test_rows_per_round_are_in_the_tables_and_the_plot_but_have_no_cost(changed):
    text = built(with_three_rounds(changed))
    assert text.count("| three rounds | 50 %, per round |") == 1  # the table of every point, not that of costs
    row = row_of(changed, "three", "50 %, per round")
    assert row.per_round
    assert row.verdict is not None
    results, study = read_results(changed), read_study(changed / "study.yaml")
    figure = frontier_figures.frontier_figure(line_up_frontier(results, study, "all"), rows_of(changed))
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert "three rounds: thresholds per round, chosen on the other half" in labels
    assert "thresholds per round, chosen on the other half" in [text.get_text() for text in figure.legends[0].texts]
    lined_up = LineUp(title="t", rows=(gather(results, "three"),), missing=(), against=None, unmeasured_base=None)
    table = exit_table(lined_up)
    points = [near_lossless_per_round(one) for one in gather(results, "three").seeds]
    spent = np.mean([point.gmacs for point in points])
    assert "per round, from the other half: GMACs" in table
    assert f"| {spent:.3f} |" in table
    axes = comparison_figure(lined_up).axes[0]
    assert "three: thresholds per round, chosen on the other half" in [line.get_label() for line in axes.lines]
    assert "dotted: thresholds per round, chosen on the other half" in " ".join(axes.get_title().split())


def test_a_comparison_without_entropies_has_no_curve_per_round(made):
    lined_up = line_up(read_results(made), read_study(made / "study.yaml"), "schedules")
    assert any(run.rounds == 3 for run in lined_up.rows)
    labels = [line.get_label() for line in comparison_figure(lined_up).axes[0].lines]
    assert not any("per round" in label for label in labels)
    assert "per round" not in exit_table(lined_up)


@pytest.mark.parametrize(
    ("run", "point", "place"), [("widths", "round 1", 0), ("widths", "round 2", 1), ("plain160", "the model", 0)]
)
def test_ours_is_compared_at_the_gmacs_of_the_row(frontier_folder, run, point, place):
    row = row_of(frontier_folder, run, point)
    ours = [best_by_hand("full", seed, RUNS[run][2][place]) for seed in SEEDS]
    theirs = [measured(run, IMAGES, seed)[1][:, place] for seed in SEEDS]
    total = 0
    for (_, correct), other in zip(ours, theirs):
        for image in range(IMAGES):
            total += int(correct[image]) - int(other[image])
    assert row.difference.mean == pytest.approx(total / (len(SEEDS) * IMAGES))
    assert row.difference == crossed_difference(
        np.array([correct for _, correct in ours], float), np.array(theirs, float)
    )
    assert row.ours_gmacs == pytest.approx(np.mean([spent for spent, _ in ours]))
    assert row.top1 == row.top1_interval.mean == pytest.approx(np.mean(theirs))


def test_a_more_expensive_row_is_compared_with_the_full_path_and_a_cheaper_one_with_nothing(changed):
    assert row_of(changed, "width", "every round").ours_gmacs == pytest.approx(1.546)
    for seed in SEEDS:
        change(changed / f"widths-{seed}.json", lambda file: file["rounds"].update(gmacs_paper=[0.28, 1.541]))
    cheap = row_of(changed, "widths", "round 1")
    assert (cheap.ours_gmacs, cheap.difference, cheap.verdict) == (None, None, None)
    assert cheap.top1_interval is not None
    ours = row_of(changed, "full", "50 %")
    assert (ours.ours_gmacs, ours.difference, ours.verdict, ours.compute) == (None, None, None, 1)


def test_one_seed_has_no_intervals_and_no_verdicts(tmp_path):
    folder = write_frontier(tmp_path / "results", seeds=(2,), cost=False)
    row = row_of(folder, "widths", "round 2")
    assert (row.top1_interval, row.difference, row.verdict) == (None, None, None)
    assert row.ours_gmacs == pytest.approx(1.26, abs=0.02)
    missing = line_up_frontier(read_results(folder), read_study(folder / "study.yaml"), "all").missing
    assert missing == ("seed 1", "seed 3")
    assert "Not measured: seed 1, seed 3." in built(folder)


@pytest.mark.parametrize(
    ("run", "forward"),
    [("full", 1.546), ("plain", 1.26), ("widths", (0.561 + 1.26) / 2), ("distilled", 0.561 + 1.26 + 1.26 / 3)],
)
def test_training_compute_counts_the_rounds_of_a_step(frontier_folder, run, forward):
    expected = 3 * forward * 1e9 * TRAININGS[run][0] * 5 * IMAGES / 1e15
    assert training_pmacs(read_results(frontier_folder).runs[f"{run}-1"]) == pytest.approx(expected)


@pytest.mark.parametrize(("options", "times"), [({"per_step": "all"}, 2), ({"per_step": 2}, 2), ({"per_step": 1}, 1)])
def test_training_compute_follows_the_drawn_rounds(changed, options, times):
    before = training_pmacs(read_results(changed).runs["widths-1"])
    change(changed / "widths-1.json", lambda values: values["recipe"].update(task_options=options))
    assert training_pmacs(read_results(changed).runs["widths-1"]) == pytest.approx(times * before)
    assert SubnetworksOptions().per_step == PER_STEP


REFUSED = {
    r"differ in data\.names: nnnnnnnn and others": lambda values: values["data"].update(names="others"),
    r"differ in data\.classes: 4 and 5": lambda values: values["data"].update(classes=5),
    r"differ in precision: fp32 and bf16": lambda values: values.update(precision="bf16"),
    r"full-1 took 0\.1855 PMACs and plain-1 0\.1663, .* Train plain-1 for about 49\.1 epochs instead of 44": (
        lambda values: values.update(epochs=44)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_runs_that_were_trained_differently_are_refused(changed, message):
    for seed in SEEDS:
        change(changed / f"plain-{seed}.json", REFUSED[message])
    with pytest.raises(ValueError, match=message):
        rows_of(changed)


def test_runs_of_other_epochs_are_refused_where_epochs_should_be_equal(changed):
    values = yaml.safe_load((changed / "study.yaml").read_text())
    values["frontiers"]["all"]["equal"] = "epochs"
    (changed / "study.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    with pytest.raises(ValueError, match="full-1 was trained for 40 and width-1 for 34"):
        rows_of(changed)


def test_a_missing_seed_is_refused_and_a_missing_run_is_named(changed):
    (changed / "plain-2.json").unlink()
    message = r"plain lacks seed 2, which full has\. Measure plain-2, or take seed 2 out .* \(full-2\.json\)"
    with pytest.raises(ValueError, match=message):
        rows_of(changed)
    for seed in (1, 3):
        (changed / f"plain-{seed}.json").unlink()
    assert line_up_frontier(read_results(changed), read_study(changed / "study.yaml"), "all").missing == ("plain, 224",)


def test_a_routed_model_without_entropies_is_refused(changed):
    for seed in SEEDS:
        change(changed / f"width-{seed}.json", lambda values: values["rounds"].pop("entropy"))
    with pytest.raises(ValueError, match="width-1 has no entropies"):
        rows_of(changed)


def cost_of(folder):
    """And the data of its runs."""
    results = read_results(folder)
    return results.cost["cost"], results.runs["full-1"].data


def test_costs_of_another_model_are_refused(changed):
    assert len(costs_of(rows_of(changed), *cost_of(changed))) == 16

    def other_model(values):
        point = next(point for point in values["points"] if point["run"] == "plain")
        point["gmacs_paper"] *= 1.06

    change(changed / "cost.json", other_model)
    with pytest.raises(ValueError, match=r"the cost of plain at the model was measured at 1\.336 GMACs.* 1\.26"):
        costs_of(rows_of(changed), *cost_of(changed))


def test_costs_on_other_images_are_refused(changed):
    change(changed / "cost.json", lambda values: values["data"].update(names="other"))
    with pytest.raises(ValueError, match=r"cost\.json was measured on other images than the runs"):
        costs_of(rows_of(changed), *cost_of(changed))


def test_gains_that_a_correction_removes_are_marginal(frontier_folder):
    rows = rows_of(frontier_folder)
    intervals = sum(row.difference is not None for row in rows)
    marginal = {(row.run, row.point) for row in marginal_rows(rows)}
    for row in rows:
        if row.difference is not None:
            wider = stats.t.ppf([1 - 0.025 / intervals, 0.975], row.difference.freedom)
            reach = wider[0] / wider[1] * (row.difference.highest - row.difference.lowest) / 2
            expected = row.verdict in ("gain", "loss") and abs(row.difference.mean) <= reach
            assert ((row.run, row.point) in marginal) == expected
    assert 0 < len(marginal) < len([row for row in rows if row.verdict in ("gain", "loss")])


def test_two_costs_on_one_device_are_refused(changed):
    shutil.copy(changed / "cost.json", changed / "cost2.json")
    change(changed / "cost2.json", lambda values: values.update(name="cost2"))
    with pytest.raises(ValueError, match=r"cost and cost2, both costs on"):
        read_results(changed)


def test_the_plots_have_every_row_and_one_legend_entry_for_a_family(frontier_folder):
    results, rows = read_results(frontier_folder), rows_of(frontier_folder)
    lined_up = line_up_frontier(results, read_study(frontier_folder / "study.yaml"), "all")
    costs = costs_of(rows, *cost_of(frontier_folder))
    gmacs = frontier_figures.frontier_figure(lined_up, rows)
    speed = frontier_figures.speed_figure(lined_up, rows, costs, "a GPU")
    of_speed = [(costs[row.run, row.point].images_per_s, 100 * row.top1) for row in rows]
    for figure, expected in ((gmacs, [(row.gmacs, 100 * row.top1) for row in rows]), (speed, of_speed)):
        (axes,) = figure.axes
        marked = [bars.lines[0].get_xydata() for bars in axes.containers]
        assert np.array(sorted(map(tuple, np.concatenate(marked)))) == pytest.approx(np.array(sorted(expected)))
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels == ["ours, 160→224", "width only", "HydraViT", "DynaBERT", "plain", "95 % intervals"]
    curves = [line for line in gmacs.axes[0].lines if line.get_label().endswith("every threshold")]
    assert [len(line.get_xdata()) for line in curves] == [21, 21]
    verdicts = [row.verdict for row in rows if row.verdict]
    assert f"gains at {verdicts.count('gain')} and" in gmacs.axes[0].get_title().replace("\n", " ")


def built(folder):
    """The text of the page, whose plots are not drawn."""
    path = Path("results.md")
    return page.build(folder, folder, {path: page.PAGES / page.GENERIC}).texts[path]


def test_a_row_that_is_not_there_is_refused_with_those_that_are(changed, capsys):
    (changed / "results.md.j2").write_text("{{ frontier_row('all', 'widths', 'round 9') }}")
    with pytest.raises(SystemExit):
        page.main([str(changed)])
    assert "has no row widths, round 9; it has full, round 1; full, 25 %" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"ours": "never"}, "'never' is not among the rows"),
        ({"families": {"some": ["plain", "plian160"]}}, "'plian160' is not among the rows, did you mean 'plain160'"),
        (
            {"rows": {"a": "full", "b": "plane"}, "families": {}},
            "frontiers.all: unknown run 'plane', did you mean 'plain'",
        ),
        ({"margin": 0}, "frontiers.all.margin: input should be greater than 0"),
        ({"equal": "time"}, "frontiers.all.equal"),
    ],
)
def test_a_frontier_that_makes_no_sense_is_refused(tmp_path, edit, message):
    frontiers = {"all": FRONTIER["frontiers"]["all"] | edit}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(FRONTIER | {"frontiers": frontiers}))
    with pytest.raises(ValueError, match=message):
        read_study(tmp_path / "study.yaml")
