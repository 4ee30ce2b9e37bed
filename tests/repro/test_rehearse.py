"""The rehearsal: the whole paper at toy size, from generated images to a page without gaps."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from progresvit.analysis.registry import DIAGNOSTICS
from repro import rehearse
from repro.store import read_all
from repro.study import entries_of, load_study, read_study

REPRO = Path(__file__).parents[2] / "repro"
STARTS = {name: Path("toys") / name for name in rehearse.TOYS}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The study of the rehearsal."""
    file = tmp_path_factory.mktemp("toy") / "study.yaml"
    values = yaml.safe_load((REPRO / "runs" / "paper.yaml").read_text(encoding="utf-8"))
    toy = rehearse.toy_study(read_study("paper"), values, STARTS)
    file.write_text(yaml.safe_dump(toy, sort_keys=False), encoding="utf-8")
    return load_study(file)


def test_the_toy_study_has_every_entry_of_the_paper(toy):
    paper = load_study("paper")
    assert [entry.name for entry in entries_of(toy)] == [entry.name for entry in entries_of(paper)]
    for plans in ("comparisons", "frontiers", "segmentation"):
        assert getattr(toy, plans) == getattr(paper, plans)


def test_toy_models_keep_rounds_tasks_and_starts(toy):
    paper = load_study("paper")
    for run in paper.runs:
        ours, real = toy.load_recipe_of(run), paper.load_recipe_of(run)
        assert (ours.task, ours.model.kind, ours.model.psg) == (real.task, real.model.kind, real.model.psg)
        assert (ours.model.start is None) == (real.model.start is None), run
        assert ours.model.start not in rehearse.TOYS, run  # nothing is downloaded
        assert ours.schedule.epochs <= 2


@pytest.mark.parametrize(
    ("text", "gap"),
    [
        ("Not measured: ours.", "Not measured: ours."),
        ('<img src="figures/none.png" width="640">', "figures/none.png is missing"),
        ("| ours | nan |", "no number: | ours | nan |"),
    ],
)
def test_a_page_with_a_gap_is_not_complete(tmp_path, text, gap):
    assert list(rehearse.gaps(tmp_path, f"All 1.2.\n\n{text}\n")) == [gap]


def test_a_complete_page_has_no_gap(tmp_path):
    (tmp_path / "a.png").touch()
    assert not list(rehearse.gaps(tmp_path, '| a | 1 |\n\n<img src="a.png">'))


@pytest.mark.long
def test_the_whole_paper_runs_at_toy_size(tmp_path):
    words = [sys.executable, REPRO / "rehearse.py", tmp_path / "rehearsal"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results = tmp_path / "rehearsal" / "runs" / "results"
    study = load_study(results / "study.yaml")
    assert set(read_all(results)) == {entry.name for entry in entries_of(study)}
    text = (results / "results.md").read_text(encoding="utf-8")
    plans = [*study.comparisons.values(), *study.frontiers.values(), *study.commands.values(), study.segmentation]
    assert all(f"## {plan.title}" in text for plan in plans)
    assert not list(rehearse.gaps(results, text))
    inside = {path.stem for path in (results / "files" / "inside-192-240").glob("*.png")}
    assert inside == DIAGNOSTICS.keys() - {"memory"}  # of a GPU


@pytest.mark.parametrize("names", [["data"], ["study.yaml", "psg-1.json"]])
def test_a_folder_of_other_files_is_refused_and_kept(names, tmp_path, capsys):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(SystemExit):
        rehearse.main([str(tmp_path)])
    assert "holds other files than those of a rehearsal; name a new folder" in capsys.readouterr().err
    assert all((tmp_path / name).exists() for name in names)
