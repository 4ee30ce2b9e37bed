"""What a config.json in timm's format says: architecture, preprocessing and classes.

Folders and repositories of others are checked here, before timm sees their values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import timm
from pydantic import ConfigDict, Field
from timm.data import ImageNetInfo
from timm.data.constants import DEFAULT_CROP_PCT

from progresvit.config import (
    HEAD_WIDTH,
    IMAGENET_MEAN,
    IMAGENET_STD,
    MAX_HEADS,
    Count,
    CountOrZero,
    Depth,
    Heads,
    Number,
    Side,
)
from progresvit.data.crop import INTERPOLATION
from progresvit.io.model_folder import CONFIG_FILE
from progresvit.io.parse import Section, parse

PLAIN_NAMES = re.compile(
    r"(deit3?|vit)_(tiny|small|medium|base|large)_patch\d+_\d+|vit_(small|base|large)_patch14_dinov2"
)
"""timm's plain ViTs, which errors suggest. Others are accepted too, such as flexivit_small."""


class ModelArguments(Section):
    """The ``model_args`` that a config.json may have: the architecture of a ViT, within the limits of our configs.

    timm has others, which download weights or open files.
    """

    img_size: Side | tuple[Side, Side] | None = None
    patch_size: Side | tuple[Side, Side] | None = None
    in_chans: Count | None = None
    num_classes: CountOrZero | None = None
    embed_dim: Annotated[int, Field(strict=True, ge=1, le=MAX_HEADS * HEAD_WIDTH)] | None = None
    depth: Depth | None = None
    num_heads: Heads | None = None
    mlp_ratio: Annotated[float, Field(gt=0, le=64)] | None = None
    init_values: Number | None = None
    qkv_bias: bool | None = None
    proj_bias: bool | None = None
    class_token: bool | None = None
    no_embed_class: bool | None = None
    pre_norm: bool | None = None
    final_norm: bool | None = None
    fc_norm: bool | None = None
    dynamic_img_size: bool | None = None
    reg_tokens: CountOrZero | None = None
    global_pool: str | None = None
    pos_embed: str | None = None
    act_layer: str | None = None
    drop_rate: Number | None = None
    pos_drop_rate: Number | None = None
    patch_drop_rate: Number | None = None
    proj_drop_rate: Number | None = None
    attn_drop_rate: Number | None = None
    drop_path_rate: Number | None = None


class PretrainedCfg(Section):
    """What is read of timm's ``pretrained_cfg``: preprocessing and classes, not where weights are."""

    model_config = ConfigDict(extra="ignore")

    architecture: str | None = None
    tag: str | None = None
    input_size: tuple[Count, Side, Side] = (3, 224, 224)
    fixed_input_size: bool = False
    interpolation: str = INTERPOLATION
    crop_mode: str = "center"
    crop_pct: Number = DEFAULT_CROP_PCT
    mean: tuple[Number, ...] = IMAGENET_MEAN
    std: tuple[Number, ...] = IMAGENET_STD
    num_classes: CountOrZero = 1000
    label_names: tuple[str | int, ...] | None = None
    label_descriptions: dict[str, str] | tuple[str, ...] | None = None


def folder_cfg(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The ``pretrained_cfg`` of a config.json, in which the keys beside it take precedence, as in timm."""
    cfg = values.get("pretrained_cfg")
    if not isinstance(cfg, Mapping | None):
        raise ValueError(f"{folder / CONFIG_FILE} is damaged: pretrained_cfg is an object; download it again.")
    stated = {key: values[key] for key in ("num_classes", "label_names", "label_descriptions") if key in values}
    return {**(cfg or {}), **stated}


def read_arguments(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The ``model_args`` of a config.json, whose values are not checked."""
    arguments = values.get("model_args") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{folder / CONFIG_FILE} is damaged: model_args is an object; download it again.")
    return dict(arguments)


def trained_cfg(options: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing that timm's training script was called with, by the keys of ``pretrained_cfg``."""
    keys = ("mean", "std", "crop_pct", "crop_mode", "interpolation")
    return {key: options[key] for key in keys if options.get(key) not in (None, "")}


def preprocessing(values: Mapping[str, Any], origin: str, *, channels: int, num_classes: int) -> dict[str, Any]:
    """Channels, normalisation, crop and classes of a config, from timm's ``pretrained_cfg`` of a model with this head.

    A head with 1000 classes and no names gets ImageNet's.
    """
    cfg = parse_cfg(values, origin)
    if (cfg.interpolation, cfg.crop_mode) != (INTERPOLATION, "center"):
        nearest = f" The nearest plain ViTs are {nearest_plain(cfg.architecture)}." if cfg.architecture else ""
        raise ValueError(
            f"timm prepares the images of {origin} with interpolation {cfg.interpolation} and crop mode "
            f"{cfg.crop_mode}; only {INTERPOLATION} and center are available here.{nearest}"
        )
    mean, std = (numbers * channels if len(numbers) == 1 else numbers for numbers in (cfg.mean, cfg.std))
    fields = {"in_channels": channels, "num_classes": num_classes, "mean": mean, "std": std, "crop": cfg.crop_pct}
    if cfg.label_names is None or cfg.num_classes != num_classes:  # the names of another head
        class_ids, labels = imagenet_names(num_classes)
    else:
        class_ids = tuple(map(str, cfg.label_names))
        words = cfg.label_descriptions or class_ids
        labels = tuple(words.get(name, name) for name in class_ids) if isinstance(words, dict) else words
        for key, names in (("label_names", class_ids), ("label_descriptions", labels)):
            if len(names) != num_classes:
                raise ValueError(
                    f"{origin}: {key} has {len(names)} names for {num_classes} classes; give one per class, or leave "
                    "it out."
                )
    return {**fields, "class_ids": class_ids, "labels": labels}


def parse_cfg(values: Mapping[str, Any], origin: str) -> PretrainedCfg:
    """``pretrained_cfg``, in which null counts as missing."""
    values = {key: value for key, value in values.items() if value is not None}
    return parse(PretrainedCfg, values, origin=f"{origin}: pretrained_cfg")


def imagenet_names(classes: int) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """ImageNet's folder names and words for a head of 1000 classes; None for another."""
    if classes != 1000:
        return None, None
    names = ImageNetInfo()
    return tuple(names.label_names()), tuple(names.label_descriptions())


def nearest_plain(name: str) -> str:
    """The names of timm's plain ViTs that are most similar."""
    plain = [other for other in timm.list_models() if PLAIN_NAMES.fullmatch(other) and other != name]
    return ", ".join(difflib.get_close_matches(name, plain, n=3, cutoff=0))
