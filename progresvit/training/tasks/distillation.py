"""Distillation: every round learns the labels and the answers of a frozen teacher for the same images.

Hard, as in the paper: per round, (1 - w) CE(z, y) + w CE(z, argmax of the teacher), w = 1/2.
The probabilities of several teachers are averaged.

Soft: the teacher's probabilities at a temperature t, (1 - w) CE(z, y) + w t² KL(teacher || student). With a map, patch
tokens also learn the teacher's answer at their place, with the same head as the class token.

Letters: B images, K classes of the head, Y classes of the data, S rounds, d channels, g side of the patch grid, T side
of the teacher's map, P its places (T * T).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from progresvit.data.augment.classification import Batch
from progresvit.distributed import Processes
from progresvit.model import RoundOutput, slicing
from progresvit.model.interface import RoundModel, capability
from progresvit.training.recipe import DistillationOptions, Recipe
from progresvit.training.tasks.classification import Classification, soft_cross_entropy
from progresvit.training.tasks.task import Frozen, Splits
from progresvit.training.teachers import check_teacher, find_classes, load_teacher, teacher_class_ids


class TeacherBatch(NamedTuple):
    """A batch with the teacher's answer."""

    images: Tensor
    targets: Tensor
    """(B, Y)"""
    answer: Tensor
    """Hard: the teacher's label (B,). Soft: its probabilities (B, K)."""
    places: tuple[Tensor, ...]
    """The teacher's probabilities at each place, (B, P, K); empty without a map."""


class MapOutput(NamedTuple):
    """A round's predictions for the image and for the places of the teacher's map."""

    logits: Tensor
    """(B, K)"""
    map_logits: Tensor
    """(B, P, K)"""


