"""Labelled images for training: their splits, and batches of them in the mode that the recipe asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from progresvit.data.dataset import find_images
from progresvit.data.gpu_loader import GpuLoaderBatches, plan_training
from progresvit.data.in_memory import (
    InMemoryBatches,
    in_memory_evaluation_batches,
    in_memory_for_evaluation,
    in_memory_for_training,
)
from progresvit.data.loader import Batch, LoaderBatches, Unreadable, evaluation_batches
from progresvit.data.timm_dataset import find_timm_images, is_timm_name
from progresvit.distributed import Processes
from progresvit.model.interface import RoundModel
from progresvit.training.tasks.task import Splits, TaskData, make_sampler

if TYPE_CHECKING:
    from progresvit.training.recipe import Recipe


def find_splits(recipe: Recipe, source: str) -> Splits:
    """Training and validation images of at least two classes."""
    find = find_timm_images if is_timm_name(source) else find_images
    train = find(source, recipe.data.train, None)
    if len(train.class_ids) < 2:
        raise ValueError(
            f"{source} has only one class, {train.class_ids[0]}; give a folder for each of two or more classes (or did "
            "you mean the folder above or below?)."
        )
    return Splits(train, find(source, recipe.data.val, train.class_ids))


def describe_splits(splits: Splits) -> str:
    """How many images of which classes, in one line."""
    names, more = splits.train.class_ids[:5], len(splits.train.class_ids) - 5
    listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
    drawn = "" if splits.val.drawn_from is None else ", a fifth of each class, selected by name"
    return (
        f"training on {len(splits.train):,} images of {len(splits.train.class_ids)} classes ({listed}); "
        f"{len(splits.val):,} validation images{drawn}"
    )


def load_batches(recipe: Recipe, splits: Splits, model: RoundModel, processes: Processes) -> TaskData:
    """Training batches, and this process's share of the validation batches."""
    config, device, batch = model.config, processes.device, recipe.optimizer.batch
    val = splits.val.subset(range(processes.rank, len(splits.val), processes.count))
    val_batch = max(1, batch // processes.count)
    if recipe.data.mode == "loader":
        workers, unreadable = recipe.data.workers, Unreadable(val)
        loader = _make_loader(recipe, splits, model, processes)
        decode = "gpu" if isinstance(loader, GpuLoaderBatches) else "cpu"

        def from_loader() -> Iterator[Batch]:
            return evaluation_batches(
                val,
                config=config,
                batch=val_batch,
                workers=workers,
                device=device,
                unreadable=unreadable,
                decode=decode,
            )

        return TaskData(loader, from_loader, [loader.unreadable, unreadable])
    stored = in_memory_for_training(
        splits.train,
        side=recipe.data.in_memory_side or config.input_side,
        device=device,
        cache=recipe.data.in_memory_cache,
    )
    batches = InMemoryBatches(
        stored,
        config=config,
        augmentation=recipe.augment,
        sampler=make_sampler(len(stored), recipe, processes),
        resolution=config.input_side,
        compiled=bool(recipe.run.compile),
    )
    stored_val = in_memory_for_evaluation(val, config=config, device=device, cache=recipe.data.in_memory_cache)

    def from_memory() -> Iterator[Batch]:
        return in_memory_evaluation_batches(stored_val, config=config, batch=val_batch)

    return TaskData(batches, from_memory, [stored.unreadable, stored_val.unreadable])


def _make_loader(
    recipe: Recipe, splits: Splits, model: RoundModel, processes: Processes
) -> LoaderBatches | GpuLoaderBatches:
    """Training batches from files, made on the GPU where it can."""
    config, device = model.config, processes.device
    known: dict[str, Any] = {
        "augmentation": recipe.augment,
        "sampler": make_sampler(len(splits.train), recipe, processes),
        "resolution": config.input_side,
        "workers": recipe.data.workers,
        "device": device,
    }
    plan = plan_training(config, recipe.augment, device, recipe.data.decode)
    if plan is None:
        return LoaderBatches(splits.train, config=config, **known)
    return GpuLoaderBatches(splits.train, plan=plan, ahead=0 if recipe.run.cuda_graphs else 2, **known)
