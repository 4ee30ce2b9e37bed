"""A dataset of images by index: a folder per class, tars with the same layout, or images without labels.

The layout is ``<split>/<class>/<image>``, in folders and in tars. A split may have several parts (``fog/3``); ``.``
means that the class folders are at the top. If they are, and there is neither ``train/`` nor ``val/``, these two splits
are drawn from the dataset (``split.py``). A source is a folder, a tar, a folder of tars, or a pattern such as
``photos/*.tar``; files outside of this layout are ignored. Images without labels may also be named in a list.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL.Image import Image

from progresvit.data.decode import ImageError, decode
from progresvit.data.entries import Entries as Entries
from progresvit.data.entries import Entry as Entry
from progresvit.data.split import TRAIN, VAL, hold_out

SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".jpe", ".jfif",
    ".mpo", ".apng", ".dib", ".avif", ".jp2", ".j2k", ".jpx", ".jpf", ".j2c", ".jpc", ".tga", ".heic", ".heif", ".qoi",
    ".dds", ".pcx", ".psd", ".sgi",
)  # fmt: skip
"""Images that Pillow reads; .heic and .heif with the plug-in pillow-heif."""

UNLABELLED = -1

TIMM_NAMES = ("hfds/", "wds/", "tfds/", "hfids/", "torch/")
"""How timm's names of datasets begin; see timm_dataset.py."""


