"""The long table of a study: what JSON files hold, in one file, without a change."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from repro import store
from repro.formats import read_measurement, to_json
from tests.repro.made import change
from tests.repro.made_dino import write_dino
from tests.repro.made_segmentation import write_segmentation

RESULTS = Path(__file__).parents[2] / "repro" / "results"


def texts(folder):
    return {path.stem: to_json(read_measurement(path)) for path in folder.glob("*.json")}


@pytest.fixture(params=["made", "tested", "frontier", "segmentation", "dino"])
def any_folder(request, tmp_path):
    """Results of every kind."""
    if request.param == "segmentation":
        return write_segmentation(tmp_path / "results")
    if request.param == "dino":
        return write_dino(tmp_path / "results", images=40, seeds=(1,))
    name = "frontier_folder" if request.param == "frontier" else request.param
    return shutil.copytree(request.getfixturevalue(name), tmp_path / "results")


def test_a_table_holds_every_measurement_without_a_change(any_folder):
    before = texts(any_folder)
    store.main([str(any_folder)])
    assert not list(any_folder.glob("*.json"))
    assert {name: to_json(one) for name, one in store.read_all(any_folder).items()} == before
    assert store.measured_names(any_folder) == set(before)


def test_a_table_that_holds_pixels_and_no_errors_is_read(tmp_path, monkeypatch):
    folder = write_segmentation(tmp_path / "results")
    before = texts(folder)
    monkeypatch.setattr(store, "_count_errors", lambda images: images)  # as earlier versions wrote it
    store.main([str(folder)])
    assert {name: to_json(one) for name, one in store.read_all(folder).items()} == before


def test_a_file_replaces_the_rows_of_its_name_and_moves_into_the_table(folder):
    kept = (folder / "full-1.json").read_text()
    store.main([str(folder)])
    (folder / "full-1.json").write_text(kept)
    change(folder / "full-1.json", lambda values: values.update(epochs=7))
    assert store.read_results(folder).runs["full-1"].epochs == 7
    store.main([str(folder)])
    assert store.read_table(folder)["full-1"].epochs == 7


def test_a_removed_measurement_is_measured_again(folder, capsys):
    store.main([str(folder), "--remove", "full-1"])
    assert "full-1" not in store.measured_names(folder)
    with pytest.raises(SystemExit, match="has no measurement full-1"):
        store.main([str(folder), "--remove", "full-1"])


def test_rows_are_named_by_metric_and_point(folder, capsys):
    before = {path.name for path in folder.iterdir()}
    store.main([str(folder), "--csv"])
    assert {path.name for path in folder.iterdir()} == before
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    by_name = {(row["name"], row["metric"], row["point"]): row for row in rows}
    routing = json.loads((folder / "routing.json").read_text())
    setting = by_name["routing", "settings[].point.top1", "1 drop-0.5"]
    assert float(setting["value"]) == routing["settings"][1]["point"]["top1"]
    harm = by_name["routing", "settings[].halves.harm", "1 drop-0.5"]
    assert [float(harm[end]) for end in ("value", "low", "high")] == [0.002, 0.001, 0.003]


def test_a_table_with_other_columns_is_refused(folder, monkeypatch):
    store.main([str(folder)])
    monkeypatch.setattr(store, "SCHEMA", store.SCHEMA.remove(3))
    with pytest.raises(ValueError, match=r"results\.parquet has other columns"):
        store.read_results(folder)
