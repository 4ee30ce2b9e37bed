"""Semantic segmentation: every round learns the label of each pixel, with one linear decoder (Segmenter).

    per round: logits of the patches -> bilinear to the crop -> cross entropy with the labels of the pixels

Ignored pixels have no effect.

Letters: B images, K classes, g side of the patch grid, r side of the crops, S rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from progresvit import compute
from progresvit.data.augment.classification import Augmentation
from progresvit.data.augment.segmentation import AugmentPairs, SegmentationAugmentation, SegmentationBatch
from progresvit.data.loading import Unreadable
from progresvit.data.segmentation import IGNORE, SegmentationDataset, find_segmentation
from progresvit.data.segmentation.images import EvaluationImage, evaluation_images
from progresvit.data.segmentation.sources import pairs_in_memory, segmentation_from_workers
from progresvit.data.segmentation.windows import WindowOptions
from progresvit.data.sources import InMemorySource
from progresvit.distributed import Processes
from progresvit.metrics.miou import ClassCounts, confusion_matrix, iou, mean_iou, pixel_accuracy
from progresvit.model import RoundOutput
from progresvit.model.interface import RoundModel
from progresvit.predict.segment import segment_rounds
from progresvit.routing import MeanIoU, metric_near_lossless
from progresvit.training.tasks.task import Metrics, Splits, Task, TaskData, make_sampler

if TYPE_CHECKING:
    from progresvit.config import Task as ModelTask
    from progresvit.training.recipe import Recipe

CONVENTION: compute.Convention = "paper"
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
        wanted = {"labels": self.options.labels, "ignore": self.options.ignore}
        train, val = (find_segmentation(source, split, **wanted) for split in (recipe.data.train, recipe.data.val))
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
        cast(nn.Module, model).eval()
        classes, device = model.config.num_classes, processes.device
        scores, counts, windows = [], [], []
        for image in data.val():
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                maps = segment_rounds(model, [image.cut(model.config, device)], batch=WINDOWS)[0]
            assert image.mask is not None
            mask = image.mask.to(device)
            scores.append(torch.stack([round_map.score for round_map in maps]))
            confusion = torch.stack(
                [confusion_matrix(round_map.labels, mask, classes=classes, ignore=IGNORE) for round_map in maps]
            )  # (S, K, K)
            counts.append(np.stack(ClassCounts.of(confusion.cpu().numpy())))  # (3, S, K)
            windows.append(sum(view.count for view in image.views))
        mine = None
        if scores:
            mine = torch.stack(scores).cpu().numpy(), np.stack(counts), np.array(windows)
        shares = [share for share in processes.gather(mine) if share is not None]
        score, pixels, count = (np.concatenate([share[part] for share in shares]) for part in range(3))
        return self._metrics(model, score, ClassCounts(*pixels.swapaxes(0, 1)), count)

    def _metrics(self, model: RoundModel, scores: Any, counts: ClassCounts, windows: Any) -> Metrics:
        """From (N, S) scores, (N, S, K) pixels of each class and (N,) numbers of windows."""
        total = ClassCounts(*(part.sum(axis=0) for part in counts))  # (S, K) each
        if not total.labelled.any():
            raise ValueError(
                f"no pixel of the {len(scores)} validation images has a label; check their masks, and the values that "
                "task_options.ignore leaves out."
            )
        miou = mean_iou(total).tolist()
        gmacs = np.asarray(model.gmacs(CONVENTION)) * windows[:, None]  # (N, S)
        names = model.config.labels or range(model.config.num_classes)
        values: dict[str, Any] = {
            "images": len(scores),
            "miou": miou,
            "pixel_accuracy": pixel_accuracy(total).tolist(),
            "iou": {str(name): None if np.isnan(value) else float(value) for name, value in zip(names, iou(total)[-1])},
        }
        if model.config.routable:
            values["near_lossless"] = asdict(metric_near_lossless(scores, MeanIoU(counts), gmacs))
        full = float(gmacs[:, -1].mean())
        return Metrics(primary=miou[-1], values={**values, "full_gmacs": full, "convention": CONVENTION})

    def summarize(self, values: Mapping[str, Any]) -> str:
        rounds = f"mIoU of the rounds {' '.join(f'{miou:.2%}' for miou in values['miou'])}"
        point = values.get("near_lossless")
        if point is None:
            return rounds
        return (
            f"{rounds}; near-lossless {point['miou']:.2%} at {point['gmacs']:.3f} of {values['full_gmacs']:.3f} GMACs "
            f"({values['convention']}), threshold {point['threshold']:.4f}"
        )


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
