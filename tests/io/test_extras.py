"""Errors about missing packages name a command that works without a clone or a package index."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import progresvit
from progresvit.io import extras

ROOT = Path(progresvit.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements):
    return {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in requirements}


@pytest.mark.parametrize("extra", [None, "hfds", "onnx", "openvino", "plots", "quickstart", "teacher", "serve"])
def test_requirements_equal_the_project_file(extra):
    listed = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    assert names(extras.requirements(extra)) == names(listed)


def test_an_extra_that_holds_another_one_names_all_of_its_packages():
    assert {"ray", "fastapi", "uvicorn"} <= names(extras.requirements("ray"))


def test_only_missing_packages_are_named(monkeypatch):
    lines = ["pytest>=8; extra == 'x'", "no-such-package>=1,<2; extra == 'x'", "other-package; extra == 'y'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert extras.install_command("x") == "pip install 'no-such-package>=1,<2'"


def test_a_package_that_is_there_but_broken_is_installed_again_with_its_extra(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["pytest>=8; extra == 'x'"])
    assert extras.not_installed("pytest", "x") == "pytest is not installed; run: pip install 'pytest>=8'"


def test_sources_that_were_never_installed_name_the_clone(monkeypatch):
    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", unknown)
    assert extras.install_command("onnx").startswith("pip install '.[onnx]'")
    monkeypatch.setattr(metadata, "requires", lambda name: ["pytest>=8; extra == 'x'"])
    assert extras.install_command("newer").startswith("pip install '.[newer]'")


def test_no_text_names_the_package_on_an_index_where_it_is_not():
    files = [path for folder in ("progresvit", "docs", "recipes", "repro") for path in (ROOT / folder).rglob("*.*")]
    texts = [path for path in files if path.suffix in (".py", ".md", ".yaml", ".html")]
    assert len(texts) > 100
    wrong = [str(path) for path in texts if re.search(r"pip install [^\n`]*\bprogresvit\b", path.read_text())]
    assert not wrong
