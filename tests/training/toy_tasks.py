"""Tasks that use each part of the seam, small enough for tests."""

import copy
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from progresvit.io.parse import Section
from progresvit.training.tasks.supervised import Supervised
from progresvit.training.tasks.task import Metrics, TaskData


class ColourOptions(Section):
    weight: float = 0.5
    momentum: float = 0.9


class Colour(Supervised):
    """An extra head predicts the mean colour of the image, relative to a running mean.

    As in DINO, a copy of the head follows it (``after_step``), and a buffer is updated with every batch.
    """

    Options = ColourOptions

    def setup(self, model, splits, recipe, processes):
        super().setup(model, splits, recipe, processes)
        self.heads = nn.ModuleList(nn.Linear(round_.width, 3) for round_ in model.config.rounds)
        self.follower = copy.deepcopy(self.heads).requires_grad_(False)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def prepare(self, batch):
        batch = super().prepare(batch)
        self.center.lerp_(batch.images.mean(dim=(0, 2, 3)), 0.1)
        return batch

    def losses(self, outputs, batch):
        colour = batch.images.mean(dim=(2, 3)) - self.center  # (B, 3)
        extra = [F.mse_loss(head(output.tokens[:, 0]), colour) for head, output in zip(self.heads, outputs)]
        return super().losses(outputs, batch) + self.options.weight * torch.stack(extra)

    def after_step(self, model, step, total_steps):
        assert 0 <= step < total_steps
        self.steps += 1
        for mine, target in zip(self.follower.parameters(), self.heads.parameters()):
            mine.lerp_(target, 1 - self.options.momentum)


class CropBatch(NamedTuple):
    images: list[Tensor]
    targets: Tensor


class Crops(Supervised):
    """Every image as two large crops and a small one, which are run by size."""

    def load_data(self, model, splits, recipe, processes):
        loaded = super().load_data(model, splits, recipe, processes)

        def steps(first, last):
            for batches in loaded.train.steps(first, last):
                yield [
                    CropBatch([batch.images, batch.images.flip(-1), F.interpolate(batch.images, 40)], batch.targets)
                    for batch in batches
                ]

        return TaskData(SimpleNamespace(sampler=loaded.train.sampler, steps=steps), loaded.val, loaded.unreadable)

    def prepare(self, batch):
        return CropBatch(batch.images, F.one_hot(batch.targets, 4).float())

    def outputs(self, model, batch):
        *large, small = batch.images
        assert small.shape[-1] != large[0].shape[-1]
        by_size = [model(torch.cat(large)), model(small)]
        return [torch.cat([output.logits for output in outputs]) for outputs in zip(*by_size)]  # of each round

    def losses(self, outputs, batch):
        targets = batch.targets.repeat(len(batch.images), 1)
        return torch.stack([F.cross_entropy(logits, targets) for logits in outputs])


class OneRound(Supervised):
    """Runs the first round alone; HydraViT draws one."""

    uses_all_parameters = False

    def outputs(self, model, batch):
        return [model.run_round(0, batch.images)]


class Scored(Supervised):
    """A task whose metric is fixed: it is best at the second of four evaluations, and never positive."""

    def validate(self, model, data, *, processes, dtype):
        self.count = getattr(self, "count", 0) + 1
        return Metrics(primary=[-3.0, -1.0, -2.0, float("nan")][self.count - 1], values={"score": self.count / 2})

    def summarize(self, values):
        return f"score {values['score']}"


not_a_task = "a string"
