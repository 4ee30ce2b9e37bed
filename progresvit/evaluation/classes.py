"""The model's class numbers for the class names of a dataset."""

from __future__ import annotations

import progresvit._torchvision  # noqa: F401  (ahead of timm)

# isort: split
from collections.abc import Sequence

from timm.data import ImageNetInfo

from progresvit.config import BaseConfig
from progresvit.data.dataset import ImageDataset, some_of

IMAGENET_CLASSES = 1000


def class_numbers(names: Sequence[str], config: BaseConfig) -> list[int]:
    """The model's class number for each name, by the first rule that applies.

    1. The model's class ids.
    2. For a model of 1000 classes without class ids: ImageNet's folder names.
    3. Names that are whole numbers are class numbers, as in ImageNet-V2's folders: for a model without class ids, and
       for a model of 1000 classes if all of 0 to 999 are there.
    4. Without class ids: as many names as classes, in order.
    """
    numbers = _numbers_by_name(config)
    if numbers and all(name in numbers for name in names):
        return [numbers[name] for name in names]
    if _are_numbers(names, config):
        return [int(name) for name in names]
    if numbers:
        foreign = [name for name in names if name not in numbers]
        if len(foreign) == len(names):
            raise ValueError(
                f"the model knows no class of the data: the data has the classes {some_of(names, 3)}, the model "
                f"{some_of(list(numbers), 3)}. Name the class folders by the model's class ids, give other data or "
                "another model, or evaluate with unlabelled=True; progresvit train own_images trains a model for these "
                "classes."
            )
        raise ValueError(
            f"the model does not know {len(foreign)} of the {len(names)} classes of the data, such as {foreign[0]!r}; "
            f"it knows {some_of(list(numbers), 3)}. Use data of its own classes, or evaluate with unlabelled=True."
        )
    if len(names) != config.num_classes:
        raise ValueError(
            f"the data has {len(names)} classes and the model {config.num_classes}, and the model's config has no "
            "class_ids to tell which is which; add class_ids to its config.json."
        )
    return list(range(len(names)))


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
        return {name: number for number, name in enumerate(ImageNetInfo().label_names())}
    return {}
