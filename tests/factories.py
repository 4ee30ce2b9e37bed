"""What tests of many rooms begin with: tiny models, images in folders, settings. Each call makes a new object."""

import torch
from PIL import Image

from progresvit.config import ModelConfig, make_rounds
from progresvit.data.crop import preprocessing_hash
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from progresvit.routing import Setting


def tiny_config(resolutions=(16, 32), heads=(1, 2), **fields):
    """A ProgResViT that runs in milliseconds."""
    rounds = make_rounds(list(resolutions), list(heads))
    return ModelConfig(**{"rounds": rounds, "heads": max(heads), "depth": 1, "patch_size": 8, **fields})


def digits_config(**fields):
    """Of a model for the four classes of the fixture ``digits``."""
    return tiny_config(**{"num_classes": 4, "class_ids": tuple("0123"), **fields})


def undecided_model(config, *, seed=2):
    """A model whose entropies differ from image to image, so that some images exit early and others do not."""
    torch.manual_seed(seed)
    model = ProgResViT(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def random_pixels(count, *, side=32, seed=5):
    """Images as bytes: (count, 3, side, side)."""
    torch.manual_seed(seed)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)


def image_folder(folder, count=40):
    """Images of 40 x 36 in three folders, and one file that cannot be read."""
    torch.manual_seed(0)
    for number in range(count):
        path = folder / f"{number % 3}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(torch.randint(0, 256, (36, 40, 3), dtype=torch.uint8).numpy()).save(path)
    (folder / "1" / "torn.jpg").write_bytes(b"torn")
    return folder


def setting_of(model, **fields):
    """A setting of two rounds that was calibrated for a model."""
    hashes = {"weights_sha256": weights_hash(model), "preprocessing_sha256": preprocessing_hash(model.config)}
    evidence = {"epsilon": 0.01, "delta": 0.05, "k": 0} if fields.get("rule", "guarantee") == "guarantee" else {}
    defaults = {"rule": "guarantee", "threshold": 1.5, "rounds": 2, "precision": "fp32", "n": 1000}
    return Setting(**{**defaults, **evidence, **hashes, **fields})
