"""Import strings: which texts are some, and what is said about those that cannot be resolved."""

import sys

import pytest

from progresvit.io.imports import check_call, check_name, import_module, is_import_string, make, resolve

MODULE = "import math\ndef margin(s, statistics): ...\nclass Router:\n    def __init__(self, path): ...\nvalue = 3\n"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """A module whose name is not an identifier, in the working directory; a recipe may name it all the same."""
    (tmp_path / "01-mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield import_module("01-mine", what="test")
    del sys.modules["01-mine"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my_module:name", True),
        ("a.b:name", True),
        ("01-mine:margin", False),  # such a module is named for a task, and looks like a path elsewhere
        ("hf-hub:router", False),
        ("margin", False),
        ("my_module:", False),
        ("my_module:1", False),
        ("my_module:Outer.inner", False),
        ("s3://bucket/router", False),
        (r"C:\router", False),
        (None, False),
    ],
)
def test_an_import_string_is_a_module_and_a_name(text, expected):
    assert is_import_string(text) is expected


def test_the_named_object_is_resolved_in_the_working_directory(module):
    assert resolve("01-mine:margin", what="router") is module.margin


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: check_name("magin", ["margin"], what="router", example="m:n"), "did you mean 'margin'. Your own is"),
        (lambda _: check_name("01-magin", ["margin"], what="router", example="m:n"), "unknown router '01-magin'"),
        (lambda _: resolve("no_module:name", what="router"), "router: no_module cannot be imported .*PYTHONPATH"),
        (lambda _: resolve("01-mine:magin", what="router"), "has no function or class 'magin'; did you mean 'margin'"),
        (lambda _: resolve("01-mine:value", what="router"), "has no function or class 'value'"),
        (lambda own: check_call(own.margin, 1, what="router", example="f(s)"), "is not a router; define it as f"),
        (lambda own: make(own.Router, what="router", example="f()"), "cannot be made .*missing 1 .*; define it as f"),
    ],
)  # fmt: skip
def test_an_error_names_the_remedy(module, call, message):
    with pytest.raises(ValueError, match=message):
        call(module)
