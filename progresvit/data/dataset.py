"""Pictures by number: a folder per class, or tars that hold one; without labels, in any folders.

``<split>/<class>/<picture>`` is the layout in both; a split may have several parts (``fog/3``), and ``.`` means that
the class folders lie at the top. A set that has them there, and neither ``train/`` nor ``val/``, can still be asked for
these two: they are drawn from it (``held_back.py``). A source is a folder, a tar, a folder of tars, or a pattern such
as ``photos/*.tar``; what does not have this layout is passed over.
"""

from __future__ import annotations

import glob
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from progresvit.data.split import TRAIN, VAL, hold_back

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")

UNLABELLED = -1


@dataclass(frozen=True)
class Entry:
    """Where one picture lies: a file, or a stretch of a tar."""

    path: str
    name: str
    offset: int = 0
    size: int = -1


@dataclass(frozen=True)
class Pictures:
    """A split of a data set."""

    class_ids: tuple[str, ...]
    entries: tuple[Entry, ...]
    targets: tuple[int, ...]
    """The class of each picture; UNLABELLED where there is none."""
    drawn_from: int | None = None
    """If the split is no folder but was drawn from a set without splits, how many pictures that set has."""

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, index: int) -> bytes:
        """The picture's file, undecoded. Any number of processes may read at once."""
        entry = self.entries[index]
        with open(entry.path, "rb") as file:
            file.seek(entry.offset)
            return file.read(entry.size)

    def subset(self, indices: Iterable[int]) -> Pictures:
        """Some of the pictures, the classes unchanged."""
        chosen = list(indices)
        entries, targets = tuple(self.entries[i] for i in chosen), tuple(self.targets[i] for i in chosen)
        return replace(self, entries=entries, targets=targets)


def find_pictures(source: str | os.PathLike[str], split: str, class_ids: Sequence[str] | None = None) -> Pictures:
    """The pictures of a split. Classes are the folder names, sorted, or those given (the training split's)."""
    roots = _roots(os.fspath(source))
    found = _find_classes(roots, split)
    drawn_from = None
    if not found and split in (TRAIN, VAL) and not _find_classes(roots, VAL if split == TRAIN else TRAIN):
        whole = _find_classes(roots, ".")
        _check_filled(whole, source, ".")
        _check_top(whole, source)
        found, drawn_from = _draw_split(whole, split), sum(len(entries) for entries in whole.values())
    if not found:
        raise ValueError(
            f"{source} has no pictures under {split}/<class>/; lay them out so, in a folder or in tars, "
            f"or name another split ('.' if the class folders lie at the top)."
        )
    _check_filled(found, source, split)
    if class_ids is not None:
        foreign = sorted(set(found) - set(class_ids))
        if foreign:
            raise ValueError(
                f"{split} has classes that training lacks: {_some(foreign)}; add them to it or remove them."
            )
    classes = tuple(class_ids) if class_ids is not None else tuple(sorted(found))
    entries = [entry for class_id in classes for entry in found.get(class_id, [])]
    targets = [target for target, class_id in enumerate(classes) for _ in found.get(class_id, [])]
    return Pictures(classes, tuple(entries), tuple(targets), drawn_from)


def _find_classes(roots: Sequence[Path], split: str) -> dict[str, list[Entry]]:
    """The pictures of each class in a split that is a folder, by name; none for a class whose folder is empty."""
    found: dict[str, dict[str, Entry]] = {}
    for root in roots:
        for class_id, entry in _tar_entries(root, split) if root.suffix == ".tar" else _folder_entries(root, split):
            known = found.setdefault(class_id, {})
            if entry is not None:
                known.setdefault(entry.name, entry)  # a tar may lie beside its contents
    return {class_id: [known[name] for name in sorted(known)] for class_id, known in found.items()}


def _draw_split(whole: dict[str, list[Entry]], split: str) -> dict[str, list[Entry]]:
    """Training's or validation's share of every class of a set without splits."""
    drawn = {}
    for class_id, entries in whole.items():
        held_back = hold_back([entry.name for entry in entries], class_id=class_id)
        drawn[class_id] = [entry for entry in entries if (entry.name in held_back) == (split == VAL)]
    return drawn


def _check_filled(found: dict[str, list[Entry]], source: str | os.PathLike[str], split: str) -> None:
    empty = sorted(class_id for class_id, entries in found.items() if not entries)
    if empty:
        raise ValueError(
            f"{_some(empty)} of {source} ({split}) hold no pictures; "
            f"add some ({', '.join(SUFFIXES[:4])}, …) or remove the folder."
        )


def _check_top(whole: dict[str, list[Entry]], source: str | os.PathLike[str]) -> None:
    """Folders of folders at the top are splits of other names rather than classes, and splits need classes."""
    if TRAIN in whole and set(whole) <= {TRAIN, VAL, "test"}:
        raise ValueError(
            f"{source} has {_some(sorted(whole))} with pictures and no classes in them; lay the pictures out as "
            "<split>/<class>/<picture>, or as <class>/<picture>."
        )
    deep = sorted(
        class_id for class_id, entries in whole.items() if all(entry.name.count("/") > 1 for entry in entries)
    )
    if deep:
        raise ValueError(
            f"{source} has neither train/ nor val/, and {_some(deep)} hold folders of pictures, as a split does and a "
            "class does not; name the splits (--set data.train=…, --set data.val=… in training, --split … elsewhere), "
            "or lay the pictures out as <class>/<picture>."
        )


def find_unlabelled(source: str | os.PathLike[str]) -> Pictures:
    """Every picture in a folder, however deep, or in tars; known by its name, in a tar with the tar's before it."""
    entries = []
    for root in _roots(os.fspath(source)):
        if root.suffix == ".tar":
            entries += [replace(entry, name=f"{root.name}/{entry.name}") for _, entry in _tar_members(root)]
        else:
            entries += [
                Entry(str(path), path.relative_to(root).as_posix())
                for path in sorted(root.rglob("*"))
                if path.suffix.lower() in SUFFIXES and path.is_file()
            ]
    if not entries:
        raise ValueError(f"{source} holds no pictures ({', '.join(SUFFIXES[:4])}, …).")
    return Pictures((), tuple(entries), (UNLABELLED,) * len(entries))


def _roots(source: str) -> list[Path]:
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
        if not class_folder.is_dir() or _is_hidden((class_folder.name,)):
            continue
        yield class_folder.name, None
        for path in class_folder.rglob("*"):
            inside = path.relative_to(root)
            if path.suffix.lower() in SUFFIXES and path.is_file() and not _is_hidden(inside.parts):
                yield class_folder.name, Entry(str(path), inside.as_posix())


def _tar_entries(path: Path, split: str) -> Iterator[tuple[str, Entry | None]]:
    prefix = Path(split).parts  # none for "."
    for parts, entry in _tar_members(path):
        if not _is_hidden(parts) and len(parts) >= len(prefix) + 2 and parts[: len(prefix)] == prefix:
            yield parts[len(prefix)], entry


def _is_hidden(parts: Sequence[str]) -> bool:
    """What systems leave behind: dot files and folders, and a Mac's shadow of every file in an archive."""
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def _tar_members(path: Path) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """The pictures of a tar, each with the parts of its name."""
    try:
        with tarfile.open(path, "r:") as tar:  # pictures are read by their place, so the tar must not be compressed
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isfile() and name.lower().endswith(SUFFIXES):
                    yield tuple(name.split("/")), Entry(str(path), name, member.offset_data, member.size)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is damaged, compressed or no tar ({error}); copy or unpack it again.") from error


def _some(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
