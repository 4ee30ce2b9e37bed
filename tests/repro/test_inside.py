"""Numbers of docs/inside.md: collected from reports, and on the page as the results have them."""

import csv
import json
import re
from pathlib import Path

import pytest

from progresvit.analysis.page import INDEX
from progresvit.plots import COLUMN, render
from repro.inside import FIGURES, TABLES, collect, draw, main, parse
from repro.inside_figures import of_gates, of_tables
from repro.inside_tables import MODELS, Inside, read_reports, to_json

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "inside.md").read_text(encoding="utf-8")
RESULTS = read_reports(ROOT / "repro" / "inside.json")


def shown(row, measure="accuracy"):
    """A change as the page writes it, by another way than the page's."""
    texts = []
    for end in ("", "_low", "_high"):
        value = round(100 * row[f"{measure}_change{end}"], 2)
        texts.append(f"{value:+.2f}".replace("-", "−") if value else "0.00")
    return f"{texts[0]} ({texts[1]} to {texts[2]})"


def find(model, table, **wanted):
    (row,) = (row for row in RESULTS[model][table] if all(row[key] == value for key, value in wanted.items()))
    return row


def test_interventions_of_strength_zero_changed_nothing():
    for model in MODELS:
        untouched = RESULTS[model]["token-swap"][0]
        assert untouched["tokens"] == "none"
        for table in ("low-pass", "noise-replacement"):
            row = find(model, table, strength=0.0)
            assert row["accuracy_change"] == row["confidence_change"] == 0
            assert (row["accuracy"], row["images"]) == (untouched["accuracy"], untouched["images"])


def test_static_shares_of_the_page_follow_from_the_rows():
    for model in MODELS:
        for branch in ("attention", "MLP", "output"):
            rows = [row for row in RESULTS[model]["gate-depth"] if row["branch"] == branch and row["round"] == 1]
            static = sum(row["rms_static"] ** 2 for row in rows)
            total = static + sum(row["rms_difference_to_next_round"] ** 2 for row in rows) / 4
            largest = max(rows, key=lambda row: row["rms_difference_to_next_round"])
            cells = f"| {branch} | {100 * static / total:.1f} | {largest['block']} |"
            assert f"| {MODELS[model]} {cells}" in PAGE


def test_every_figure_of_the_page_is_there_and_no_other():
    named = set(re.findall(r"\(figures/inside/([\w.-]+)\)", PAGE))
    assert named == {path.name for path in FIGURES.glob("*.png")}
    assert len(named) >= 25


def test_reports_survive_the_file_and_those_of_earlier_versions_are_read(tmp_path):
    for text in (to_json(RESULTS), json.dumps(RESULTS)):
        (tmp_path / "inside.json").write_text(text)
        assert read_reports(tmp_path / "inside.json") == RESULTS


def test_exit_counts_are_of_all_images():
    for model in MODELS:
        images = RESULTS[model]["token-swap"][0]["images"]
        assert sum(row["images"] for row in RESULTS[model]["exits"]) == images
        counts = Inside().exit_counts(model, 1)
        right = sum(
            row["images"] for row in RESULTS[model]["exits"] if row["exit_round"] == 1 and row["correct_round1"]
        )
        assert counts["broken"] + counts["right"] == right


def titles(figure):
    """Everything above the panels, on one line, with plain spaces."""
    parts = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return " ".join(" ".join(parts).split())


def test_titles_of_the_figures_hold_the_numbers_of_the_page():
    for model in MODELS:
        drawn = of_tables(RESULTS[model])
        for name, strength in (("low-pass", 0.9), ("noise-replacement", 1.0)):
            change = 100 * find(model, name, strength=strength)["accuracy_change"]
            assert f"{abs(change):.2f} points (" in titles(drawn[name]())
        most = max(RESULTS[model]["token-swap"][1:], key=lambda row: abs(row["accuracy_change"]))
        assert shown(most).replace(" (", " points (", 1) in titles(drawn["token-swap"]())
        before = find(model, "similarity", tokens="class", round=1, block=12)["similarity"]
        after = find(model, "similarity", tokens="class", round=2, block=1)["similarity"]
        assert f"class token {before:.2f} → {after:.2f}" in titles(drawn["similarity"]())
        if "memory" in drawn:
            peak = find(model, "memory", way="engine", batch=512)["peak_gib"]
            assert f"–{peak:.2f} GiB, round by round" in titles(drawn["memory"]())
            assert "NVIDIA H200" in titles(drawn["memory"]())
            speed = find(model, "throughput-cpu", continuing=1.0)["images_per_s"]
            assert f"instead of {speed:.0f} images/s" in titles(drawn["throughput-cpu"]())


