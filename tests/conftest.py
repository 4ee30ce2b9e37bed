import hashlib
import os
import shutil

import pytest
import torch
from filelock import FileLock

import progresvit._torchvision  # noqa: F401  (ahead of timm)
from progresvit.model import ProgResViT
from tests.factories import tiny_config

torch.set_num_threads(1)  # the suite runs one process per core


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def small_config():
    """Two rounds, small enough to run in milliseconds."""
    return tiny_config(depth=2, num_classes=12)


@pytest.fixture(scope="session")
def randomize():
    """Every parameter of a model random, gates included, so that nothing is an identity any more."""

    def fill(model: ProgResViT) -> ProgResViT:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(std=0.1)
                if name.endswith(("_scale", "gamma", "norm1.weight", "norm2.weight", "norm.weight")):
                    parameter.add_(1)
        return model.eval()

    return fill


@pytest.fixture
def small_model(small_config, randomize):
    return randomize(ProgResViT(small_config, start_gates="torch"))  # whose random draws tests were made with


@pytest.fixture
def images():
    return torch.randn(3, 3, 32, 32)


@pytest.fixture(scope="module")
def browser():
    """Chromium, or the test is skipped."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"chromium does not start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


def pytest_collection_modifyitems(items):
    """Skip GPU tests without a GPU; ``make check`` covers the package, ``make test`` repro/ and benchmarks/ too."""
    for item in items:
        if item.nodeid.startswith(("tests/repro/", "tests/benchmarks/")):
            item.add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def graphs_once(tmp_path_factory):
    """Each round of a model is converted to ONNX once, which takes seconds; exports that follow get a copy of the file.

    Test processes share the files. Weights, configuration and round name them.
    """
    from progresvit.engine.export import export

    convert, root = export._write_onnx, tmp_path_factory.getbasetemp()
    known = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "graphs"
    known.mkdir(exist_ok=True)

    def convert_once(graph, path, s):
        digest = hashlib.sha256(f"{s} {graph.config!r}".encode())
        for name, value in graph.state_dict().items():
            digest.update(name.encode() + value.numpy().tobytes())
        made = known / f"{digest.hexdigest()}.onnx"
        with FileLock(f"{made}.lock"):
            if not made.exists():
                convert(graph, path, s)
                shutil.copy(path, made)
        shutil.copy(made, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_write_onnx", convert_once)
        yield


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """Real handwritten digits as image files: four classes, twelve training and six validation images of each."""
    from PIL import Image
    from sklearn.datasets import load_digits

    root, data = tmp_path_factory.mktemp("digits"), load_digits()
    for digit in range(4):
        for number, index in enumerate((data.target == digit).nonzero()[0][:18]):
            folder = root / ("train" if number < 12 else "val") / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (data.images[index] * 15).astype("uint8")
            Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    return root
