"""Segmentation in rounds: the windows of an image run a round together, and one score decides for all of them.

Letters: B images, S rounds, H and W height and width of the image, V windows of an image, K classes, g side of the
patch grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from progresvit.data.segmentation import IGNORE
from progresvit.data.segmentation.images import EvaluationImage
from progresvit.data.segmentation.windows import ImageWindows, label_map
from progresvit.metrics.miou import confusion_matrix
from progresvit.model.interface import RoundModel
from progresvit.routing.scores import patch_entropy, uncertain_entropy


class RoundMap(NamedTuple):
    """The answer of a round for an image."""

    labels: Tensor
    """(H, W) uint8"""
    score: Tensor
    """Uncertainty of the image, a scalar (float32)."""


def image_score(logits: Tensor) -> Tensor:
    """Mean entropy of the most uncertain 10 % of the patches of all windows: (V, K, g, g) -> a scalar."""
    return uncertain_entropy(patch_entropy(logits).flatten())


def image_labels(logits: Tensor, image: ImageWindows) -> Tensor:
    """The class of every pixel, from the logits of all windows: (V, K, g, g) -> (H, W) uint8."""
    return label_map(logits.split([view.count for view in image.views]), image.views, image.size)


def segment_rounds(model: RoundModel, images: Sequence[ImageWindows], *, batch: int) -> list[list[RoundMap]]:
    """Every round on every image, with no early exit; at most ``batch`` windows at a time. By image, then by round."""
    windows = torch.cat([image.windows for image in images])
    parts = [model(part) for part in windows.split(batch)]
    rounds = [torch.cat([outputs[s].logits for outputs in parts]) for s in range(len(model.config.rounds))]
    counts = [len(image.windows) for image in images]
    by_round = [logits.split(counts) for logits in rounds]
    return [
        [RoundMap(image_labels(logits[index], image), image_score(logits[index])) for logits in by_round]
        for index, image in enumerate(images)
    ]


class Segmenter:
    """The predictor of a segmentation model.

    Args:
        model: It is on the device, in evaluation mode.
        device: Where it runs.
        dtype: Precision of autocast; None: float32.
        batch: Windows that run at a time.
    """

    def __init__(
        self, model: RoundModel, device: torch.device, *, dtype: torch.dtype | None = None, batch: int
    ) -> None:
        self.model, self.device, self.dtype, self.batch = model, device, dtype, batch

    def columns(self, images: Sequence[EvaluationImage], targets: Sequence[Tensor]) -> dict[str, Any]:
        """Numbers of windows (B,), scores (B, S), and confusion matrices (B, S, K, K); ``targets`` are masks (H, W)."""
        config = self.model.config
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            cut = [image.cut(config, self.device) for image in images]
            maps = segment_rounds(self.model, cut, batch=self.batch)
        confusion = []
        for rounds, target in zip(maps, targets):
            mask = target.to(self.device)
            matrices = [
                confusion_matrix(round_map.labels, mask, classes=config.num_classes, ignore=IGNORE)
                for round_map in rounds
            ]
            confusion.append(torch.stack(matrices))  # S times (K, K) -> (S, K, K)
        return {
            "windows": torch.tensor([len(image.windows) for image in cut]),
            "scores": torch.stack([torch.stack([round_map.score for round_map in rounds]) for rounds in maps]).float(),
            "confusion": torch.stack(confusion),
        }