def test_legends_of_the_figures_name_each_thing_once_and_a_column_holds_them():
    for name, draw_figure in (of_tables(RESULTS["nettewoof-tiny"]) | of_gates("nettewoof-tiny")).items():
        figure = draw_figure()
        for legend in (legend for part in (figure, *figure.subfigs) for legend in part.legends):
            labels = [text.get_text() for text in legend.get_texts()]
            assert len(set(labels)) == len(labels), name
            prefixes = [label.split(": ")[0] for label in labels if ": " in label]
            assert len(set(prefixes)) == len(prefixes), name
        assert render(figure, ".pdf").startswith(b"%PDF")
        assert figure.get_size_inches()[0] == COLUMN, name
        figure.draw_without_rendering()
        for text in (text for axes in figure.axes for text in (axes.title, axes.xaxis.label)):
            box = text.get_window_extent()
            assert figure.bbox.x0 - 1 <= box.x0, (name, text.get_text())
            assert box.x1 <= figure.bbox.x1 + 1, (name, text.get_text())


def test_figures_are_drawn_again_from_the_results_without_reports(tmp_path):
    draw("from-scratch", RESULTS["from-scratch"], None, tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    of_all = ("token-swap", "noise-replacement", "low-pass", "similarity")  # trajectories show tokens
    assert made == {f"{name}_from-scratch.png" for name in of_all}


@pytest.fixture
def report(tmp_path):
    """A report with tables of one or two rows."""
    tables = {
        "exits": [
            {"id": "a", "exit_round": 1, "correct_round1": True, "correct_round2": True},
            {"id": "b", "exit_round": 2, "correct_round1": False, "correct_round2": True},
            {"id": "c", "exit_round": 2, "correct_round1": False, "correct_round2": True},
        ],
        "trajectories": [
            {"class": name, "round": 1, "block": 0, "pc1": 0.5, "pc2": 1, "separation": 0.25} for name in ("x", "y")
        ],
        "gates": [
            {"round": 1, "branch": "attention", "multiplier": 3},
            {"round": 2, "branch": "fusion image", "multiplier": 1},
            {"round": 2, "branch": "fusion previous", "multiplier": 0.5},
            {"round": 2, "branch": "fusion previous", "multiplier": 0.25},
        ],
        "low-pass": [{"strength": 0.9, "accuracy": 0.123456789, "accuracy_change": ""}],
    }
    folder = tmp_path / "reports" / "nettewoof-tiny"
    folder.mkdir(parents=True)
    (folder / INDEX).write_text("<h1>x</h1><p>3 images of 2 classes from a &amp; b.</p>\n<p>CPU, today.</p><p>text</p>")
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder


def test_a_report_is_collected_into_few_numbers(report):
    found = collect(report)
    assert found["about"] == ["3 images of 2 classes from a & b.", "CPU, today."]
    assert found["exits"] == [
        {"exit_round": 1, "correct_round1": True, "correct_round2": True, "images": 1},
        {"exit_round": 2, "correct_round1": False, "correct_round2": True, "images": 2},
    ]
    assert found["trajectories"] == [{"round": 1, "block": 0, "separation": 0.25}]
    assert found["low-pass"] == [{"strength": 0.9, "accuracy": 0.123457, "accuracy_change": None}]
    assert found["fusion-gates"] == [
        {"round": 2, "stream": "image", "mean": 1},
        {"round": 2, "stream": "previous", "mean": 0.375},
    ]
    assert set(found) - {"about", "fusion-gates"} < set(TABLES)
    assert [parse(text) for text in ("12", "1.0", "True", "", "tench", "inf")] == [12, 1.0, True, None, "tench", "inf"]


def test_missing_reports_and_results_are_refused(report, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(report.parent)])
    assert "no report of imagenet-tiny, from-scratch" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"run repro/inside\.py"):
        Inside(tmp_path / "none.json")
    (tmp_path / "some.json").write_text('{"nettewoof-tiny": {}}')
    with pytest.raises(ValueError, match="no results of imagenet-tiny, from-scratch"):
        Inside(tmp_path / "some.json")
    with pytest.raises(ValueError, match="has 0 rows with"):
        Inside().row("imagenet-tiny", "low-pass", strength=3)
