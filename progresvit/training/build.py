"""From a recipe to a model with its initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from timm.data import ImageNetInfo
from torch import nn

from progresvit import api
from progresvit.interop import start_from_timm
from progresvit.io.model_folder import find_folder
from progresvit.model import registry
from progresvit.model.interface import RoundModel
from progresvit.model.saving import check_fit
from progresvit.training.recipe import Recipe


def build_model(recipe: Recipe, class_ids: tuple[str, ...]) -> RoundModel:
    """The recipe's model for these classes (none: without a head), with the weights that it starts from."""
    count = len(class_ids)
    classes = recipe.model.num_classes or count
    if classes < count:
        raise ValueError(f"the data has {count} classes and the head {classes}; set model.num_classes={count} or null.")
    named = bool(class_ids) and classes == count
    try:
        config = recipe.model.config(
            num_classes=classes,
            class_ids=class_ids if named else None,
            labels=_labels(class_ids) if named else None,
        )
    except ValueError as error:
        raise ValueError(f"model: {error}") from error
    model: RoundModel = registry.build(config, drop_path=recipe.model.drop_path)
    start = recipe.model.start
    if start and (start == api.SHIPPED or Path(start).expanduser().is_dir()):
        _start_from_folder(model, find_folder(start))
    elif start:
        start_from_timm(cast(Any, model), start)
    return model


def _start_from_folder(model: RoundModel, folder: Path) -> None:
    """Weights of a model folder; a head of other classes keeps its random weights."""
    assert isinstance(model, nn.Module)
    source = api.load(folder)
    weights = source.state_dict()
    if source.config.class_ids != model.config.class_ids:
        fresh = {key: value for key, value in model.state_dict().items() if key.startswith("head.")}
        weights = {**weights, **fresh}
    check_fit(weights, model.config, origin=str(folder))
    model.load_state_dict(weights)


def _labels(class_ids: tuple[str, ...]) -> tuple[str, ...]:
    """ImageNet's words for its folder names; other folder names are labels themselves."""
    info = ImageNetInfo()
    known = set(info.label_names())
    return tuple(info.label_name_to_description(name).split(",")[0] if name in known else name for name in class_ids)
