"""Training of DynaBERT: in every step, all widths learn from the frozen model from which the run starts.

    per width: CE(student, probabilities of the teacher) + w * sum over the blocks of MSE(hidden state, teacher's)

Hidden states are the residual stream after each block; the embedding is not compared. Labels are used only in
validation and, once before the first step, to measure the importance of heads and neurons. Label smoothing has no
effect.

Letters: B images, K classes, N tokens, W channels of the backbone, L blocks, S rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from progresvit.baselines.dynabert import DynaBERT, reorder
from progresvit.data.augment.classification import Batch
from progresvit.distributed import Processes
from progresvit.interop import start_from
from progresvit.io.parse import Section
from progresvit.model import RoundOutput
from progresvit.model.interface import RoundModel
from progresvit.training.recipe import Recipe
from progresvit.training.tasks.classification import Classification, soft_cross_entropy
from progresvit.training.tasks.task import Frozen, Splits, TaskData


class DynaBERTOptions(Section):
    """Options of the task ``dynabert``."""

    hidden_weight: float = Field(0.1, ge=0)
    """Weight of the hidden states in the loss."""
    importance_batches: int = Field(8, ge=1)
    """Training batches to estimate the importance of heads and neurons before the first step."""


class HiddenBatch(NamedTuple):
    """Images with the teacher's answer and hidden states."""

    images: Tensor
    answer: Tensor
    """Probabilities (B, K)."""
    states: tuple[Tensor, ...]
    """Hidden states, L times (B, N, W)."""


class FullWidth(nn.Module):
    """The last round of a DynaBERT, which runs the whole backbone, with its hidden states."""

    def __init__(self, model: DynaBERT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[RoundOutput, tuple[Tensor, ...]]:
        return self.model.run_with_hidden(len(self.model.config.rounds) - 1, images)


class DynaBERTDistillation(Classification):
    """Every width learns the predictions and hidden states of the full width."""

    Options = DynaBERTOptions
    needs_start = True

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Load the teacher: ``model.start`` at full width."""
        if not isinstance(model, DynaBERT):
            raise ValueError(
                f"the task dynabert trains models of the kind dynabert, not {model.config.kind}; set "
                "model.kind=dynabert."
            )
        if recipe.model.start is None:
            raise ValueError(
                "the task dynabert learns from a trained model of the full width; name it as model.start: a timm model "
                "such as deit_small_patch16_224.fb_in1k, or a model folder."
            )
        if recipe.model.start_as_prefix:
            raise ValueError("the task dynabert learns from a start of the full width; remove model.start_as_prefix.")
        super().setup(model, splits, recipe, processes)
        teacher = DynaBERT(model.config)
        if "head.weight" in start_from(teacher, recipe.model.start):
            raise ValueError(
                f"{recipe.model.start} does not know the classes of the data, so there is nothing to learn from it; "
                "train it on them first (task: supervised), and start from the folder of that model."
            )
        self.teacher = Frozen(FullWidth(teacher).to(processes.device))
        if recipe.run.compile:
            self.teacher.module.compile(dynamic=False)

    def load_data(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> TaskData:
        """Batches of labelled images. The first batches decide the order of heads and neurons.

        A run that resumes restores its weights afterwards, and with them its first order.
        """
        loaded = super().load_data(model, splits, recipe, processes)
        steps = loaded.train.steps(0, self.options.importance_batches)
        reorder(cast(DynaBERT, model), (batch for step in steps for batch in step), mean=processes.mean)
        return loaded

    def prepare(self, batch: Batch) -> HiddenBatch:
        """Mixed images, and the teacher's answer for the same images."""
        images = super().prepare(batch).images
        output, states = self.teacher(images)
        return HiddenBatch(images, output.logits.float().softmax(dim=-1), states)

    def outputs(self, model: RoundModel, batch: HiddenBatch) -> list[tuple[RoundOutput, tuple[Tensor, ...]]]:
        """All widths with their hidden states."""
        return [cast(Any, model).run_with_hidden(s, batch.images) for s in range(len(model.config.rounds))]

    def losses(self, outputs: Sequence[tuple[RoundOutput, tuple[Tensor, ...]]], batch: HiddenBatch) -> Tensor:
        """(S,)"""
        return torch.stack(
            [
                soft_cross_entropy(output.logits, batch.answer)
                + self.options.hidden_weight * hidden_distance(states, batch.states)
                for output, states in outputs
            ]
        )


def hidden_distance(states: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """The sum over blocks of the mean squared difference of hidden states, in float32."""
    return torch.stack([F.mse_loss(a.float(), b.float()) for a, b in zip(states, teacher, strict=True)]).sum()
