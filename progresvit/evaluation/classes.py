"""The model's class numbers for the class names of a dataset."""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
import re
import unicodedata
from collections.abc import Mapping, Sequence

from timm.data import ImageNetInfo

from progresvit.config import BaseConfig
from progresvit.data.dataset import ImageDataset, some_of
from progresvit.io.parse import did_you_mean

IMAGENET_CLASSES = 1000


def class_numbers(names: Sequence[str], config: BaseConfig) -> list[int]:
    """The model's class number for each name, by the first rule that applies.

    1. The model's class ids.
    2. For a model of 1000 classes without class ids: ImageNet's folder names.
    3. Names that are whole numbers are class numbers, as in ImageNet-V2's folders: for a model without class ids, and
       for a model of 1000 classes if all of 0 to 999 are there.
    4. The model's class ids and labels: ``golden retriever`` is also ``golden_retriever`` or ``Golden-Retriever``.
    5. Without class ids, and without any label among the names: as many names as classes, in order.
    """
    numbers = _numbers_by_name(config)
    if numbers and all(name in numbers for name in names):
        return [numbers[name] for name in names]
    if _are_numbers(names, config):
        return [int(name) for name in names]
    by_label = _look_up(names, numbers, config)
    foreign = [name for name, number in by_label.items() if number is None]
    if not foreign:
        return _check_distinct(by_label)
    if numbers or len(foreign) < len(names):
        known = list(numbers) or list(config.labels or ())
        nearest = did_you_mean(foreign[0], dict.fromkeys((*(config.labels or ()), *numbers)))
        remedy = f" {foreign[0]!r}: {nearest}" if nearest.startswith("did") else ""
        if len(foreign) == len(names):
            raise ValueError(
                f"the model knows no class of the data: the data has the classes {some_of(names, 3)}, the model "
                f"{some_of(known, 3)}.{remedy} Name the class folders by the model's labels or class ids, give other "
                "data or another model, or evaluate with unlabelled=True; progresvit train own_images trains a model "
                "for these classes."
            )
        raise ValueError(
            f"the model does not know {len(foreign)} of the {len(names)} classes of the data, such as {foreign[0]!r}; "
            f"it knows {some_of(known, 3)}.{remedy} Use data of its own classes, or evaluate with unlabelled=True."
        )
    if len(names) != config.num_classes:
        raise ValueError(
            f"the data has {len(names)} classes and the model {config.num_classes}, and the model's config has no "
            "class_ids to tell which is which; add class_ids to its config.json."
        )
    return list(range(len(names)))


def _look_up(names: Sequence[str], numbers: Mapping[str, int], config: BaseConfig) -> dict[str, int | None]:
    """The class of each name: by class id, by label, or by label up to case and separators; None if there is none."""
    labels, exact, plain = config.labels or (), dict[str, list[int]](), dict[str, list[int]]()
    for number, label in enumerate(labels):
        exact.setdefault(label, []).append(number)
        plain.setdefault(_plain(label), []).append(number)
    plain.pop("", None)
    result: dict[str, int | None] = {}
    for name in names:
        matching = [numbers[name]] if name in numbers else exact.get(name) or plain.get(_plain(name)) or []
        if len(matching) > 1:
            ids = config.class_ids or tuple(map(str, range(config.num_classes)))
            raise ValueError(
                f"the class folder {name!r} fits {len(matching)} classes of the model: "
                f"{', '.join(f'{ids[number]} ({labels[number]})' for number in matching)}; name it by the class id."
            )
        result[name] = matching[0] if matching else None
    return result


def _plain(label: str) -> str:
    """The label in lower case, its words separated by single spaces."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFC", label).casefold()).strip()


def _check_distinct(by_label: Mapping[str, int | None]) -> list[int]:
    """The numbers of the class folders; refuses two folders of one class."""
    folders: dict[int, str] = {}
    for name, number in by_label.items():
        assert number is not None
        if number in folders:
            raise ValueError(
                f"the class folders {folders[number]!r} and {name!r} are the same class of the model; merge them."
            )
        folders[number] = name
    return list(folders)


def relabel(images: ImageDataset, config: BaseConfig) -> list[int]:
    """The model's class of each image."""
    numbers = class_numbers(images.class_ids, config)
    return [numbers[target] for target in images.targets]


def _are_numbers(names: Sequence[str], config: BaseConfig) -> bool:
    if not all(name.isdecimal() for name in names):
        return False
    numbers = {int(name) for name in names}
    if config.class_ids is not None:  # its thousand numbers are classes of ImageNet, ten digits are not
        return config.num_classes == IMAGENET_CLASSES and numbers == set(range(IMAGENET_CLASSES))
    return max(numbers) < config.num_classes


def _numbers_by_name(config: BaseConfig) -> dict[str, int]:
    if config.class_ids is not None:
        return {name: number for number, name in enumerate(config.class_ids)}
    if config.num_classes == IMAGENET_CLASSES:
        return {name: number for number, name in enumerate(imagenet_ids())}
    return {}


def imagenet_ids() -> list[str]:
    """ImageNet's 1000 folder names, in the order of the classes."""
    return list(ImageNetInfo().label_names())
