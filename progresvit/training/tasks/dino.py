"""DINO: self-distillation without labels. Every round of the student learns from the same round of the teacher.

    per round: cross entropy of each student view with each global view of the teacher; mean over rounds

The teacher is the moving average of the student's backbone and head, and sees the global crops only. The teacher is
validated and saved. Each round has its own centre; all rounds share one head. Global crops run every round at its
resolution, and local crops at their own side, scaled with the round.

Letters: B images, V local crops, K prototypes, N tokens, d channels, S rounds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from progresvit.data.augment.classification import Augmentation, Batch
from progresvit.data.augment.multicrop import MultiCrop, MultiCropBatch, MultiCropOptions
from progresvit.data.dataset import Entry, ImageDataset, find_images, find_unlabelled
from progresvit.data.in_memory import load_whole
from progresvit.data.sources import InMemorySource, WorkerSource
from progresvit.distributed import Processes
from progresvit.io.parse import count_of
from progresvit.model import RoundOutput, registry
from progresvit.model.interface import RoundModel, capability
from progresvit.predict.features import KNN, Features
from progresvit.predict.head import score_columns
from progresvit.training.recipe import Recipe
from progresvit.training.step import compile_blocks
from progresvit.training.tasks.classification import EvaluatedImages
from progresvit.training.tasks.dino_loss import (
    DINOHead,
    dino_loss,
    entropy,
    local_resolutions,
    momentum_at,
    spread,
    teacher_probabilities,
)
from progresvit.training.tasks.task import Metrics, Splits, Task, TaskData, make_sampler, source_in_memory
from progresvit.training.tasks.validation import gather_columns, summarize_rounds, top1_metrics

LOADER_SCALE = 2
"""In mode loader, whole images have this times the model's side, so that small crops are not enlarged."""
COLLAPSED = 0.05
"""Information about the image, in nats, below which the teacher's output has collapsed."""
WATCHED = 16
"""Fewest images of a micro-batch to estimate this information."""


class DINOOptions(MultiCropOptions):
    """Options of the task ``dino``, with the defaults of DINO for ViT-S/16."""

    prototypes: int = Field(65536, ge=2)
    """Outputs of the head."""
    hidden: int = Field(2048, ge=1)
    bottleneck: int = Field(256, ge=1)
    student_temperature: float = Field(0.1, gt=0)
    teacher_temperature: float = Field(0.04, gt=0)
    momentum: float = Field(0.996, ge=0, le=1)
    """Momentum of the teacher at the start of the run; it follows a cosine to 1."""
    centre_momentum: float = Field(0.9, ge=0, le=1)
    unlabelled: str | None = None
    """More training images: a folder or tars, in any structure."""
    knn: bool = True
    """Validate with a k-NN classifier, in which labelled training images vote. If false, the data needs no labels, and
    all its images are trained on."""
    k: int = Field(20, ge=1)
    knn_temperature: float = Field(0.07, gt=0)


class DINOBatch(NamedTuple):
    """Crops, and the teacher's output for the global crops."""

    global_crops: Tensor
    """(2, B, C, r, r)"""
    local_crops: Tensor
    """(V, B, C, r', r')"""
    teacher: tuple[Tensor, ...]
    """Probabilities of each round, (2, B, K)."""


