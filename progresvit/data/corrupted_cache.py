"""Corrupted images on the disk: generated once, and read by every model with the same input.

The cache of a set is a folder with ``images.npy`` and ``about.json``. Letters: B images of a batch, C channels, N
images of the set, r the side of the model's input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap

from progresvit import __version__
from progresvit.data.augment.corruption import file_name
from progresvit.data.crop import describe_preprocessing
from progresvit.data.dataset import ImageDataset, dataset_hash
from progresvit.data.evaluation_batches import Numbered, numbered_batches
from progresvit.data.loading import Unreadable
from progresvit.data.transforms import NamedTransform
from progresvit.io.files import replacing_folder

_IMAGES, _ABOUT = "images.npy", "about.json"
_BATCH = 64  # images that a worker corrupts at a time


class CorruptedCache:
    """The images of a dataset after crop and corruption.

    Args:
        cache: Folder of all sets. The name of this set's folder follows from the images, the corruption and the crop.
        dataset: The images.
        transform: Crop and corruption.
    """

    def __init__(self, cache: Path, dataset: ImageDataset, transform: NamedTransform) -> None:
        assert transform.corruption is not None
        self.dataset, self.transform = dataset, transform
        name, severity = transform.corruption.name, transform.corruption.severity
        seen = describe_preprocessing(transform.config)
        crop = {key: seen[key] for key in ("resolution", "crop", "interpolation", "channels")}  # bytes: no mean and std
        self._about = {"corruption": name, "severity": severity, **crop, "version": __version__}
        if transform.corruption.source is not None:
            self._about["source"] = transform.corruption.source
        digest = dataset_hash(dataset, json.dumps(self._about), remedy="evaluate them without a cache")
        self.folder = cache.expanduser() / f"{file_name(name)}_{severity}-{crop['resolution']}-{digest}"

    def fill(self, *, workers: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Generate the images unless they exist. An interrupted run leaves nothing under the folder's name."""
        if self.folder.exists():
            self._open()  # an error before anything is written
            return
        side, count = self.transform.config.input_side, len(self.dataset)
        groups = [list(range(first, min(first + _BATCH, count))) for first in range(0, count, _BATCH)]
        skipped = Unreadable(self.dataset)
        cpu = torch.device("cpu")
        with replacing_folder(self.folder) as staged:
            images = open_memmap(staged / _IMAGES, "w+", np.uint8, (count, 3, side, side))  # (N, C, r, r)
            for numbers, pixels, unreadable in numbered_batches(
                self.dataset, groups, transform=self.transform, workers=workers, device=cpu
            ):
                for index, reason in unreadable.items():
                    skipped.add(index, reason)
                if pixels is not None:
                    images[numbers] = pixels.numpy()
                if progress:
                    progress(min(max(numbers, default=0) + 1, count), count)
            images.flush()
            about = {**self._about, "unreadable": list(skipped.reasons.items())}
            (staged / _ABOUT).write_text(json.dumps(about), encoding="utf-8")

    def batches(self, groups: Sequence[list[int]], device: torch.device) -> Iterator[Numbered]:
        """Each group of indices as a batch with its pixels on the device, as ``numbered_batches`` makes them."""
        images, unreadable = self._open()
        for group in groups:
            numbers = [index for index in group if index not in unreadable]
            pixels = torch.from_numpy(images[numbers]).to(device) if numbers else None  # (B, C, r, r)
            yield Numbered(numbers, pixels, {index: unreadable[index] for index in group if index in unreadable})

    def _open(self) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], dict[int, str]]:
        """The images, mapped into memory, and why others are unreadable."""
        side = self.transform.config.input_side
        try:
            about = json.loads((self.folder / _ABOUT).read_text(encoding="utf-8"))
            unreadable = {int(index): str(reason) for index, reason in about.pop("unreadable")}
            images = np.load(self.folder / _IMAGES, mmap_mode="r")
            if about != self._about or images.dtype != np.uint8 or images.shape != (len(self.dataset), 3, side, side):
                raise ValueError("its images do not match its name")
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.folder} is damaged ({error}); delete it, and the images are corrupted again."
            ) from error
        return images, unreadable
