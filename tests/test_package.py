"""The package as a user gets it: what it requires, its image, and the wheel, installed into an empty environment."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement

import progresvit
from progresvit.data.samples import samples_folder
from progresvit.engine.export.export import export
from progresvit.io.model_folder import BUNDLED, bundled_folder
from progresvit.routing.settings import find_setting

ROOT = Path(__file__).parent.parent
VULNERABLE = {
    "fastapi": "0.132.0",  # requires a starlette with the next hole
    "filelock": "3.20.2",  # CVE-2026-22701
    "h11": "0.15.0",  # CVE-2025-43859
    "jinja2": "3.1.5",  # CVE-2025-27516
    "onnx": "1.21.0",  # CVE-2026-44512
    "pillow": "12.2.0",  # CVE-2026-59199 and others; 12.1.1: CVE-2026-40192
    "pillow-heif": "1.2.1",  # CVE-2026-28231
    "pyarrow": "23.0.0",  # CVE-2026-25087
    "pytest": "9.0.2",  # CVE-2025-71176
    "ray": "2.54.1",  # CVE-2026-41486
    "scikit-learn": "1.4.2",  # CVE-2024-5206
    "starlette": "1.3.0",  # CVE-2026-54283
    "torch": "2.10.0",  # CVE-2026-4538
    "uv": "0.11.14",  # CVE-2026-114109
}
"""The last release of each package with a published hole that matters at its floor."""
ABSENT = ("torch", "torchvision", "timm", "scipy")
"""Packages that hosts of exports need not have."""


def requirements():
    """All requirements in pyproject.toml and in the files for hosts of exports."""
    project = project_table()
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [Requirement(line) for line in [*lines, *host_requirements("runtime"), *host_requirements("serve")]]


def project_table():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def host_requirements(name):
    """The requirements in a file for hosts of exports, without those that it includes."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith(("#", "-r "))]


def test_hosts_of_exports_need_what_the_package_needs_and_no_torch():
    project = project_table()
    extras = project["optional-dependencies"]
    assert set(host_requirements("runtime")) < {*project["dependencies"], *extras["onnx"]}
    assert host_requirements("serve") == extras["serve"]
    assert not set(ABSENT) & {Requirement(line).name for line in host_requirements("runtime")}


@pytest.mark.parametrize(("name", "version"), list(VULNERABLE.items()))
def test_no_release_with_a_known_hole_is_installed(name, version):
    own = [requirement for requirement in requirements() if requirement.name == name]
    assert own
    assert not any(requirement.specifier.contains(version) for requirement in own)


def test_constraints_are_within_the_requirements():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    specifiers = {requirement.name: requirement.specifier for requirement in requirements()}
    for pin in pins:
        (exact,) = pin.specifier
        assert specifiers[pin.name].contains(exact.version)


def test_the_image_is_built_with_the_constraints_on_a_named_base():
    lines = (ROOT / "docker" / "Dockerfile").read_text()
    assert "pip install --no-cache-dir --constraint /src/constraints.txt '/src[serve]'" in lines
    assert re.search(r"^ARG BASE=python:3\.\d+-slim-\w+$", lines, re.MULTILINE)
    assert re.findall(r"^FROM (\S+)", lines, re.MULTILINE) == ["${BASE}", "${BASE}"]
    assert re.search("^USER progresvit$", lines, re.MULTILINE)


def test_what_the_image_copies_is_in_its_context():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists()
                assert f"!{name}" in ignored


def test_containers_have_a_memory_limit_and_no_privileges():
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert services["progresvit"]["read_only"] is True
    for service in services.values():
        assert service["mem_limit"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_hosted_actions_are_pinned_to_commits_and_dependencies_are_audited():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in actions)
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert any("pip-audit " in step.get("run", "") for step in yaml.safe_load(text)["jobs"]["audit"]["steps"])


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
    pages = ("style.css", "serving/page/page.css", *(f"analysis/page.{kind}" for kind in ("html", "css", "js")))
    assert {f"progresvit/{name}" for name in pages} <= set(names)
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
def test_an_export_is_classified_and_served_with_the_packages_of_the_requirements_alone(wheel, tmp_path):
    """The setting has a certificate, whose numbers are checked where scipy is absent."""
    exported, images = tmp_path / "exported", sorted(samples_folder().glob("*.jpg"))
    setting = find_setting("drop-1", bundled_folder("nettewoof-tiny"))
    export(progresvit.load("nettewoof-tiny"), exported, threshold=setting)
    expected = progresvit.Engine("nettewoof-tiny", setting, device="cpu", threads=1).classify(images)
    assert {prediction.exit_round for prediction in expected} == {1, 2}
    uv("venv", "--quiet", "--python", sys.executable, tmp_path / "env")
    python, program = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "progresvit"

    def install(*words):
        uv("pip", "install", "--quiet", "--python", python, *words)
        look = f"from importlib.util import find_spec; print([name for name in {ABSENT} if find_spec(name)])"
        assert run(python, "-c", look).stdout == "[]\n"

    def run(*command):
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=clean_environment())

    install("--no-deps", wheel)
    install("--requirements", ROOT / "requirements" / "runtime.txt")
    done = run(program, "classify", *images, "--json", "--model", exported)
    assert done.returncode == 0, done.stderr
    check_answers([json.loads(line) for line in done.stdout.splitlines()], expected)
    done = run(program, "classify", *images, "--model", exported, "--out", tmp_path / "answers.parquet")
    assert done.returncode == 0, done.stderr
    refused = run(program, "classify", "--samples")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: torch is not installed; run: pip install ")
    assert "torch>=2.11" in refused.stderr or "torch<2.14" in refused.stderr
    assert "numpy" not in refused.stderr
    refused = run(program, "serve", exported)
    assert refused.returncode == 2
    assert re.match("error: (fastapi|uvicorn) is not installed; run: pip install ", refused.stderr)

    install("--requirements", ROOT / "requirements" / "serve.txt")
    command = [program, "serve", exported, "--port", "0", "--audit", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment()) as server:
        try:
            address = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())[0]
            files = [{"image": image.read_bytes()} for image in images]
            responses = [httpx.post(f"{address}/classify", files=file, timeout=60) for file in files]
            check_answers([response.json() for response in responses], expected)
            metrics = httpx.get(f"{address}/metrics").text
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert 'progresvit_audit_bound{side="upper"}' in metrics


def check_answers(answers, expected):
    """These are the answers of the torch engine."""
    assert len(answers) == len(expected)
    for answer, prediction in zip(answers, expected):
        assert (answer["label"], answer["exit_round"]) == (prediction.label, prediction.exit_round)
        assert answer["probability"] == pytest.approx(prediction.probability, abs=1e-3)
        assert answer["entropy"] == pytest.approx(prediction.entropy, abs=1e-3)
