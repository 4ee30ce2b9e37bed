"""An export where commands take a model: info, bench, evaluate, calibrate, and its own settings in classify."""

import json
import re
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.data.dataset import find_images
from progresvit.data.trained_on import save_splits, save_training_list
from progresvit.engine import Engine, measurement
from progresvit.engine.export.export import export
from progresvit.engine.export.int8 import Int8Check
from progresvit.engine.export.manifest import Manifest
from progresvit.evaluation import read_records
from progresvit.io.extras import not_installed
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from progresvit.routing import SettingWarning, load_setting
from tests.commands import refused, run, works
from tests.factories import digits_config, tiny_config

pytestmark = [pytest.mark.usefixtures("graphs_once"), pytest.mark.slow]
OWN_IMAGES = Path(__file__).parents[2] / "docs" / "own_images.md"
PLAIN = ("--workers", 0)


@pytest.fixture(scope="module")
def folder(randomize, digits, tmp_path_factory):
    """A model with two settings and a table of budgets."""
    torch.manual_seed(0)
    made = progresvit.save(randomize(ProgResViT(digits_config())), tmp_path_factory.mktemp("model") / "model")
    records = made.parent / "records.parquet"
    works("evaluate", made, "--data", digits, "--out", records, *PLAIN)
    for name, share in (("near-lossless", 0.5), ("drop-1", 0.75)):
        works("calibrate", records, "--exit-share", share, "--out", made / "settings" / f"{name}.json")
    works("calibrate", records, "--budgets", "--out", made / "budgets.json")
    return made


@pytest.fixture(scope="module")
def exported(folder, graphs_once):
    works("export", folder, "--out", folder.parent / "fp32")
    return folder.parent / "fp32"


@pytest.fixture(scope="module")
def int8(folder, digits, graphs_once):
    dataset = find_images(digits, "val")
    check = Int8Check(dataset=dataset, labels=dataset.targets, threads=1)
    with pytest.warns(SettingWarning, match="other precision"):
        export(
            progresvit.load(folder),
            folder.parent / "int8",
            threshold=load_setting(folder / "settings" / "near-lossless.json"),
            int8=check,
            settings_from=folder,
        )
    return folder.parent / "int8"


@contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def copy_of_int8(int8, tmp_path):
    return shutil.copytree(int8, tmp_path / "export")


def test_an_export_has_all_settings_and_budgets_of_its_model(folder, exported, digits):
    for name in ("settings/near-lossless.json", "settings/drop-1.json", "budgets.json"):
        assert (exported / name).read_bytes() == (folder / name).read_bytes()
    first, last = progresvit.compute.cumulative_gmacs(progresvit.load(folder).config)
    with no_warnings():
        assert Engine(exported).setting == load_setting(folder / "settings" / "near-lossless.json")
        assert Engine(exported, "drop-1").setting == load_setting(folder / "settings" / "drop-1.json")
        engine = Engine(exported, budget_gmacs=(first + last) / 2)
    spent = [prediction.gmacs for prediction in engine.classify(sorted((digits / "val").rglob("*.png")))]
    assert first < np.mean(spent) <= (first + last) / 2 + 1e-9
    works("classify", digits / "val", "--model", exported, "--threshold", "drop-1")
    works("classify", digits / "val", "--model", exported, "--budget-gmacs", (first + last) / 2)
    message = "has no setting 'drop-2' (it has drop-1, near-lossless)"
    refused(message, "classify", digits / "val", "--model", exported, "--threshold", "drop-2")


def test_settings_and_budgets_for_another_precision_warn_in_an_int8_export(folder, int8):
    full = progresvit.compute.cumulative_gmacs(progresvit.load(folder).config)[1]
    for options in ({}, {"threshold": "drop-1"}, {"budget_gmacs": full}):
        with pytest.warns(SettingWarning, match="other precision"):
            Engine(int8, **options)


def test_evaluating_an_export_gives_the_records_of_its_model(folder, exported, digits, tmp_path):
    model, graphs = (tmp_path / f"{name}.parquet" for name in ("model", "graphs"))
    works("evaluate", folder, "--data", digits, "--out", model, *PLAIN)
    works("evaluate", exported, "--data", digits, "--out", graphs, *PLAIN)
    expected, records = read_records(model), read_records(graphs)
    assert records.header.weights_sha256 == expected.header.weights_sha256 == weights_hash(progresvit.load(folder))
    assert records.header.preprocessing_sha256 == expected.header.preprocessing_sha256
    assert (records.header.precision, records.header.backend, records.header.device) == ("fp32", "onnxruntime", "cpu")
    assert expected.header.backend is None
    assert records.gmacs() == expected.gmacs()
    assert records.predictions.tolist() == expected.predictions.tolist()
    assert np.abs(records.top10_entropy - expected.top10_entropy).max() <= 1e-4
    openvino = tmp_path / "openvino.parquet"
    works("evaluate", exported, "--backend", "openvino", "--data", digits, "--out", openvino, *PLAIN)
    assert read_records(openvino).header.backend == "openvino"
    assert np.abs(read_records(openvino).top10_entropy - expected.top10_entropy).max() <= 1e-4


