"""Plain ViTs of timm (DeiT, DeiT-III, AugReg, DINO) as models of one round, which need no threshold.

A plain ViT is a ProgResViT of one round without PSG. Width, depth, patch size, classes and preprocessing are those of
timm's model. Its weights have the same names; a missing class position (DeiT-III) or bias of qkv becomes zero.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, resolve_model_data_config
from timm.layers import Mlp
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn

from progresvit.config import HEAD_WIDTH, MLP_RATIO, ModelConfig, plain_vit
from progresvit.data.crop import INTERPOLATION
from progresvit.model.blocks import NORM_EPS
from progresvit.model.saving import with_weights
from progresvit.model.vit import ProgResViT

PLAIN_KEYS = re.compile(
    r"cls_token|pos_embed|(patch_embed\.proj|norm|head)\.(weight|bias)"
    r"|blocks\.\d+\.((norm1|attn\.qkv|attn\.proj|norm2|mlp\.fc1|mlp\.fc2)\.(weight|bias)|ls[12]\.gamma)"
)
"""The names of the weights of a plain ViT."""
LAYER_SCALE_START = 1e-6
"""Start value of LayerScale in the config of a model that was trained elsewhere; the weights replace it."""

_PLAIN_NAMES = re.compile(
    r"(deit3?|vit)_(tiny|small|medium|base|large)_patch\d+_\d+|vit_(small|base|large)_patch14_dinov2"
)
"""timm's plain ViTs, which errors suggest. Others are accepted too, such as flexivit_small."""


def from_timm(source: str | nn.Module) -> ProgResViT:
    """A plain ViT of timm as a model of one round, in evaluation mode and float32.

    Args:
        source: The name of a pretrained model, such as ``deit_small_patch16_224.fb_in1k``, or a model of timm.
    """
    if isinstance(source, nn.Module):
        return _convert(source, f"the {type(source).__name__}")
    config_from_timm(source)  # an error before the weights are downloaded
    try:
        module: nn.Module = timm.create_model(source, pretrained=True)
    except Exception as error:  # without a network, timm and the hub raise many kinds
        raise ValueError(
            f"timm cannot load the weights of {source} ({_first_line(error)}); check the name (timm.list_pretrained) "
            "and the network, or give a folder or a file of them."
        ) from error
    return _convert(module, source)


def config_from_timm(name: str) -> ModelConfig:
    """The config of a plain ViT by its name in timm, without weights."""
    return _config(_build(name, name), name)


