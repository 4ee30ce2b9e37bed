"""``progresvit calibrate`` without --out: a setting in the folder of the model, if the records are of it."""

import json
from dataclasses import replace

import pytest
import torch

import progresvit
from progresvit.evaluation import write_records
from progresvit.io.weights import weights_hash
from progresvit.io.weights_hash import hash_of_folder
from progresvit.routing import load_budgets, load_setting
from tests.commands import refused, run, works
from tests.evaluation.made import make_records


@pytest.fixture
def records(model, digits, tmp_path):
    out = tmp_path / "r.parquet"
    works("evaluate", model, "--data", digits, "--out", out, "--workers", 0, "--device", "cpu")
    return out


def test_a_setting_is_written_to_the_model_and_used_by_its_name(model, digits, records):
    output = works("calibrate", records, "--exit-share", 0.5)
    path = model / "settings" / "exit-0.5.json"
    assert f"wrote {path}\n" in output
    assert f"use it: progresvit classify IMAGES --model {model} --threshold exit-0.5" in output
    command = ("classify", digits / "val", "--model", model, "--device", "cpu")
    assert "12 after round 1" in works(*command, "--threshold", "exit-0.5")
    assert "note: every round runs" in works(*command)
    output = works("calibrate", records, "--near-lossless")
    assert f"use it by default: progresvit classify IMAGES --model {model}\n" in output
    assert "calibrated by the rule near-lossless on 24 images" in works(*command)
    low, high = progresvit.Engine(model).gmacs
    works("calibrate", records, "--max-drop", 0.5, "--confidence", 0.9)
    works("calibrate", records, "--near-lossless", "--ood-share", 0.05)
    works("calibrate", records, "--budget-gmacs", (low + high) / 2)
    works("calibrate", records, "--budgets")
    names = {path.stem for path in (model / "settings").iterdir()}
    budget = f"budget-{(low + high) / 2}"
    assert names == {"exit-0.5", "near-lossless", "near-lossless-ood-0.05", "drop-50-confidence-0.9", budget}
    assert load_budgets(model / "budgets.json").n == 24
    certified = "drop-50-confidence-0.9"
    assert "certified on 24 images" in works(*command, "--threshold", certified)
    assert repr(progresvit.Engine(model, certified)).endswith("(certified)>")
    assert "(replaced certified on 24 images, of 20" in works(
        "calibrate", records, "--max-drop", 0.5, "--confidence", 0.9
    )


def test_info_shows_the_settings_of_a_model_folder(model, records):
    assert json.loads(works("info", model, "--json"))["settings"] == []
    works("calibrate", records, "--near-lossless")
    path = model / "settings" / "near-lossless.json"
    load_setting(path).model_copy(update={"date": "2020-02-02T02:02:02", "chosen_on": "validation"}).save(path)
    works("calibrate", records, "--max-drop", 0.5)
    table = works("info", model)
    assert "2020-02-02T02:02 │ default" in table
    assert "24 validation" in table
    assert "certified" in table
    assert "replaced near-lossless on 24 validation images" in works("calibrate", records, "--near-lossless")
    certified, default = json.loads(works("info", model, "--json"))["settings"]
    assert (certified["name"], certified["certified"], certified["default"]) == ("drop-50", True, False)
    assert (default["name"], default["n"], default["default"], default["note"]) == ("near-lossless", 24, True, None)
    assert default["date"] == load_setting(path).date > "2021"
    path.write_text(path.read_text().replace('"n": 24', '"n": 25'))
    (model / "settings" / "drop-50.json").write_text("{")
    edited, other = json.loads(run("info", model, "--json").stdout)["settings"]
    assert "drop-50.json" in edited["note"]
    assert other["name"] == "near-lossless"


def test_records_of_another_model_are_calibrated_without_writing_to_the_folder(model, records, tmp_path):
    """The folder holds other weights now, is gone, or is a bundled model."""
    network = progresvit.load(model)
    with torch.no_grad():
        network.head.bias += 1
    progresvit.save(network, model)
    result = run("calibrate", records, "--exit-share", 0.5)
    assert json.loads(result.stdout)["rule"] == "exit-share"
    assert f"note: {model} has other weights than the model of these records" in result.stderr
    assert not (model / "settings").exists()
    model.rename(tmp_path / "elsewhere")
    result = run("calibrate", records, "--exit-share", 0.5)
    assert json.loads(result.stdout)["rule"] == "exit-share"
    assert "is not a folder on this machine" in result.stderr
    refused("is not a folder on this machine", "calibrate", records, "--budgets")
    of_bundled = make_records(100)
    of_bundled = replace(of_bundled, header=replace(of_bundled.header, model="imagenet-tiny"))
    write_records(of_bundled, tmp_path / "bundled.parquet")
    result = run("calibrate", tmp_path / "bundled.parquet", "--exit-share", 0.5)
    assert json.loads(result.stdout)["rule"] == "exit-share"
    assert "note: the model of these records, imagenet-tiny, is a bundled model, so the setting" in result.stderr


def test_a_certificate_is_not_replaced_by_a_setting_without_one(model, records):
    path = model / "settings" / "near-lossless.json"
    works("calibrate", records, "--max-drop", 0.5, "--out", path)
    before = path.read_bytes()
    refused("is certified on 24 images; use --out FILE.json for a setting that is not", "calibrate", records,
            "--near-lossless")  # fmt: skip
    assert path.read_bytes() == before


def test_records_that_say_little_about_new_images_are_only_printed(model, digits, records, tmp_path):
    corrupted = tmp_path / "c.parquet"
    works("evaluate", model, "--data", digits, "--corruption", "fog/5", "--out", corrupted, "--workers", 0,
          "--device", "cpu")  # fmt: skip
    assert "records of corrupted images (" in run("calibrate", corrupted, "--near-lossless").stderr
    (model / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert "are missing or cannot be compared" in run("calibrate", records, "--near-lossless").stderr
    assert not (model / "settings").exists()


def test_the_hash_of_a_folder_is_that_of_its_model(model):
    loaded = progresvit.load(model)
    assert hash_of_folder(model, loaded.config) == weights_hash(loaded)
    (model / "model.safetensors").write_bytes(b"torn")
    assert hash_of_folder(model, loaded.config) is None
