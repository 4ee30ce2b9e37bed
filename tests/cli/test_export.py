import json

import pytest
import torch

import progresvit
from progresvit.engine.export.manifest import Manifest
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.model import ProgResViT
from tests.commands import refused, works
from tests.factories import digits_config, setting_of

pytestmark = pytest.mark.usefixtures("graphs_once")


@pytest.fixture(scope="module")
def folder(randomize, tmp_path_factory):
    torch.manual_seed(0)
    return progresvit.save(randomize(ProgResViT(digits_config())), tmp_path_factory.mktemp("model") / "model")


@pytest.mark.slow
def test_export_writes_graphs_that_run(folder, tmp_path):
    output = works("export", folder, "--format", "onnx", "--out", tmp_path / "out", "--threshold", "0.4")
    assert "round1.onnx, round2.onnx, export.json" in output
    assert GraphRounds(tmp_path / "out", threads=1).manifest.threshold == 0.4


@pytest.mark.slow
def test_export_in_int8_shows_what_it_costs(folder, digits, tmp_path):
    output = works(
        *("export", folder, "--out", tmp_path / "out", "--threshold", "0.9", "--int8", "--data", digits),
        *("--workers", 0, "--temperatures", "1.5,2"),
    )
    for text in ("int8 beside fp32 on 24 images", "top-1 int8", "same answer", "same exit", "round 2", "routed"):
        assert text in output
    report = json.loads((tmp_path / "out" / "export.json").read_text())["int8"]
    assert report["images"] == 24
    assert report["data"] == f"{digits} (val)"
    assert Manifest.read(tmp_path / "out").temperatures == (1.5, 2.0)


def test_a_setting_of_another_model_is_refused(folder, tmp_path):
    setting_of(progresvit.load(folder), weights_sha256="x").save(tmp_path / "setting.json")
    words = ("export", folder, "--out", tmp_path / "out", "--threshold", tmp_path / "setting.json")
    refused("for a model with other weights", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_export_contains_the_default_setting_of_the_model_or_the_named_one(folder, tmp_path):
    model = progresvit.load(folder)
    own = progresvit.save(model, tmp_path / "model")
    (own / "settings").mkdir()
    for name, threshold in (("near-lossless", 0.4), ("quick", 0.8)):
        setting_of(model, threshold=threshold).save(own / "settings" / f"{name}.json")
    for options, threshold in (((), 0.4), (("--threshold", "quick"), 0.8)):
        assert "note:" not in works("export", own, "--out", tmp_path / "out", *options)
        assert progresvit.Engine(tmp_path / "out").policy.thresholds == (threshold,)


@pytest.mark.slow
def test_a_wrong_argument_is_one_line_and_exit_code_two(folder, digits, tmp_path):
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "thesis.tex").touch()
    out = ("--out", tmp_path / "out")
    for arguments, remedy in (
        ((folder, *out, "--int8"), "give images with --data"),
        ((folder, *out, "--data", digits), "give both"),
        ((folder, *out, "--int8", "--data", tmp_path / "nowhere"), "there is no data at"),
        ((folder, *out, "--format", "tflite"), "choose one of onnx, openvino"),
        ((folder, *out, "--threshold", "low"), "has no setting 'low'"),
        ((folder, *out, "--threshold", tmp_path / "none.json"), "there is no setting at"),
        ((folder, *out, "--threshold", "0.1,0.2"), "so 1 for 2 rounds"),
        ((folder, "--out", tmp_path / "busy"), "give a new folder"),
        ((tmp_path / "nowhere", *out), "no model folder"),
        (("progresvit_tiny_160_224", *out), "no model folder"),
    ):
        refused(remedy, "export", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["busy"]
