"""Training speed: images a second, peak memory and time to the first step, in one run and beside timm's DeiT-S.

    python benchmarks/training.py                              # synthetic images, already on the device
    python benchmarks/training.py --data photos                # and real ones, in device memory and from files
    python benchmarks/training.py --batches 128,256,512,1024   # speed and memory against the batch
    python benchmarks/training.py --dino --batches 256         # DINO: 2 global and 8 local crops of each image

What is timed is the step that ``progresvit train`` takes: mixup, all rounds, losses, gradients, AdamW, moving average;
for DINO, the teacher, all crops, and in one of its rows the crops themselves, made on the device from whole images.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import progresvit
from progresvit.cli.output import show_table
from progresvit.data.augment.classification import Augmentation, AugmentImages, Batch
from progresvit.data.augment.multicrop import MultiCrop
from progresvit.data.sampler import EpochSampler
from progresvit.data.sources import InMemorySource
from progresvit.distributed import Processes, start_processes
from progresvit.model import ProgResViT
from progresvit.model.precision import PRECISIONS, matrix_products
from progresvit.table import Column, Table
from progresvit.training.recipe import Recipe, make_recipe
from progresvit.training.step import TrainingStep
from progresvit.training.tasks.classification import make_mixup, soft_cross_entropy
from progresvit.training.tasks.dino import DINO
from progresvit.training.tasks.supervised import Supervised

COLUMNS = (
    Column("what", "what"),
    Column("batch", "batch"),
    Column("images_per_second", "images/s", "{:,.0f}".format),
    Column("peak_gib", "peak GiB", "{:.1f}".format),
    Column("first_step_s", "first step s", "{:.0f}".format),
)


def make(preset: str, batch: int, *, precision: str, compile_: bool) -> Recipe:
    """The paper's recipe as far as it concerns a step."""
    return make_recipe(
        {
            "model": {"preset": preset, "drop_path": 0.1},
            "mixing": {"mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1},
            "augment": {"colour": [0.3, 0.3, 0.3], "erasing": 0.25},
            "optimizer": {"batch": batch},
            "run": {"precision": precision, "compile": compile_},
        },
        origin="benchmark",
    )


def synthetic(batch: int, resolution: int, classes: int, device: torch.device) -> Iterator[list[Batch]]:
    """Copies of one batch of random images: mixup writes into its batch."""
    images = torch.randn(batch, 3, resolution, resolution, device=device)
    targets = torch.randint(classes, (batch,), device=device)
    while True:
        yield [Batch(images.clone(), targets)]


def timed(
    step: Callable[[int, list[Any]], None], batches: Iterator[list[Any]], *, steps: int, batch: int
) -> dict[str, float]:
    """Median of five stretches after a warm-up."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    start = time.perf_counter()
    step(0, next(batches))
    synchronize()
    first = time.perf_counter() - start
    for number in range(1, 6):
        step(number, next(batches))
    stretches = []
    for stretch in range(5):
        synchronize()
        start = time.perf_counter()
        for number in range(steps):
            step(stretch * steps + number, next(batches))
        synchronize()
        stretches.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    return {
        "batch": batch,
        "images_per_second": batch * steps / sorted(stretches)[2],
        "first_step_s": first,
        "peak_gib": peak,
    }


def fresh() -> None:
    """Nothing of the last measurement may help or hinder the next."""
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def make_step(config: progresvit.ModelConfig, recipe: Recipe, processes: Processes) -> TrainingStep:
    """The supervised step of a fresh model."""
    task = Supervised()
    task.mixup = make_mixup(recipe, config.num_classes)
    model = ProgResViT(config, drop_path=0.1).to(processes.device)
    return TrainingStep(model, task, recipe, processes, steps_per_epoch=1000)


def ours(options: argparse.Namespace, processes: Processes, batch: int) -> dict[str, float]:
    """Synthetic images."""
    fresh()
    recipe = make(options.preset, batch, precision=options.precision, compile_=options.compile)
    config = progresvit.preset(options.preset)
    step = make_step(config, recipe, processes)
    batches = synthetic(batch, config.resolution, config.num_classes, processes.device)
    return timed(step, batches, steps=options.steps, batch=batch)


def ours_on_photographs(options: argparse.Namespace, processes: Processes, batch: int) -> dict[str, float]:
    """Images in device memory, cropped, flipped, jittered, erased and mixed there."""
    from progresvit.data.dataset import find_images
    from progresvit.data.in_memory import in_memory_for_training

    fresh()
    recipe = make(options.preset, batch, precision=options.precision, compile_=options.compile)
    dataset = find_images(options.data, "train")
    config = progresvit.preset(options.preset, num_classes=1000)
    start = time.perf_counter()
    stored = in_memory_for_training(dataset, side=config.resolution, device=processes.device)
    decoding = time.perf_counter() - start
    step = make_step(config, recipe, processes)
    sampler = EpochSampler(count=len(stored), batch=batch, seed=0)
    augment = AugmentImages(config, recipe.augment, device=processes.device)
    batches = InMemorySource(stored, sampler, augment).steps(0, 10**9)
    return {**timed(step, batches, steps=options.steps, batch=batch), "decoding_s": decoding, "images": len(stored)}


def ours_from_files(options: argparse.Namespace, processes: Processes, batch: int) -> dict[str, float]:
    """Files that are decoded, cropped, augmented with RandAugment, mixed and erased on the device."""
    from progresvit.data.dataset import find_images
    from progresvit.data.sources import GpuSource, plan_training

    fresh()
    recipe = make(options.preset, batch, precision=options.precision, compile_=options.compile)
    augmentation = Augmentation(rand_augment="rand-m9-mstd0.5-inc1", erasing=0.25)
    dataset, config = find_images(options.data, "train"), progresvit.preset(options.preset, num_classes=1000)
    plan = plan_training(config, augmentation, processes.device, "gpu")
    assert plan is not None
    sampler = EpochSampler(count=len(dataset), batch=batch, seed=0)
    augment = AugmentImages(config, augmentation, device=processes.device)
    batches = GpuSource(
        dataset, sampler, plan=plan, augment=augment, workers=options.workers, device=processes.device
    ).steps(0, 10**9)
    return timed(make_step(config, recipe, processes), batches, steps=options.steps, batch=batch)


def make_dino(options: argparse.Namespace, processes: Processes, batch: int) -> tuple[TrainingStep, InMemorySource]:
    """DINO's step with the crops of the paper, and crops of random images that are stored on the device."""
    fresh()
    config, values = progresvit.preset(options.preset, num_classes=0), {"prototypes": options.prototypes}
    recipe = make_recipe(
        {
            "task": "dino",
            "task_options": values,
            "model": {"preset": options.preset, "drop_path": 0.1},
            "optimizer": {"batch": batch, "clip": 3.0, "clip_each": True},
            "ema": 0.0,
            "run": {"precision": options.precision, "compile": options.compile},
        },
        origin="benchmark",
    )
    task, model = DINO(DINO.Options(**values)), ProgResViT(config, drop_path=0.1).to(processes.device)
    task.setup(model, None, recipe, processes)  # type: ignore[arg-type]  # it does not look at the images
    side, device = config.resolution, processes.device
    stored = SimpleNamespace(
        images=torch.randint(256, (2 * batch, 3, side, side), dtype=torch.uint8, device=device),
        sizes=torch.tensor([[375, 500]], device=device).expand(2 * batch, -1),
        targets=torch.zeros(2 * batch, dtype=torch.int64, device=device),
        unreadable=None,
    )
    crops = MultiCrop(config, task.options, device=device, compiled=options.compile)
    source = InMemorySource(stored, EpochSampler(count=2 * batch, batch=batch), crops)  # type: ignore[arg-type]
    return TrainingStep(model, task, recipe, processes, steps_per_epoch=1000), source


def dino(options: argparse.Namespace, processes: Processes, batch: int) -> dict[str, float]:
    """One batch of crops for every step."""
    step, crops = make_dino(options, processes, batch)
    same = next(crops.steps(0, 1))
    return timed(step, iter(lambda: same, None), steps=options.steps, batch=batch)


def dino_with_crops(options: argparse.Namespace, processes: Processes, batch: int) -> dict[str, float]:
    """New crops for every step."""
    step, crops = make_dino(options, processes, batch)
    return timed(step, crops.steps(0, 10**9), steps=options.steps, batch=batch)


def timm_deit(options: argparse.Namespace, processes: Processes, batch: int) -> dict[str, float]:
    """timm's plain DeiT-S at 224, compiled, with the same optimizer and precision."""
    import timm

    fresh()
    model = timm.create_model("deit_small_patch16_224", drop_path_rate=0.1).to(processes.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    dtype = PRECISIONS[options.precision]

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return soft_cross_entropy(model(images), labels)

    compiled = torch.compile(loss_of, fullgraph=True, dynamic=False) if options.compile else loss_of

    def step(number: int, batches: list[Batch]) -> None:
        ((images, targets),) = batches
        optimizer.zero_grad(set_to_none=True)
        labels = torch.nn.functional.one_hot(targets, 1000).float()
        with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
            loss = compiled(images, labels)
        loss.backward()
        optimizer.step()

    batches = synthetic(batch, 224, 1000, processes.device)
    return timed(step, batches, steps=options.steps, batch=batch)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="progresvit_small_192_240")
    parser.add_argument("--batches", default="512", help="batch sizes, with commas")
    parser.add_argument("--data", help="images for the rows of photographs, in memory and from files")
    parser.add_argument("--workers", type=int, default=8, help="processes that read files")
    parser.add_argument("--steps", type=int, default=20, help="steps of each of five timed stretches")
    parser.add_argument("--precision", default="bf16", choices=list(PRECISIONS))
    parser.add_argument("--eager", dest="compile", action="store_false", help="do not compile")
    parser.add_argument("--only", choices=["ours", "photographs", "files", "timm"], help="one kind of row alone")
    parser.add_argument("--dino", action="store_true", help="measure DINO instead of supervised training")
    parser.add_argument("--prototypes", type=int, default=65536, help="outputs of DINO's head")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    processes = start_processes()
    kinds: dict[str, Callable[[argparse.Namespace, Processes, int], dict[str, float]]] = {
        "ours": ours,
        "photographs": ours_on_photographs,
        "files": ours_from_files,
        "timm": timm_deit,
    }
    names = {
        "ours": f"{options.preset}, synthetic",
        "photographs": f"{options.preset}, photographs in memory",
        "files": f"{options.preset}, photographs from files, RandAugment",
        "timm": "timm DeiT-S 224",
    }
    if options.dino:
        kinds = {"dino": dino, "crops": dino_with_crops}
        names = {
            "dino": f"{options.preset}, DINO, the same crops",
            "crops": f"{options.preset}, DINO, crops made in every step",
        }
    rows = []
    for batch in (int(size) for size in options.batches.split(",")):
        for kind, measure in kinds.items():
            if (options.only and kind != options.only) or (kind in ("photographs", "files") and not options.data):
                continue
            with matrix_products(options.precision):
                rows.append({"what": names[kind], **measure(options, processes, batch)})
            print(json.dumps(rows[-1]), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    compiled = "compiled" if options.compile else "eager"
    show_table(Table(f"{device}, {options.precision}, {compiled}", COLUMNS, rows))
    if options.json:
        about = {
            "device": device,
            "torch": torch.__version__,
            "precision": options.precision,
            "compiled": options.compile,
        }
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