def test_int8_gets_a_certificate_of_its_own_which_its_engine_takes_in_silence(copy_of_int8, digits, tmp_path):
    records, setting = tmp_path / "int8.parquet", tmp_path / "setting.json"
    works("evaluate", copy_of_int8, "--data", digits, "--out", records, *PLAIN)
    header = read_records(records).header
    assert (header.precision, header.backend) == ("int8", "onnxruntime")
    certify = ("calibrate", records, "--max-drop", 0.5, "--unlabelled", "--out")
    works(*certify, setting)
    assert load_setting(setting).precision == "int8"
    works(*certify, copy_of_int8 / "settings" / "certified.json")
    works("calibrate", records, "--exit-share", 0.25, "--out", copy_of_int8 / "settings" / "near-lossless.json")
    with no_warnings():
        assert Engine(copy_of_int8, setting).setting.epsilon == 0.5
        assert Engine(copy_of_int8, "certified").setting.rule == "guarantee"
        assert Engine(copy_of_int8).setting.expected["exit_shares"] == [0.25, 0.75]  # the default, calibrated again
    output = works("classify", digits / "val", "--model", copy_of_int8, "--threshold", "certified")
    assert "note:" not in output


def test_bf16_gets_a_setting_of_its_own_too(exported, digits, tmp_path):
    bf16 = {"backend": "openvino", "precision": "bf16"}
    try:
        Engine(exported, 0.5, **bf16)
    except ValueError as error:  # a CPU without bf16
        pytest.skip(str(error))
    records, setting = tmp_path / "bf16.parquet", tmp_path / "setting.json"
    words = ("--backend", "openvino", "--precision", "bf16", "--data", digits, *PLAIN)
    works("evaluate", exported, *words, "--out", records)
    assert (read_records(records).header.precision, read_records(records).header.backend) == ("bf16", "openvino")
    works("calibrate", records, "--exit-share", 0.5, "--out", setting)
    with no_warnings():
        Engine(exported, setting, **bf16)
    with pytest.warns(SettingWarning, match="other precision"):
        Engine(exported, setting)


def test_a_certificate_for_one_backend_does_not_hold_for_another_in_int8(copy_of_int8, digits, tmp_path):
    records, certified = tmp_path / "int8.parquet", copy_of_int8 / "settings" / "certified.json"
    works("evaluate", copy_of_int8, "--data", digits, "--out", records, *PLAIN)
    works("calibrate", records, "--max-drop", 0.5, "--unlabelled", "--out", certified)
    works("calibrate", records, "--budgets", "--out", copy_of_int8 / "budgets.json")
    assert load_setting(certified).backend == "onnxruntime"
    with pytest.warns(SettingWarning, match="other backend: the certificate does not hold here"):
        Engine(copy_of_int8, "certified", backend="openvino")
    with pytest.warns(SettingWarning, match="other backend: expect other results"):
        Engine(copy_of_int8, budget_gmacs=Engine(copy_of_int8, 0.5).gmacs[-1], backend="openvino")
    output = works(
        *("classify", digits / "val", "--model", copy_of_int8, "--backend", "openvino", "--threshold", "certified")
    )
    assert "note: the threshold was calibrated with other backend" in output
    other = tmp_path / "openvino.parquet"
    works("evaluate", copy_of_int8, "--backend", "openvino", "--data", digits, "--out", other, *PLAIN)
    assert "other backend" in works("frontier", other, "--setting", certified)
    assert "note:" not in works("frontier", records, "--setting", certified)


