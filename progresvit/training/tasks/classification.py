"""What classification tasks share: labelled images, mixup, top-1 of every round.

Letters: B images, K classes, S rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.data.mixup import mixup_target
from torch import Tensor, nn

from progresvit.data.augment.classification import Batch
from progresvit.distributed import Processes
from progresvit.model.interface import RoundModel
from progresvit.predict.head import Head, score_columns
from progresvit.training.tasks.labelled_images import describe_splits, find_splits, load_batches
from progresvit.training.tasks.task import Metrics, Splits, Task, TaskData
from progresvit.training.tasks.validation import gather_columns, top1_metrics

if TYPE_CHECKING:
    from progresvit.training.recipe import Recipe


class Classification(Task):
    """A task with labelled images. A subclass adds ``losses``, whose targets are (B, K), mixed and smoothed."""

    sections = ("mixing",)

    def find_splits(self, recipe: Recipe, source: str) -> Splits:
        """Folders or tars with one folder per class, or a dataset that timm reads."""
        return find_splits(recipe, source)

    def describe(self, splits: Splits) -> str:
        return describe_splits(splits)

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Create mixup over the labelled classes."""
        self.mixup = make_mixup(recipe, self.labelled_classes(model, splits), processes.count)

    def labelled_classes(self, model: RoundModel, splits: Splits) -> int:
        """Number of classes over which labels are smoothed."""
        classes: int = model.config.num_classes
        return classes

    def load_data(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> TaskData:
        return load_batches(recipe, splits, model, processes)

    def prepare(self, batch: Batch) -> Any:
        """Mixed images, and labels (B,) -> (B, K)."""
        return Batch(*self.mixup(batch.images, batch.targets))

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
        rounds = f"top-1 of the rounds {' '.join(f'{top1:.2%}' for top1 in values['top1'])}"
        point = values.get("near_lossless")
        if point is None:
            return rounds
        return (
            f"{rounds}; near-lossless {point['top1']:.2%} at {point['gmacs']:.3f} of {values['full_gmacs']:.3f} GMACs "
            f"({values['convention']}), threshold {point['threshold']:.4f}"
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
