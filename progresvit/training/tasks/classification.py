"""What classification tasks share: labelled images in the mode of the recipe, mixing, top-1 of every round.

Letters: B images, K classes, S rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.data.mixup import mixup_target
from torch import Tensor, nn

from progresvit.data.augment.classification import AugmentImages, Batch
from progresvit.data.augment.gpu_augment import erase_randomly
from progresvit.data.dataset import ImageDataset, find_images
from progresvit.data.evaluation_batches import evaluation_batches, in_memory_evaluation_batches
from progresvit.data.in_memory import InMemoryImages, in_memory_for_evaluation
from progresvit.data.loading import Unreadable
from progresvit.data.sources import GpuSource, InMemorySource, WorkerSource, classification_from_workers, plan_training
from progresvit.distributed import Processes
from progresvit.io.parse import count_of
from progresvit.model.interface import RoundModel
from progresvit.predict.head import Head, score_columns
from progresvit.training.recipe import Recipe
from progresvit.training.tasks.task import Metrics, Splits, Task, TaskData, make_sampler, source_in_memory
from progresvit.training.tasks.validation import gather_columns, summarize_rounds, top1_metrics


class Classification(Task):
    """A task with labelled images. A subclass adds ``losses``, whose targets are (B, K), mixed and smoothed."""

    sections = ("mixing",)
    erasing: float = 0.0
    """Probability of erasing an image after mixing."""

    def find_splits(self, recipe: Recipe, source: str) -> Splits:
        """Images of two or more classes: folders or tars with one folder per class, or a dataset that timm reads."""
        train = find_images(source, recipe.data.train)
        if len(train.class_ids) < 2:
            raise ValueError(
                f"{source} has only one class, {train.class_ids[0]}; give a folder for each of two or more classes (or "
                "did you mean the folder above or below?)."
            )
        return Splits(train, find_images(source, recipe.data.val, train.class_ids))

    def describe(self, splits: Splits) -> str:
        """How many images of which classes, in one line."""
        names, more = splits.train.class_ids[:5], len(splits.train.class_ids) - 5
        listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
        drawn = "" if splits.val.drawn_from is None else ", a fifth of each class, selected by name"
        return (
            f"training on {count_of(len(splits.train), 'image', ',')} of {len(splits.train.class_ids)} classes "
            f"({listed}); {count_of(len(splits.val), 'validation image', ',')}{drawn}"
        )

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Create mixup over the labelled classes, and erasing after it."""
        self.mixup = make_mixup(recipe, self.labelled_classes(model, splits), processes.count)
        self.erasing = recipe.augment.late_erasing

    def labelled_classes(self, model: RoundModel, splits: Splits) -> int:
        """Number of classes over which labels are smoothed."""
        classes: int = model.config.num_classes
        return classes

    def load_data(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> TaskData:
        """Training batches, and this process's share of the validation batches."""
        config, device = model.config, processes.device
        val = splits.val.subset(range(processes.rank, len(splits.val), processes.count))
        source: InMemorySource | GpuSource | WorkerSource
        decode = "cpu"
        if recipe.data.mode == "in_memory":
            augment = AugmentImages(config, recipe.augment, device=device, compiled=bool(recipe.run.compile))
            source = source_in_memory(splits.train, config, recipe, processes, augment)
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

    def prepare(self, batch: Batch) -> Any:
        """Mixed images, some of them erased, and labels (B,) -> (B, K)."""
        images, labels = self.mixup(batch.images, batch.targets)
        if self.erasing:
            seed = int(torch.randint(2**32, (), device="cpu"))  # the loop seeds the generator of the CPU
            generator = torch.Generator(images.device).manual_seed(seed)
            images = erase_randomly(images, self.erasing, generator)
        return Batch(images, labels)

    @torch.no_grad()
    def validate(
        self, model: RoundModel, data: TaskData, *, processes: Processes, dtype: torch.dtype | None
    ) -> Metrics:
        """Top-1 of every round and of the near-lossless routed point; the last round's selects the best model.

        A model whose rounds are alternatives (``config.routable`` is false) has no routed point.
        """
        head = Head(cast(Any, cast(nn.Module, model).eval()), dtype=dtype, make=score_columns)
        return top1_metrics(model, gather_columns((head.columns(*batch) for batch in data.val()), processes))

    def summarize(self, values: Mapping[str, Any]) -> str:
        return summarize_rounds(values, "top-1", values["top1"], metric="top1")


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


def soft_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
    """Mean over the batch of -sum_k w_k y_k log p_k, in float32; w (K,) is 1 by default."""
    return F.cross_entropy(logits.float(), labels, weight)


def make_mixup(recipe: Recipe, classes: int, processes: int = 1) -> Any:
    """timm's mixup and cutmix with label smoothing, or label smoothing alone."""
    mixing = recipe.mixing
    if not mixing.mixup and not mixing.cutmix:
        return lambda images, targets: (images, mixup_target(targets, classes, smoothing=mixing.smoothing))
    micro_batch = recipe.optimizer.batch // (recipe.optimizer.accumulate * processes)
    if micro_batch % 2:
        raise ValueError(
            f"mixup needs an even micro-batch in each process, not {micro_batch}; change optimizer.batch or "
            "optimizer.accumulate, or set mixing.mixup=0 and mixing.cutmix=0."
        )
    return Mixup(
        mixup_alpha=mixing.mixup,
        cutmix_alpha=mixing.cutmix,
        prob=mixing.probability,
        switch_prob=mixing.switch,
        label_smoothing=mixing.smoothing,
        num_classes=classes,
    )
