import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from progresvit.engine.export.manifest import Manifest, hash_file
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.routing import Policy, top10_entropy
from progresvit.routing.decide import decide
from tests.engine.conftest import CONFIGS, expected_rounds, random_pixels

pytestmark = pytest.mark.usefixtures("graphs_once")

ROOT = Path(__file__).parents[2]


def run_all(graphs, pixels):
    logits, tokens, found = [], None, []
    for s in range(len(graphs.manifest.config.rounds)):
        logits, tokens = graphs.run(s, pixels, tokens)
        found.append((logits, tokens))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format", "backend"),
    [
        ("two rounds", "onnx", "onnxruntime"),
        ("two rounds", "onnx", "openvino"),
        ("two rounds", "openvino", "openvino"),
        ("three rounds", "onnx", "onnxruntime"),
        ("three rounds", "onnx", "openvino"),
        ("larger input", "onnx", "onnxruntime"),
        ("larger input", "onnx", "openvino"),
        ("merged tokens", "onnx", "onnxruntime"),
        ("merged tokens", "openvino", "openvino"),
    ],
)
def test_graphs_equal_the_model_for_any_batch(exports, models, name, format, backend):
    graphs = GraphRounds(exports(name, format), backend=backend, threads=1)
    for batch in (1, 3, 8):
        pixels = random_pixels(CONFIGS[name], batch, seed=batch)
        expected = expected_rounds(models[name], pixels)
        for s, (logits, tokens) in enumerate(run_all(graphs, pixels)):
            assert logits.dtype == np.float32
            assert logits.shape == (batch, 12)
            assert np.abs(logits - expected[s].logits.numpy()).max() < 1e-4
            assert expected[s].logits.std() > 0.05  # there is something to compare
            if s == len(expected) - 1:
                assert tokens is None
            else:
                assert np.abs(tokens - expected[s].tokens.numpy()).max() < 1e-4


def test_what_one_run_gave_is_not_changed_by_the_next(exports):
    for backend in ("onnxruntime", "openvino"):
        graphs = GraphRounds(exports("two rounds"), backend=backend, threads=1)
        first = graphs.run(0, random_pixels(CONFIGS["two rounds"], 2, seed=1))
        kept = [one.copy() for one in first]
        graphs.run(0, random_pixels(CONFIGS["two rounds"], 2, seed=2))
        assert all(np.array_equal(a, b) for a, b in zip(first, kept))


@pytest.mark.slow
def test_bf16_decides_as_fp32_but_within_a_hundredth_of_the_threshold(exports):
    folder = exports("two rounds")
    pixels = random_pixels(CONFIGS["two rounds"], 4000, seed=3)
    try:
        rough = GraphRounds(folder, backend="openvino", precision="bf16", threads=1)
    except ValueError as error:
        pytest.skip(str(error))
    exact = GraphRounds(folder, backend="onnxruntime", threads=1)
    exact_entropy, rough_entropy = (
        np.concatenate([top10_entropy(g.run(0, pixels[n : n + 100])[0]) for n in range(0, 4000, 100)])
        for g in (exact, rough)
    )
    assert not np.array_equal(exact_entropy, rough_entropy)  # it is bf16 indeed
    for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
        tau = np.quantile(exact_entropy, quantile)
        far = np.abs(exact_entropy - tau) > 0.01
        assert far.sum() > 1000
        assert ((exact_entropy < tau) == (rough_entropy < tau))[far].mean() >= 0.999


def test_the_backend_follows_from_the_format(exports):
    assert GraphRounds(exports("two rounds"), threads=1).backend == "onnxruntime"
    graphs = GraphRounds(exports("two rounds", "openvino"), threads=1)
    assert (graphs.backend, graphs.precision) == ("openvino", "fp32")


