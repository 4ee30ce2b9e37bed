"""Semantic segmentation: every round learns the label of each pixel, with one linear decoder (Segmenter).

    per round: logits of the patches -> bilinear to the crop -> cross entropy with the labels of the pixels

Ignored pixels have no effect.

Letters: B images, K classes, g side of the patch grid, r side of the crops, S rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from progresvit.config import ModelTask
from progresvit.data.augment.classification import Augmentation
from progresvit.data.augment.segmentation import AugmentPairs, SegmentationAugmentation, SegmentationBatch
from progresvit.data.loading import Unreadable
from progresvit.data.segmentation import IGNORE, SegmentationDataset, find_segmentation
from progresvit.data.segmentation.images import EvaluationImage, evaluation_images
from progresvit.data.segmentation.sources import pairs_in_memory, segmentation_from_workers
from progresvit.data.segmentation.windows import WindowOptions, windows_hash
from progresvit.data.sources import InMemorySource
from progresvit.distributed import Processes
from progresvit.metrics.miou import ClassCounts, iou
from progresvit.model import RoundOutput
from progresvit.model.interface import RoundModel
from progresvit.predict.segment import Segmenter
from progresvit.routing import MeanIoU
from progresvit.training.recipe import Recipe
from progresvit.training.tasks.task import Metrics, Splits, Task, TaskData, make_sampler
from progresvit.training.tasks.validation import CONVENTION, gather_columns, routed_metrics, summarize_rounds

WINDOWS = 32
"""Windows of a batch in validation."""


class SegmentationOptions(SegmentationAugmentation):
    """Options of the task ``segmentation``: the augmentation, the labels, and how images are validated."""

    labels: str | None = None
    """File of the class names, or a built-in list (camvid, pets, ade20k); None uses the data's."""
    ignore: tuple[int, ...] = (255,)
    """Values of the masks that are not a class."""
    stride: float = Field(1.0, gt=0, le=1)
    """Distance between windows in validation, as a share of their side."""


