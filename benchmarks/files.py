"""From image files to answers: images a second, beside timm's DataLoader, and whether the answers stay the same.

    python benchmarks/files.py speed --data photos --device cuda     # GPU and CPU decoding, timm's DataLoader
    python benchmarks/files.py speed --data photos --device cpu --threads 2 --images 400
    python benchmarks/files.py answers --data imagenet --split val   # DCT scaling, GPU cropping and GPU decoding

``speed`` repeats the files of a folder until there are enough (so they are read from the page cache) and times
everything after the first tenth: processes and kernels are started by then. On a CPU it times everything, and decoding
and computing alone. ``answers`` compares predictions with those of the reference crop, timm's evaluation transform.
"""

from __future__ import annotations

import progresvit._torchvision

# isort: split
import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor

import progresvit
from progresvit.config import ModelConfig
from progresvit.data.crop import EvaluationCrop
from progresvit.data.dataset import Entry, ImageDataset, find_images, find_unlabelled
from progresvit.data.decode import decode, open_header
from progresvit.data.evaluation_batches import numbered_batches
from progresvit.data.transforms import NamedTransform, normalise
from progresvit.engine.images import ImageOpener
from progresvit.engine.measurement import hardware
from progresvit.evaluation.classes import relabel
from progresvit.io.files import replace_file
from progresvit.model.precision import PRECISIONS, autocast
from progresvit.routing import SettingWarning


def repeated(dataset: ImageDataset, images: int) -> list[Entry]:
    """The files, repeated until the list has this many entries."""
    return list(itertools.islice(itertools.cycle(dataset.entries), images))


def batched(entries: list[Entry], size: int) -> list[list[Entry]]:
    """Split a list into batches."""
    return [entries[first : first + size] for first in range(0, len(entries), size)]


def rate(results: Iterable[int], total: int, *, skip: float = 0.1) -> float:
    """Images a second after the first share of them; ``results`` counts images as they are done."""
    done, start, first = 0, time.perf_counter(), 0
    for count in results:
        done += count
        if not first and done >= skip * total > 0:
            start, first = time.perf_counter(), done
    return (done - first) / (time.perf_counter() - start)


def engine_speed(options: argparse.Namespace, entries: list[Entry], decode: str) -> dict[str, Any]:
    """Files to predictions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingWarning)  # it was calibrated in fp32
        engine = progresvit.Engine(
            options.model, device=options.device, precision=options.precision, batch=options.batch, decode=decode,
            workers=options.workers, threads=options.threads,
        )  # fmt: skip
    engine.warm_up()
    exits = [0] * len(engine.gmacs)

    def predictions() -> Iterator[int]:
        for prediction in engine.stream(batched(entries, engine.batch), deadline=None):
            assert prediction.error is None, prediction.error
            exits[prediction.exit_round - 1] += 1
            yield 1

    speed = rate(predictions(), len(entries), skip=0.1 if options.device.startswith("cuda") else 0.0)
    return {"way": f"engine, decode={decode}", "images_per_s": speed, "continuing": 1 - exits[0] / sum(exits)}


def timm_speed(options: argparse.Namespace, entries: list[Entry], workers: int) -> dict[str, Any]:
    """timm's DataLoader, its evaluation transform and its compiled DeiT-Tiny of the same crop."""
    from timm.data import create_loader
    from timm.data.dataset import ImageDataset as TimmDataset

    config = progresvit.load(options.model).config
    device, dtype = torch.device(options.device), PRECISIONS[options.precision] or torch.float32
    model = timm.create_model("deit_tiny_patch16_224", img_size=config.input_side, num_classes=config.num_classes)
    model = torch.compile(model.to(device, dtype).eval())
    batch = min(options.batch or 512, 256)
    dataset = TimmDataset("", reader=FileReader(entries))
    loader = create_loader(
        dataset, input_size=(3, config.input_side, config.input_side), batch_size=batch, is_training=False,
        use_prefetcher=device.type == "cuda", interpolation="bicubic", mean=config.mean, std=config.std,
        num_workers=workers, crop_pct=config.crop, device=device,
    )  # fmt: skip

    @torch.inference_mode()
    def predictions() -> Iterator[int]:
        for images, _ in loader:
            yield len(model(images.to(device, dtype)).argmax(dim=-1).tolist())

    return {"way": f"timm DataLoader, {workers} workers", "images_per_s": rate(predictions(), len(entries))}


class FileReader:
    """Files for timm's dataset."""

    def __init__(self, entries: list[Entry]) -> None:
        self.paths = [entry.path for entry in entries]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return open(self.paths[index], "rb"), 0


