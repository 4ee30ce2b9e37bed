"""Subnetworks: labels for some of a model's rounds in every step, where the rounds are alternatives.

    HydraViT    per_step: 1              one round
    SortedNet   per_step: 3              several different rounds, the mean of their cross entropies
    MatFormer   per_step: all, sum       every round, the sum of their cross entropies

Only the drawn rounds run. Rounds are drawn uniformly, without replacement, once per step for all processes and
micro-batches.

Letters: B images, K classes, S rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import PlainValidator
from torch import Tensor

from progresvit.data.augment.classification import Batch
from progresvit.distributed import Processes
from progresvit.io.parse import Section
from progresvit.model import RoundOutput
from progresvit.model.interface import RoundModel
from progresvit.training.recipe import Recipe
from progresvit.training.tasks.classification import Classification, soft_cross_entropy
from progresvit.training.tasks.task import Splits


def _count_or_all(value: Any) -> Any:
    if value != "all" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"must be all, or a number of rounds of at least 1, got {value!r}")
    return value


class SubnetworksOptions(Section):
    """Which rounds a step trains, and how their losses are combined."""

    per_step: Annotated[int | Literal["all"], PlainValidator(_count_or_all)] = 1
    """Number of different rounds to draw for a step, or all rounds."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the losses of the rounds that ran are combined."""


class DrawnBatch(NamedTuple):
    """A batch and the rounds that learn it."""

    images: Tensor
    targets: Tensor
    """(B, K)"""
    rounds: tuple[int, ...]
    """The drawn rounds in ascending order; empty for all."""


class Subnetworks(Classification):
    """The cross entropy of the drawn rounds with the mixed and smoothed labels."""

    Options = SubnetworksOptions

    def __init__(self, options: SubnetworksOptions | None = None) -> None:
        super().__init__(options)
        self.static_graph = self.uses_all_parameters = self.options.per_step == "all"
        self.drawn: tuple[int, ...] = ()
        """Rounds of the current step; empty for all."""

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Check that the model's rounds can be drawn."""
        super().setup(model, splits, recipe, processes)
        self.rounds, count = len(model.config.rounds), self.options.per_step
        if count == "all":
            return
        if model.config.routable:
            raise ValueError(
                f"the rounds of a model of kind {model.config.kind!r} build on each other, so they cannot be drawn "
                "separately; set task=supervised, or task_options.per_step=all."
            )
        if count > self.rounds:
            raise ValueError(
                f"task_options.per_step={count} is more than the {self.rounds} rounds of the model; set it to at most "
                f"{self.rounds}, or to all."
            )
        if recipe.run.compile:  # compiles each draw
            draws = math.comb(self.rounds, count)
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, draws)

    def before_step(self, step: int) -> None:
        """Draw the rounds of the step, all choices with equal probability, by torch's generator on the CPU.

        The draw follows from the seed of the run and the step.
        """
        if self.options.per_step != "all":
            self.drawn = tuple(sorted(torch.randperm(self.rounds, device="cpu")[: self.options.per_step].tolist()))

    def prepare(self, batch: Batch) -> DrawnBatch:
        """Mixed images, labels (B,) -> (B, K), and the rounds of the step."""
        images, targets = super().prepare(batch)
        return DrawnBatch(images, targets, self.drawn)

    def outputs(self, model: RoundModel, batch: DrawnBatch) -> Sequence[RoundOutput | None]:
        """The outputs of the drawn rounds; None for the other rounds."""
        if not batch.rounds:
            return model(batch.images)
        rounds = range(len(model.config.rounds))
        return [model.run_round(s, batch.images) if s in batch.rounds else None for s in rounds]

    def losses(self, outputs: Sequence[RoundOutput | None], batch: DrawnBatch) -> Tensor:
        """(S,), 0 for a round that did not run. The mean of all S is the mean, or sum, of the drawn cross entropies.

        With ``mean``, a round's loss is S / per_step times its cross entropy in the steps that draw it, so its average
        over steps is the cross entropy. With ``sum``, it is S times its cross entropy.
        """
        ran = sum(output is not None for output in outputs)
        scale = len(outputs) / (ran if self.options.reduction == "mean" else 1)
        zero = torch.zeros((), device=batch.images.device)
        return torch.stack(
            [zero if output is None else scale * soft_cross_entropy(output.logits, batch.targets) for output in outputs]
        )
