"""The wheel, as a user gets it: built, installed into an empty environment, run there."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import progresvit
from progresvit.data.samples import samples_folder
from progresvit.engine.export.export import export
from progresvit.io.model_folder import BUNDLED

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    uv("build", "--wheel", "--quiet", "--out-dir", out, ROOT)
    (path,) = out.glob("*.whl")
    return path


def uv(*arguments):
    """As in the Makefile: with the system's certificates, and with pip's local folder of wheels, which uv ignores."""
    environment = clean_environment()
    environment.setdefault("UV_SYSTEM_CERTS", "1")
    links = environment.get("PIP_FIND_LINKS") or pip_setting("global.find-links")
    if links:
        environment["UV_FIND_LINKS"] = links
    subprocess.run([sys.executable, "-m", "uv", *map(str, arguments)], check=True, env=environment)


def clean_environment():
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def pip_setting(name):
    command = [sys.executable, "-m", "pip", "config", "get", name]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    information = f"progresvit-{progresvit.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"progresvit", information}
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"tests", "benchmarks", "repro", "scripts", "docs"}
    assert "progresvit/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    files = ("model.safetensors", "config.json", "README.md", "figures.json", "budgets.json")
    settings = ("near-lossless", "drop-0.5", "drop-1", "careful")
    for model in BUNDLED:
        assert {f"progresvit/bundled/{model}/{name}" for name in files} <= set(names)
        assert {f"progresvit/bundled/{model}/settings/{name}.json" for name in settings} <= set(names)
    assert {f"progresvit/samples/{name}" for name in ("starfish.jpg", "labels.json", "CREDITS.md")} <= set(names)


@pytest.mark.slow
def test_wheel_is_at_most_45_mb(wheel):
    assert wheel.stat().st_size <= 45e6


@pytest.mark.long
def test_wheel_installs_into_an_empty_environment_and_runs_there(wheel, tmp_path):
    """One process imports torch, which takes many seconds in an environment without bytecode."""
    uv("venv", "--quiet", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, "--constraints", ROOT / "constraints.txt", wheel)

    def run(*command):
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean_environment())
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert run(tmp_path / "env" / "bin" / "progresvit", "--version").strip() == f"progresvit {progresvit.__version__}"
    code = """
import torch, progresvit
from progresvit.cli import app
from progresvit.training.recipe import load_recipe
model = progresvit.create_model("progresvit_tiny_160_224", depth=1)
print(progresvit.__file__, load_recipe("192_240").epochs, model(torch.zeros(1, 3, 224, 224))[-1].logits.shape)
app(["classify", "--samples", "--json"])
"""
    first, *shown = run(python, "-c", code).splitlines()
    file, epochs, shape = first.split(" ", 2)
    assert Path(file).is_relative_to(tmp_path)
    assert (epochs, shape) == ("310", "torch.Size([1, 1000])")
    answers = {one["image"]: one["label"] for one in map(json.loads, shown)}
    assert answers["golden_retriever.jpg"] == "golden retriever"


@pytest.mark.long
def test_an_export_runs_with_the_packages_of_the_runtime_file_alone(wheel, small_model, tmp_path):
    exported = tmp_path / "exported"
    export(small_model, exported, threshold=0.5)
    uv("venv", "--quiet", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, "--no-deps", wheel)
    uv("pip", "install", "--quiet", "--python", python, "--requirements", ROOT / "requirements" / "runtime.txt")

    def classify(*words):
        command = [tmp_path / "env" / "bin" / "progresvit", "classify", "--samples", "--json", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean_environment())

    done = classify("--model", exported)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    expected = progresvit.Engine(exported).classify([samples_folder() / one["image"] for one in answers])
    assert [one["index"] for one in answers] == [prediction.index for prediction in expected]
    refused = classify()
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: torch is not installed; run: pip install ")
    assert "torch>=2.11" in refused.stderr or "torch<2.14" in refused.stderr
    assert "numpy" not in refused.stderr
