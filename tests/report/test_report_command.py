"""``progresvit report`` as a user types it, on good folders and bad ones, and on this repository's own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from progresvit.report.build import drawn_from
from tests.commands import refused, run, works
from tests.report.made import change, run_result, write_result

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def reported_once(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reported") / "results"
    shutil.copytree(made, folder)
    works("report", folder)
    return folder


@pytest.fixture
def reported(reported_once, tmp_path):
    """A results folder with its page and figures."""
    return shutil.copytree(reported_once, tmp_path / "results")


@pytest.mark.slow
def test_a_page_is_made_and_made_again_is_the_same(reported):
    page = (reported / "results.md").read_text()
    assert page.startswith("# A made-up study\n")
    names = sorted(path.name for path in (reported / "figures").iterdir())
    assert "construction-accuracy.png" in names
    assert all(f'src="figures/{name}"' in page for name in names)
    assert works("report", reported) == "12 of 12 files did not change\n"
    assert (reported / "results.md").read_text() == page
    assert "results.md and 11 figures are those of" in works("report", reported, "--check")


@pytest.mark.slow
def test_one_changed_figure_fails_the_check_which_writes_nothing(reported):
    change(reported / "routing.json", lambda values: values["settings"][0]["point"].update(top1=0.5))
    before = {path: path.read_bytes() for path in reported.rglob("*") if path.is_file()}
    result = run("report", reported, "--check")
    assert result.exit_code == 1, result.output
    assert "results routing.settings" in result.output
    assert "routing-settings.png is of other results" in result.output
    assert "construction" not in result.output
    assert {path: path.read_bytes() for path in reported.rglob("*") if path.is_file()} == before
    assert "results.md" in works("report", reported)
    works("report", reported, "--check")


@pytest.mark.slow
def test_changed_prose_is_kept_and_a_changed_table_is_not(reported):
    page = reported / "results.md"
    page.write_text(page.read_text().replace("## Construction", "## Building it up\n\nWords.") + "\nAn end.\n")
    works("report", reported, "--check")
    page.write_text(page.read_text().replace("| width only |", "| width mostly |"))
    assert "results construction" in run("report", reported, "--check").output
    works("report", reported)
    assert "| width only |" in page.read_text()
    assert "## Building it up\n\nWords." in page.read_text()
    assert page.read_text().endswith("\nAn end.\n")


@pytest.mark.slow
def test_a_missing_or_foreign_figure_fails_the_check(reported):
    path = reported / "figures" / "construction-accuracy.png"
    other = reported / "figures" / "construction-frontier.png"
    assert drawn_from(path) != drawn_from(other)
    path.write_bytes(other.read_bytes())
    assert "construction-accuracy.png is of other results" in run("report", reported, "--check").output
    path.write_bytes(b"no picture")
    assert "construction-accuracy.png is of other results" in run("report", reported, "--check").output
    path.unlink()
    assert "construction-accuracy.png is not there" in run("report", reported, "--check").output
    (reported / "results.md").unlink()
    assert "results.md is not there" in run("report", reported, "--check").output


def test_a_page_elsewhere_shows_the_blocks_that_it_asks_for(folder):
    (folder / "report.yaml").write_text("page: ../docs/page.md\nfigures: ../docs/figures/results\n")
    page = folder.parent / "docs" / "page.md"
    page.parent.mkdir()
    marked = "<!-- results: construction -->\n<!-- /results -->"
    page.write_text(f"# P\n\n{marked}\n\n<!-- fact: full.top1 --><!-- /fact --> %\n")
    output = works("report", folder)
    assert "not on the page: about, schedules" in output
    assert sorted(path.name for path in (page.parent / "figures" / "results").iterdir()) == [
        "construction-accuracy.png",
        "construction-frontier.png",
    ]
    assert 'src="figures/results/construction-accuracy.png"' in page.read_text()
    works("report", folder, "--check")


def test_claims_are_a_block(folder):
    claim = {"claim": "Good", "paper": "82.2 %", "measured": "{full.gmacs} GMACs", "verdict": "holds"}
    (folder / "claims.yaml").write_text(yaml.safe_dump([claim]))
    (folder / "results.md").write_text("<!-- results: claims -->\n<!-- /results -->\n")
    works("report", folder)
    assert "| Good | 82.2 % | 1.546 GMACs | **holds** |" in (folder / "results.md").read_text()


def test_what_is_wrong_is_one_line_and_nothing_is_written(folder, tmp_path):
    refused("there is no folder", "report", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("holds no results", "report", tmp_path / "empty")
    (folder / "results.md").write_text("<!-- results: constructoin -->\n<!-- /results -->\n")
    refused("results.md, line 1: there is no block 'constructoin'; did you mean construction?", "report", folder)
    (folder / "results.md").unlink()
    (folder / "report.yaml").write_text("pages: x.md\n")
    refused("report.yaml: pages is no key; it may say page: and figures:", "report", folder)
    (folder / "report.yaml").write_text("- x.md\n")
    refused("it may say page: and figures:", "report", folder)
    (folder / "report.yaml").write_text("{")
    refused("report.yaml is no YAML", "report", folder)
    (folder / "report.yaml").unlink()
    change(folder / "width-1.json", lambda values: values["data"].update(names="others"))
    refused("compares width-1 and width-2, which are of different data: the names of the pictures", "report", folder)
    write_result(folder, run_result("width", 1, 40))
    change(folder / "full-1.json", lambda values: values.pop("seed"))
    refused("full-1.json: the field seed is missing", "report", folder)
    write_result(folder, run_result("full", 1, 40))
    (folder / "full-1.json").rename(folder / "full-one.json")
    refused("full-one.json is called full-1 inside; rename the file full-1.json", "report", folder)
    (folder / "full-one.json").rename(folder / "full-1.json")
    (folder / "study.yaml").write_text("title: only\n")
    refused("study.yaml: data: Field required", "report", folder)
    (folder / "study.yaml").unlink()
    refused("has no study.yaml", "report", folder)
    assert not (folder / "results.md").exists()
    assert not (folder / "figures").exists()


def test_models_under_corruption_of_different_data_are_not_compared(folder):
    change(folder / "shift_both-plain.json", lambda values: values["data"].update(classes=5))
    refused("the shift measurement shift_both compares", "report", folder)


def test_the_page_of_this_repository_is_that_of_its_results():
    output = works("report", ROOT / "results", "--check")
    assert str(ROOT / "docs" / "results.md") in output


def test_a_report_needs_no_torch():
    asked = "import sys, progresvit.report.build; print([name for name in ('torch', 'timm') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
