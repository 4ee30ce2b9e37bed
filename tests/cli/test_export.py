import json

import pytest
import torch
from typer.testing import CliRunner

import progresvit
from progresvit.cli import app
from progresvit.engine.export.manifest import Manifest
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.model import ProgResViT
from tests.factories import setting_of

pytestmark = pytest.mark.usefixtures("graphs_once")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(randomize, tmp_path_factory):
    torch.manual_seed(0)
    config = progresvit.ModelConfig(
        rounds=progresvit.make_rounds([16, 32], [1, 2]),
        heads=2,
        depth=1,
        patch_size=8,
        num_classes=4,
        class_ids=tuple("0123"),
    )
    return progresvit.save(randomize(ProgResViT(config)), tmp_path_factory.mktemp("model") / "model")


@pytest.mark.slow
def test_export_writes_graphs_that_run(folder, tmp_path):
    done = run("export", folder, "--format", "onnx", "--out", tmp_path / "out", "--threshold", "0.4")
    assert done.exit_code == 0, done.output
    assert "round1.onnx, round2.onnx, export.json" in done.stdout
    assert GraphRounds(tmp_path / "out", threads=1).manifest.threshold == 0.4


@pytest.mark.slow
def test_export_in_int8_shows_what_it_costs(folder, digits, tmp_path):
    done = run(
        *("export", folder, "--out", tmp_path / "out", "--threshold", "0.9", "--int8", "--data", digits),
        *("--workers", 0, "--temperatures", "1.5,2"),
    )
    assert done.exit_code == 0, done.output
    for text in ("int8 beside fp32 on 24 images", "top-1 int8", "same answer", "same exit", "round 2", "routed"):
        assert text in done.stdout
    report = json.loads((tmp_path / "out" / "export.json").read_text())["int8"]
    assert report["images"] == 24
    assert report["data"] == f"{digits} (val)"
    assert Manifest.read(tmp_path / "out").temperatures == (1.5, 2.0)


def test_a_setting_of_another_model_is_refused(folder, tmp_path):
    from progresvit.routing import Setting

    setting = Setting(
        rule="budget", threshold=0.3, rounds=2, weights_sha256="x", preprocessing_sha256="y", precision="fp32", n=1
    )
    setting.save(tmp_path / "setting.json")
    done = run("export", folder, "--out", tmp_path / "out", "--threshold", tmp_path / "setting.json")
    assert done.exit_code == 2
    assert "for a model with other weights" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_export_takes_the_models_own_setting_along_unless_another_is_asked_for(folder, tmp_path):
    model = progresvit.load(folder)
    own = progresvit.save(model, tmp_path / "model")
    (own / "settings").mkdir()
    for name, threshold in (("near-lossless", 0.4), ("quick", 0.8)):
        setting_of(model, threshold=threshold).save(own / "settings" / f"{name}.json")
    for options, threshold in (((), 0.4), (("--threshold", "quick"), 0.8)):
        done = run("export", own, "--out", tmp_path / "out", *options)
        assert done.exit_code == 0, done.output
        assert "note:" not in done.stderr
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
        result = run("export", *arguments)
        assert result.exit_code == 2, arguments
        assert result.stderr.startswith("error: "), arguments
        assert remedy in result.stderr, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["busy"]