@dataclass(frozen=True)
class ImageDataset:
    """A split of a dataset."""

    class_ids: tuple[str, ...]
    entries: tuple[Entry, ...] | Entries
    targets: tuple[int, ...]
    """The class of each image; UNLABELLED where there is none."""
    drawn_from: int | None = None
    """If the split was drawn from a dataset without splits, the number of images of that dataset."""
    others: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Number of files of other kinds in the folders of the classes, by suffix, without hidden files. If the split was
    drawn, they are counted in the whole dataset."""
    sampled_from: int | None = None
    """If these images are a random sample, the number of images that it was drawn from."""

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, index: int) -> bytes:
        """The bytes of an image file. Several processes may read at once."""
        return self.entries[index].read()

    def read_image(self, index: int, *, reduce: bool = True) -> Image:
        """The decoded image, upright and in RGB; every problem with the file is an :class:`ImageError`.

        With ``reduce``, a JPEG above Pillow's limit is decoded at a smaller scale instead of being refused.
        """
        try:
            content = self.read(index)
        except OSError as error:
            raise ImageError(f"cannot be read ({error.strerror or error})") from error
        return decode(content, reduce=reduce)

    def subset(self, indices: Iterable[int]) -> ImageDataset:
        """The images at these indices, with the same classes."""
        indices = list(indices)
        make = Entries if isinstance(self.entries, Entries) else tuple
        entries, targets = make(self.entries[i] for i in indices), tuple(self.targets[i] for i in indices)
        return replace(self, entries=entries, targets=targets)


def dataset_hash(dataset: ImageDataset, about: str, *, remedy: str) -> str:
    """A name for a cache of these images, prepared as ``about`` says; it changes with files, classes and order.

    ``remedy`` ends the error for images that are not stored in files.
    """
    paths = {entry.path for entry in dataset.entries}
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise ValueError(f"{missing[0]} is not a file, so its images cannot be cached; {remedy}.")
    changed = {path: os.stat(path).st_mtime_ns for path in paths}
    digest = hashlib.sha256(f"{about} {dataset.class_ids}".encode())
    for entry, target in zip(dataset.entries, dataset.targets):
        digest.update(f"\n{entry} {target} {changed[entry.path]}".encode())
    return digest.hexdigest()[:16]


def find_images(source: str | os.PathLike[str], split: str, class_ids: Sequence[str] | None = None) -> ImageDataset:
    """The images of a split. Classes are the sorted folder names, or ``class_ids`` of the training split.

    The source may also be a timm name such as ``hfds/…``.
    """
    source = os.fspath(source)
    if source.startswith(TIMM_NAMES):
        from progresvit.data.timm_dataset import find_timm_images  # timm is slow to import

        return find_timm_images(source, split, class_ids)
    roots, others = find_roots(source), Counter[str]()
    images = _find_classes(roots, split, others)
    drawn_from = None
    if not images and split in (TRAIN, VAL) and not _find_classes(roots, VAL if split == TRAIN else TRAIN):
        undivided = _find_classes(roots, ".", others)
        _check_filled(undivided, source, ".")
        _check_top(undivided, source)
        drawn_from = sum(len(entries) for entries in undivided.values())
        for class_id, entries in undivided.items():
            held_out = hold_out([entry.name for entry in entries], class_id=class_id)
            images[class_id] = [entry for entry in entries if (entry.name in held_out) == (split == VAL)]
    if not images:
        raise _missing_split(Path(source).expanduser(), source, split)
    _check_filled(images, source, split)
    if class_ids is not None:
        foreign = sorted(set(images) - set(class_ids))
        if foreign:
            raise ValueError(
                f"{split} has classes that the training split lacks: {some_of(foreign)}; add them there, or remove "
                "them here."
            )
    classes = tuple(class_ids) if class_ids is not None else tuple(sorted(images))
    entries = [entry for class_id in classes for entry in images.get(class_id, [])]
    targets = [target for target, class_id in enumerate(classes) for _ in images.get(class_id, [])]
    return ImageDataset(classes, tuple(entries), tuple(targets), drawn_from, others)


def _find_classes(roots: Sequence[Path], split: str, others: Counter[str] | None = None) -> dict[str, list[Entry]]:
    """The images of each class in a split that is a folder, by name; an empty list for an empty class folder."""
    by_class: dict[str, dict[str, Entry]] = {}
    for root in roots:
        entries_of = _tar_entries if root.suffix == ".tar" else _folder_entries
        for class_id, entry in entries_of(root, split, others):
            by_name = by_class.setdefault(class_id, {})
            if entry is not None:
                by_name.setdefault(entry.name, entry)  # a tar may be next to its unpacked contents
    return {class_id: [by_name[name] for name in sorted(by_name)] for class_id, by_name in by_class.items()}


def _check_filled(images: dict[str, list[Entry]], source: str, split: str) -> None:
    empty = sorted(class_id for class_id, entries in images.items() if not entries)
    if empty:
        raise ValueError(
            f"{some_of(empty)} of {source} ({split}) hold no images; "
            f"add some ({', '.join(SUFFIXES[:4])}, …) or remove the folder."
        )


def _missing_split(root: Path, source: str, split: str) -> ValueError:
    """Why a split has no images: they have no class folders, only training has them, or nothing is there."""
    for folder in (root / split, root):
        if not folder.is_dir():
            continue
        with os.scandir(folder) as files:
            count = sum(_is_image_file(file) for file in files)
        if count:
            return ValueError(
                f"{folder} holds {count:,} images without class folders; the class of an image is the name of its "
                "folder, so move the images of each class into one: <class>/<image>. (Images without classes: "
                "progresvit classify, or evaluate with unlabelled=True.)"
            )
    if split == VAL and (root / TRAIN).is_dir():
        return ValueError(
            f"{source} has {TRAIN}/ and no images under {VAL}/<class>/; name another split (data.val=… in training, "
            f"split=… elsewhere), or pass {root / TRAIN}, of which a part is held out."
        )
    return ValueError(
        f"{source} has no images under {split}/<class>/; use that layout, in a folder or in tars, or name another "
        "split (data.train=… and data.val=… in training, split=… elsewhere; '.' if the class folders are at the top)."
    )


def _check_top(images: dict[str, list[Entry]], source: str) -> None:
    """Refuse splits without classes, and folders of folders at the top, which are splits with other names."""
    if TRAIN in images and set(images) <= {TRAIN, VAL, "test"}:
        raise ValueError(
            f"{source} has {some_of(sorted(images))} with images and no classes in them; lay the images out as "
            "<split>/<class>/<image>, or as <class>/<image>."
        )
    deep = sorted(
        class_id for class_id, entries in images.items() if all(entry.name.count("/") > 1 for entry in entries)
    )
    if deep:
        raise ValueError(
            f"{source} has neither train/ nor val/, and {some_of(deep)} hold folders of images, as a split does and a "
            "class does not; name the splits (data.train=…, data.val=… in training, split=… elsewhere), or lay the "
            "images out as <class>/<image>."
        )


def find_unlabelled(source: str | os.PathLike[str], others: Counter[str] | None = None) -> ImageDataset:
    """All images in a folder and its subfolders, or in tars; names in a tar begin with the name of the tar.

    ``others`` counts the files of other kinds by their suffix, except hidden files and tars in the folder itself.
    """

    def entries_of(root: Path) -> Iterator[Entry]:
        if root.suffix == ".tar":
            for _, entry in tar_members(root, others=others):
                yield replace(entry, name=f"{root.name}/{entry.name}")
        else:
            folder = "" if root == Path() else os.path.join(root, "")
            yield from (Entry(folder + name, name) for name in _image_files(folder, others))

    entries = Entries(entry for root in find_roots(os.fspath(source)) for entry in entries_of(root))
    if not entries:
        raise ValueError(f"{source} holds no images ({', '.join(SUFFIXES[:4])}, …).")
    return unlabelled(entries)


def find_listed(path: str | os.PathLike[str]) -> ImageDataset:
    """The images that a text file lists, one path per line; ``-`` reads the list from standard input.

    Relative paths are relative to the current folder. Empty lines are skipped. The paths are not opened.
    """
    if os.fspath(path) == "-":
        entries = Entries(_listed_entries(sys.stdin.buffer))
    else:
        try:
            with open(path, "rb") as lines:
                entries = Entries(_listed_entries(lines))
        except OSError as error:
            raise ValueError(
                f"the list {path} cannot be read ({error.strerror}); pass a text file with one path per line."
            ) from error
    if not entries:
        raise ValueError(f"the list {path} names no images; write one path per line.")
    return unlabelled(entries)


def unlabelled(entries: tuple[Entry, ...] | Entries) -> ImageDataset:
    """A dataset of images without classes."""
    return ImageDataset((), entries, (UNLABELLED,) * len(entries))


def _count_other(others: Counter[str] | None, name: str) -> None:
    """Count a file that is not an image by its suffix, unless it is hidden."""
    if others is not None and not is_hidden(name.split("/")):
        others[os.path.splitext(name)[1].lower() or "no suffix"] += 1


def describe_others(others: Mapping[str, int], most: int = 5) -> str:
    """One line with the number of files that are not images, by suffix; empty if there are none."""
    total = sum(others.values())
    kinds = [f"{number} {suffix}" for suffix, number in sorted(others.items(), key=lambda kind: (-kind[1], kind[0]))]
    more = ["…"] if len(kinds) > most else []
    were = "file that is not an image was" if total == 1 else "files that are not images were"
    return f"note: {total} {were} left out ({', '.join(kinds[:most] + more)})" if total else ""


def _listed_entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    for number, line in enumerate(lines):
        text = os.fsdecode(line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line).rstrip("\r\n")
        if text:
            yield Entry(text, text)


def _image_files(folder: str, others: Counter[str] | None = None) -> Iterator[str]:
    """Names of the images in a folder and its subfolders, sorted by their parts. Links to folders are not followed."""
    pending = [""]  # in reverse order; names of folders end with a slash
    while pending:
        name = pending.pop()
        if name and not name.endswith("/"):
            yield name
            continue
        try:
            with os.scandir(folder + name or ".") as files:
                inside = []
                for file in files:
                    is_folder = file.is_dir(follow_symlinks=False)
                    if is_folder or _is_image_file(file):
                        inside.append((file.name, is_folder))
                    elif name or not file.name.endswith(".tar"):  # tars of the folder itself are read
                        _count_other(others, name + file.name)
                inside.sort()
        except (PermissionError, FileNotFoundError, NotADirectoryError):  # it may have been removed meanwhile
            continue
        pending += [f"{name}{child}/" if is_folder else f"{name}{child}" for child, is_folder in reversed(inside)]


def _is_image_file(file: os.DirEntry[str]) -> bool:
    dot = file.name.rfind(".")
    try:
        return dot > 0 and file.name[dot:].lower() in SUFFIXES and file.is_file()
    except OSError:  # a link that leads nowhere
        return False


def is_web_address(path: str | os.PathLike[str]) -> bool:
    """Whether this is an address on the web or in cloud storage instead of a path."""
    return os.fspath(path).lower().startswith(("http:/", "https:/", "ftp:/", "s3:/", "gs:/"))  # a Path has one slash


def find_roots(source: str) -> list[Path]:
    """The folders and tars that a source names."""
    if is_web_address(source):
        raise ValueError(f"{source} is a web address; download it, and pass the folder or the tar.")
    path = Path(source).expanduser()
    if path.is_dir():
        tars = sorted(path.glob("*.tar"))
        return [path, *tars]
    if path.is_file() and path.suffix == ".tar":
        return [path]
    matches = sorted(Path(match) for match in glob.glob(str(path)) if match.endswith(".tar"))
    if not matches and path.is_file():
        raise ValueError(f"{source} is a file but not a tar; pass the folder of the data, or a tar.")
    if not matches:
        raise ValueError(
            f"there is no data at {source}; pass a folder, a tar, or a pattern of tars such as 'DIR/*.tar'."
        )
    return matches


def _folder_entries(root: Path, split: str, others: Counter[str] | None) -> Iterator[tuple[str, Entry | None]]:
    folder = root / split
    for class_folder in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not class_folder.is_dir() or is_hidden((class_folder.name,)):
            continue
        yield class_folder.name, None
        for path in class_folder.rglob("*"):
            inside = path.relative_to(root)
            if is_hidden(inside.parts) or not path.is_file():
                continue
            if path.suffix.lower() in SUFFIXES:
                yield class_folder.name, Entry(str(path), inside.as_posix())
            else:
                _count_other(others, inside.as_posix())


def _tar_entries(path: Path, split: str, others: Counter[str] | None) -> Iterator[tuple[str, Entry | None]]:
    prefix = Path(split).parts  # none for "."

    def is_inside(parts: Sequence[str]) -> bool:
        return not is_hidden(parts) and len(parts) >= len(prefix) + 2 and tuple(parts[: len(prefix)]) == prefix

    for parts, entry in tar_members(path, others=others, counted=is_inside):
        if is_inside(parts):
            yield parts[len(prefix)], entry


def is_hidden(parts: Sequence[str]) -> bool:
    """Dot files and folders, and the copies that macOS adds to archives."""
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def tar_members(
    path: Path,
    suffixes: tuple[str, ...] = SUFFIXES,
    others: Counter[str] | None = None,
    counted: Callable[[Sequence[str]], bool] = lambda parts: True,
) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """The images of a tar, or its files with other suffixes, each with the parts of its name.

    ``others`` counts the files of other kinds for whose parts ``counted`` is true.
    """
    try:
        with tarfile.open(path, "r:") as tar:  # images are read by their offset, so the tar must not be compressed
            for member in tar:
                name = member.name.removeprefix("./")
                if member.isfile() and name.lower().endswith(suffixes):
                    yield tuple(name.split("/")), Entry(str(path), name, member.offset_data, member.size)
                elif member.isfile() and counted(name.split("/")):
                    _count_other(others, name)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is damaged, compressed or not a tar ({error}); copy or unpack it again.") from error


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are, for a message."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
