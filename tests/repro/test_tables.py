"""Tables hold what the results hold, and what follows from the bits."""

import numpy as np
import pytest

from repro import routing_tables, shift_tables, tables
from repro.compare import Difference, line_up
from repro.outcomes import gather_outcomes
from repro.store import read_results
from repro.study import read_study
from repro.tables import interval, percent, signed
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


def test_accuracy_in_a_comparison_is_that_of_the_bits(results, study):
    rows, heads = table(tables.accuracy_table(line_up(results, study, "schedules")))
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
    compared = line_up(results, study, "schedules")
    expected = [interval(compared.rows[number].less(compared.rows[0])) for number in (1, 2)]
    assert [row["points over 160→224"] for row in rows] == ["–", *expected]
    assert heads[6] == "points over 160→224"


@pytest.fixture(scope="module")
def tested_study(tested):
    return read_results(tested), read_study(tested / "study.yaml"), "construction"


def test_accuracy_beside_tests_is_a_mean_and_a_deviation_over_seeds(tested_study):
    rows, heads = table(tables.seeds_table(line_up(*tested_study)))
    assert len(heads) <= 9
    each = [100 * measured("full", 200, seed)[1].mean(axis=0) for seed in (1, 2, 3)]
    (first, last), (first_deviation, last_deviation) = np.mean(each, axis=0), np.std(each, axis=0, ddof=1)
    assert rows[1]["round 1, top-1 (%)"] == f"{first:.2f} ± {first_deviation:.2f}"
    assert rows[1]["full path, top-1 (%)"] == f"{last:.2f} ± {last_deviation:.2f}"
    assert [row["seeds"] for row in rows] == ["3", "3", "3", "3"]
    assert [row["rounds"] for row in rows[1:]] == ["160→224, 2→3 heads", "224 / 224", "224, 3 heads"]
    assert rows[3]["round 1, top-1 (%)"] == "–"


def test_a_test_is_a_row_with_its_intervals_and_its_verdict(tested_study):
    outcomes = gather_outcomes(*tested_study)
    rows, heads = table(tables.tests_table(outcomes))
    assert len(heads) <= 9
    assert [row[""] for row in rows] == ["PSG", "rounds", "alternatives"]
    psg = outcomes.measured[0]
    assert (rows[0]["seeds × images"], rows[0]["the paper's (points)"]) == ("3 × 200", "+0.46")
    assert rows[0]["top-1 (points)"] == interval(psg.last.top1, 2)
    assert rows[0]["detectable at 80 % power (points)"] == f"{100 * psg.last.top1.detectable:.2f}"
    assert rows[0]["errors removed (%)"] == interval(psg.last.top1, 1, scale=100 / psg.last.errors)
    assert [row["verdict"] for row in rows] == [one.verdict for one in outcomes.measured]
    assert rows[0]["log-loss"] == interval(psg.last.log_loss, 4, scale=1)
    assert (rows[0]["log-loss is"], rows[2]["log-loss is"]) == ("better", "worse")
    assert rows[1]["the paper's (points)"] == "–"
    rows, _ = table(tables.first_round_table(outcomes))
    assert [row[""] for row in rows] == ["PSG", "alternatives"]
    assert rows[0]["top-1 (points)"] == interval(psg.first.top1, 2)


def test_rounds_that_are_alternatives_have_no_early_exit(tested_study):
    rows, _ = table(tables.exit_table(line_up(*tested_study)))
    assert rows[2][""] == "widths"
    assert {rows[2][head] for head in ("top-1 (%)", "GMACs", "saved (%)", "exit after round 1 (%)")} == {"–"}
    assert rows[2]["round 1 of each seed (%)"].count(",") == 2


def test_early_exit_is_a_mean_over_seeds_and_each_seed_is_given(results, study):
    rows, heads = table(tables.exit_table(line_up(results, study, "construction")))
    assert len(heads) <= 9
    points = [results.runs[f"full-{seed}"].near_lossless for seed in (1, 2)]
    saving = np.mean([1 - point.gmacs_paper / RUNS["full"][2][-1] for point in points])
    assert rows[1]["saved (%)"] == f"{100 * saving:.1f}"
    assert rows[1]["GMACs"] == f"{np.mean([point.gmacs_paper for point in points]):.3f}"
    assert rows[1]["full path of each seed (%)"] == ", ".join(f"{top1('full', -1, (seed,)):.1f}" for seed in (1, 2))
    spread = abs(top1("full", -1, (1,)) - top1("full", -1, (2,)))
    assert rows[1]["range over seeds, full path (points)"] == f"{spread:.1f}"


