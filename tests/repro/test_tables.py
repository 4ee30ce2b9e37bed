"""Tables hold what the results hold, and what follows from the bits."""

import numpy as np
import pytest

from repro import routing_tables, tables
from repro.compare import Difference, line_up
from repro.formats import read_results
from repro.study import read_study
from repro.tables import percent, signed
from tests.repro.made import RUNS, measured


@pytest.fixture(scope="module")
def results(made):
    return read_results(made)


@pytest.fixture(scope="module")
def study(made):
    return read_study(made / "study.yaml")


def table(markdown):
    """Rows by head, and the heads; of two equal heads the last counts."""
    lines = [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    heads, _, *cells = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(heads, row)) for row in cells], heads


def top1(run, place, seeds=(1,)):
    return 100 * np.mean([measured(run, 40, seed)[1][:, place].mean() for seed in seeds])


def test_a_comparison_tells_accuracy_from_the_bits(results, study):
    made = tables.accuracy_table(line_up(results, study, "schedules"))
    rows, heads = table(made)
    assert len(heads) <= 9
    assert [row[""] for row in rows] == ["160→224", "128→176→224", "plain ViT"]
    assert rows[1]["rounds"] == "128→176→224, 1→2→3 heads"
    assert [row["GMACs"] for row in rows] == ["1.546", "1.660", "1.260"]
    assert [row["seeds"] for row in rows] == ["2", "1", "1"]
    full = [top1("full", -1, (1, 2)), top1("three", -1), top1("plain", -1)]
    assert [row["full path, top-1 (%)"] for row in rows] == [f"{share:.1f}" for share in full]
    assert [row["round 1, top-1 (%)"] for row in rows][:2] == [
        f"{top1('full', 0, (1, 2)):.1f}",
        f"{top1('three', 0):.1f}",
    ]
    assert rows[2]["round 1, top-1 (%)"] == "–"
    assert [100 * row["difference"].mean for row in made.rows[1:]] == pytest.approx(
        [full[1] - full[0], full[2] - full[0]]
    )
    assert made.rows[0]["difference"] is None
    assert heads[6] == "points over 160→224"


def test_leaving_early_is_a_mean_over_seeds_and_each_seed_is_told(results, study):
    made = tables.leaving_table(line_up(results, study, "construction"))
    rows, heads = table(made)
    assert len(heads) <= 9
    points = [results.runs[f"full-{seed}"].near_lossless for seed in (1, 2)]
    saving = np.mean([1 - point.gmacs_paper / RUNS["full"][2][-1] for point in points])
    assert rows[1]["saved (%)"] == f"{100 * saving:.1f}"
    assert made.rows[1]["gmacs"] == pytest.approx(np.mean([point.gmacs_paper for point in points]))
    assert rows[1]["full path of each seed (%)"] == ", ".join(f"{top1('full', -1, (seed,)):.1f}" for seed in (1, 2))
    assert 100 * made.rows[1]["spread"] == pytest.approx(abs(top1("full", -1, (1,)) - top1("full", -1, (2,))))


def test_runs_are_listed_with_time_and_machine(results):
    rows, heads = table(tables.runs_table([*results.runs.values(), *results.shift.values()]))
    assert len(heads) <= 9
    assert rows[0]["file"] == "`full-1.json`"
    assert (rows[0]["minutes"], rows[0]["on"], rows[0]["jobs at a time"]) == ("10.0", "Made GPU", "2")
    assert rows[-1]["parameters"] == "–"


def test_settings_stand_between_every_round_and_the_first_alone(results):
    result = results.routing["routing"]
    rows, _ = table(routing_tables.settings_table(result))
    assert [row["setting"] for row in rows] == [
        *("every round", "near-lossless", "drop-0.5", "drop-1", "careful", "round 1 alone")
    ]
    assert rows[0]["top-1 (%)"] == f"{100 * result.rounds.right[1] / 40:.1f}"
    assert rows[2]["guarantee"] == "at most 0.5 % of answers lost, at 95 % confidence"
    point = result.settings[2].point
    assert rows[3]["saved (%)"] == f"{100 * (1 - point.gmacs_paper / 1.546):.1f}"
    rows, _ = table(routing_tables.halves_table(result))
    assert [row["guarantee broken on"] for row in rows] == ["–", "1 of 20", "1 of 20", "–"]
    assert rows[0]["lost (points)"] == "0.08"


def test_routers_are_told_as_gains_with_intervals(results):
    one = results.routing["routing"].matched[1]
    rows, _ = table(routing_tables.matched_table(one))
    assert rows[5]["go on (%)"] == "50"
    assert rows[5]["gain (points)"] == "+0.30 (−0.10 to +0.70)"


def test_withheld_answers_rules_and_groups(results):
    result = results.routing["routing"]
    assert table(routing_tables.withheld_table(result))[0][0]["answered (%)"] == "85.0"
    assert table(routing_tables.risk_table(result))[0][1]["mean risk over all coverages (%)"] == "4.00"
    assert table(routing_tables.equal_accuracy_table(result))[0][1]["given up (%)"] == "3.00"
    rows, _ = table(routing_tables.groups_table(result))
    assert [row["classes"] for row in rows] == ["easy ten"] * 6 + ["ten dogs"] * 6
    at = result.groups[1].at[0]
    assert rows[7]["leave after round 1 (%)"] == f"{100 * at.exit_shares[0]:.1f}"


def test_severities_are_means_over_corruptions_models_under_each_other(results):
    models = {"full": results.shift["shift_both-full"], "plain": results.shift["shift_both-plain"]}
    accuracy, cost = shift_tables.severity_tables(models)
    rows, _ = table(accuracy)
    assert [(row["severity"], row["model"]) for row in rows] == [
        *(("clean", "full"), ("clean", "plain"), ("1", "full"), ("1", "plain"), ("3", "full"), ("3", "plain"))
    ]
    sets = [one for one in models["full"].sets if one.severity == 3]
    assert len(sets) == 3
    assert accuracy.rows[4]["full"] == pytest.approx(np.mean([one.top1[1] for one in sets]))
    assert accuracy.rows[4]["near-lossless"] == pytest.approx(np.mean([one.at[0].top1 for one in sets]))
    assert [row["severity"] for row in cost.rows] == ["clean", "1", "3"]
    full, routed = shift_tables.corruption_tables(models)
    assert table(full)[1] == ["corruption", *(f"{model}, severity {s}" for model in models for s in (1, 3))]
    assert table(full)[0][2]["full, severity 3"] == f"{100 * sets[2].top1[1]:.1f}"
    assert "near-lossless" in routed.title


def test_words_go_left_numbers_right_and_a_bar_is_no_border():
    made = Table("t", [Column("a", "name", left=True), Column("b", "n")], [{"a": "x|y", "b": 1}])
    assert made.to_markdown() == "t\n\n| name | n |\n| --- | ---: |\n| x\\|y | 1 |\n"


def test_figures_in_words():
    assert percent(-0.00001) == "0.0"
    assert signed(-0.0001) == "0.0"
    assert signed(-0.012) == "−1.2"
    assert with_interval(Difference(mean=0.004, lowest=-0.003, highest=0.011)) == "+0.4 (−0.3 to +1.1)"
    assert key("Easy ten, soft") == "easy-ten-soft"
    assert key("drop-0.5") == "drop-0.5"
