"""The command as a user meets it: fast help, one line for an error, exit code 2 and no traceback."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

import progresvit
from progresvit.compute import RoundMacs
from tests.commands import refused, run, works
from tests.interop.authors import authors_state
from tests.interop.test_official import Trap


def run_process(*arguments, code="from progresvit.cli import app; app()"):
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.slow
def test_help_names_the_commands_and_imports_no_torch():
    code = """
import sys
from progresvit.cli import app
try:
    app()
finally:
    heavy = {"torch", "timm", "torchvision", "numpy", "huggingface_hub", "safetensors"} & set(sys.modules)
    print("imported:", sorted(heavy))
"""
    for arguments in (["--help"], ["info", "--help"], ["import-official", "--help"], ["--version"]):
        result = run_process(*arguments, code=code)
        assert result.returncode == 0, result.stderr
        assert "imported: []" in result.stdout
    assert "import-official" in run("--help").stdout
    assert run("--version").stdout.strip() == f"progresvit {progresvit.__version__}"


def test_info_of_a_preset_imports_no_torch():
    code = "import sys; from progresvit.cli import app\ntry: app()\nfinally: assert 'torch' not in sys.modules"
    result = run_process("info", "progresvit_small_192_240", code=code)
    assert result.returncode == 0, result.stderr
    for text in ("24,731,560", "0.912", "6.267", "0.888", "6.241", "paper", "executed"):
        assert text in result.stdout
    for component in fields(RoundMacs):
        assert component.name.replace("_", " ") in result.stdout


def test_info_as_json():
    report = json.loads(run("info", "progresvit_small_128_192_240", "--json").stdout)
    config = progresvit.preset("progresvit_small_128_192_240")
    assert report["parameters"] == 24_947_560
    assert [row["resolution"] for row in report["rounds"]] == [128, 192, 240]
    assert [row["tokens"] for row in report["rounds"]] == [65, 145, 226]
    assert progresvit.ModelConfig.from_dict(report["config"]) == config
    for convention in ("paper", "executed"):
        compute = report["compute"][convention]
        assert compute["cumulative_gmacs"] == progresvit.compute.cumulative_gmacs(config, convention)
        assert sum(macs["total"] for macs in compute["round_macs"]) / 1e9 == compute["cumulative_gmacs"][-1]
        for macs in compute["round_macs"]:
            assert macs.pop("total") == sum(macs.values())
            assert set(macs) == {field.name for field in fields(RoundMacs)}


def test_info_of_a_folder(small_model, tmp_path):
    progresvit.save(small_model, tmp_path / "model")
    report = json.loads(run("info", tmp_path / "model", "--json").stdout)
    assert report["parameters"] == sum(parameter.numel() for parameter in small_model.parameters())


@pytest.mark.parametrize(("name", "classes"), [("imagenet-tiny", 1000), ("nettewoof-tiny", 20), ("shipped", 20)])
def test_info_of_a_bundled_model(name, classes):
    report = json.loads(run("info", name, "--json").stdout)
    assert report["model"] == name
    assert report["config"]["num_classes"] == classes


def test_info_without_a_name_shows_the_default_model_and_lists_all_names():
    assert json.loads(run("info", "--json").stdout) == json.loads(run("info", "imagenet-tiny", "--json").stdout)
    shown = " ".join(run("info").stdout.split())
    assert shown.startswith("imagenet-tiny")
    assert "Bundled models: imagenet-tiny, nettewoof-tiny Presets: progresvit_small_192_240, " in shown


@pytest.mark.parametrize(
    "words",
    [
        ("info",), ("evaluate", "--data", ".", "--out", "r.parquet"), ("export", "--out", "x"), ("bench",),
        ("classify", "--samples", "--model"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_an_unknown_model_name_gets_the_nearest_bundled_name(words):
    refused("did you mean 'nettewoof-tiny'?", *words, "nettewof-tiny")


def test_info_of_an_authors_model_needs_no_network():
    report = json.loads(run("info", "NCPS/progresvit-deit-s-160-384-kd-imagenet1k", "--json").stdout)
    assert [row["resolution"] for row in report["rounds"]] == [160, 384]
    assert report["config"]["layer_scale"] == 1e-6


def test_import_official_writes_a_model_folder(tmp_path):
    state = authors_state(width=128, widths=[64, 128], depth=1, patch_size=16, grid=15, classes=5)
    torch.save({"state_dict_ema": state}, tmp_path / "checkpoint.pth.tar")
    output = works("import-official", tmp_path / "checkpoint.pth.tar", "--out", tmp_path / "model")
    assert "192" in output
    assert str(tmp_path / "model") in output
    assert progresvit.load(tmp_path / "model").config.resolution == 240
    arguments = ("--out", tmp_path / "other", "--resolutions", "160,240")
    works("import-official", tmp_path / "checkpoint.pth.tar", *arguments)
    assert progresvit.load(tmp_path / "other").config.rounds[0].resolution == 160


def test_a_wrong_argument_is_one_line_and_exit_code_two(tmp_path, small_model):
    folder = progresvit.save(small_model, tmp_path / "model")
    torch.save({"args": Trap(tmp_path / "sprung")}, tmp_path / "trap.pth")
    (folder / "config.json").write_text("{}")
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "thesis.tex").touch()
    state = authors_state(width=128, widths=[64, 128], depth=1, patch_size=16, grid=15, classes=5)
    torch.save(state, tmp_path / "good.pth")
    out = ("--out", tmp_path / "out")
    for arguments, remedy in (
        (("info", "progresvit_smal_192_240"), "progresvit_small_192_240"),
        (("info", tmp_path / "nowhere"), "no model folder"),
        (("info", folder), "lacks rounds"),
        (("info", tmp_path / "trap.pth"), "import-official"),
        (("import-official", tmp_path / "nothing.pth", *out), "there is no file"),
        (("import-official", tmp_path / "trap.pth", *out), "could run code"),
        (("import-official", tmp_path / "good.pth", *out, "--resolutions", "192;240"), "such as 192,240"),
        (("import-official", tmp_path / "good.pth", *out, "--resolutions", "192,230"), "the nearest are 224 and 240"),
        (("import-official", tmp_path / "good.pth", *out, "--resolutions", "128,192,240"), "one of each per round"),
        (("import-official", tmp_path / "good.pth", "--out", tmp_path / "busy"), "give a new folder"),
    ):
        refused(remedy, *arguments)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("arguments", [["bench"], ["inf"], ["info", "progresvit_tiny_160_224", "--jsn"]])
def test_misuse_is_exit_code_two(arguments):
    assert run(*arguments).exit_code == 2


def test_an_error_of_the_real_process_has_no_traceback():
    result = run_process("info", "progresvit_smal_192_240")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_reader_that_closes_the_pipe_causes_no_error_message():
    reading, writing = os.pipe()
    os.close(reading)  # nobody listens
    command = [sys.executable, "-m", "progresvit", "info", "progresvit_tiny_160_224", "--json"]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert result.stderr == ""


def test_info_prints_names_as_they_are_and_never_cuts_a_number(tmp_path, small_config):
    rounds = tuple(small_config.rounds[:1] * 12)
    model = progresvit.ProgResViT(small_config.replace(rounds=rounds))
    shown = run("info", progresvit.save(model, tmp_path / "m[v1][/bold]")).stdout
    assert "m[v1][/bold]" in shown
    assert "…" not in shown


@pytest.mark.slow
def test_train_is_refused_in_one_line_when_it_cannot_start(digits, tmp_path):
    out = ("--out", tmp_path / "out", "--device", "cpu")
    for arguments, remedy in (
        (("photos_tiny", "--data", tmp_path / "nowhere", *out), "there is no data at"),
        (("photos_tinny", "--data", digits, *out), "did you mean 'photos_tiny'"),
        (("photos_tiny", "--data", digits, *out, "--set", "optimizer.bacth=3"), "did you mean 'batch'"),
        (("photos_tiny", "--data", digits, *out), "larger than the dataset of 48 images"),
        (("photos_tiny", "--data", digits, "--out", digits, "--device", "cpu"), "holds other files and no run"),
        (("192_240", "--data", digits, *out, "--set", "data.mode=in_memory", "--set", "optimizer.batch=8",
          "--set", "model.start=null", "--set", "run.precision=fp32",
          "--set", "augment.rand_augment=rand-m9-t3a"), "data.mode=loader"),
        (("192_240", "--data", digits, *out, "--set", "data.decode=gpu", "--set", "optimizer.batch=8",
          "--set", "model.start=null"), "use --set data.decode=cpu"),
    ):  # fmt: skip
        refused(remedy, "train", *arguments)
    assert not (tmp_path / "out").exists()  # a run that could not start leaves nothing behind