def test_runs_are_listed_with_time_and_machine(results):
    rows, heads = table(tables.runs_table(results.all))
    assert len(heads) <= 9
    assert rows[0]["file"] == "`full-1.json`"
    assert (rows[0]["minutes"], rows[0]["on"], rows[0]["jobs at a time"]) == ("10.0", "Made GPU", "2")
    assert rows[-1]["parameters"] == "–"


def test_settings_stand_between_every_round_and_the_first_alone(results):
    result = results.routing["routing"]
    rows, _ = table(routing_tables.settings_table(result))
    assert [row["setting"] for row in rows] == [
        *("every round", "near-lossless", "drop-0.5", "drop-1", "careful", "drop-1-unlabelled", "round 1 alone")
    ]
    assert rows[0]["top-1 (%)"] == f"{100 * result.rounds.right[1] / 40:.1f}"
    assert rows[2]["guarantee"] == "at most 0.5 % of answers lost, at 95 % confidence"
    assert rows[5]["guarantee"] == "at most 1 % of answers changed, at 95 % confidence"
    point = result.settings[2].point
    assert rows[3]["saved (%)"] == f"{100 * (1 - point.gmacs_paper / 1.546):.1f}"
    rows, _ = table(routing_tables.halves_table(result))
    assert rows[0]["top-1 lost (points)"] == "0.08"
    assert (rows[0]["right answers lost (%)"], rows[0]["answers changed (%)"]) == ("0.20", "0.60")


def test_guarantees_are_judged_by_draws_beside_what_chance_allows(results):
    rows, heads = table(routing_tables.certificates_table(results.routing["routing"]))
    assert len(heads) <= 9
    assert [(row["setting"], row["bounds"]) for row in rows] == [
        ("drop-0.5", "right answers lost"), ("drop-1", "right answers lost"), ("drop-1-unlabelled", "answers changed")
    ]  # fmt: skip
    assert rows[0]["beyond the bound (% of 500 draws)"] == "4.6"
    assert rows[0]["allowed (with 2 standard errors of chance, %)"] == "5.0 (6.9)"
    assert (rows[0]["mean (%)"], rows[0]["highest (%)"], rows[2]["bound (%)"]) == ("0.30", "0.71", "1.0")


def test_rejection_stands_beside_entropy_at_equal_compute(results):
    rows, _ = table(routing_tables.rejection_table(results.routing["routing"]))
    assert [row["continue (%)"] for row in rows] == [str(share) for share in range(10, 100, 10)]
    assert rows[4]["entropy, 2 % rejected (points)"] == "−0.25 (−0.65 to +0.15)"
    rows, _ = table(routing_tables.equal_accuracy_means(results.routing["routing"]))
    assert [row["errors added (points)"] for row in rows] == ["–", "+0.40 (+0.10 to +0.70)"]
    assert rows[1]["saving added (points)"] == "+2.00 (+1.00 to +3.00)"


def narrowed(result, reach):
    """With intervals so wide of the first two routers; the third stays as it is."""

    def narrow(one):
        gains = np.subtract(one.router_top1, one.entropy_top1)
        return one.model_copy(update={"lowest": tuple(gains - reach), "highest": tuple(gains + reach)})

    first, second, third = result.matched
    return result.model_copy(update={"matched": (narrow(first), narrow(second), third)})


def test_routers_help_only_where_corrected_intervals_say_so(results):
    result = results.routing["routing"]
    assert routing_tables.router_verdict(result) == "whether it helps cannot be told"
    # the gain is 0.003 at most; intervals of 33 gains are 1.62 times as wide
    assert routing_tables.router_verdict(narrowed(result, 0.003 / 1.55)) == "where it helps cannot be told"
    assert routing_tables.router_verdict(narrowed(result, 0.003 / 1.65)) == (
        "benefit, fitted on half of the held-out images: helps at 50 %"
    )
    assert routing_tables.router_verdict(narrowed(result, 0.0006)).startswith(
        "benefit, fitted on training images: harms at 50 %; benefit, fitted on half of the held-out images: helps at"
    )


def test_routers_are_given_as_gains_with_intervals(results):
    one = results.routing["routing"].matched[1]
    rows, _ = table(routing_tables.matched_table(one))
    assert rows[5]["continue (%)"] == "50"
    assert rows[5]["gain (points)"] == "+0.30 (−0.10 to +0.70)"


def test_withheld_answers_rules_and_groups(results):
    result = results.routing["routing"]
    assert table(routing_tables.withheld_table(result))[0][0]["answered (%)"] == "85.0"
    assert table(routing_tables.risk_table(result))[0][1]["mean risk over all coverages (%)"] == "4.00"
    assert table(routing_tables.equal_accuracy_means(result))[0][1]["rejected (%)"] == "3.00"
    rows, _ = table(routing_tables.groups_table(result))
    assert [row["classes"] for row in rows] == ["easy ten"] * 6 + ["ten dogs"] * 6
    at = result.groups[1].at[0]
    assert rows[7]["exit after round 1 (%)"] == f"{100 * at.exit_shares[0]:.1f}"


