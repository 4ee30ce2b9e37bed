"""From a recipe and pictures to what the loop works with: model, objective, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.data import ImageNetInfo
from torch import nn

from progresvit import api, checkpoint
from progresvit.data.dataset import ImageDataset, find_images
from progresvit.data.in_memory import (
    InMemoryBatches,
    in_memory_evaluation_batches,
    in_memory_for_evaluation,
    in_memory_for_training,
)
from progresvit.data.loader import Batch, LoaderBatches, Unreadable, evaluation_batches
from progresvit.data.sampler import EpochSampler
from progresvit.data.timm_dataset import find_timm_images, is_timm_name
from progresvit.distributed import Processes
from progresvit.interop import start_from_timm
from progresvit.io.model_folder import find_folder
from progresvit.model import ProgResViT
from progresvit.training.distillation import HardDistillation, SoftDistillation
from progresvit.training.recipe import Recipe
from progresvit.training.step import Objective
from progresvit.training.supervised import Supervised
from progresvit.training.teachers import load_teacher, teacher_class_ids


@dataclass
class Fed:
    """The data of a run, ready to be drawn from."""

    train: LoaderBatches | InMemoryBatches
    val: Callable[[], Iterator[Batch]]
    """Gives this process's share of the validation batches."""
    unreadable: list[Unreadable]


def find_splits(recipe: Recipe, data: str) -> tuple[ImageDataset, ImageDataset]:
    """The pictures to learn from and those held back."""
    find = find_timm_images if is_timm_name(data) else find_images
    pictures = find(data, recipe.data.train, None)
    if len(pictures.class_ids) < 2:
        raise ValueError(
            f"{data} has one class only, {pictures.class_ids[0]}, and nothing to tell it from; give a folder for each "
            "of two or more (or did you mean the folder above or below?)."
        )
    return pictures, find(data, recipe.data.val, pictures.class_ids)


def describe_splits(pictures: ImageDataset, held_out: ImageDataset) -> str:
    """What a run learns from and what it is measured with, in a line for the person."""
    names, more = pictures.class_ids[:5], len(pictures.class_ids) - 5
    named = ", ".join(names) + (f" and {more} more" if more > 0 else "")
    drawn = "" if held_out.drawn_from is None else ": a fifth of each class, drawn by name"
    return (
        f"learning from {len(pictures):,} pictures of {len(pictures.class_ids)} classes ({named}); "
        f"{len(held_out):,} others are held back{drawn}"
    )


def build_model(recipe: Recipe, pictures: ImageDataset) -> ProgResViT:
    """The recipe's model, with the start it asks for: for the classes of the data, or in training the teacher's."""
    distillation = recipe.distillation
    wide = distillation is not None and distillation.classes == "teacher"
    class_ids = teacher_class_ids(distillation.teacher) if distillation and wide else pictures.class_ids
    count = len(class_ids)
    classes = recipe.model.num_classes or count
    if classes < count:
        raise ValueError(f"the data has {count} classes and the head {classes}; set model.num_classes={count} or null.")
    named = classes == count
    config = recipe.model.config(
        num_classes=classes,
        class_ids=class_ids if named else None,
        labels=_labels(class_ids) if named else None,
    )
    model = ProgResViT(config, drop_path=recipe.model.drop_path)
    start = recipe.model.start
    if start and (start == api.SHIPPED or Path(start).expanduser().is_dir()):
        _start_from_folder(model, find_folder(start))
    elif start:
        start_from_timm(model, start)
    return model


def _start_from_folder(model: ProgResViT, folder: Path) -> None:
    """Our own weights; a head of other classes keeps its fresh start."""
    source = api.load(folder)
    weights = source.state_dict()
    if source.config.class_ids != model.config.class_ids:
        fresh = {key: value for key, value in model.state_dict().items() if key.startswith("head.")}
        weights = {**weights, **fresh}
    checkpoint.check_fit(weights, model.config, origin=str(folder))
    model.load_state_dict(weights)


def _labels(class_ids: tuple[str, ...]) -> tuple[str, ...]:
    """ImageNet's words for its folder names; other names speak for themselves."""
    info = ImageNetInfo()
    known = set(info.label_names())
    return tuple(info.label_name_to_description(name).split(",")[0] if name in known else name for name in class_ids)


def data_rows(recipe: Recipe, model: ProgResViT, pictures: ImageDataset) -> tuple[int, ...] | None:
    """Where a head of the teacher's classes has those of the data; None for a head of the data's own."""
    if recipe.distillation is None or recipe.distillation.classes == "data":
        return None
    place = {name: row for row, name in enumerate(model.config.class_ids or ())}
    foreign = [name for name in pictures.class_ids if name not in place]
    if foreign:
        raise ValueError(
            f"the teacher does not know the classes {', '.join(foreign[:5])}; distil on classes that it knows "
            "(ImageNet's are folders named like n01440764), or set distillation.classes=data."
        )
    return tuple(place[name] for name in pictures.class_ids)


def build_objective(
    recipe: Recipe, model: ProgResViT, processes: Processes, rows: Sequence[int] | None = None
) -> Objective:
    """Labels alone, or with a teacher."""
    wanted, device = recipe.distillation, processes.device
    if wanted is None:
        return Supervised()
    teacher = load_teacher(wanted.teacher, model.config, resolution=wanted.resolution, as_map=wanted.map_weight > 0).to(
        device, memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    if recipe.run.compile:
        teacher.compile(dynamic=False)
    if wanted.kind == "hard":
        return HardDistillation(teacher, weight=wanted.weight)
    assert isinstance(model.head, nn.Linear)
    return SoftDistillation(
        teacher,
        model.head,
        weight=wanted.weight,
        temperature=wanted.temperature,
        map_weight=wanted.map_weight,
        rows=None if rows is None else torch.tensor(rows, device=device),
    )


def feed(
    recipe: Recipe, pictures: ImageDataset, held_out: ImageDataset, model: ProgResViT, processes: Processes
) -> Fed:
    """Training and validation batches in the mode that the recipe asks for."""
    config, device, batch = model.config, processes.device, recipe.optimizer.batch
    share = held_out.subset(range(processes.rank, len(held_out), processes.count))
    ordering = {
        "batch": batch,
        "accumulate": recipe.optimizer.accumulate,
        "processes": processes.count,
        "rank": processes.rank,
        "seed": recipe.seed,
    }
    per_process = max(1, batch // processes.count)
    resolution = config.input_side
    if recipe.data.mode == "loader":
        order = EpochSampler(count=len(pictures), **ordering)
        workers = recipe.data.workers
        loader = LoaderBatches(
            pictures,
            config=config,
            augmentation=recipe.augment,
            sampler=order,
            resolution=resolution,
            workers=workers,
            device=device,
        )
        skipped = Unreadable(share)

        def from_loader() -> Iterator[Batch]:
            return evaluation_batches(
                share, config=config, batch=per_process, workers=workers, device=device, unreadable=skipped
            )

        return Fed(loader, from_loader, [loader.unreadable, skipped])
    stored = in_memory_for_training(pictures, side=recipe.data.resident_side or resolution, device=device)
    order = EpochSampler(count=len(stored), **ordering)
    resident = InMemoryBatches(
        stored,
        config=config,
        augmentation=recipe.augment,
        sampler=order,
        resolution=resolution,
        compiled=bool(recipe.run.compile),
    )
    shown = in_memory_for_evaluation(share, config=config, device=device)

    def from_memory() -> Iterator[Batch]:
        return in_memory_evaluation_batches(shown, config=config, batch=per_process)

    return Fed(resident, from_memory, [stored.unreadable, shown.unreadable])
