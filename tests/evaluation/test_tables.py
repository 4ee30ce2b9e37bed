import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from progresvit.analysis.routing_figures import frontier_figure
from progresvit.compute import CONVENTIONS, cumulative_gmacs
from progresvit.config import preset
from progresvit.evaluation import frontier_table, matched_table
from progresvit.metrics.interval import share_interval
from progresvit.routing import fit_router, near_lossless
from progresvit.table import Column, Table, check_outputs
from tests.evaluation.made import make_logits, make_records


def papers(count=1000):
    """Records of the paper's 192->240 model in which image i is the i-th surest."""
    records = make_records(count)
    model = preset("progresvit_small_192_240")
    gmacs = {convention: cumulative_gmacs(model, convention) for convention in CONVENTIONS}
    header = replace(records.header, config=model.to_dict(), gmacs=gmacs)
    entropy = records.top10_entropy.copy()
    entropy[:, 0] = np.arange(count, dtype=np.float32) / count
    return replace(records, header=header, top10_entropy=entropy)


def test_the_table_holds_both_conventions_and_the_near_lossless_point():
    records = papers()
    table = frontier_table({"m": records}, [0.0, 0.4, 5.0])
    first, middle, last, best = table.rows
    assert [round(row["gmacs_paper"], 3) for row in (first, last)] == [6.267, 0.912]
    assert [round(row["gmacs_executed"], 3) for row in (first, last)] == [6.241, 0.888]
    assert middle["exit_share_1"] == pytest.approx(0.4)
    assert middle["gmacs_paper"] == pytest.approx(0.4 * 0.912 + 0.6 * 6.267, abs=1e-3)
    rows = np.arange(1000) < 400
    assert middle["top1"] == np.where(rows, records.correct[:, 0], records.correct[:, 1]).mean()
    assert middle["top5"] == np.where(rows, records.correct5[:, 0], records.correct5[:, 1]).mean()
    interval = share_interval(round(1000 * middle["top1"]), 1000)
    assert (middle["top1_low"], middle["top1_high"]) == (interval.lowest, interval.highest)
    assert best["note"] == "near-lossless"
    assert best["threshold"] == near_lossless(records.top10_entropy, records.correct, records.gmacs()).threshold


def test_different_samples_of_the_same_data_are_not_compared():
    everything = make_records()
    some, others = (
        replace(everything, header=replace(everything.header, sample={"images": 400, "of": 900, "seed": seed}))
        for seed in (0, 1)
    )
    other_data = replace(everything, ids=np.char.add("other/", everything.ids))
    frontier_table({"a": some, "b": some, "c": other_data}, [0.5])
    same_path = replace(everything, header=replace(everything.header, data="/where/made"))
    for show in (frontier_table, frontier_figure):
        with pytest.raises(ValueError, match="on all images of /where/made, and made on a sample of 400"):
            show({"a": same_path, "b": some})
    no_image_in_common = replace(others, ids=other_data.ids)
    with pytest.raises(
        ValueError, match=r"a sample of 400 of 900 images \(seed 0\) of made, .* \(seed 1\) of made; .* limit"
    ):
        frontier_table({"a": some, "b": no_image_in_common}, [0.5])
    with pytest.raises(ValueError, match="on all images of made, and made on a sample of 400"):
        frontier_table({"a": everything, "b": some}, [0.5])


def test_the_papers_thresholds_are_the_default_and_three_rounds_may_have_one_each():
    three = make_records(rounds=3)
    assert [row["threshold"] for row in frontier_table({"m": three}).rows[:4]] == [0.0, 0.1, 0.2, 0.3]
    row = frontier_table({"m": three}, [[0.5, 1.5]]).rows[0]
    assert row["threshold"] == (0.5, 1.5)
    assert row["exit_share_1"] == (three.top10_entropy[:, 0] < 0.5).mean()
    with pytest.raises(ValueError, match="so 2 for 3 rounds, not 1"):
        frontier_table({"m": three}, [[0.5]])


def test_models_of_different_rounds_share_a_table(tmp_path):
    table = frontier_table({"two": make_records(), "three": make_records(rounds=3)}, [0.5])
    assert [row["model"] for row in table.rows[:4]] == ["two", "two", "three", "three"]
    assert {row["model"] for row in table.rows[4:]} == {"three"}
    assert table.rows[0]["exit_share_3"] is None
    heads, cells = table.cells()
    assert cells[0][heads.index("exit 3 (%)")] == "–"


