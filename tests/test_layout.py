"""The walls of the house: who may import whom, and that the front door is light."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import progresvit

PACKAGE = Path(progresvit.__file__).parent

FOUNDATION = {"config", "compute", "io", "distributed"}
"""Rooms that may import each other."""

FLOORS = (  # each may import from those above it
    {"_torchvision"},
    FOUNDATION,
    {"model", "data", "metrics"},
    {"table", "plots"},
    {"routing"},
    {"predict", "baselines"},
    {"interop"},
    {"api"},
    {"training", "evaluation", "engine"},
    {"analysis"},
    {"serving"},
    {"cli"},
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


@cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path):
    """Names of the modules that a file imports, from top to bottom, whatever the function."""
    nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path} has a relative import"
            of_package = node.module == "progresvit"
            yield from (f"progresvit.{alias.name}" for alias in node.names) if of_package else [node.module]


def named_modules(path):
    """Modules that strings of a file name, such as ``progresvit.model.vit:ProgResViT``; also parts of f-strings."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^progresvit\.\w+(?=[.:]\S*$|$)", node.value)


def imported_rooms(path):
    for name in [*imported_modules(path), *named_modules(path)]:
        package, _, rest = name.partition(".")
        if package == "progresvit" and rest:
            yield rest.partition(".")[0]


def source_files():
    return [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not path.name.startswith("__")]


def test_import_strings_count_as_imports(tmp_path):
    file = tmp_path / "made.py"
    file.write_text(
        '"""progresvit.cli is in a sentence."""\nA = "progresvit.engine.engine:Engine"\nB = f"progresvit.data.{A}"'
    )
    assert sorted(imported_rooms(file)) == ["data", "engine"]


def test_every_room_has_a_floor():
    assert {room_of(path) for path in source_files()} <= set(FLOOR_OF)


def test_imports_point_one_way():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in source_files()
        for room in imported_rooms(path)
        if room in FLOOR_OF
        and room != room_of(path)
        and FLOOR_OF[room] >= FLOOR_OF[room_of(path)]
        and not {room, room_of(path)} <= FOUNDATION
    ]
    assert wrong == []


def test_the_package_does_not_import_repro():
    lines = [(path, line) for path in source_files() for line in path.read_text(encoding="utf-8").splitlines()]
    assert [f"{path}: {line}" for path, line in lines if line.strip().startswith(("import repro", "from repro"))] == []


@pytest.mark.parametrize(
    ("use", "heavy"),
    [
        ("progresvit.__version__", {"pydantic", "numpy", "torch"}),
        ("progresvit.data.decoding_process", {"pydantic", "torch"}),
        ("progresvit.compute.parameters(progresvit.preset('progresvit_tiny_160_224'))", {"numpy", "torch"}),
        ("progresvit.routing.load_setting(sys.argv[1])", {"scipy", "torch"}),
        ("from progresvit.cli import app; app(['info'], standalone_mode=False)", {"scipy", "torch"}),
    ],
)
def test_importing_the_package_is_light(use, heavy):
    module = "progresvit.data.decoding_process" if "decoding_process" in use else "progresvit"
    code = f"import sys, {module}; {use}; print(*sys.modules)"
    certificate = PACKAGE / "bundled" / "imagenet-tiny" / "settings" / "drop-1.json"
    command = [sys.executable, "-c", code, certificate]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {*heavy, "timm", "torchvision"} & set(loaded)


def test_what_a_host_of_exported_graphs_needs_imports_no_torch():
    modules = ["data", "data.decode", "data.crop", "data.dataset", "routing", "routing.decide", "routing.settings"]
    modules += [
        "routing.frontier",
        "routing.scores",
        "engine.engine",
        "engine.onnx_backend",
        "serving.start",
        "cli.serve",
    ]
    code = "\n".join(["import sys", *(f"import progresvit.{name}" for name in modules), "print(*sys.modules)"])
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "timm", "torchvision", "scipy", "safetensors", "huggingface_hub", "yaml"} & set(loaded)


NOT_FOR_ONE_IMAGE = {
    *("timm", "torchvision", "scipy", "triton", "sympy", "huggingface_hub", "matplotlib", "sklearn", "onnx"),
    *("torch._dynamo", "torch._inductor", "torch.onnx", "torch.distributed.tensor", "pyarrow.compute", "tensorboard"),
}
"""Slow to import."""


@pytest.mark.slow
def test_classifying_one_image_on_a_cpu_imports_nothing_slow_but_torch():
    code = """
import sys, torch
of_torch = set(sys.modules)
from progresvit.cli import app
app(["classify", sys.argv[1], "--json"], standalone_mode=False)
print(*sorted(set(sys.modules) - of_torch))
"""
    command = [sys.executable, "-c", code, PACKAGE / "samples" / "tabby.jpg"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    answer, loaded = done.stdout.splitlines()
    assert json.loads(answer)["label"] == "tabby"
    assert "progresvit.engine.torch_backend" in loaded.split()
    assert not NOT_FOR_ONE_IMAGE & set(loaded.split())


def test_every_module_that_imports_timm_can_be_the_first_that_is_imported():
    """Beside a CPU build of torch, torchvision (and so timm) imports only after ``progresvit._torchvision``."""
    wrong = []
    for path in source_files():
        imported = list(imported_modules(path))
        heavy = [number for number, name in enumerate(imported) if name.split(".")[0] in ("timm", "torchvision")]
        before = imported[: heavy[0]] if heavy else []
        for package in [parent for parent in path.parents if parent.is_relative_to(PACKAGE)]:
            before += imported_modules(package / "__init__.py")
        if heavy and path.stem != "_torchvision" and "progresvit._torchvision" not in before:
            wrong.append(path.relative_to(PACKAGE).as_posix())
    assert wrong == []


@pytest.mark.parametrize("room", [progresvit.data, progresvit.evaluation, progresvit.model, progresvit.routing])
def test_every_name_of_a_lazy_room_is_there(room):
    assert dir(room) == room.__all__
    for name in room.__all__:
        assert not inspect.ismodule(getattr(room, name))
    with pytest.raises(AttributeError, match="attribute entropi"):
        room.entropi  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("door", ["progresvit.load", "progresvit.interop"])
def test_every_door_to_a_model_registers_the_presets_with_timm(door):
    code = f"import progresvit; {door}; import timm; assert timm.is_model('progresvit_small_192_240')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    assert dir(progresvit) == progresvit.__all__
    for name in progresvit.__all__:
        assert getattr(progresvit, name) is not None
    with pytest.raises(AttributeError, match="attribute lod"):
        progresvit.lod  # noqa: B018
