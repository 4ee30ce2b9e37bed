"""Supervised training: every round learns the labels.

Letters: B images, K classes, S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from progresvit.data.augment.classification import Batch
from progresvit.distributed import Processes
from progresvit.io.parse import Section
from progresvit.model import RoundOutput
from progresvit.model.interface import RoundModel
from progresvit.training.recipe import Recipe
from progresvit.training.tasks.classification import Classification, soft_cross_entropy
from progresvit.training.tasks.task import Splits


class SupervisedOptions(Section):
    """Options of the task ``supervised``."""

    class_weights: Literal["balanced"] | None = None
    """Weights of the classes in the loss. With ``balanced`` all classes have the same sum over the training images."""


class Supervised(Classification):
    """The cross entropy of every round with the mixed and smoothed labels, without early exit."""

    Options = SupervisedOptions
    weights: Tensor | None = None
    """(K,); None for equal weights."""

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Mixup and class weights."""
        super().setup(model, splits, recipe, processes)
        if getattr(self.options, "class_weights", None) == "balanced":  # a subclass may have other options
            self.weights = balanced_weights(splits.train.targets, model.config.num_classes).to(processes.device)

    def losses(self, outputs: Sequence[RoundOutput], batch: Batch) -> Tensor:
        """(S,)"""
        return torch.stack([soft_cross_entropy(output.logits, batch.targets, self.weights) for output in outputs])


def balanced_weights(targets: Sequence[int], classes: int) -> Tensor:
    """Weights inversely proportional to the images of the class, with a mean of 1 over the images: -> (K,)."""
    counts = torch.bincount(torch.tensor(targets), minlength=classes)
    present = int((counts > 0).sum())
    return len(targets) / (present * counts.clamp(min=1))
