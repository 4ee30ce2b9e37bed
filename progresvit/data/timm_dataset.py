"""Datasets by timm's names: ``hfds/…`` through timm's reader, ``wds/…`` from local WebDataset shards.

Both become images by index, so that sampling, resuming and errors work as with folders. A WebDataset shard is a tar
whose members are grouped by their stem: ``0001.jpg`` next to ``0001.cls``.
"""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from timm.data import create_dataset

from progresvit.data.dataset import SUFFIXES, Entry, ImageDataset, tar_members
from progresvit.io.extras import not_installed


def find_timm_images(source: str, split: str, class_ids: Sequence[str] | None) -> ImageDataset:
    """A split of the named dataset, with the class names of the dataset if it has them."""
    if source.startswith("hfds/"):
        dataset: ImageDataset = _from_reader(source, split)
    elif source.startswith("wds/"):
        dataset = _from_shards(Path(source.removeprefix("wds/")).expanduser(), split)
    else:
        raise ValueError(f"{source} cannot be read by index; use hfds/…, wds/… with local shards, folders or tars.")
    if class_ids is not None and len(dataset.class_ids) > len(class_ids):
        raise ValueError(f"{split} has {len(dataset.class_ids)} classes and the training split {len(class_ids)}.")
    return dataset


@dataclass(frozen=True)
class ReaderDataset(ImageDataset):
    """Images that a timm reader provides."""

    reader: Any = None
    numbers: tuple[int, ...] = ()
    """Index of each image in the reader."""

    def read(self, index: int) -> bytes:
        file, *_ = self.reader[self.numbers[index]]
        with file:
            content: bytes = file.read()
        return content

    def subset(self, indices: Iterable[int]) -> ReaderDataset:
        indices = list(indices)
        images = super().subset(indices)
        assert isinstance(images, ReaderDataset)
        return replace(images, numbers=tuple(self.numbers[index] for index in indices))


def _from_reader(source: str, split: str) -> ReaderDataset:
    try:
        reader = create_dataset(source, root=None, split=split).reader
    except ImportError as error:
        raise ValueError(f"hfds/… needs more: {not_installed('datasets', 'hfds')}") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{source} ({split}) could not be opened: {error}") from error
    targets = tuple(int(target) for target in reader.dataset[reader.label_key])
    names = {index: name for name, index in reader.class_to_idx.items()}
    classes = tuple(str(names.get(index, index)) for index in range(max(targets) + 1))
    name = source.removeprefix("hfds/")
    entries = tuple(Entry(source, f"{name}/{split}/{number}") for number in range(len(targets)))
    return ReaderDataset(classes, entries, targets, reader=reader, numbers=tuple(range(len(targets))))


def _from_shards(folder: Path, split: str) -> ImageDataset:
    shards = sorted(path for path in folder.glob("*.tar") if split in path.stem) if folder.is_dir() else []
    if not shards:
        raise ValueError(
            f"{folder} has no shards of {split}; name them with {split!r} in the file name, and .tar at the end."
        )
    entries, targets = [], []
    for shard in shards:
        images, labels = _read_shard(shard)
        unlabelled = sorted(set(images) - set(labels))
        if unlabelled:
            raise ValueError(
                f"{shard}: {unlabelled[0]} has no .cls next to it, and neither have {len(unlabelled) - 1} more; "
                "add the missing files."
            )
        entries += list(images.values())
        targets += [labels[stem] for stem in images]
    if not entries:
        raise ValueError(f"the shards of {split} in {folder} hold no images with a .cls next to them.")
    return ImageDataset(tuple(str(index) for index in range(max(targets) + 1)), tuple(entries), tuple(targets))


def _read_shard(shard: Path) -> tuple[dict[str, Entry], dict[str, int]]:
    """Images and classes of a shard, by their stem."""
    images: dict[str, Entry] = {}
    labels: dict[str, int] = {}
    for _, entry in tar_members(shard, (*SUFFIXES, ".cls")):
        stem, _, suffix = entry.name.partition(".")
        if suffix == "cls":
            try:
                labels[stem] = int(entry.read())
            except ValueError as error:
                raise ValueError(f"{shard}: {entry.name} is not the number of a class; copy it again.") from error
        elif f".{suffix}".lower() in SUFFIXES:
            images[stem] = replace(entry, name=f"{shard.name}/{entry.name}")
    return images, labels
