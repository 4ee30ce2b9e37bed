"""A dataset of images by index: a folder per class, tars with the same layout, or images without labels.

The layout is ``<split>/<class>/<image>``, in folders and in tars. A split may have several parts (``fog/3``); ``.``
means that the class folders are at the top. If they are, and there is neither ``train/`` nor ``val/``, these two splits
are drawn from the dataset (``split.py``). A source is a folder, a tar, a folder of tars, or a pattern such as
``photos/*.tar``; files outside of this layout are ignored.
"""

from __future__ import annotations

import glob
import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from progresvit.data.split import TRAIN, VAL, hold_out

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")

UNLABELLED = -1


@dataclass(frozen=True)
class Entry:
    """Where an image is stored: a file, or a range of bytes in a tar."""

    path: str
    name: str
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True)
class ImageDataset:
    """A split of a dataset."""

    class_ids: tuple[str, ...]
    entries: tuple[Entry, ...]
    targets: tuple[int, ...]
    """The class of each image; UNLABELLED where there is none."""
    drawn_from: int | None = None
    """If the split was drawn from a dataset without splits, the number of images of that dataset."""

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, index: int) -> bytes:
        """The bytes of an image file. Several processes may read at once."""
        return self.entries[index].read()

    def subset(self, indices: Iterable[int]) -> ImageDataset:
        """Some of the images, with the same classes."""
        chosen = list(indices)
        entries, targets = tuple(self.entries[i] for i in chosen), tuple(self.targets[i] for i in chosen)
        return replace(self, entries=entries, targets=targets)


def dataset_hash(dataset: ImageDataset, about: str, *, remedy: str) -> str:
    """Names a cache of these images and of what ``about`` says; another name for changed files, classes or order.

    ``remedy`` ends the error for images that are in no file.
    """
    paths = {entry.path for entry in dataset.entries}
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise ValueError(f"{missing[0]} is no file, so its images cannot be cached; {remedy}.")
    changed = {path: os.stat(path).st_mtime_ns for path in paths}
    digest = hashlib.sha256(f"{about} {dataset.class_ids}".encode())
    for entry, target in zip(dataset.entries, dataset.targets):
        digest.update(f"\n{entry} {target} {changed[entry.path]}".encode())
    return digest.hexdigest()[:16]


def find_images(source: str | os.PathLike[str], split: str, class_ids: Sequence[str] | None = None) -> ImageDataset:
    """The images of a split. Classes are the folder names, sorted, or those given (of the training split)."""
    roots = find_roots(os.fspath(source))
    found = _find_classes(roots, split)
    drawn_from = None
    if not found and split in (TRAIN, VAL) and not _find_classes(roots, VAL if split == TRAIN else TRAIN):
        whole = _find_classes(roots, ".")
        _check_filled(whole, source, ".")
        _check_top(whole, source)
        found, drawn_from = _draw_split(whole, split), sum(len(entries) for entries in whole.values())
    if not found:
        raise ValueError(
            f"{source} has no images under {split}/<class>/; use that layout, in a folder or in tars, "
            f"or name another split ('.' if the class folders are at the top)."
        )
    _check_filled(found, source, split)
    if class_ids is not None:
        foreign = sorted(set(found) - set(class_ids))
        if foreign:
            raise ValueError(
                f"{split} has classes that the training split lacks: {some_of(foreign)}; add them there, or remove "
                "them here."
            )
    classes = tuple(class_ids) if class_ids is not None else tuple(sorted(found))
    entries = [entry for class_id in classes for entry in found.get(class_id, [])]
    targets = [target for target, class_id in enumerate(classes) for _ in found.get(class_id, [])]
    return ImageDataset(classes, tuple(entries), tuple(targets), drawn_from)


def _find_classes(roots: Sequence[Path], split: str) -> dict[str, list[Entry]]:
    """The images of each class in a split that is a folder, by name; none for a class whose folder is empty."""
    found: dict[str, dict[str, Entry]] = {}
    for root in roots:
        for class_id, entry in _tar_entries(root, split) if root.suffix == ".tar" else _folder_entries(root, split):
            known = found.setdefault(class_id, {})
            if entry is not None:
                known.setdefault(entry.name, entry)  # a tar may be next to its unpacked contents
    return {class_id: [known[name] for name in sorted(known)] for class_id, known in found.items()}