def load_timm_folder(folder: Path, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ProgResViT:
    """A plain ViT from a folder as timm writes it.

    Args:
        folder: The folder.
        values: What its config.json holds: ``architecture``, ``pretrained_cfg``, and optionally ``num_classes``,
            ``model_args``, ``label_names`` and ``label_descriptions``.
        weights: Its weights.
    """
    name = values["architecture"]
    if not isinstance(name, str) or not timm.is_model(name):
        raise ValueError(
            f"{folder / 'config.json'} names the architecture {name!r}, which neither timm nor this package has; "
            f"the nearest plain ViTs of timm are {_nearest(str(name))}."
        )
    cfg, arguments = values.get("pretrained_cfg"), values.get("model_args") or {}
    if not isinstance(cfg, Mapping) or not isinstance(arguments, Mapping):
        raise ValueError(
            f"{folder / 'config.json'} has no pretrained_cfg, which holds the preprocessing, or damaged model_args; "
            "download it again, or write the folder with timm.models.save_for_hf."
        )
    given = {key: values[key] for key in ("num_classes", "label_names", "label_descriptions") if key in values}
    module = _build(name, str(folder), pretrained_cfg={**cfg, **given, "architecture": name}, **arguments)
    return _convert(_fill(module, weights, name, str(folder)), str(folder))


def load_timm_file(file: Path, weights: Mapping[str, Tensor]) -> ProgResViT:
    """A plain ViT from a file of weights whose name begins with the name of a timm model.

    Architecture and preprocessing are those of timm's model of this name.
    """
    name = timm_name(file.name)
    if name is None:
        raise ValueError(
            f"{file} holds the weights of a ViT, but not its preprocessing. Rename it, so that its name begins with "
            "timm's name of the model, such as deit_small_patch16_224.fb_in1k.safetensors; or with hydravit if it is "
            "a HydraViT, whose weights have the same names."
        )
    head = weights.get("head.weight")
    classes = 0 if head is None or not head.ndim else len(head)
    module = _build(name, str(file), num_classes=classes)
    return _convert(_fill(module, weights, name, str(file)), str(file))


def timm_name(text: str) -> str | None:
    """The longest name of a timm model that the text begins with, with its tag if it has one; None without one."""
    names = (*timm.list_models(), *timm.list_models(pretrained=True))
    begins = [name for name in names if text.startswith(name) and not text[len(name) :][:1].isalnum()]
    return max(begins, key=len, default=None)


def _build(name: str, origin: str, **arguments: Any) -> nn.Module:
    """A model of timm without weights, on the meta device."""
    try:
        with torch.device("meta"):
            module: nn.Module = timm.create_model(name, **arguments)
    except Exception as error:  # what timm raises depends on the model and the argument
        raise ValueError(
            f"timm cannot build {origin} ({_first_line(error)}); check the name, or the config.json of the folder."
        ) from error
    return module


def _fill(module: nn.Module, weights: Mapping[str, Tensor], name: str, origin: str) -> nn.Module:
    """Put weights into a model on the meta device. Anything but a plain ViT is refused first."""
    _check_plain(module, origin, name)
    try:
        module.load_state_dict(dict(weights), assign=True)
    except RuntimeError as error:
        problems = " ".join(" ".join(str(error).split()).split(" ")[:60])
        raise ValueError(
            f"the weights of {origin} do not fit timm's {name}: {problems}; download them again, or check the name."
        ) from error
    return module


def _convert(module: nn.Module, origin: str) -> ProgResViT:
    config = _config(module, origin)
    weights = {key: value.detach() for key, value in module.state_dict().items()}
    position = weights["pos_embed"]
    if position.shape[1] == config.stored_grid**2:  # DeiT-III has no class position
        weights["pos_embed"] = torch.cat(
            [torch.zeros_like(position[:, :1]), position], dim=1
        )  # (1, N, W) -> (1, 1 + N, W)
    for block in range(config.depth):
        qkv = f"blocks.{block}.attn.qkv"
        weights.setdefault(f"{qkv}.bias", weights[f"{qkv}.weight"].new_zeros(3 * config.width))
    model = with_weights(config, weights, origin=origin)
    assert isinstance(model, ProgResViT), "the config is a plain ViT's"
    return model


def _config(module: nn.Module, origin: str) -> ModelConfig:
    """The config of a model of timm; an error if it is no plain ViT, or if its images are prepared in another way."""
    vit = _check_plain(module, origin)
    data = resolve_model_data_config(vit)
    if (data["interpolation"], data["crop_mode"]) != (INTERPOLATION, "center"):
        raise ValueError(
            f"timm prepares the images of {origin} with interpolation {data['interpolation']} and crop mode "
            f"{data['crop_mode']}; only {INTERPOLATION} and center are available here. The nearest plain ViTs are "
            f"{_nearest(_name(vit) or origin)}."
        )
    (height, width), patch_size = vit.patch_embed.img_size, vit.patch_embed.patch_size
    if height != width or patch_size[0] != patch_size[1]:
        raise ValueError(
            f"{origin} takes images of {height}x{width} pixels; only square images and patches are supported."
        )
    class_ids, labels = _class_names(vit)
    try:
        return plain_vit(
            resolution=height,
            heads=vit.embed_dim // HEAD_WIDTH,
            depth=len(vit.blocks),
            patch_size=patch_size[0],
            in_channels=vit.patch_embed.proj.in_channels,
            num_classes=vit.num_classes,
            layer_scale=LAYER_SCALE_START if "blocks.0.ls1.gamma" in vit.state_dict() else None,
            mean=tuple(data["mean"]),
            std=tuple(data["std"]),
            crop=data["crop_pct"],
            class_ids=class_ids,
            labels=labels,
        )
    except ValueError as error:  # the numbers of a config.json may be anything
        raise ValueError(f"{origin}: {error}") from error


def imagenet_names(classes: int) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """ImageNet's folder names and words for a head of 1000 classes; None for another."""
    if classes != 1000:
        return None, None
    names = ImageNetInfo()
    return tuple(names.label_names()), tuple(names.label_descriptions())


def _class_names(vit: VisionTransformer) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Ids and words of the classes, from timm's description of the model or for a head of ImageNet."""
    names, words = (vit.pretrained_cfg.get(key) for key in ("label_names", "label_descriptions"))
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != vit.num_classes:
        return imagenet_names(vit.num_classes)
    class_ids = tuple(map(str, names))
    if isinstance(words, Mapping):
        words = [words.get(name, name) for name in class_ids]
    fits = isinstance(words, Sequence) and not isinstance(words, str) and len(words) == len(class_ids)
    return class_ids, tuple(map(str, words)) if words is not None and fits else class_ids


def _check_plain(module: nn.Module, origin: str, name: str | None = None) -> VisionTransformer:
    """Refuse anything but a plain ViT; the error names the nearest plain ones."""
    difference = _difference(module)
    if difference is not None:
        raise ValueError(
            f"{origin} is not a plain ViT: {difference}. The nearest plain ViTs of timm are "
            f"{_nearest(name or _name(module) or origin)}."
        )
    assert isinstance(module, VisionTransformer), "it has no difference"
    return module


def _difference(module: nn.Module) -> str | None:
    """How a model differs from a plain ViT; None if it is one."""
    if type(module) is not VisionTransformer:
        return f"it is a {type(module).__name__}"
    others = [key for key in module.state_dict() if not PLAIN_KEYS.fullmatch(key)]
    if others:
        return f"it has {', '.join(others[:3])}"
    if module.global_pool != "token":
        return f"its head reads tokens that are pooled by {module.global_pool!r}, not the class token"
    if not isinstance(module.norm, nn.LayerNorm):
        return "it has no norm before the head"
    vit: Any = module
    width = vit.embed_dim
    for block in vit.blocks:
        for part, expected in ((block, Block), (block.attn, Attention), (block.mlp, Mlp)):
            if type(part) is not expected:
                return f"its blocks have {type(part).__name__} instead of {expected.__name__}"
        if block.attn.num_heads * HEAD_WIDTH != width:
            return f"it has {block.attn.num_heads} heads for {width} channels, not heads of {HEAD_WIDTH}"
        if block.mlp.fc1.out_features != MLP_RATIO * width:
            return f"its MLPs have {block.mlp.fc1.out_features} hidden channels, not {MLP_RATIO * width}"
        if not isinstance(block.mlp.act, nn.GELU) or block.mlp.act.approximate != "none":
            return f"its MLPs have the activation {block.mlp.act}"
    epsilons = {part.eps for part in module.modules() if isinstance(part, nn.LayerNorm)}
    if epsilons != {NORM_EPS}:
        return f"its norms have an epsilon of {max(epsilons)}, not {NORM_EPS}"
    return None


def _name(module: nn.Module) -> str | None:
    """timm's name of a model that timm built."""
    cfg = getattr(module, "pretrained_cfg", None)
    return cfg.get("architecture") if isinstance(cfg, Mapping) else None


def _nearest(name: str) -> str:
    """The names of timm's plain ViTs that are most similar."""
    plain = [other for other in timm.list_models() if _PLAIN_NAMES.fullmatch(other) and other != name]
    return ", ".join(difflib.get_close_matches(name, plain, n=3, cutoff=0))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