@pytest.mark.long
def test_openvinos_own_int8_is_measured_on_other_images_than_gave_its_ranges(folder, int8, digits, tmp_path):
    pytest.importorskip("nncf")
    target = tmp_path / "openvino"
    output = works("export", folder, "--format", "openvino", "--int8", "--data", digits, "--out", target, *PLAIN)
    assert "int8 beside fp32 on 12 images" in output
    assert "note: the threshold was calibrated with other precision" in output
    assert "note: the ranges of int8 come from 12 images instead of 300" in output
    assert "give 600 images or more" in output
    manifest = Manifest.read(target)
    assert (manifest.precision, manifest.kind) == ("int8", "openvino")
    assert (manifest.int8["calibration_images"], manifest.int8["images"]) == (12, 12)
    assert all(row["same_answer"] > 0.5 for row in manifest.int8["rounds"])  # of a model with random weights
    assert 'element_type="i8"' in (target / "round2.xml").read_text()
    records, certified = tmp_path / "int8.parquet", target / "settings" / "certified.json"
    works("evaluate", target, "--data", digits, "--out", records, *PLAIN)
    header = read_records(records).header
    assert (header.precision, header.backend, header.graphs_sha256) == ("int8", "openvino", manifest.graphs_sha256)
    works("calibrate", records, "--max-drop", 0.5, "--unlabelled", "--out", certified)
    with no_warnings():
        engine = Engine(target, "certified")
    assert engine.identity()["graphs"] == manifest.graphs_sha256
    paths = sorted((digits / "val").rglob("*.png"))
    for path, batched in zip(paths[:3], engine.classify(paths)):  # static ranges do not depend on the batch
        assert engine.classify([path])[0].entropy == pytest.approx(batched.entropy, abs=1e-4)
    with pytest.warns(SettingWarning, match="other graphs: the certificate does not hold here"):
        Engine(int8, certified, backend="openvino")
    settings = json.loads(works("info", target, "--json"))["settings"]
    assert [settings[0][key] for key in ("name", "certified", "note")] == ["certified", True, None]


def test_the_engine_exits_as_the_records_of_an_int8_export_say(copy_of_int8, digits, tmp_path):
    records = tmp_path / "int8.parquet"
    works("evaluate", copy_of_int8, "--data", digits, "--out", records, *PLAIN)
    works("calibrate", records, "--exit-share", 0.5, "--out", tmp_path / "half.json")
    table = read_records(records)
    engine = Engine(copy_of_int8, tmp_path / "half.json")
    answers = engine.classify([digits / name for name in table.ids])
    assert [answer.exit_round for answer in answers].count(1) == 12
    first = [number for number, answer in enumerate(answers) if answer.exit_round == 1]
    assert [answers[number].index for number in first] == table.predictions[first, 0].tolist()


def test_a_new_export_does_not_replace_settings_that_were_calibrated_on_the_old_one(folder, exported, tmp_path):
    target = shutil.copytree(exported, tmp_path / "export")
    works("export", folder, "--out", target)  # all settings are the model's
    (target / "settings" / "own.json").write_text("{}")
    refused("would be lost; move it away, or give a new folder", "export", folder, "--out", target)
    assert (target / "settings" / "own.json").exists()


def test_what_evaluation_cannot_do_with_an_export_is_refused(folder, exported, digits, tmp_path):
    words = ("--data", digits, "--out", tmp_path / "records.parquet", *PLAIN)
    refused("for models, and this is an export", "evaluate", exported, *words, "--task", "knn")
    refused("for models, and this is an export", "evaluate", exported, *words, "--merge", "1")
    refused("leave out --backend torch and --device cuda", "evaluate", exported, *words, "--device", "cuda")
    refused("progresvit export", "evaluate", folder, *words, "--backend", "openvino")
    refused("--backend openvino", "evaluate", exported, *words, "--precision", "bf16")
    assert not list(tmp_path.iterdir())


def test_calibrate_asks_for_the_records_of_an_export(exported, tmp_path):
    words = ("calibrate", exported, "--near-lossless", "--out", tmp_path / "t.json")
    refused("is a folder and not a file of records", *words)
    assert not list(tmp_path.iterdir())


def test_a_setting_of_an_export_without_one_becomes_its_default(model, digits, tmp_path):
    target = tmp_path / "export"
    works("export", model, "--out", target)
    command = ("classify", digits / "val", "--model", target)
    assert "note: every round runs, because" in works(*command)
    works("evaluate", target, "--data", digits, "--out", tmp_path / "r.parquet", *PLAIN)
    shown = works("calibrate", tmp_path / "r.parquet", "--near-lossless")
    assert f"use it by default: progresvit classify IMAGES --model {target}\n" in shown
    assert "calibrated by the rule near-lossless on 24 images" in works(*command)
    (row,) = json.loads(works("info", target, "--json"))["settings"]
    assert (row["name"], row["default"], row["note"]) == ("near-lossless", True, None)


def test_info_describes_an_export_and_its_settings(exported, int8):
    report = json.loads(works("info", exported, "--json"))
    assert report["export"]["kind"] == "onnx"
    assert report["export"]["settings"] == {"drop-1": None, "near-lossless": None}
    assert len(report["compute"]["paper"]["cumulative_gmacs"]) == 2
    output = works("info", int8)
    assert "Export: onnx, int8" in output
    assert re.search("drop-1 .* the threshold was calibrated with other precision", output)
    assert re.search("near-lossless .* default the threshold was", output)


