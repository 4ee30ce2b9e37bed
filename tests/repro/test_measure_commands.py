"""Commands of a study: what they wrote becomes a results file, copies beside it, and a part of the page."""

import json

import pytest
import yaml
from PIL import Image

from repro.blocks import Page
from repro.measure.entries import check_earlier, measure_entry
from repro.store import read_all, write_table
from repro.study import Places, entries_of, load_study

STUDY = {
    "title": "made",
    "data": "nothing",
    "recipe": "digits",
    "commands": {
        "speed": {
            "title": "Speed",
            "words": "bench {model} --out {out}/speed.md",
            "rows": {"ours": "nettewoof-tiny", "theirs": "imagenet-tiny"},
            "tables": ["speed.md"],
        },
        "listed": {"title": "List", "words": "info nettewoof-tiny", "printed": True},
        "inside": {"title": "Inside", "words": "analyze all nettewoof-tiny --data {data} --out {out}"},
    },
}
TABLES = {
    "speed-ours": "Speed\n\n| what | images/s |\n| --- | ---: |\n| engine | 12 |\n| plain | 34 |\n\nA note.\n",
    "speed-theirs": "| what | images/s | τ |\n| --- | ---: | --- |\n| rounds | 56 | 0.2 |\n",
}


@pytest.fixture
def study(tmp_path):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY, sort_keys=False))
    return load_study(tmp_path / "study.yaml")


@pytest.fixture
def places(tmp_path):
    """A folder of runs in which all commands have run."""
    places = Places(data="D", runs=tmp_path / "runs")
    places.log("x").parent.mkdir(parents=True)
    for name in (*TABLES, "listed", "inside"):
        places.timings(name).write_text(json.dumps({"seconds": 2.5, "jobs": 1, "processes": 1}) + "\n")
        (places.made(name) / "records").mkdir(parents=True)
        (places.made(name) / "printed.txt").write_text("7 parameters\n")
        (places.made(name) / "all.parquet").touch()
    for name, text in TABLES.items():
        (places.made(name) / "speed.md").write_text(text)
    (places.made("inside") / "index.html").touch()
    Image.new("RGB", (4, 4)).save(places.made("inside") / "gates.png")
    return places


@pytest.fixture
def results(study, places, tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "study.yaml").write_text(study.to_yaml())
    write_table(folder, [measure_entry(study, entry, places, folder) for entry in entries_of(study)])
    return folder


def test_tables_and_figures_are_kept_without_records(results):
    measured = read_all(results)
    assert measured["speed-ours"].tables == {"speed.md": (("what", "images/s"), ("engine", "12"), ("plain", "34"))}
    assert measured["speed-ours"].commands == ("progresvit bench nettewoof-tiny --out RUNS/made/speed-ours/speed.md",)
    assert measured["speed-ours"].weights != measured["speed-theirs"].weights
    assert measured["listed"].printed == "7 parameters\n"
    assert measured["inside"].figures == ("gates.png",)
    kept = {path.relative_to(results / "files").as_posix() for path in (results / "files").rglob("*") if path.is_file()}
    assert {"speed-ours/speed.md", "inside/gates.png", "inside/index.html"} <= kept
    assert not any(name.endswith(".parquet") for name in kept)


def test_the_page_has_the_rows_of_all_models_and_the_figures(results):
    page = Page(results, {})
    table = page.command("speed")
    assert "| ours | engine | 12 | – |" in table or "| ours | engine | 12 |  |" in table
    assert "| theirs | rounds | 56 | 0.2 |" in table
    assert "```\n7 parameters\n```" in page.command("listed")
    assert 'src="files/inside/gates.png"' in page.command("inside")
    assert "(files/inside/index.html)" in page.command("inside")
    assert "speed-ours" in page.measurements()


def test_a_row_that_was_not_measured_is_named(results):
    write_table(results, [one for name, one in read_all(results).items() if name != "speed-theirs"])
    assert "Not measured: theirs." in Page(results, {}).command("speed")
    write_table(results, [one for name, one in read_all(results).items() if not name.startswith("speed")])
    assert Page(results, {}).command("speed") == "Not measured."


def test_a_command_without_its_table_is_not_measured(study, places, tmp_path):
    (places.made("speed-ours") / "speed.md").unlink()
    entry = next(entry for entry in entries_of(study) if entry.name == "speed-ours")
    with pytest.raises(ValueError, match=r"speed-ours wrote no speed\.md; .*speed-ours has printed\.txt"):
        measure_entry(study, entry, places, tmp_path)
    (places.made("inside") / "gates.png").unlink()
    entry = next(entry for entry in entries_of(study) if entry.name == "inside")
    with pytest.raises(ValueError, match=r"inside wrote no \*\.png"):
        measure_entry(study, entry, places, tmp_path)


def test_another_command_beside_those_results_is_refused(study, places, results):
    check_earlier(study, results, places)
    changed = study.commands["speed"].model_copy(update={"words": "bench {model} --batch 2 --out {out}/speed.md"})
    other = study.model_copy(update={"commands": study.commands | {"speed": changed}})
    with pytest.raises(ValueError, match=r"speed-ours.* made differently from what the study says .other commands."):
        check_earlier(other, results, places)
