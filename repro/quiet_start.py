"""A quiet start is the pretrained ViT in its last round: measured with real weights on real images.

    python repro/quiet_start.py --weights deit_tiny_patch16_224.safetensors [--data FOLDER] [--device cpu]

The weights belong to timm's ``deit_tiny_patch16_224``. The script prints the largest difference between the logits
of timm's model and those of the last round of ``progresvit_tiny_160_224`` on the bundled sample images, in float32 and,
where rounding is out of the way, in float64. ``--data`` is a folder with one folder per class of ImageNet, named by
WordNet id or by class number (000 to 999); with it, the script compares the first 64 images and prints top-1 of every
round on all images. If the folders are WordNet ids of some of the classes, the head keeps their rows alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import progresvit._torchvision  # (ahead of timm)

# isort: split
import timm
import torch
from timm.data import ImageNetInfo
from torch import Tensor

import progresvit
from progresvit.config import ModelConfig
from progresvit.data.dataset import ImageDataset, find_images, find_unlabelled
from progresvit.data.evaluation_batches import numbered_batches
from progresvit.data.samples import samples_folder
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, Records, evaluate
from progresvit.interop import start_from_timm
from progresvit.io.weights import read_weights
from progresvit.model import ProgResViT

COMPARED = 64
IMAGENET = ImageNetInfo().label_names()


def main(arguments: list[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="weights of timm's deit_tiny_patch16_224")
    parser.add_argument("--data", type=Path, help="a folder with one folder per class of ImageNet")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    images = find_unlabelled(samples_folder()) if options.data is None else find_images(options.data, ".")
    model = ProgResViT(make_config(images.class_ids)).eval()
    start_from_timm(model, options.weights, fusion="quiet")
    pixels = read_pixels(images, model, device)
    for dtype in (torch.float32, torch.float64):
        largest = difference(model.to(dtype), options.weights, pixels.to(dtype))
        print(f"largest difference of logits on {len(pixels)} images in {str(dtype)[6:]}: {largest:.2e}")
    model.float()
    if options.data is not None:
        records = evaluate_saved(model, options.data, device)
        shares = ", ".join(f"round {s + 1} {share:.2%}" for s, share in enumerate(records.correct.mean(axis=0)))
        print(f"top-1 of {len(records)} images: {shares}")


def make_config(class_ids: Sequence[str]) -> ModelConfig:
    """A model of the data's classes if these are some of ImageNet's, by WordNet id; otherwise of all 1000."""
    if class_ids and set(class_ids) < set(IMAGENET):
        return progresvit.preset("progresvit_tiny_160_224", num_classes=len(class_ids), class_ids=class_ids)
    return progresvit.preset("progresvit_tiny_160_224")


def read_pixels(images: ImageDataset, model: ProgResViT, device: torch.device) -> Tensor:
    """The first images, cropped and normalised for the model: (B, C, r, r)."""
    group = list(range(min(COMPARED, len(images))))
    transform = NamedTransform(model.config)
    batch = next(numbered_batches(images, [group], transform=transform, workers=0, device=device))
    assert batch.pixels is not None, batch.unreadable
    return normalise(batch.pixels, model.config)


@torch.inference_mode()
def difference(model: ProgResViT, weights: Path, pixels: Tensor) -> float:
    """Largest difference between the logits of the model's last round and of timm's model."""
    original = timm.create_model("deit_tiny_patch16_224")
    original.load_state_dict(read_weights(weights))
    expected = original.to(pixels).eval()(pixels)
    if model.config.class_ids is not None:
        expected = expected[:, [IMAGENET.index(name) for name in model.config.class_ids]]
    return float((model.to(pixels.device)(pixels)[-1].logits - expected).abs().max())


def evaluate_saved(model: ProgResViT, data: Path, device: torch.device) -> Records:
    """Records of the model, saved and loaded, on all images."""
    with tempfile.TemporaryDirectory() as scratch:
        loaded = progresvit.load(progresvit.save(model, Path(scratch) / "model"))
        source, out = DataSource(data=str(data), split="."), Path(scratch) / "records.parquet"
        return evaluate(loaded, source, out, name="quiet start", processes=Processes(rank=0, count=1, device=device))


if __name__ == "__main__":
    main()