class Distillation(Classification):
    """Every round learns labels and a teacher, hard or soft (:class:`DistillationOptions`)."""

    Options = DistillationOptions
    options_key = "distillation"
    rows: Tensor | None
    teachers: list[Frozen]

    def __init__(self, options: DistillationOptions) -> None:
        super().__init__(options)
        self.soft = options.kind == "soft"
        self.weight, self.temperature, self.map_weight = options.weight, options.temperature, options.map_weight
        self.register_buffer("rows", None)
        """Rows of the data's classes if the head has the teacher's classes; else None."""

    def problems(self) -> Iterator[str]:
        """Teachers that are not here."""
        missing = []
        for name in self.options.teachers:
            try:
                check_teacher(name)
            except ValueError as error:
                missing.append(str(error))
        if missing:
            yield f"{' '.join(missing)} To train without a teacher, set task=supervised and distillation=null."

    def class_ids(self, splits: Splits) -> tuple[str, ...]:
        """The data's classes, or all classes of the teacher."""
        wide = self.options.classes == "teacher"
        return teacher_class_ids(self.options.teachers[0]) if wide else splits.train.class_ids

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Load the teachers."""
        if self.options.classes == "teacher":
            capability(model, "keep_classes", "distillation.classes=teacher", "distillation.classes=data")
            of_teacher, remedy = model.config.class_ids or (), "set distillation.classes=data"
            rows = find_classes(of_teacher, splits.train.class_ids, remedy)
            self.register_buffer("rows", torch.tensor(rows), persistent=False)
        if self.map_weight:
            capability(model, "head", "distillation.map_weight", "distillation.map_weight=0")
            if not getattr(model, "one_head", True):
                raise ValueError(
                    f"distillation.map_weight needs one head for the tokens of all rounds, but {type(model).__name__} "
                    "has one per round; set distillation.map_weight=0."
                )
        super().setup(model, splits, recipe, processes)
        self.teachers = []
        for number, name in enumerate(self.options.teachers):
            mapped = self.map_weight > 0 and number == 0
            teacher = load_teacher(name, model.config, resolution=self.options.resolution, as_map=mapped)
            teacher = teacher.to(processes.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            if recipe.run.compile:
                teacher.compile(dynamic=False)
            self.teachers.append(Frozen(teacher))

    def labelled_classes(self, model: RoundModel, splits: Splits) -> int:
        return super().labelled_classes(model, splits) if self.rows is None else len(self.rows)

    def prepare(self, batch: Batch) -> TeacherBatch:
        """Mixed images, their labels, and the teacher's answer for these images."""
        images, targets = super().prepare(batch)
        logits = [teacher(images) for teacher in self.teachers]  # (B, K) each; with a map, the first is (B, P, K)
        places = (self._soften(logits[0]),) if self.map_weight else ()
        if places:
            logits[0] = logits[0].float().mean(dim=1)  # (B, P, K) -> (B, K)
        if not self.soft and len(logits) == 1:
            return TeacherBatch(images, targets, logits[0].argmax(dim=-1), ())
        answer = torch.stack([self._soften(values) for values in logits]).mean(dim=0)
        return TeacherBatch(images, targets, answer if self.soft else answer.argmax(dim=-1), places)

    def outputs(self, model: RoundModel, batch: TeacherBatch) -> Sequence[RoundOutput | MapOutput]:
        """The outputs of all rounds; with a map, also the predictions of the patch tokens."""
        rounds = model(batch.images)
        if not batch.places:
            return rounds
        head, places = cast(nn.Linear, cast(Any, model).head), batch.places[0].shape[1]
        return [MapOutput(output.logits, map_logits(output.tokens, head, places)) for output in rounds]

    def losses(self, outputs: Sequence[RoundOutput | MapOutput], batch: TeacherBatch) -> Tensor:
        """(S,)"""
        return torch.stack([self._loss(output, batch) for output in outputs])

    def export(self, model: RoundModel) -> RoundModel:
        """The model with only the data's classes."""
        if self.rows is None:
            return model
        kept: RoundModel = cast(Any, model).keep_classes(self.rows.tolist())
        return kept

    def _loss(self, output: RoundOutput | MapOutput, batch: TeacherBatch) -> Tensor:
        """The loss of one round."""
        if not self.soft:
            loss = (1 - self.weight) * soft_cross_entropy(output.logits, batch.targets)
            return loss + self.weight * F.cross_entropy(output.logits.float(), batch.answer)
        labelled = output.logits if self.rows is None else output.logits[:, self.rows]  # (B, K) -> (B, Y)
        loss = (1 - self.weight) * soft_cross_entropy(labelled, batch.targets)
        loss = loss + self.weight * self._divergence(output.logits, batch.answer)
        if isinstance(output, MapOutput):
            loss = loss + self.map_weight * self._divergence(output.map_logits, batch.places[0])
        return loss

    def _soften(self, logits: Tensor) -> Tensor:
        return (logits.float() / self.temperature).softmax(dim=-1)

    def _divergence(self, logits: Tensor, answer: Tensor) -> Tensor:
        """t² KL(teacher || student), a mean over images and places; t² keeps the gradient's size at any temperature."""
        log_probabilities = (logits.float() / self.temperature).log_softmax(dim=-1)
        divergence = F.kl_div(log_probabilities.flatten(0, -2), answer.flatten(0, -2), reduction="batchmean")
        return self.temperature**2 * divergence


def map_logits(tokens: Tensor, head: nn.Linear, places: int) -> Tensor:
    """Predictions of the patch tokens on the grid of the teacher's map: (B, 1 + g * g, d) -> (B, P, K)."""
    patches, side = tokens[:, 1:], math.isqrt(places)
    grid = math.isqrt(patches.shape[1])
    pooled = F.adaptive_avg_pool2d(patches.mT.unflatten(2, (grid, grid)), side)  # -> (B, d, T, T)
    return slicing.linear(pooled.flatten(2).mT, head)  # (B, d, T, T) -> (B, P, d) -> (B, P, K)