def test_what_cannot_be_run_is_refused_with_the_remedy(exports, tmp_path):
    onnx, openvino = exports("two rounds"), exports("two rounds", "openvino")
    for make, match in (
        (lambda: GraphRounds(tmp_path), "command progresvit export"),
        (lambda: GraphRounds(onnx, backend="tensorrt"), "choose one of onnxruntime, openvino"),
        (lambda: GraphRounds(openvino, backend="onnxruntime"), "format='onnx'"),
        (lambda: GraphRounds(onnx, precision="bf16"), "backend='openvino', or fp32"),
        (lambda: GraphRounds(onnx, precision="fp16"), "did you mean .bf16."),
        (lambda: GraphRounds(onnx, threads=0), "threads must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            make()


@pytest.mark.parametrize("package", ["onnxruntime", "openvino"])
def test_a_backend_that_is_not_installed_is_named_with_its_package(exports, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"{package} is not installed; run: pip install .*{package}"):
        GraphRounds(exports("two rounds"), backend=package)


@pytest.mark.slow
def test_missing_and_foreign_graphs_are_refused(exports, tmp_path):
    folder = shutil.copytree(exports("two rounds"), tmp_path / "copy")
    (folder / "round2.onnx").unlink()
    with pytest.raises(ValueError, match=r"round2\.onnx is missing; copy the whole folder"):
        GraphRounds(folder)
    shutil.copy(exports("three rounds") / "round2.onnx", folder)
    with pytest.raises(ValueError, match=r"round2\.onnx is not the graph"):
        GraphRounds(folder)


@pytest.mark.slow
def test_a_graph_with_other_inputs_or_another_file_is_refused_even_with_the_right_hash(exports, tmp_path):
    folder = shutil.copytree(exports("two rounds"), tmp_path / "copy")
    for content, match in (
        ((exports("three rounds") / "round2.onnx").read_bytes(), "another graph: its outputs are"),
        ((exports("larger input") / "round2.onnx").read_bytes(), "another graph: its inputs are"),
        (b"no graph", "cannot read"),
    ):
        (folder / "round2.onnx").write_bytes(content)
        known = json.loads((folder / "export.json").read_text())
        known["rounds"][1]["files"]["round2.onnx"] = hash_file(folder / "round2.onnx")
        (folder / "export.json").write_text(json.dumps(known))
        for backend in ("onnxruntime", "openvino"):
            with pytest.raises(ValueError, match=match):
                GraphRounds(folder, backend=backend)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (lambda pixels, tokens: (2, pixels), "rounds 0 to 1"),
        (lambda pixels, tokens: (-1, pixels), "rounds 0 to 1"),
        (lambda pixels, tokens: (0, pixels.astype(np.float32)), r"uint8 of shape \(B, 3, 32, 32\), not float32"),
        (lambda pixels, tokens: (0, pixels[..., :30]), "crop images"),
        (lambda pixels, tokens: (0, pixels[:0]), "uint8 of shape"),
        (lambda pixels, tokens: (0, pixels, tokens), "without tokens"),
        (lambda pixels, tokens: (1, pixels), "not nothing; take the tokens of round 0"),
        (lambda pixels, tokens: (1, pixels, tokens[:1]), r"float32 of shape \(B, 5, 64\)"),
        (lambda pixels, tokens: (1, pixels, tokens.astype(np.float64)), "not float64"),
    ],
)
def test_wrong_arrays_are_refused(exports, arguments, match):
    graphs = GraphRounds(exports("two rounds"), threads=1)
    pixels = random_pixels(CONFIGS["two rounds"], 2)
    _, tokens = graphs.run(0, pixels)
    with pytest.raises(ValueError, match=match):
        graphs.run(*arguments(pixels, tokens))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda known: known.update(version=2), "of version 2 and this library reads version 1"),
        (lambda known: known.update(format="other"), "does not describe an export"),
        (lambda known: known.pop("config"), "config: Field required"),
        (lambda known: known["rounds"].pop(), "1 graphs for a model of 2 rounds"),
        (lambda known: known["rounds"][0].pop("files"), "files.0: input should be a valid dictionary"),
        (lambda known: known["rounds"][0].update(files={"../x.onnx": ""}), r"should be in round1\.onnx"),
        (lambda known: known["rounds"][0].update(width=128), "'rounds' differs from what its config gives"),
        (lambda known: known.update(crop=0.5), "'crop' differs from what its config gives"),
        (lambda known: known.update(kind="tflite"), "kind: unknown value 'tflite'; choose one of onnx, openvino"),
        (lambda known: known.update(precision="fp4"), "precision: unknown value 'fp4'; did you mean 'fp32'"),
        (lambda known: known.update(threshold=-1), "0 .* or more"),
        (lambda known: known.update(temperatures=[1.0]), "2 numbers above 0"),
        (lambda known: known.update(setting={"rule": "budget"}), "setting.threshold: Field required"),
        (lambda known: known.update(rounds=None), "its rounds must be a list"),
    ],
)
def test_a_manifest_that_does_not_hold_is_refused(exports, tmp_path, change, match):
    known = json.loads((exports("two rounds") / "export.json").read_text())
    change(known)
    (tmp_path / "export.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match=match):
        Manifest.read(tmp_path)


def test_a_manifest_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "export.json").write_text("{")
    with pytest.raises(ValueError, match=r"export\.json: "):
        Manifest.read(tmp_path)


