"""The wheel, as a user gets it: built, installed into an empty environment, run there."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    uv("build", "--wheel", "--quiet", "--out-dir", out, ROOT)
    (path,) = out.glob("*.whl")
    return path


def uv(*arguments):
    """uv does not read pip's settings, so a local folder of wheels that pip knows of is handed over."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    links = environment.get("PIP_FIND_LINKS") or pip_setting("global.find-links")
    if links:
        environment["UV_FIND_LINKS"] = links
    subprocess.run([sys.executable, "-m", "uv", *map(str, arguments)], check=True, env=environment)


def pip_setting(name):
    command = [sys.executable, "-m", "pip", "config", "get", name]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"progresvit", wheel.name.split("-py3")[0] + ".dist-info"}
    assert "progresvit/py.typed" in names
    assert not {"repro", "studies", "results", "report"} & {part for name in names for part in name.split("/")}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shipped = ("model.safetensors", "config.json", "README.md", "figures.json", "budgets.json")
    settings = ("near-lossless", "drop-0.5", "drop-1", "careful")
    assert {f"progresvit/shipped/{name}" for name in shipped} <= set(names)
    assert {f"progresvit/shipped/settings/{name}.json" for name in settings} <= set(names)
    assert {"progresvit/samples/church.jpg", "progresvit/samples/CREDITS.md"} <= set(names)


def test_wheel_installs_into_an_empty_environment_and_runs_there(wheel, tmp_path):
    uv("venv", "--quiet", "--python", sys.executable, tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, "--constraints", ROOT / "constraints.txt", wheel)
    program = tmp_path / "env" / "bin" / "progresvit"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [program, "info", "progresvit_small_192_240", "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert json.loads(shown.stdout)["parameters"] == 24_731_560
    command = [program, "classify", "--samples", "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    answers = {one["picture"]: one["label"] for one in map(json.loads, shown.stdout.splitlines())}
    assert answers["church.jpg"] == "church"
    command = [python, "-c", "from progresvit.training.recipe import load_recipe; print(load_recipe('192_240').epochs)"]
    recipe = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert recipe.stdout.strip() == "310", recipe.stderr
    forward = (
        "import torch, progresvit; model = progresvit.create_model('progresvit_tiny_160_224', depth=1); "
        "print(progresvit.__file__, model(torch.zeros(1, 3, 224, 224))[-1].logits.shape)"
    )
    result = subprocess.run([python, "-c", forward], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout
    assert "[1, 1000]" in result.stdout