class DINOTeacher(nn.Module):
    """A backbone and a head that follow the student's."""

    def __init__(self, backbone: RoundModel, head: DINOHead) -> None:
        super().__init__()
        self.backbone, self.head = cast(nn.Module, backbone), head
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits of every round: (B, C, r, r) -> S times (B, K)."""
        return tuple(self.head(output.tokens[:, 0]) for output in self.backbone(images))

    def follow(self, backbone: nn.Module, head: nn.Module, momentum: float) -> None:
        """Move towards the student."""
        own: list[Tensor] = [*self.backbone.parameters(), *self.head.parameters()]
        torch._foreach_lerp_(own, [*backbone.parameters(), *head.parameters()], 1 - momentum)


@dataclass
class DINOData(TaskData):
    """Also the labelled training images, which vote in the k-NN classifier."""

    bank: Callable[[], Iterator[Batch]]


class DINO(Task):
    """Student and teacher are both progressive; the student's class token of each round predicts the teacher's."""

    Options = DINOOptions
    evaluate_options = "task=knn"
    centre: Tensor

    def find_splits(self, recipe: Recipe, source: str) -> Splits:
        """Images by class; only validation uses the labels. With ``knn: false`` any images."""
        if not self.options.knn:
            train = find_unlabelled(source)
            return Splits(self._with_unlabelled(train, ()), train.subset([]))
        train = find_images(source, recipe.data.train)
        if len(train) < self.options.k:
            raise ValueError(
                f"{source} has {len(train)} labelled training images, too few for a vote of {self.options.k} "
                "neighbours; add images, lower task_options.k, or set task_options.knn=false."
            )
        val = find_images(source, recipe.data.val, train.class_ids)
        return Splits(self._with_unlabelled(train, val.entries), val)

    def _with_unlabelled(self, train: ImageDataset, held_out: Sequence[Entry]) -> ImageDataset:
        if self.options.unlabelled is None:
            return train
        more = find_unlabelled(self.options.unlabelled)
        validated = {(os.path.realpath(entry.path), entry.offset) for entry in held_out}
        for entry in more.entries:
            if (os.path.realpath(entry.path), entry.offset) in validated:
                raise ValueError(
                    f"task_options.unlabelled={self.options.unlabelled} holds validation images, such as {entry.name}; "
                    "name a folder without them."
                )
        named = tuple(replace(entry, name=f"unlabelled/{entry.name}") for entry in more.entries)
        return replace(train, entries=train.entries + named, targets=train.targets + more.targets)

    def class_ids(self, splits: Splits) -> tuple[str, ...]:
        """Empty: the model has no classifier."""
        return ()

    def describe(self, splits: Splits) -> str:
        votes = f"; {count_of(len(splits.val), 'validation image', ',')}" if self.options.knn else ""
        return f"training on {count_of(len(splits.train), 'image', ',')} without labels{votes}"

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Create head, teacher and centres. The teacher starts as a copy of the student."""
        self._check(model, recipe)
        options, config = self.options, model.config
        capability(model, "run_at", "task: dino", "model.kind=progresvit (a plain ViT is one of its models)")
        self.local_resolutions = local_resolutions(cast(Any, config), options.local_side)
        sizes = {"hidden": options.hidden, "bottleneck": options.bottleneck, "prototypes": options.prototypes}
        self.head, follower = (DINOHead(width=cast(Any, config).width, **sizes) for _ in range(2))
        follower.load_state_dict(self.head.state_dict())
        backbone = registry.build(config)  # without stochastic depth
        backbone.load_state_dict(model.state_dict())
        self.teacher = DINOTeacher(backbone, follower).to(processes.device)
        self.register_buffer("centre", torch.zeros(len(config.rounds), options.prototypes))
        self.processes, self.warm_up = processes, recipe.schedule.warmup
        self.sums: list[Tensor] = []
        """Mean logits of the teacher in each micro-batch of the step, (S, K)."""
        self.spread = torch.zeros(len(config.rounds), 2)
        """Spread of the teacher's probabilities in each round, in the last micro-batch."""
        self.micro_batch = recipe.optimizer.batch // (recipe.optimizer.accumulate * processes.count)
        self.has_warned = False
        if recipe.run.compile:
            versions = 4 * len(config.rounds) * cast(Any, config).depth  # global and local crops
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, versions)
            if recipe.run.compile == "blocks":
                compile_blocks(backbone)
            else:
                self.teacher.compile(dynamic=False)

    def _check(self, model: RoundModel, recipe: Recipe) -> None:
        if recipe.ema:
            raise ValueError("the task dino saves its own moving average, the teacher; set ema=0.")
        if recipe.augment != Augmentation():
            raise ValueError(
                "augment: the task dino does not read this section; its crops and colours are under task_options."
            )
        if recipe.model.num_classes is not None:
            raise ValueError("model.num_classes: the task dino trains no classifier; remove it.")
        if any(getattr(round_, "merge", 0) for round_ in model.config.rounds):
            raise ValueError("model.merge: tokens are merged after training; remove it for the task dino.")

    def load_data(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> TaskData:
        config, device = model.config, processes.device
        options = self.options.model_copy(update={"local_side": self.local_resolutions[-1]})
        augment = MultiCrop(config, options, device=device, compiled=bool(recipe.run.compile))
        source: InMemorySource | WorkerSource
        if recipe.data.mode == "in_memory":
            source = source_in_memory(splits.train, config, recipe, processes, augment)
        else:
            source = WorkerSource(
                splits.train,
                make_sampler(len(splits.train), recipe, processes),
                load=partial(load_whole, splits.train, LOADER_SCALE * config.input_side),
                augment=augment,
                workers=recipe.data.workers,
                device=device,
            )
        labelled = [index for index, target in enumerate(splits.train.targets) if target >= 0]
        bank, val = (
            EvaluatedImages(images.subset(images_of[processes.rank :: processes.count]), model, recipe, processes)
            for images, images_of in ((splits.train, labelled), (splits.val, range(len(splits.val))))
        )
        return DINOData(source, val, [source.unreadable, bank.unreadable, val.unreadable], bank)

    def prepare(self, batch: MultiCropBatch) -> DINOBatch:
        """Run the teacher. Its logits also move the centre after the step."""
        views, images = batch.global_crops.shape[:2]
        logits = [
            round_.float().unflatten(0, (views, images)) for round_ in self.teacher(batch.global_crops.flatten(0, 1))
        ]  # S times (2, B, K)
        self.sums.append(torch.stack([round_.mean(dim=(0, 1)) for round_ in logits]))
        temperature = self.options.teacher_temperature
        targets = tuple(teacher_probabilities(round_, self.centre[s], temperature) for s, round_ in enumerate(logits))
        self.spread = torch.stack([spread(round_) for round_ in targets])
        return DINOBatch(batch.global_crops, batch.local_crops, targets)

    def outputs(self, model: RoundModel, batch: DINOBatch) -> list[Tensor]:
        """Logits of every round for all views, global views first: S times (2 + V, B, K)."""
        images = batch.global_crops.shape[1]
        runs: list[Sequence[RoundOutput]] = [model(batch.global_crops.flatten(0, 1))]
        if len(batch.local_crops):
            runs.append(cast(Any, model).run_at(batch.local_crops.flatten(0, 1), self.local_resolutions))
        tokens = [torch.cat([output.tokens[:, 0] for output in outputs]) for outputs in zip(*runs)]  # (2B + VB, d)
        return [self.head(class_token).unflatten(0, (-1, images)) for class_token in tokens]

    def losses(self, outputs: Sequence[Tensor], batch: DINOBatch) -> Tensor:
        """(S,)"""
        temperature = self.options.student_temperature
        return torch.stack([dino_loss(logits, teacher, temperature) for logits, teacher in zip(outputs, batch.teacher)])

    def after_step(self, model: RoundModel, step: int, total_steps: int) -> None:
        """Move the centres and the teacher."""
        mean = self.processes.mean(torch.stack(self.sums).mean(dim=0))  # (S, K)
        self.sums.clear()
        self.centre.lerp_(mean, 1 - self.options.centre_momentum)
        momentum = momentum_at(step, total_steps, self.options.momentum)
        self.teacher.follow(cast(nn.Module, model), self.head, momentum)

    def monitor(self) -> Mapping[str, Any]:
        """Entropies of each round in nats: of the teacher for an image, of its mean over images, and of the centre."""
        each, mean = self.spread.mT.tolist()
        centre = entropy((self.centre / self.options.teacher_temperature).softmax(dim=-1))
        return {"teacher_entropy": each, "mean_entropy": mean, "centre_entropy": centre.tolist()}

    def warning(self, values: Mapping[str, Any], *, step: int, steps_per_epoch: int) -> str | None:
        """Warn once, after the warm-up, if the teacher's output is the same for every image."""
        information = [mean - each for each, mean in zip(values["teacher_entropy"], values["mean_entropy"])]
        early = step <= (self.warm_up + 1) * steps_per_epoch
        if self.has_warned or early or self.micro_batch < WATCHED or min(information) >= COLLAPSED:
            return None
        self.has_warned = True
        number = information.index(min(information))
        uniform = values["teacher_entropy"][number] > 0.9 * math.log(self.options.prototypes)
        remedy = (
            "lower task_options.teacher_temperature or raise task_options.centre_momentum"
            if uniform
            else "raise task_options.teacher_temperature, lower task_options.centre_momentum, or lower optimizer.lr"
        )
        kind = "almost uniform" if uniform else "the same"
        return f"the teacher's output in round {number + 1} has collapsed: it is {kind} for all images; {remedy}."

    def export(self, model: RoundModel) -> RoundModel:
        """The teacher's backbone."""
        return cast(RoundModel, self.teacher.backbone)

    @torch.no_grad()
    def validate(
        self, model: RoundModel, data: TaskData, *, processes: Processes, dtype: torch.dtype | None
    ) -> Metrics:
        """Top-1 of a k-NN classifier on the class tokens of each round, and of its near-lossless routed point.

        Without labels there is nothing to measure.
        """
        if not self.options.knn:
            return Metrics(primary=-math.inf, values={})
        features, device = Features(cast(Any, cast(nn.Module, model).eval()), dtype=dtype), processes.device

        def tokens_of(batches: Iterator[Batch]) -> tuple[list[Tensor], Tensor]:
            """Class tokens and labels of the images of all processes: S times (N, d), and (N,)."""
            of_batches = ({**features.columns(*batch), "target": batch.targets} for batch in batches)
            columns = gather_columns(of_batches, processes)
            targets = torch.from_numpy(columns.pop("target")).to(device)
            return [torch.from_numpy(tokens).to(device) for tokens in columns.values()], targets

        bank, bank_targets = tokens_of(cast(DINOData, data).bank())
        tokens, targets = tokens_of(data.val())
        classes, options = int(max(bank_targets.max(), targets.max())) + 1, self.options
        votes = {"classes": classes, "k": options.k, "temperature": options.knn_temperature}
        knn = KNN(bank, bank_targets, **votes, make=score_columns)
        columns = {name: column.cpu().numpy() for name, column in knn.columns(tokens, targets).items()}
        return top1_metrics(model, columns, "knn")

    def summarize(self, values: Mapping[str, Any]) -> str:
        if "knn" not in values:
            return "no validation"
        return summarize_rounds(values, f"{self.options.k}-NN top-1", values["knn"], metric="top1", threshold=False)