WITHOUT_TORCH = """
import importlib.abc, sys

ABSENT = ("torch", "timm", "torchvision", "scipy", "safetensors", "huggingface_hub", "yaml")

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import progresvit
import numpy as np
import progresvit.data, progresvit.routing
import progresvit.routing.settings, progresvit.routing.frontier
from progresvit.data.crop import crop
from progresvit.data.decode import decode
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.routing.decide import decide
from progresvit.routing.decide import Policy

folder, image, backend = sys.argv[1:]
graphs = GraphRounds(folder, backend=backend, threads=1)
manifest = graphs.manifest
pixels = crop(decode(open(image, "rb").read()), manifest.config)[None]
policy, tokens = Policy.make(len(manifest.config.rounds), manifest.threshold), None
for s in range(len(manifest.config.rounds)):
    logits, tokens = graphs.run(s, pixels, tokens)
    answers = decide(policy, s, logits, manifest.temperatures[s])
    print(bool(answers.exits[0]), int(answers.index[0]), float(answers.entropy[0]))
assert not {"torch", "timm", "torchvision"} & set(sys.modules)
"""


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_an_export_is_loaded_and_run_without_torch(exports, models, tmp_path, backend):
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(tmp_path / "image.png")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(exports("two rounds")), str(tmp_path / "image.png"), backend]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    from progresvit.data import evaluation_transform

    transform = evaluation_transform(CONFIGS["two rounds"], as_bytes=True)
    pixels = transform(Image.open(tmp_path / "image.png")).numpy()[None]
    lines = [line.split() for line in done.stdout.splitlines()]
    for s, output in enumerate(expected_rounds(models["two rounds"], pixels)):
        expected = decide(Policy.make(2, 0.5), s, output.logits.numpy())
        assert lines[s][0] == str(bool(expected.exits[0]))
        assert int(lines[s][1]) == expected.index[0]
        assert float(lines[s][2]) == pytest.approx(float(expected.entropy[0]), abs=1e-4)


def test_a_signal_after_an_openvino_engine_is_freed_reaches_its_handler(exports):
    """The last thread that uses the backend frees it; OpenVINO keeps a stack for signals of the thread that made it."""
    code = """
import signal, sys, threading, time
import numpy as np
import progresvit

signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
engine = progresvit.Engine(sys.argv[1], 0.0, backend="openvino", threads=1)
engine.classify(np.zeros((1, 3, engine.config.input_side, engine.config.input_side), np.uint8))
threads = [thread for thread in threading.enumerate() if thread.name == "progresvit-engine"]
del engine
for thread in threads:
    thread.join()
rubbish = [bytearray(100_000) for _ in range(100)]  # in the memory that was freed
signal.raise_signal(signal.SIGUSR1)
time.sleep(0)
"""
    command = [sys.executable, "-c", code, exports("two rounds")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
