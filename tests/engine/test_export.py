import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit import compute
from progresvit.data.crop import preprocessing_hash
from progresvit.data.dataset import ImageDataset, find_images
from progresvit.engine import Engine
from progresvit.engine.export.export import export
from progresvit.engine.export.int8 import Int8Check
from progresvit.engine.export.manifest import Manifest, hash_file
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.io.extras import not_installed
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from progresvit.model.backbone import resize, resizing_matrix
from progresvit.routing import SettingWarning
from tests.engine.conftest import CONFIGS, LABELS, random_pixels
from tests.factories import setting_of

pytestmark = pytest.mark.usefixtures("graphs_once")


def a_setting(model, **changes):
    fields = {"rule": "budget", "threshold": (0.7,), "n": 10, "expected": {"gmacs": 1.5}}
    return setting_of(model, **{**fields, **changes})


@pytest.fixture
def no_graphs(monkeypatch):
    """Exports without the slow part, for tests of what is around it."""
    monkeypatch.setattr("progresvit.engine.export.export._write_onnx", lambda _, path, s: path.write_bytes(b"graph"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Twelve classes of images, two of each."""
    root = tmp_path_factory.mktemp("images")
    pixels = random_pixels(CONFIGS["two rounds"].replace(input_resolution=40), 24, seed=7)
    for number, image in enumerate(pixels):
        folder = root / "val" / f"{number // 2:02}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / f"{number}.png")
    return root


@pytest.mark.parametrize(("source", "target"), [(240, 192), (240, 160), (384, 160), (384, 240), (32, 16), (36, 24)])
def test_two_products_resize_as_the_model_does(source, target):
    images = torch.rand(2, 3, source, source)
    matrix = resizing_matrix(source, target)
    assert matrix.shape == (target, source)
    assert (matrix @ images @ matrix.mT - resize(images, target)).abs().max() <= 1e-6


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_the_manifest_tells_a_host_everything(exports, models, format):
    folder, model = exports("two rounds", format), models["two rounds"]
    known = json.loads((folder / "export.json").read_text())
    assert (known["format"], known["version"], known["kind"], known["precision"]) == (
        "progresvit-export",
        1,
        format,
        "fp32",
    )
    suffixes = [".onnx"] if format == "onnx" else [".xml", ".bin"]
    for s, round_ in enumerate(known["rounds"]):
        assert list(round_["files"]) == [f"round{s + 1}{suffix}" for suffix in suffixes]
        assert all(hash_file(folder / name) == value for name, value in round_["files"].items())
        assert round_["cumulative_gmacs"] == compute.cumulative_gmacs(model.config)[s]
    assert [round_["resolution"] for round_ in known["rounds"]] == [16, 32]
    assert [round_["width"] for round_ in known["rounds"]] == [64, 192]
    assert [round_["tokens"] for round_ in known["rounds"]] == [[5, 64], None]
    assert (known["input_side"], known["channels"], known["crop"], known["interpolation"]) == (32, 3, 0.9, "bicubic")
    assert (tuple(known["mean"]), tuple(known["std"])) == (model.config.mean, model.config.std)
    assert (known["labels"], known["class_ids"]) == (list(LABELS), None)
    assert (known["threshold"], known["setting"], known["temperatures"]) == (0.5, None, [1.0, 1.0])
    assert known["weights"] == weights_hash(model)
    assert known["preprocessing"] == preprocessing_hash(model.config)
    manifest = Manifest.read(folder)
    assert manifest.config == model.config
    assert json.loads(manifest.to_json()) == known
    assert {path.name for path in folder.iterdir()} == {"export.json"} | {
        name for round_ in known["rounds"] for name in round_["files"]
    }


def test_the_weights_of_openvino_are_not_halved(exports):
    folder = exports("two rounds", "openvino")
    assert "f16" not in (folder / "round1.xml").read_text()


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(None, None), (0.25, 0.25), ((0.5, 1.0), (0.5, 1.0)), (np.float64(2), 2.0), ((math.inf, 0.3), (math.inf, 0.3))],
)
def test_thresholds_and_temperatures_come_back(models, tmp_path, no_graphs, threshold, kept):
    made = export(models["three rounds"], tmp_path / "out", threshold=threshold, temperatures=(1.5, 1.0, 0.5))
    assert made == Manifest.read(tmp_path / "out")
    assert made.threshold == kept
    assert made.temperatures == (1.5, 1.0, 0.5)


def test_a_setting_is_kept_whole(models, tmp_path, no_graphs):
    setting = a_setting(models["two rounds"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(models["two rounds"], tmp_path / "out", threshold=setting)
    made = Manifest.read(tmp_path / "out")
    assert made.setting == setting
    assert made.threshold == (0.7,)
    with pytest.raises(ValueError, match="other weights"):
        export(models["two rounds"], tmp_path / "other", threshold=a_setting(models["two rounds"], weights_sha256="x"))
    assert not (tmp_path / "other").exists()
    with pytest.warns(SettingWarning, match="other precision"):
        export(models["two rounds"], tmp_path / "out", threshold=a_setting(models["two rounds"], precision="bf16"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda model, root: export(model, root / "out", format="tflite"), "choose one of onnx, openvino"),
        (lambda model, root: export(model, root / "file"), "is a file"),
        (lambda model, root: export(model, root / "busy"), r"such as thesis\.tex; give a new folder"),
        (lambda model, root: export(model, root / "out", threshold=-1), "0 .* or more"),
        (lambda model, root: export(model, root / "out", threshold=(0.1, 0.2)), "so 1 for 2 rounds, not 2"),
        (
            lambda model, root: export(model, root / "out", threshold=a_setting(model, threshold=0.5, rounds=3)),
            "for a model of 3 rounds",
        ),
        (lambda model, root: export(model, root / "out", threshold=a_setting(model, router="x")), "learned router"),
        (lambda model, root: export(model, root / "out", temperatures=(1.0,)), "2 numbers above 0"),
        (
            lambda model, root: export(ProgResViT(model.config.replace(num_classes=0, labels=None)), root / "out"),
            "has no head",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(models, tmp_path, no_graphs, make, match):
    (tmp_path / "file").touch()
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=match):
        make(models["two rounds"], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "file"]


@pytest.mark.parametrize(
    ("format", "package"), [("onnx", "onnx"), ("onnx", "onnxscript"), ("openvino", "openvino"), ("openvino", "onnx")]
)
def test_a_missing_package_is_named_with_its_extra(models, tmp_path, monkeypatch, format, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ValueError, match=rf"{package} is not installed; run: pip install .*'{package}>="):
        export(models["two rounds"], tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_the_package_that_quantises_for_openvino_is_named_with_its_extra(models, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nncf", None)
    check = Int8Check(dataset=ImageDataset((), (), ()), labels=())
    with pytest.raises(ValueError, match=re.escape(not_installed("nncf", "nncf"))):
        export(models["two rounds"], tmp_path / "out", format="openvino", int8=check)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_what_was_there(models, tmp_path, no_graphs, monkeypatch):
    export(models["two rounds"], tmp_path / "out", threshold=0.1)

    def fail(graph, path, s):
        if s:
            raise RuntimeError("no more space")
        path.write_bytes(b"half")

    monkeypatch.setattr("progresvit.engine.export.export._write_onnx", fail)
    with pytest.raises(RuntimeError, match="no more space"):
        export(models["two rounds"], tmp_path / "out", threshold=0.2)
    assert Manifest.read(tmp_path / "out").threshold == 0.1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_replaces_an_older_one_and_leaves_none_of_it(models, tmp_path, no_graphs):
    export(models["three rounds"], tmp_path / "out")
    export(models["two rounds"], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["export.json", "round1.onnx", "round2.onnx"]
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"such as notes\.txt"):
        export(models["two rounds"], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two rounds", "merged tokens"])
def test_int8_is_measured_on_images_and_kept(models, tmp_path, images, name):
    model = models[name]
    found = find_images(images, "val")
    check = Int8Check(dataset=found, labels=found.targets, data="made", batch=10, threads=1)
    paths = [entry.path for entry in found.entries]
    threshold = float(np.median([one.entropy for one in Engine(model, math.inf).classify(paths)]))
    made = export(model, tmp_path / "out", threshold=threshold, int8=check)
    assert made == Manifest.read(tmp_path / "out")
    assert made.precision == "int8"
    report = made.int8
    assert (report["images"], report["data"], len(report["rounds"])) == (24, "made", 2)
    seen = [  # everybody in every round, in the batches of the check: ranges are taken from each batch anew
        [Engine(one, limit, batch=10).classify(paths) for limit in (math.inf, 0.0)] for one in (model, tmp_path / "out")
    ]
    routed = [[two if one.entropy >= threshold else one for one, two in zip(*rounds)] for rounds in seen]
    for row, plain, small in zip((*report["rounds"], report["routed"]), (*seen[0], routed[0]), (*seen[1], routed[1])):
        answers = [np.array([one.index for one in some]) for some in (plain, small)]
        assert row["top1_fp32"] == pytest.approx((answers[0] == found.targets).mean())
        assert row["top1_int8"] == pytest.approx((answers[1] == found.targets).mean())
        assert row["same_answer"] == pytest.approx((answers[0] == answers[1]).mean())
        assert row["same_answer"] >= 0.75  # a random model is all near ties
    exits = [[one.exit_round for one in some] for some in routed]
    assert report["routed"]["same_exit"] == pytest.approx(np.mean(np.equal(*exits)))
    assert report["routed"]["gmacs_int8"] == pytest.approx(np.mean([one.gmacs for one in routed[1]]))
    assert {*exits[0]} == {1, 2}
    graphs = GraphRounds(tmp_path / "out", threads=1)
    assert graphs.precision == "int8"
    exact = export_free_logits(model, random_pixels(model.config, 8))
    rough, _ = graphs.run(0, random_pixels(model.config, 8))
    error = np.abs(rough - exact).mean()
    assert 0 < error < 0.05 * np.abs(exact).mean()  # quantised, and not by much
    with pytest.raises(ValueError, match="int8 graphs do not run in bf16"):
        GraphRounds(tmp_path / "out", backend="openvino", precision="bf16")


def export_free_logits(model, pixels):
    from tests.engine.conftest import expected_rounds

    return expected_rounds(model, pixels)[0].logits.numpy()


def test_an_int8_check_needs_a_label_for_each_image(images):
    with pytest.raises(ValueError, match="1 labels for 24 images"):
        Int8Check(dataset=find_images(images, "val"), labels=(0,))


def test_temperatures_may_be_arrays_and_a_threshold_must_be_its_settings(models, tmp_path, no_graphs):
    model = models["two rounds"]
    made = export(model, tmp_path / "out", threshold=a_setting(model), temperatures=np.array([1.5, 0.5]))
    assert made.temperatures == (1.5, 0.5)
    known = json.loads((tmp_path / "out" / "export.json").read_text())
    known["threshold"] = 1.1
    (tmp_path / "out" / "export.json").write_text(json.dumps(known))
    with pytest.raises(ValueError, match=r"threshold 1\.1 differs from the threshold of its setting"):
        Manifest.read(tmp_path / "out")


def test_an_export_is_not_loaded_as_a_model(models, tmp_path, no_graphs):
    export(models["two rounds"], tmp_path / "out")
    with pytest.raises(ValueError, match=r"is an export, which is for progresvit classify.*; give the model"):
        progresvit.load(tmp_path / "out")
