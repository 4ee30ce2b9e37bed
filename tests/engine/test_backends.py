"""The engine on graphs: the answers of the torch engine, with torch and without."""

import contextlib
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import progresvit
from progresvit.engine import Engine
from progresvit.engine.export.export import export
from progresvit.routing import Abstention, SettingWarning
from tests.engine.test_engine import all_rounds, made_router
from tests.engine.test_onnx_backend import WITHOUT_TORCH
from tests.factories import setting_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]

ABSENT = WITHOUT_TORCH[: WITHOUT_TORCH.index("import progresvit")]
BACKENDS = ("onnxruntime", "openvino")


@pytest.fixture(scope="module")
def model(models):
    return models["two rounds"]


@pytest.fixture(scope="module")
def images(model):
    torch.manual_seed(5)
    side = model.config.input_side
    return torch.randint(0, 256, (60, 3, side, side), dtype=torch.uint8)


@pytest.fixture(scope="module")
def threshold(model, images):
    entropy = [one.entropy for one in Engine(model, float("inf")).classify(images)]
    return float(np.quantile(entropy, 0.4))


@pytest.fixture(scope="module")
def folder(model, threshold, tmp_path_factory):
    where = tmp_path_factory.mktemp("exports") / "onnx"
    export(model, where, threshold=threshold)
    return where


def facts(predictions):
    return [(one.index, one.label, one.exit_round, one.gmacs, one.abstained, one.error) for one in predictions]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_export_answers_as_the_model_does(model, images, threshold, folder, backend):
    expected = Engine(model, threshold, batch=16).classify(images)
    engine = Engine(folder, backend=backend, batch=16, threads=1)
    assert engine.backend == backend
    found = engine.classify(images)
    assert facts(found) == facts(expected)
    assert [one.probability for one in found] == pytest.approx([one.probability for one in expected], abs=1e-4)
    assert facts(engine.stream(images.numpy()[at : at + 7] for at in range(0, 60, 7))) == facts(expected)
    assert {one.exit_round for one in found} == {1, 2}
    other = Engine(folder, float("inf"), backend=backend).classify(images[:5])
    assert {one.exit_round for one in other} == {1}


def test_a_model_may_be_run_by_another_backend_on_the_spot(model, images, threshold):
    expected = Engine(model, threshold).classify(images)
    engine = Engine(model, threshold, backend="openvino", threads=1)
    assert facts(engine.classify(images)) == facts(expected)


def test_learned_routers_and_abstention_work_on_graphs(model, images, folder):
    router, rejecting = made_router(), made_router("unrecoverable", seed=3)
    chances = rejecting.score(0, all_rounds(model, images)[:, 0])
    abstain = Abstention(unrecoverable=chances.double().median().item(), router=rejecting)
    expected = Engine(model, 0.5, router=router, abstain=abstain).classify(images)
    found = Engine(folder, 0.5, router=router, abstain=abstain).classify(images)
    assert facts(found) == facts(expected)
    assert 0 < sum(one.abstained for one in found) < 60


def test_a_setting_travels_with_the_export(model, images, threshold, tmp_path):
    setting = setting_of(model, threshold=threshold)
    export(model, tmp_path / "export", threshold=setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingWarning)
        found = Engine(tmp_path / "export").classify(images)
    assert facts(found) == facts(Engine(model, threshold).classify(images))


def test_a_certificate_for_fp32_does_not_hold_for_bf16_graphs(model, tmp_path):
    export(model, tmp_path / "export", threshold=setting_of(model))
    with contextlib.suppress(ValueError), pytest.warns(SettingWarning, match="other precision: the certificate"):
        Engine(tmp_path / "export", backend="openvino", precision="bf16")  # refused where the CPU has no bf16


LARGER = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda folder: Engine(folder, backend="torch"), "torch runs models, not graphs"),
        (lambda folder: Engine(folder, device="cuda"), "on the CPU, not on cuda"),
        (lambda folder: Engine(folder, kernels="plain"), "an option of torch"),
        (lambda folder: Engine(folder, precision="bf16"), "bf16"),
        (lambda folder: Engine(folder).classify(LARGER), "not 64; crop or resize them first"),
        (lambda folder: Engine(folder, (0.1, 0.2)), "so 1 for 2 rounds, not 2"),
        (lambda folder: Engine(folder, router=made_router()), "needs a threshold"),  # the export's is for entropies
    ],
)
def test_what_graphs_cannot_do_is_refused(folder, make, match):
    with pytest.raises(ValueError, match=match):
        make(folder)


def run_without_torch(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", ABSENT + code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_export_classifies_where_torch_is_not_installed(model, threshold, folder, backend, tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(path)
    (tmp_path / "bad.png").write_bytes(b"no image")
    code = """
import json
import progresvit
engine = progresvit.Engine(sys.argv[1], backend=sys.argv[2], threads=1)
found = engine.classify(sys.argv[3:])
print(json.dumps([[one.index, one.label, one.exit_round, one.error] for one in found]))
assert not {"torch", "timm", "torchvision"} & set(sys.modules)
"""
    found = json.loads(run_without_torch(code, folder, backend, *paths, tmp_path / "bad.png"))
    expected = Engine(model, threshold).classify([*paths, tmp_path / "bad.png"])
    assert found == [[one.index, one.label, one.exit_round, one.error] for one in expected]


def test_a_command_that_needs_torch_says_so(model, tmp_path):
    progresvit.save(model, tmp_path / "model")
    code = """
from progresvit.cli import app
try:
    app(["export", sys.argv[1], "--out", sys.argv[2]])
except SystemExit as end:
    print(end.code)
"""
    assert run_without_torch(code, tmp_path / "model", tmp_path / "out").strip() == "2"


def test_the_command_classifies_where_torch_is_not_installed(folder, tmp_path):
    Image.effect_noise((70, 50), 90).convert("RGB").save(tmp_path / "noise.png")
    code = """
from progresvit.cli import app
try:
    app(["classify", sys.argv[2], "--model", sys.argv[1]])
except SystemExit as end:
    assert not end.code, end.code
try:
    app(["classify", sys.argv[2], "--model", sys.argv[1], "--out", sys.argv[3]])
except SystemExit as end:
    assert not end.code, end.code
assert not {"torch", "timm", "torchvision"} & set(sys.modules)
"""
    output = run_without_torch(code, folder, tmp_path / "noise.png", tmp_path / "out.parquet")
    assert "1 image: " in output
    assert (tmp_path / "out.parquet").is_file()