def test_unlabelled_records_have_a_frontier_without_accuracy():
    table = frontier_table({"m": make_records(labelled=False)}, [0.0, 1.0])
    assert [row["top1"] for row in table.rows] == [row["top1_low"] for row in table.rows] == [None, None]
    assert "top-1 (%)" not in table.cells()[0]


def test_the_same_numbers_in_every_format(tmp_path):
    table = frontier_table({"m": papers()}, [0.0, 0.4])
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert float(rows[1]["top1"]) == table.rows[1]["top1"]
    assert json.loads(table.to_json())["rows"] == json.loads(json.dumps(table.rows))
    lines = table.to_markdown().splitlines()
    assert lines[2].startswith("| τ | top-1 (%) | 95 % from | to | top-5 (%) | GMACs (paper) | GMACs (executed) |")
    assert f"| {100 * table.rows[0]['top1']:.3f} |" in lines[4]
    latex = table.to_latex().splitlines()
    assert latex[5].startswith(r"$\tau$ & top-1 (\%) & 95 \% from & to & top-5 (\%) & GMACs (paper)")
    assert f"& {100 * table.rows[0]['top1']:.3f} &" in latex[7]
    with pytest.raises(ValueError, match="the suffix names the format"):
        check_outputs([tmp_path / "t.xlsx"])
    with pytest.raises(ValueError, match="the suffix names the format"):
        check_outputs([tmp_path / "t.png"], plots=False)


def test_at_matched_rates_the_papers_gmacs_come_out_and_the_ends_agree():
    records = papers()
    router = fit_router(records.statistics, records.correct, epochs=1)
    rows = matched_table(records, {"learned": router}).rows
    expected = [0.912, 1.447, 1.983, 2.518, 3.054, 3.590, 4.125, 4.661, 5.196, 5.732, 6.267]
    assert [round(row["gmacs_paper"], 3) for row in rows] == expected
    for row, share in ((rows[0], records.correct[:, 0].mean()), (rows[-1], records.correct[:, 1].mean())):
        assert row["entropy"] == row["learned"] == share
        assert row["learned_gain"] == 0
    refined = np.arange(1000) >= 700  # the least sure
    assert rows[3]["entropy"] == np.where(refined, records.correct[:, 1], records.correct[:, 0]).mean()


def test_a_router_that_can_tell_who_benefits_beats_entropy():
    """Half of the unsure images are beyond help, and their logits betray it, but not to entropy."""

    def made(seed):
        logits, labels = make_logits(3000, seed=seed)
        rng = np.random.default_rng(seed + 50)
        kind, rows = rng.integers(0, 3, 3000), np.arange(3000)  # easy, mendable, beyond help
        logits = rng.normal(0, 1, logits.shape)
        logits[0, rows[kind == 0], labels[kind == 0]] += 9
        logits[1, rows[kind < 2], labels[kind < 2]] += 9
        logits[:, kind == 2] += 5
        return make_records(3000, seed=seed, logits=logits)

    train, test = made(1), made(2)
    router = fit_router(train.statistics, train.correct)
    gains = [row["learned_gain"] for row in matched_table(test, {"learned": router}).rows]
    assert max(gains) > 0.1
    assert min(gains) > -0.02
    with pytest.raises(ValueError, match="for two rounds, and these records have 3"):
        matched_table(make_records(rounds=3), {"learned": router})


def test_an_infinite_threshold_is_valid_json():
    def refuse(word):
        raise AssertionError(word)

    text = frontier_table({"m": make_records(50)}, [0.0, float("inf")]).to_json()
    assert json.loads(text, parse_constant=refuse)["rows"][1]["threshold"] == "inf"


def test_latex_escapes_text_and_aligns_numbers_to_the_right():
    columns = [Column("name", "a_b", left=True), Column("share", "192→240 (%)")]
    table = Table(r"50 % of {x} \ & #1", columns, [{"name": "τ ≤ 1", "share": None}, {"name": "x^2~", "share": 3}])
    assert table.to_latex().splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{50 \% of \{x\} \textbackslash{} \& \#1}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a\_b & 192$\to$240 (\%) \\",
        r"\midrule",
        r"$\tau$ $\leq$ 1 & -- \\",
        r"x\textasciicircum{}2\textasciitilde{} & 3 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