def test_bench_measures_an_export_in_the_engine(exported, int8, monkeypatch):
    monkeypatch.setattr(measurement, "in_fresh_process", lambda function, *arguments: function(*arguments))
    quick = ("--seconds", 0, "--batch", 4, "--threads", 1)
    for model, options, name, precision in (
        (exported, ("--backend", "openvino"), "engine, openvino", "fp32"),
        (int8, ("--threshold", "inf"), "engine, onnxruntime", "int8"),
    ):
        row, every = json.loads(works("bench", model, *quick, *options, "--json"))["rows"]
        assert (row["name"], row["precision"]) == (name, precision)
        assert (every["name"], every["exit_shares"]) == ("engine, all rounds", [0, 1])
        assert row["images_per_s"] > 0
    assert "engine, onnxruntime" in works("bench", exported, *quick, "--threshold", "drop-1")


def test_an_export_of_another_version_is_one_line_with_the_remedy(exported, digits, tmp_path):
    newer = shutil.copytree(exported, tmp_path / "newer")
    manifest = json.loads((newer / "export.json").read_text())
    (newer / "export.json").write_text(json.dumps({**manifest, "version": 2, "rounds": {"from": "the future"}}))
    for command in (
        ("classify", digits / "val", "--model", newer),
        ("evaluate", newer, "--data", digits, "--out", tmp_path / "records.parquet"),
        ("info", newer),
        ("bench", newer),
    ):
        result = run(*command)
        assert result.exit_code == 2
        (line,) = result.output.strip().splitlines()
        assert "of version 2 and this library reads version 1; export the model again" in line


@pytest.mark.parametrize(("backend", "extra"), [("onnxruntime", "onnx"), ("openvino", "openvino")])
def test_a_missing_backend_is_named_before_the_model_is_opened(monkeypatch, digits, tmp_path, backend, extra):
    def fail(*_):
        raise AssertionError("the model was opened")

    monkeypatch.setattr("progresvit.api.load_with_folder", fail)
    for package in (backend, "onnxscript"):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            for command in (("classify", digits / "val"), ("bench", "nettewoof-tiny")):
                refused(not_installed(package, extra), *command, "--backend", backend)


def make_images(root):
    """Five classes of 40 images: a colour each, with noise."""
    rng = np.random.default_rng(0)
    for number, colour in enumerate(((200, 40, 40), (40, 200, 40), (40, 40, 200), (200, 200, 40), (40, 200, 200))):
        folder = root / f"class {number}"
        folder.mkdir(parents=True)
        for index in range(40):
            pixels = np.clip(np.array(colour) + rng.normal(0, 60, (40, 48, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.png")


@pytest.mark.long
def test_the_commands_of_the_page_lead_from_a_folder_of_images_to_a_certified_int8_export(
    randomize, tmp_path, monkeypatch
):
    config = tiny_config(depth=2, num_classes=5)
    start = progresvit.save(randomize(ProgResViT(config)), tmp_path / "start")
    monkeypatch.setattr("progresvit.io.model_folder.bundled_folder", lambda *_: start)  # a small model to start from
    monkeypatch.chdir(tmp_path)
    make_images(tmp_path / "images")
    section = OWN_IMAGES.read_text(encoding="utf-8").partition("## A certified int8 export")[2]
    lines = section.split("```")[1].strip().splitlines()
    printed = {}
    for line in lines:
        program, *words = line.split()
        assert program == "progresvit"
        printed[line] = works(*words)
    assert [line.split()[1] for line in lines] == [
        "train", "evaluate", "calibrate", "export", "evaluate", "calibrate", "info", "classify",
    ]  # fmt: skip
    certificates = [load_setting(f"{folder}/settings/certified.json") for folder in ("runs/own/model", "int8")]
    assert [setting.precision for setting in certificates] == ["fp32", "int8"]
    assert all((setting.n, setting.epsilon, setting.rule) == (40, 0.1, "guarantee") for setting in certificates)
    assert "the certificate does not hold here" in printed[lines[3]]
    assert "note: the threshold" not in printed[lines[-1]]
    with no_warnings():
        assert Engine("int8").setting == certificates[1]
    records = read_records("int8.parquet")
    assert (records.header.precision, len(records)) == ("int8", 40)
    assert records.correct[:, -1].mean() > 0.5  # five classes: it has learned
    assert Path("answers.parquet").is_file()


def test_an_export_knows_the_training_images_of_its_model(folder, digits, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    names = [entry.name for entry in find_images(digits, "val").entries]
    save_training_list(model, names[:5])
    save_splits(model, training=names[:5], validation=names, evaluations=3)
    for _ in range(2):  # the second replaces the first
        works("export", model, "--out", tmp_path / "exported")
    works("evaluate", tmp_path / "exported", "--data", digits, "--out", tmp_path / "r.parquet", *PLAIN)
    header = read_records(tmp_path / "r.parquet").header
    assert (header.training_images, header.evaluations) == (5, 3)
    refused("trained on 5 of these 24 images", "calibrate", tmp_path / "r.parquet", "--max-drop", 0.3)