def _draw_split(whole: dict[str, list[Entry]], split: str) -> dict[str, list[Entry]]:
    """The training or validation images of every class of a dataset without splits."""
    drawn = {}
    for class_id, entries in whole.items():
        held_out = hold_out([entry.name for entry in entries], class_id=class_id)
        drawn[class_id] = [entry for entry in entries if (entry.name in held_out) == (split == VAL)]
    return drawn


def _check_filled(found: dict[str, list[Entry]], source: str | os.PathLike[str], split: str) -> None:
    empty = sorted(class_id for class_id, entries in found.items() if not entries)
    if empty:
        raise ValueError(
            f"{some_of(empty)} of {source} ({split}) hold no images; "
            f"add some ({', '.join(SUFFIXES[:4])}, …) or remove the folder."
        )


def _check_top(whole: dict[str, list[Entry]], source: str | os.PathLike[str]) -> None:
    """Refuse splits without classes, and folders of folders at the top, which are splits of other names."""
    if TRAIN in whole and set(whole) <= {TRAIN, VAL, "test"}:
        raise ValueError(
            f"{source} has {some_of(sorted(whole))} with images and no classes in them; lay the images out as "
            "<split>/<class>/<image>, or as <class>/<image>."
        )
    deep = sorted(
        class_id for class_id, entries in whole.items() if all(entry.name.count("/") > 1 for entry in entries)
    )
    if deep:
        raise ValueError(
            f"{source} has neither train/ nor val/, and {some_of(deep)} hold folders of images, as a split does and a "
            "class does not; name the splits (--set data.train=…, --set data.val=… in training, --split … elsewhere), "
            "or lay the images out as <class>/<image>."
        )


def find_unlabelled(source: str | os.PathLike[str]) -> ImageDataset:
    """All images in a folder and its subfolders, or in tars; names in a tar begin with the name of the tar."""
    entries = []
    for root in find_roots(os.fspath(source)):
        if root.suffix == ".tar":
            entries += [replace(entry, name=f"{root.name}/{entry.name}") for _, entry in tar_members(root)]
        else:
            entries += [
                Entry(str(path), path.relative_to(root).as_posix())
                for path in sorted(root.rglob("*"))
                if path.suffix.lower() in SUFFIXES and path.is_file()
            ]
    if not entries:
        raise ValueError(f"{source} holds no images ({', '.join(SUFFIXES[:4])}, …).")
    return ImageDataset((), tuple(entries), (UNLABELLED,) * len(entries))


def find_roots(source: str) -> list[Path]:
    """The folders and tars that a source names."""
    path = Path(source).expanduser()
    if path.is_dir():
        tars = sorted(path.glob("*.tar"))
        return [path, *tars]
    if path.is_file() and path.suffix == ".tar":
        return [path]
    matches = sorted(Path(match) for match in glob.glob(str(path)) if match.endswith(".tar"))
    if not matches:
        raise ValueError(
            f"there is no data at {source}; give a folder, a tar, or a pattern of tars such as 'DIR/*.tar'."
        )
    return matches


def _folder_entries(root: Path, split: str) -> Iterator[tuple[str, Entry | None]]:
    folder = root / split
    for class_folder in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not class_folder.is_dir() or is_hidden((class_folder.name,)):
            continue
        yield class_folder.name, None
        for path in class_folder.rglob("*"):
            inside = path.relative_to(root)
            if path.suffix.lower() in SUFFIXES and path.is_file() and not is_hidden(inside.parts):
                yield class_folder.name, Entry(str(path), inside.as_posix())


def _tar_entries(path: Path, split: str) -> Iterator[tuple[str, Entry | None]]:
    prefix = Path(split).parts  # none for "."
    for parts, entry in tar_members(path):
        if not is_hidden(parts) and len(parts) >= len(prefix) + 2 and parts[: len(prefix)] == prefix:
            yield parts[len(prefix)], entry


def is_hidden(parts: Sequence[str]) -> bool:
    """Dot files and folders, and the copies that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def tar_members(path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """The images of a tar, or its files with other suffixes, each with the parts of its name."""
    try:
        with tarfile.open(path, "r:") as tar:  # images are read by their offset, so the tar must not be compressed
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isfile() and name.lower().endswith(suffixes):
                    yield tuple(name.split("/")), Entry(str(path), name, member.offset_data, member.size)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is damaged, compressed or no tar ({error}); copy or unpack it again.") from error


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are, for a message."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
