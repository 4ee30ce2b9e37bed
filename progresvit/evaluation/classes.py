"""Which of the model's classes a data set's class names mean."""

from __future__ import annotations

from collections.abc import Sequence

from timm.data import ImageNetInfo

from progresvit.config import ModelConfig
from progresvit.data.dataset import ImageDataset

IMAGENET_CLASSES = 1000


def class_numbers(names: Sequence[str], config: ModelConfig) -> list[int]:
    """The model's class for each name.

    By the model's class ids; else ImageNet's (a model of 1000 classes knows its folder names); else, for such a model
    or one without class ids, whole numbers are the classes themselves, as in ImageNet-V2's folders, where 10 comes
    after 9 and not after 1; else, if the model has no class ids, as many names as classes, in sorted order.
    """
    known = _known_ids(config)
    if known and all(name in known for name in names):
        return [known[name] for name in names]
    if _are_numbers(names, config):
        return [int(name) for name in names]
    if known:
        foreign = [name for name in names if name not in known]
        raise ValueError(
            f"the model does not know {len(foreign)} of the {len(names)} classes of the data, such as {foreign[0]!r}; "
            f"it knows {', '.join(list(known)[:3])}, … Give it data of its own classes, or --unlabelled."
        )
    if len(names) != config.num_classes:
        raise ValueError(
            f"the data has {len(names)} classes and the model {config.num_classes}, and the model's config has no "
            "class_ids to tell which is which; add class_ids to its config.json."
        )
    return list(range(len(names)))


def relabel(pictures: ImageDataset, config: ModelConfig) -> list[int]:
    """The model's class of each picture."""
    numbers = class_numbers(pictures.class_ids, config)
    return [numbers[target] for target in pictures.targets]


def _are_numbers(names: Sequence[str], config: ModelConfig) -> bool:
    if not all(name.isdecimal() for name in names):
        return False
    numbers = {int(name) for name in names}
    if config.class_ids is not None and config.num_classes != IMAGENET_CLASSES:
        return False
    return max(numbers) < config.num_classes


def _known_ids(config: ModelConfig) -> dict[str, int]:
    if config.class_ids is not None:
        return {name: number for number, name in enumerate(config.class_ids)}
    if config.num_classes == IMAGENET_CLASSES:
        return {name: number for number, name in enumerate(ImageNetInfo().label_names())}
    return {}
