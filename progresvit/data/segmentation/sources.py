"""Training crops of images with masks, from worker processes or from memory.

Worker processes crop the images at their full size; in memory, images and masks are squeezed to squares.

Letters: C channels, H and W height and width of an image, S side of the stored images.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from PIL import Image

from progresvit.config import BaseConfig
from progresvit.data.augment.segmentation import AugmentPairs, SegmentationAugmentation, SegmentationBatch
from progresvit.data.in_memory import InMemoryImages, Loaded, squeeze
from progresvit.data.sampler import EpochSampler
from progresvit.data.segmentation.dataset import SegmentationDataset
from progresvit.data.segmentation.images import check_size
from progresvit.data.sources import WorkerSource


def segmentation_from_workers(
    dataset: SegmentationDataset,
    sampler: EpochSampler,
    *,
    config: BaseConfig,
    augmentation: SegmentationAugmentation,
    workers: int,
    device: torch.device,
) -> WorkerSource:
    """Images and masks that worker processes decode and crop."""
    load = partial(_load_crop, dataset, config, AugmentPairs(config, augmentation, device=torch.device("cpu")))
    return WorkerSource(
        dataset,
        sampler,
        load=load,
        augment=lambda images, masks, seed: SegmentationBatch(images, masks),  # the workers have augmented them
        workers=workers,
        device=device,
    )


def _load_crop(
    dataset: SegmentationDataset, config: BaseConfig, augment: AugmentPairs, index: int, seed: int
) -> SegmentationBatch:
    """A crop of one image and its mask: (C, r, r) and (r, r)."""
    image, mask = dataset.read_pair(index)
    check_size(image.height, image.width, config, dataset.entries[index].name)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (H, W, C) -> (C, H, W)
    crops = augment(pixels[None], torch.tensor([mask.shape]), torch.from_numpy(mask)[None], seed)
    return SegmentationBatch(crops.images[0], crops.masks[0])


def pairs_in_memory(
    dataset: SegmentationDataset, *, config: BaseConfig, side: int, device: torch.device
) -> InMemoryImages:
    """Images and masks, squeezed to squares of this side; the masks are the targets."""

    def load(index: int) -> Loaded:
        image, mask = dataset.read_pair(index)
        check_size(image.height, image.width, config, dataset.entries[index].name)
        labels = Image.fromarray(mask).resize((side, side), Image.Resampling.NEAREST)
        return Loaded(squeeze(image, side), torch.tensor(mask.shape), torch.from_numpy(np.array(labels)))

    return InMemoryImages(dataset, load, side=side, device=device)
