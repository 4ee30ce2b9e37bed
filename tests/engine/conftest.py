"""Tiny models and their exports, made once. An export takes seconds, so every test that needs one is slow."""

import os

import numpy as np
import pytest
import torch
from filelock import FileLock

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.transforms import normalise
from progresvit.model import ProgResViT

SMALL = {"heads": 3, "depth": 2, "patch_size": 8, "num_classes": 12}
SHALLOW = {**SMALL, "depth": 1}  # converting takes time for each block
LABELS = tuple(f"class {number}" for number in range(12))
CONFIGS = {
    "two rounds": ModelConfig(rounds=make_rounds([16, 32], [1, 3]), labels=LABELS, **SMALL),
    "three rounds": ModelConfig(rounds=make_rounds([16, 24, 32], [1, 2, 3]), **SHALLOW),
    "larger input": ModelConfig(rounds=make_rounds([24, 24], [1, 2]), input_resolution=36, layer_scale=0.1, **SHALLOW),
    "merged tokens": ModelConfig(rounds=make_rounds([24, 32], [1, 3]), **SMALL).with_merge([3, 5]),
}


def pytest_collection_modifyitems(items):
    for item in items:
        if "exports" in item.fixturenames:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def models(randomize):
    torch.manual_seed(0)
    return {name: randomize(ProgResViT(config, start_gates="torch")) for name, config in CONFIGS.items()}


@pytest.fixture(scope="session")
def exports(models, tmp_path_factory):
    """A function from a model's name and a format to the folder of its export, which test processes share."""
    pytest.importorskip("onnxscript")
    from progresvit.engine.export.export import export

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def get(name, format="onnx"):
        folder = root / "exports" / f"{name.replace(' ', '_')}_{format}"
        folder.parent.mkdir(exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                export(models[name], folder, format=format, threshold=0.5)
        return folder

    return get


def random_pixels(config, count, seed=0):
    """Bytes as the crop gives them: patches of colours rather than noise alone, so that images differ."""
    rng = np.random.default_rng(seed)
    side = config.input_side
    coarse = rng.integers(0, 256, (count, config.in_channels, 4, 4))
    fine = rng.integers(-40, 41, (count, config.in_channels, side, side))
    image = coarse.repeat(-(-side // 4), axis=2).repeat(-(-side // 4), axis=3)[..., :side, :side]
    return np.clip(image + fine, 0, 255).astype(np.uint8)


@torch.no_grad()
def expected_rounds(model, pixels):
    return model(normalise(torch.from_numpy(pixels), model.config))
