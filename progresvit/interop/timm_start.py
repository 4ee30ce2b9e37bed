"""Initial weights from a plain ViT: any DeiT, DeiT-III or ViT of timm that has the model's width."""

from __future__ import annotations

import math
from collections.abc import Mapping

import timm
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from progresvit.config import HEAD_WIDTH
from progresvit.model import ProgResViT

_OWN_PARTS = ("psg.", "projectors.", "transitions.")  # what a plain ViT does not have


@torch.no_grad()
def start_from_timm(model: ProgResViT, source: str | nn.Module | Mapping[str, Tensor]) -> list[str]:
    """Copy a plain ViT's weights into the backbone; PSG and the projectors keep their initial weights.

    The position grid is resampled to the model's; if the source has no class position (DeiT-III), it is set to zero. A
    head with another number of classes is not copied.

    Args:
        model: The model to initialise.
        source: The name of a pretrained timm model, a timm model, or its state dict.

    Returns:
        The names of the parameters that were not copied.
    """
    weights = dict(_state(source))
    own = model.state_dict()
    if "pos_embed" in weights:
        weights["pos_embed"] = _resample(weights["pos_embed"], like=own["pos_embed"])
    if "head.weight" in weights and weights["head.weight"].shape[0] != model.config.num_classes:
        weights = {key: value for key, value in weights.items() if not key.startswith("head.")}
    _check_fit(model, weights, own)
    _check_heads(source, model)
    model.load_state_dict(weights, strict=False)
    return [key for key in own if key not in weights]


def _state(source: str | nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if isinstance(source, str):
        if not timm.is_model(source):
            raise ValueError(f"timm has no model {source!r}; timm.list_models('*deit*') lists some that fit.")
        return dict(timm.create_model(source, pretrained=True).state_dict())
    return source.state_dict() if isinstance(source, nn.Module) else source


def _check_heads(source: str | nn.Module | Mapping[str, Tensor], model: ProgResViT) -> None:
    """The number of heads does not follow from weights alone, but from a module."""
    heads = (
        {part.num_heads for part in source.modules() if hasattr(part, "num_heads")}
        if isinstance(source, nn.Module)
        else set()
    )
    if heads - {model.config.heads}:
        raise ValueError(
            f"the source has {heads.pop()} heads for {model.config.width} channels; "
            f"only heads of {HEAD_WIDTH} channels fit, so take a source with {model.config.heads}."
        )


def _resample(position: Tensor, *, like: Tensor) -> Tensor:
    """(1, g * g [+ 1], W) -> (1, 1 + N, W), the class position zero if there was none."""
    patches = position.shape[1]
    if math.isqrt(patches) ** 2 == patches:  # no class position: DeiT-III
        position = torch.cat([torch.zeros_like(position[:, :1]), position], dim=1)
    elif math.isqrt(patches - 1) ** 2 != patches - 1:
        raise ValueError(
            f"a position embedding of {patches} tokens is not a square grid with one class token; "
            "models with register or distillation tokens are not supported, take the plain variant."
        )
    side = math.isqrt(like.shape[1] - 1)
    resampled: Tensor = resample_abs_pos_embed(position, new_size=[side, side])
    return resampled


def _check_fit(model: ProgResViT, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    width = weights["cls_token"].shape[-1] if "cls_token" in weights else None
    if width != model.config.width:
        raise ValueError(f"the source is {width} channels wide and the model {model.config.width}; they must be equal.")
    with_scale = any(key.endswith("ls1.gamma") for key in weights)
    if with_scale != (model.config.layer_scale is not None):
        remedy = "layer_scale=1e-6" if with_scale else "layer_scale=None"
        raise ValueError(f"only one of source and model has LayerScale; build the model with {remedy}.")
    missing = [key for key in own if key not in weights and not key.startswith((*_OWN_PARTS, "head."))]
    foreign = [key for key in weights if key not in own]
    unequal = [key for key in own if key in weights and weights[key].shape != own[key].shape]
    if missing or foreign or unequal:
        raise ValueError(
            "the source is not a plain ViT of the model's depth and patch size: "
            f"missing {missing[:4]}, unknown {foreign[:4]}, of another shape {unequal[:4]}; "
            "build the model with the source's depth and patch_size, or choose another source."
        )
