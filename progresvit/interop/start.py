"""Initial weights from a pretrained model: a plain ViT of timm, by name or from a file, a model folder, or a checkpoint
of the authors, whose files have not been seen.

The weights of a plain ViT have the same names in timm and here. Every other parameter of a model is its own part, which
only a folder of the same kind of model can fill; otherwise it keeps its initial weights.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import timm
import torch
from timm.data import ImageNetInfo
from torch import Tensor, nn

from progresvit.config import HEAD_WIDTH, OFFICIAL_MODELS, BaseConfig, ModelTask
from progresvit.interop.official import import_official, is_official_file, load_foreign_folder, load_official
from progresvit.interop.plain import PLAIN_KEYS, download_timm
from progresvit.io.model_folder import BUNDLED, find_folder, is_foreign, is_local
from progresvit.io.parse import did_you_mean
from progresvit.io.weights import WEIGHT_SUFFIXES, read_weights
from progresvit.model.backbone import is_head, resample_position
from progresvit.model.interface import RoundModel, capability
from progresvit.model.registry import DEFAULT_KIND, build
from progresvit.model.saving import load_folder

Fusion = Literal["paper", "quiet"]
"""Whether rounds after the first begin with the paper's projectors, or without the tokens of the round before."""

_NEEDED = {"cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "blocks.0.norm1.weight": 1}
"""Weights that every plain ViT has, and their numbers of dimensions."""
_WIDENS = re.compile(r"(projectors|transitions)\.\d+\.widen\w*\.weight")
"""Weights that widen the tokens of a round for the next; a quiet start sets them to zero."""
_IMAGENET_CLASSES = 1000

Weights = Mapping[str, Tensor]


def start_from(model: RoundModel, source: str, *, fusion: Fusion = "paper", as_prefix: bool = False) -> list[str]:
    """Copy initial weights from the source that ``model.start`` of a recipe names.

    ``as_prefix`` also takes a source that is narrower than the model, as ``start_from_timm`` says.

    Returns:
        The names of the parameters that were not copied.
    """
    if is_local(source):
        folder = find_folder(source)
        start, origin = load_foreign_folder(folder) if is_foreign(folder) else load_folder(folder), str(folder)
    elif source in OFFICIAL_MODELS or is_official_file(source):
        start, origin = load_official(source) if source in OFFICIAL_MODELS else import_official(source), source
    else:
        return start_from_timm(model, source, fusion=fusion, as_prefix=as_prefix)
    # draws the random numbers that runs always drew here: what a task initialises after this stays the same for a seed
    options: dict[str, Any] = {"start_gates": "torch"} if start.config.kind == DEFAULT_KIND else {}
    build(start.config, **options)
    return _start_from_model(model, start, fusion=fusion, as_prefix=as_prefix, origin=origin)


def check_start(source: str) -> None:
    """Refuse a source whose weights are neither here nor can be downloaded. Whether they fit a model is not checked."""
    if is_local(source):
        find_folder(source)
    elif source in OFFICIAL_MODELS:
        load_official(source)
    elif not is_official_file(source):
        _read(source)


def start_from_timm(
    model: RoundModel,
    source: str | os.PathLike[str] | nn.Module | Weights,
    fusion: Fusion = "paper",
    *,
    as_prefix: bool = False,
) -> list[str]:
    """Copy a plain ViT's weights into the backbone; the model's other parts keep their initial weights.

    The position grid is resampled to the model's; if the source has no class position (DeiT-III), it is set to zero.
    A head of ImageNet's 1000 classes gives the rows of the model's ``class_ids``, if it has them all. Without
    ``class_ids`` the head is copied if it has as many classes. Any other head is not copied.

    Args:
        model: The model to initialise.
        source: The name of a pretrained timm model, a file of its weights, a timm model, or its state dict.
        fusion: ``quiet`` sets the projectors' widening layers to zero, so that the last round begins as the source.
        as_prefix: A source that is narrower than the model becomes its leading heads and channels, so that a round of
            the source's width begins as the source. The other weights keep their initial values.

    Returns:
        The names of the parameters that were not copied.
    """
    if isinstance(source, str | os.PathLike):
        origin, source = str(source), _read(os.fspath(source))
    else:
        origin = "the source"
    weights: Weights = source.state_dict() if isinstance(source, nn.Module) else source
    own = model.state_dict()
    if any(key not in own for key in _NEEDED):
        raise ValueError(f"{type(model).__name__} has no backbone of a plain ViT to start; remove model.start.")
    _check_plain(weights, own, model.config, origin, as_prefix=as_prefix)
    if isinstance(source, nn.Module):
        _check_heads(source, width=weights["cls_token"].shape[-1], origin=origin)
    foreign = [key for key in weights if not PLAIN_KEYS.fullmatch(key)]
    if foreign:
        raise ValueError(
            f"{origin} is not a plain ViT: it has {', '.join(foreign[:4])}; take the plain variant, and for the "
            "weights of a model folder give the folder."
        )
    of_imagenet = model.config.class_ids is not None and _classes(weights) == _IMAGENET_CLASSES
    class_ids = ImageNetInfo().label_names() if of_imagenet else None
    return _copy(model, weights, class_ids=class_ids, task="classification", fusion=fusion, origin=origin)


def _start_from_model(
    model: RoundModel, source: RoundModel, *, fusion: Fusion, as_prefix: bool, origin: str
) -> list[str]:
    """Copy the weights of a model: the backbone, and all that fits if the models are of the same kind.

    The position grid is resampled. Rows of the head are copied by class id, if the source has all classes of the model.
    """
    weights, own = source.state_dict(), model.state_dict()
    same_kind = source.config.kind == model.config.kind
    if all(key in own for key in _NEEDED):
        _check_plain(weights, own, model.config, origin, as_prefix=as_prefix)
        weights = {
            key: value
            for key, value in weights.items()
            if PLAIN_KEYS.fullmatch(key)
            or (same_kind and key in own and (is_head(key) or value.shape == own[key].shape))
        }
    elif not same_kind:
        raise ValueError(
            f"{origin} holds a model of the kind {source.config.kind}, whose weights {type(model).__name__} cannot "
            "take; give a model of its own kind, or remove model.start."
        )
    if fusion == "quiet" and any(_WIDENS.fullmatch(key) for key in weights):
        raise ValueError(
            f"{origin} brings what it learned between its rounds, which a quiet start would set to zero; "
            "set model.start_fusion=paper."
        )
    class_ids = source.config.class_ids
    return _copy(model, weights, class_ids=class_ids, task=source.config.task, fusion=fusion, origin=origin)


def _read(source: str) -> nn.Module | Weights:
    """A timm model by name, or the weights in a file."""
    path = Path(source).expanduser()
    if path.is_file() or path.suffix in WEIGHT_SUFFIXES or len(path.parts) > 1:
        return read_weights(path)
    if not timm.is_model(source):
        raise ValueError(
            f"timm has no model {source!r}, and there is no such file, folder or bundled model; "
            f"{did_you_mean(source, BUNDLED)} timm.list_models('*deit*') lists timm's models that fit."
        )
    return download_timm(source, instead="set model.start=FILE to a file of them")


@torch.no_grad()
def _copy(
    model: RoundModel,
    weights: Weights,
    *,
    class_ids: Sequence[str] | None,
    task: ModelTask,
    fusion: Fusion,
    origin: str,
) -> list[str]:
    """Copy the weights that fit. Rows of the head are copied only between models of the same task.

    A head for class tokens cannot decode patches.
    """
    if fusion not in get_args(Fusion):
        raise ValueError(f"fusion is 'paper' or 'quiet', not {fusion!r}.")
    own = model.state_dict()
    rows = _head_rows(class_ids, _classes(weights), model.config) if task == model.config.task else None
    copied = {key: value for key, value in weights.items() if not is_head(key)}
    if rows is not None:
        copied |= {key: value[rows] for key, value in weights.items() if is_head(key) and key in own}
    if "pos_embed" in own:
        copied["pos_embed"] = _resample(weights["pos_embed"].to(own["pos_embed"]), like=own["pos_embed"])
    if "cls_token" in own and copied["cls_token"].shape[-1] < own["cls_token"].shape[-1]:  # as_prefix
        copied = {
            key: _widen(key, value, own[key]) if key in own and PLAIN_KEYS.fullmatch(key) else value
            for key, value in copied.items()
        }
    problems = {
        "lacks": [key for key in own if key not in copied and PLAIN_KEYS.fullmatch(key) and not is_head(key)],
        "has unknown": [key for key in copied if key not in own],
        "has another shape or type for": [key for key in copied if key in own and not _fits(copied[key], own[key])],
    }
    described = ", ".join(f"{what} {', '.join(keys[:4])}" for what, keys in problems.items() if keys)
    if described:
        raise ValueError(f"{origin} does not fit the model: it {described}; choose another start.")
    model.load_state_dict({**own, **copied})
    if fusion == "quiet":
        capability(model, "start_quiet", "model.start_fusion=quiet", "model.start_fusion=paper")()
    return [key for key in own if key not in copied]


def _widen(key: str, value: Tensor, own: Tensor) -> Tensor:
    """A weight of a narrower ViT as the leading part of our own; the other entries of ours stay."""
    parts = 3 if ".attn.qkv." in key else 1  # Q, K and V have a leading part each
    if value.ndim != own.ndim or value.shape[0] % parts or any(n > w for n, w in zip(value.shape, own.shape)):
        return value  # does not fit, as the caller will say
    wide, narrow = own.clone(), value.unflatten(0, (parts, -1))
    wide.unflatten(0, (parts, -1))[tuple(slice(size) for size in narrow.shape)] = narrow.to(wide)
    return wide


def _fits(value: Tensor, own: Tensor) -> bool:
    return value.shape == own.shape and value.is_floating_point() == own.is_floating_point()


def _classes(weights: Weights) -> int:
    """The number of rows of the head; 0 without one."""
    return len(weights["head.weight"]) if "head.weight" in weights else 0


def _head_rows(class_ids: Sequence[str] | None, count: int, config: BaseConfig) -> list[int] | None:
    """Rows of the source's head for the model's classes; None if they are unknown."""
    if config.class_ids is None:
        return list(range(count)) if class_ids is None and count == config.num_classes else None
    place = {name: row for row, name in enumerate(class_ids or ())}
    return [place[name] for name in config.class_ids] if all(name in place for name in config.class_ids) else None


def _resample(position: Tensor, *, like: Tensor) -> Tensor:
    """Resample positions to another grid; a missing class position is zero: (1, g * g [+ 1], W) -> (1, 1 + N, W)."""
    patches = position.shape[1]
    if math.isqrt(patches) ** 2 == patches:  # no class position: DeiT-III
        position = torch.cat([torch.zeros_like(position[:, :1]), position], dim=1)
    elif math.isqrt(patches - 1) ** 2 != patches - 1:
        raise ValueError(
            f"a position embedding of {patches} tokens is not a square grid with one class token; "
            "models with register or distillation tokens are not supported, take the plain variant."
        )
    return resample_position(position, math.isqrt(like.shape[1] - 1))


def _check_plain(weights: Weights, own: Weights, config: BaseConfig, origin: str, *, as_prefix: bool) -> None:
    """Refuse anything but a plain ViT of the model's depth, patch size and width, or narrower with ``as_prefix``.

    Errors name the key to change.
    """
    lacking = [key for key, dimensions in _NEEDED.items() if key not in weights or weights[key].ndim != dimensions]
    if lacking:
        raise ValueError(
            f"{origin} is not a plain ViT: it lacks {', '.join(lacking)}; take a ViT or DeiT, or another kind of start."
        )
    own_kind = config.kind == DEFAULT_KIND
    section = "model" if own_kind else "model.fields"
    (width, depth, patch), (own_width, own_depth, own_patch) = _sizes(weights), _sizes(own)
    changes = []
    if width > own_width and as_prefix:
        changes.append(
            f"it is {width} channels wide, and a prefix is narrower than the model, which has {own_width}: choose a "
            "narrower start, or give the model more heads"
        )
    elif width < own_width and as_prefix and width % HEAD_WIDTH == 0:
        own_heads = [getattr(round_, "heads", None) for round_ in config.rounds]
        if own_heads[0] is not None and width // HEAD_WIDTH not in own_heads:
            rounds = " and ".join(map(str, own_heads))
            changes.append(
                f"it has {width // HEAD_WIDTH} heads, but the rounds have {rounds}, so that none begins as the source: "
                f"give a round {width // HEAD_WIDTH} heads"
            )
    elif width != own_width:
        remedy = (
            f"choose another start, since heads have {HEAD_WIDTH} channels"
            if width % HEAD_WIDTH
            else f"set model.heads so that it ends in {width // HEAD_WIDTH}, or choose a preset of that width"
            if own_kind
            else f"set model.fields.heads={width // HEAD_WIDTH}, and no more heads than that in model.fields.rounds"
        )
        if width < own_width and width % HEAD_WIDTH == 0:
            remedy += f", or set model.start_as_prefix=true to begin with it as the leading {width} channels"
        changes.append(f"it is {width} channels wide and the model {own_width}: {remedy}")
    if depth != own_depth:
        changes.append(f"it has {depth} blocks and the model {own_depth}: set {section}.depth={depth}")
    inputs, own_inputs = (parts["patch_embed.proj.weight"].shape[1] for parts in (weights, own))
    if inputs != own_inputs:
        changes.append(f"it takes {inputs} channels and the model {own_inputs}: set model.fields.in_channels={inputs}")
    if patch != own_patch:
        changes.append(f"its patches have {patch} pixels and the model's {own_patch}: set {section}.patch_size={patch}")
    if changes:
        raise ValueError(f"{origin} does not fit the model; {'; '.join(changes)}.")
    scale = "blocks.0.ls1.gamma"
    if (scale in weights) != (scale in own):
        value = "1e-6" if scale in weights else "null"
        raise ValueError(f"only one of source and model has LayerScale; set {section}.layer_scale={value}.")


def _sizes(weights: Weights) -> tuple[int, int, int]:
    """Width, depth and patch size."""
    blocks = {key.split(".")[1] for key in weights if key.startswith("blocks.")}
    return weights["cls_token"].shape[-1], len(blocks), weights["patch_embed.proj.weight"].shape[-1]


def _check_heads(source: nn.Module, *, width: int, origin: str) -> None:
    """Refuse a module with another number of heads; the weights alone do not show it."""
    heads = {part.num_heads for part in source.modules() if hasattr(part, "num_heads")}
    expected = width // HEAD_WIDTH
    if heads - {expected}:
        raise ValueError(
            f"{origin} has {heads.pop()} heads for {width} channels; only heads of {HEAD_WIDTH} channels fit, "
            f"so take a source with {expected}."
        )