class SegmentationTask(Task):
    """The cross entropy of every round with the labels of the pixels, without early exit."""

    Options = SegmentationOptions
    model_task: ClassVar[ModelTask] = "segmentation"

    def find_splits(self, recipe: Recipe, source: str) -> Splits:
        """Images with masks, in any layout of ``data/segmentation/dataset.py``."""
        classes = {"labels": self.options.labels, "ignore": self.options.ignore}
        train, val = (find_segmentation(source, split, **classes) for split in (recipe.data.train, recipe.data.val))
        return Splits(train, val)

    def setup(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> None:
        """Refuse options of classification."""
        if recipe.augment != Augmentation():
            raise ValueError(
                "augment: the task segmentation does not read this section; its augmentation is scale, flip and "
                "photometric under task_options."
            )
        if recipe.data.in_memory_cache is not None:
            raise ValueError("data.in_memory_cache is not for segmentation; remove it.")

    def load_data(self, model: RoundModel, splits: Splits, recipe: Recipe, processes: Processes) -> TaskData:
        train, val = (cast(SegmentationDataset, split) for split in splits)
        config, device, workers = model.config, processes.device, recipe.data.workers
        unreadable = Unreadable(val)
        mine = range(processes.rank, len(val), processes.count)
        windows = WindowOptions(stride=self.options.stride)

        def whole_images() -> Iterator[EvaluationImage]:
            images = evaluation_images(
                val, mine, config=config, options=windows, workers=workers, unreadable=unreadable
            )
            return (image for _, image in images)

        if recipe.data.mode == "loader":
            sampler = make_sampler(len(train), recipe, processes)
            crops = segmentation_from_workers(
                train, sampler, config=config, augmentation=self.options, workers=workers, device=device
            )
            return TaskData(crops, whole_images, [crops.unreadable, unreadable])
        side = recipe.data.in_memory_side or config.input_side
        stored = pairs_in_memory(train, config=config, side=side, device=device)
        augment = AugmentPairs(config, self.options, device=device)
        source = InMemorySource(stored, make_sampler(len(stored), recipe, processes), augment)
        kept: list[EvaluationImage] = []

        def from_memory() -> Iterator[EvaluationImage]:
            if not kept:
                kept.extend(image.to(device) for image in whole_images())
            return iter(kept)

        return TaskData(source, from_memory, [stored.unreadable, unreadable])

    def losses(self, outputs: Sequence[RoundOutput], batch: SegmentationBatch) -> Tensor:
        """(S,)"""
        return torch.stack([pixel_cross_entropy(output.logits, batch.masks) for output in outputs])

    @torch.no_grad()
    def validate(
        self, model: RoundModel, data: TaskData, *, processes: Processes, dtype: torch.dtype | None
    ) -> Metrics:
        """mIoU of every round over all pixels of all images, and of the near-lossless routed point.

        The last round's mIoU selects the best model.
        """
        config = model.config
        segmenter = Segmenter(cast(Any, cast(nn.Module, model).eval()), processes.device, dtype=dtype, batch=WINDOWS)

        def columns_of(image: EvaluationImage) -> dict[str, Tensor]:
            assert image.mask is not None
            columns = segmenter.columns([image], [image.mask])
            counts = np.stack(ClassCounts.of(columns.pop("confusion").cpu().numpy()), axis=1)  # (1, 3, S, K)
            return {**columns, "counts": torch.from_numpy(counts)}

        columns = gather_columns(map(columns_of, data.val()), processes)
        metric = MeanIoU(ClassCounts(*columns["counts"].swapaxes(0, 1)))  # 3 times (N, S, K)
        total = ClassCounts(*(part.sum(axis=0) for part in metric.counts))  # (S, K) each
        if not total.labelled.any():
            raise ValueError(
                f"no pixel of the {len(columns['scores'])} validation images has a label; check their masks, and the "
                "values that task_options.ignore leaves out."
            )
        names = config.labels or range(config.num_classes)
        values = {
            **{name: of_rounds.tolist() for name, of_rounds in metric.single_rounds().items()},
            "iou": {str(name): None if np.isnan(value) else float(value) for name, value in zip(names, iou(total)[-1])},
        }
        gmacs = np.asarray(model.gmacs(CONVENTION)) * columns["windows"][:, None]  # (N, S)
        return routed_metrics(model, columns["scores"], metric, gmacs, values)

    def preprocessing_sha256(self, model: RoundModel) -> str:
        return windows_hash(model.config, WindowOptions(stride=self.options.stride))

    def summarize(self, values: Mapping[str, Any]) -> str:
        return summarize_rounds(values, "mIoU", values["miou"], metric="miou")


Segmentation = SegmentationTask


def pixel_cross_entropy(logits: Tensor, masks: Tensor) -> Tensor:
    """Mean over the labelled pixels, in float32, 0 without any: (B, K, g, g), (B, r, r) -> a scalar."""
    with torch.autocast(logits.device.type, enabled=False):
        resized = upsample(logits.float(), masks.shape[-1])  # (B, K, g, g) -> (B, K, r, r)
        each = F.cross_entropy(resized, masks, ignore_index=IGNORE, reduction="none")  # (B, r, r), 0 where ignored
        return each.sum() / (masks != IGNORE).sum().clamp(min=1)  # on a GPU the other reductions are not deterministic


def upsample(logits: Tensor, side: int) -> Tensor:
    """``F.interpolate``, bilinear with align_corners=False, as two matrix products: (B, K, g, g) -> (B, K, r, r).

    On a GPU, the backward pass of F.interpolate adds the gradients of many pixels to few patches one by one, in any
    order. Matrix products are faster and deterministic.
    """
    g = logits.shape[-1]
    places = torch.arange(side, device=logits.device)
    centres = ((places + 0.5) * (g / side) - 0.5).clamp(0, g - 1)  # centres of the pixels, in patches
    matrix = (1 - (centres[:, None] - torch.arange(g, device=logits.device)).abs()).clamp(min=0)  # (r, g)
    return matrix @ logits @ matrix.mT
