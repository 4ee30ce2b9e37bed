"""Labelled images for training: their splits, and batches of them in the mode that the recipe asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from progresvit.data.augment.classification import AugmentImages, Batch
from progresvit.data.dataset import ImageDataset, find_images
from progresvit.data.evaluation_batches import evaluation_batches, in_memory_evaluation_batches
from progresvit.data.in_memory import InMemoryImages, in_memory_for_evaluation, in_memory_for_training
from progresvit.data.loading import Unreadable
from progresvit.data.sources import GpuSource, InMemorySource, WorkerSource, classification_from_workers, plan_training
from progresvit.distributed import Processes
from progresvit.model.interface import RoundModel
from progresvit.training.tasks.task import Splits, TaskData, make_sampler

if TYPE_CHECKING:
    from progresvit.training.recipe import Recipe


def find_splits(recipe: Recipe, source: str) -> Splits:
    """Training and validation images of at least two classes."""
    train = find_images(source, recipe.data.train)
    if len(train.class_ids) < 2:
        raise ValueError(
            f"{source} has only one class, {train.class_ids[0]}; give a folder for each of two or more classes (or did "
            "you mean the folder above or below?)."
        )
    return Splits(train, find_images(source, recipe.data.val, train.class_ids))


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
    config, device = model.config, processes.device
    val = splits.val.subset(range(processes.rank, len(splits.val), processes.count))
    source: InMemorySource | GpuSource | WorkerSource
    decode = "cpu"
    if recipe.data.mode == "in_memory":
        stored = in_memory_for_training(
            splits.train,
            side=recipe.data.in_memory_side or config.input_side,
            device=device,
            cache=recipe.data.in_memory_cache,
        )
        augment = AugmentImages(config, recipe.augment, device=device, compiled=bool(recipe.run.compile))
        source = InMemorySource(stored, make_sampler(len(stored), recipe, processes), augment)
    else:
        sampler, workers = make_sampler(len(splits.train), recipe, processes), recipe.data.workers
        plan = plan_training(config, recipe.augment, device, recipe.data.decode)
        if plan is None:
            source = classification_from_workers(
                splits.train, sampler, config=config, augmentation=recipe.augment, workers=workers, device=device
            )
        else:
            decode = "gpu"
            source = GpuSource(
                splits.train,
                sampler,
                plan=plan,
                augment=AugmentImages(config, recipe.augment, device=device),
                workers=workers,
                device=device,
                ahead=0 if recipe.run.cuda_graphs else 2,
            )
    images = EvaluatedImages(val, model, recipe, processes, decode=decode)
    return TaskData(source, images, [source.unreadable, images.unreadable])


class EvaluatedImages:
    """Images after the evaluation crop, in the same mode as the training images; in_memory decodes them at once."""

    def __init__(
        self, images: ImageDataset, model: RoundModel, recipe: Recipe, processes: Processes, *, decode: str = "cpu"
    ) -> None:
        self.images, self.config, self.device = images, model.config, processes.device
        self.batch, self.workers = max(1, recipe.optimizer.batch // processes.count), recipe.data.workers
        self.decode, self.unreadable = decode, Unreadable(images)
        self._stored: InMemoryImages | None = None
        if recipe.data.mode == "in_memory":
            cache = recipe.data.in_memory_cache
            self._stored = in_memory_for_evaluation(images, config=model.config, device=processes.device, cache=cache)
            self.unreadable = self._stored.unreadable

    def __call__(self) -> Iterator[Batch]:
        """Every readable image once."""
        if self._stored is not None:
            return in_memory_evaluation_batches(self._stored, config=self.config, batch=self.batch)
        return evaluation_batches(
            self.images,
            config=self.config,
            batch=self.batch,
            workers=self.workers,
            device=self.device,
            unreadable=self.unreadable,
            decode=self.decode,
        )