def parts_speed(options: argparse.Namespace, entries: list[Entry]) -> list[dict[str, Any]]:
    """Decoding alone and computing alone, with the threads of the whole."""
    model = progresvit.load(options.model)
    assert isinstance(model.config, ModelConfig)
    opener = ImageOpener(model.config, device=torch.device(options.device), workers=options.workers)
    with ThreadPoolExecutor(opener.workers) as pool:
        opened = opener.open_all(batched(entries, options.batch or 64), pool)
        decoding = rate((len(part.pixels) for part in opened), len(entries), skip=0.0)
        pixels = opener.open(entries[:64], pool).pixels
    engine = progresvit.Engine(
        options.model, device=options.device, precision=options.precision, batch=options.batch, threads=options.threads
    )
    repeats = [pixels] * max(1, len(entries) // len(pixels))
    total = len(repeats) * len(pixels)
    engine.classify(pixels)  # warm
    computing = rate((1 for _ in engine.stream(repeats, deadline=None)), total, skip=0.0)
    return [
        {"way": "decoding alone", "images_per_s": decoding},
        {"way": "computing alone", "images_per_s": computing},
        {"way": "both in turn", "images_per_s": 1 / (1 / decoding + 1 / computing)},
    ]


def measure_speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All ways on this device."""
    entries = repeated(find_unlabelled(options.data), options.images)
    ways: list[Callable[[], Any]] = []
    if options.device.startswith("cuda"):
        ways += [lambda: engine_speed(options, entries, "gpu"), lambda: engine_speed(options, entries, "cpu")]
        few = entries[: max(len(entries) // 4, 1)]
        ways.append(lambda: timm_speed(options, few, options.timm_workers))
    else:
        ways += [lambda: engine_speed(options, entries, "auto"), lambda: parts_speed(options, entries)]
    rows: list[dict[str, Any]] = []
    for way in ways:
        made = way()
        rows += made if isinstance(made, list) else [made]
        for row in rows[-len(made) if isinstance(made, list) else -1 :]:
            print(f"{row['way']}: {row['images_per_s']:,.0f} images/s", flush=True)
    return rows


def predict(options: argparse.Namespace, batches: Iterator[tuple[list[int], Tensor]], model: Any) -> dict[int, int]:
    """The last round's class of each image, by its index."""
    device, found = torch.device(options.device), {}
    with torch.inference_mode():
        for numbers, pixels in batches:
            with autocast(device, options.precision):
                logits = model(normalise(pixels, model.config))[-1].logits
            found.update(zip(numbers, logits.argmax(dim=-1).tolist()))
    return found


def compare_answers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predictions after each way of decoding, compared with the reference."""
    device = torch.device(options.device)
    model = progresvit.load(options.model).to(device).eval()
    dataset = find_images(options.data, options.split) if options.split else find_unlabelled(options.data)
    if options.least_side:
        dataset = dataset.subset(
            index for index in range(len(dataset)) if longest_side(dataset, index) >= options.least_side
        )
    if options.images:
        dataset = dataset.subset(range(0, len(dataset), max(1, len(dataset) // options.images)))
    labels = relabel(dataset, model.config) if options.split else None
    groups = batched(list(range(len(dataset))), 128)
    workers = options.workers or 2

    def reference(decode: str) -> Iterator[tuple[list[int], Tensor]]:
        transform = NamedTransform(model.config)
        for numbers, pixels, bad in numbered_batches(
            dataset, groups, transform=transform, workers=workers, device=device, decode=decode
        ):
            assert pixels is not None, bad
            yield numbers, pixels

    def opened(decode: str) -> Iterator[tuple[list[int], Tensor]]:
        opener = ImageOpener(model.config, device=device, decode=decode, workers=workers)
        with ThreadPoolExecutor(workers) as pool:
            for group in groups:
                pixels = opener.open([dataset.entries[index] for index in group], pool).pixels
                yield group, torch.as_tensor(pixels).to(device)

    def sections() -> Iterator[tuple[list[int], Tensor]]:
        crop = EvaluationCrop.of(model.config)
        for group in groups:
            images = [decode(dataset.read(index)) for index in group]
            crops = [crop(image, crop.box(image.size)) for image in images]
            yield group, torch.from_numpy(np.stack(crops)).to(device)

    expected = predict(options, reference("cpu"), model)
    if device.type == "cuda":
        ways = {"CPU decoding, GPU cropping": opened("cpu"), "GPU decoding": opened("gpu")}
    else:
        ways = {"section of the image only": sections(), "engine, DCT scaling of large files": opened("auto")}
    rows = [accuracy_row("reference crop", expected, expected, labels)]
    for name, batches in ways.items():
        rows.append(accuracy_row(name, predict(options, batches, model), expected, labels))
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def longest_side(dataset: ImageDataset, index: int) -> int:
    """The longest side in pixels, from the header."""
    return max(open_header(dataset.read(index)).size)


def accuracy_row(
    name: str, found: dict[int, int], expected: dict[int, int], labels: Sequence[int] | None
) -> dict[str, Any]:
    """Equal predictions, and correct ones of a set with labels."""
    same = sum(found[index] == expected[index] for index in expected)
    right = None if labels is None else sum(found[index] == labels[index] for index in found)
    return {"way": name, "images": len(found), "same": same, "right": right}


def main() -> None:
    """Measure and print; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "answers"])
    parser.add_argument("--data", required=True, help="folder or tar of images")
    parser.add_argument("--split", help="answers: split of a labelled set; '.' if its class folders are at the top")
    parser.add_argument("--model", default="nettewoof-tiny", help="bundled model or folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", help="by default bf16 on a GPU, else fp32")
    parser.add_argument("--images", type=int, help="speed: images of a run; answers: number of images, all by default")
    parser.add_argument("--least-side", type=int, help="answers: only images with a side of at least this many pixels")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument("--workers", type=int, help="of the engine; by default one for each core")
    parser.add_argument("--timm-workers", type=int, default=16)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    on_gpu = options.device.startswith("cuda")
    options.precision = options.precision or ("bf16" if on_gpu else "fp32")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.what == "speed":
        options.images = options.images or (100_000 if on_gpu else 400)
    rows = measure_speed(options) if options.what == "speed" else compare_answers(options)
    if options.out is not None:
        about = {"hardware": hardware(options.device), "torch": torch.__version__, "model": options.model}
        replace_file(options.out, json.dumps({**about, "what": options.what, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