def test_single_values_of_routing_are_found_by_name(results):
    result = results.routing["routing"]
    assert routing_tables.settings_of(result)["drop-1"] == result.settings[2]
    assert routing_tables.rules_of(result)["entropy, unrecoverable rejected", 0.005].given_up == 0.03
    assert interval(routing_tables.gains_of(result.matched[1])[0.5], 2) == "+0.30 (−0.10 to +0.70)"
    assert len(routing_tables.open_gains(result)) == 33


def test_images_are_called_images_whatever_the_file_calls_them(results):
    assert "pictures" in results.routing["routing"].matched[1].fitted_on
    title = routing_tables.matched_table(results.routing["routing"].matched[1]).splitlines()[0]
    assert title == "Entropy and router: benefit, fitted on half of the held-out images; mean of 5 fits"


def test_severities_are_means_over_corruptions_with_one_row_per_model(results):
    models = {"full": results.shift["shift_both-full"], "plain": results.shift["shift_both-plain"]}
    accuracy, cost = shift_tables.severity_tables(models)
    rows, _ = table(accuracy)
    assert [(row["severity"], row["model"]) for row in rows] == [
        *(("clean", "full"), ("clean", "plain"), ("1", "full"), ("1", "plain"), ("3", "full"), ("3", "plain"))
    ]
    sets = [one for one in models["full"].sets if one.severity == 3]
    assert len(sets) == 3
    assert rows[4]["full path (%)"] == f"{100 * np.mean([one.top1[1] for one in sets]):.1f}"
    assert rows[4]["near-lossless (%)"] == f"{100 * np.mean([one.at[0].top1 for one in sets]):.1f}"
    assert [row["severity"] for row in table(cost)[0]] == ["clean", "1", "3"]
    spent = np.mean([one.at[1].gmacs_paper for one in sets])
    exits = np.mean([one.at[1].exit_shares[0] for one in sets])
    assert table(cost)[0][2]["drop-1"] == f"{spent:.3f} ({100 * exits:.1f} %)"
    full, routed = shift_tables.corruption_tables(models)
    assert table(full)[1] == ["corruption", *(f"{model}, severity {s}" for model in models for s in (1, 3))]
    assert table(full)[0][2]["full, severity 3"] == f"{100 * sets[2].top1[1]:.1f}"
    assert "near-lossless" in routed.splitlines()[0]


def test_a_setting_that_not_every_corruption_has_is_left_out(results):
    full = results.shift["shift_both-full"]
    assert shift_tables.mean_at(full, 3, "drop-1").setting == "drop-1"
    assert shift_tables.mean_at(full, 3, "drop-2") is None
    sets = [one for one in full.sets if one.severity == 3]
    ats = [next(at for at in one.at if at.setting == "drop-1") for one in sets]
    repaired = sum(at.top1 - one.top1[0] for one, at in zip(sets, ats))
    continuing = sum(at.exit_shares[1] for at in ats)
    assert shift_tables.refined_gain(full, 3, "drop-1") == pytest.approx(repaired / continuing)
    with pytest.raises(ValueError, match="has no setting drop-2 at severity 3"):
        shift_tables.refined_gain(full, 3, "drop-2")
    assert shift_tables.mean_at(results.shift["shift_both-plain"], 3, "drop-1") is None


def test_words_go_left_numbers_right_and_empty_columns_are_left_out():
    made = tables.table("t", ["<name", "n", "never"], [["x|y", "1", None], ["z", None, None]])
    assert made == "t\n\n| name | n |\n| --- | ---: |\n| x\\|y | 1 |\n| z | – |\n"
    assert tables.folded(made).startswith("<details><summary>t</summary>\n\n| name | n |\n")
    assert tables.folded(made).endswith("| z | – |\n\n</details>")


def test_how_numbers_are_written():
    assert percent(-0.00001) == "0.0"
    assert signed(-0.0001) == "0.0"
    assert signed(-0.012) == "−1.2"
    assert interval(Difference(mean=0.004, lowest=-0.003, highest=0.011)) == "+0.4 (−0.3 to +1.1)"
    small = Difference(mean=-0.01234, lowest=-0.02, highest=0.00001)
    assert interval(small, 4, scale=1) == "−0.0123 (−0.0200 to 0.0000)"
    assert tables.gmacs(0.00123) == "0.00123"
    assert tables.each([0.5, 0.25], " / ") == "50.0 / 25.0"
