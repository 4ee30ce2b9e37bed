"""Plain ViTs of timm (DeiT, DeiT-III, AugReg, DINO) as models of one round, which need no threshold.

A plain ViT is a ProgResViT of one round without PSG. It keeps timm's width, depth, patch size, classes and
preprocessing. Its weights have the same names; a missing class position (DeiT-III) or bias of qkv becomes zero.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm.layers import Mlp
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn

from progresvit.config import HEAD_WIDTH, MLP_RATIO, ModelConfig, plain_vit
from progresvit.interop.timm_config import (
    ModelArguments,
    folder_cfg,
    nearest_plain,
    parse_cfg,
    preprocessing,
    read_arguments,
    trained_cfg,
)
from progresvit.io.model_folder import CONFIG_FILE, PICKLE_SUFFIXES
from progresvit.io.parse import parse
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


def from_timm(source: str | nn.Module) -> ProgResViT:
    """A plain ViT of timm as a model of one round, in evaluation mode and float32.

    Args:
        source: The name of a pretrained model, such as ``deit_small_patch16_224.fb_in1k``, or a model of timm.
    """
    if isinstance(source, nn.Module):
        return _convert(source, f"the {type(source).__name__}")
    config_from_timm(source)  # an error before the weights are downloaded
    return _convert(download_timm(source), source)


def config_from_timm(name: str) -> ModelConfig:
    """The config of a plain ViT by its name in timm, without weights."""
    return config_of(_build(name, name), name)


def download_timm(name: str, instead: str = "give a file of them") -> nn.Module:
    """A pretrained model of timm; its weights are downloaded, or read from the cache. ``instead`` ends the error."""
    try:
        module: nn.Module = timm.create_model(name, pretrained=True)
    except Exception as error:  # without a network, timm and the hub raise many kinds
        raise ValueError(
            f"timm cannot load the weights of {name} ({_first_line(error)}); check the name (timm.list_pretrained) and "
            f"the network, or {instead}."
        ) from error
    return module


def build_folder(folder: Path, values: Mapping[str, Any]) -> nn.Module:
    """The model that a folder of timm describes, on the meta device: a plain ViT, or an error. No weights are read.

    Args:
        folder: The folder.
        values: What its config.json holds: ``architecture``, ``pretrained_cfg``, and optionally ``num_classes``,
            ``model_args``, ``label_names`` and ``label_descriptions``.
    """
    name, path = values["architecture"], folder / CONFIG_FILE
    if not isinstance(name, str) or not timm.is_model(name):
        raise ValueError(
            f"{path} names the architecture {name!r}, which neither timm nor this package has; "
            f"the nearest plain ViTs of timm are {nearest_plain(str(name))}."
        )
    if not values.get("pretrained_cfg"):
        raise ValueError(
            f"{path} has no pretrained_cfg, which holds the preprocessing; "
            "download it again, or write the folder with timm.models.save_for_hf."
        )
    arguments = parse(ModelArguments, read_arguments(folder, values), origin=f"{path}: model_args")
    cfg = parse_cfg({**folder_cfg(folder, values), "architecture": name}, str(path))
    kept = cfg.model_dump(exclude_unset=True)
    module = _build(name, str(folder), pretrained_cfg=kept, **arguments.model_dump(exclude_none=True))
    config_of(module, str(folder))
    return module


def load_timm_file(file: Path, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> ProgResViT:
    """A plain ViT from a file of weights.

    The options name timm's model, or else the file name does. Architecture and preprocessing are read from timm's entry
    of it, whose name is ``timm_entry`` of the model; the options change the preprocessing.

    Args:
        file: The file.
        weights: Its weights.
        options: The options of timm's training script that a checkpoint holds.
    """
    trained = options.get("model")
    name = trained if isinstance(trained, str) and timm.is_model(trained) else timm_name(file)
    head, side = weights.get("head.weight"), options.get("img_size")
    sizes: dict[str, Any] = {"num_classes": 0 if head is None or not head.ndim else len(head)}
    if side is not None:
        sizes |= parse(ModelArguments, {"img_size": side}, origin=f"{file}: options").model_dump(exclude_none=True)
    module: Any = _build(name, str(file), **sizes)
    entry = ".".join(filter(None, (module.pretrained_cfg.get(key) for key in ("architecture", "tag"))))
    module.pretrained_cfg = {**module.pretrained_cfg, **trained_cfg(options)}
    model = fill(module, weights, str(file))
    cast(Any, model).timm_entry = entry
    return model


def timm_name(file: Path) -> str:
    """timm's name of a model as a file is named: ``deit_tiny_patch16_224``, with a tag, or by a former name of it.

    The hash in the names of published files, ``-a1311bcf``, is left out.
    """
    stem = re.sub("(" + "|".join(map(re.escape, (".safetensors", *PICKLE_SUFFIXES))) + ")+$", "", file.name)
    stem = re.sub(r"-[0-9a-f]{8}$", "", stem)
    name = stem.partition(".")[0]
    if timm.is_model(name) and (stem == name or stem in timm.list_models(f"{name}.*", pretrained=True)):
        return stem
    begins = [name for name in timm.list_models() if stem.startswith(name)]
    if begins:
        longest = max(begins, key=len)
        entries = [longest, *timm.list_models(f"{longest}.*", pretrained=True)]
        raise ValueError(
            f"{file}: timm has no model {stem!r}, so its preprocessing is unknown. Rename the file to one of timm's "
            f"names: {', '.join(f'{entry}{file.suffix}' for entry in entries)}."
        )
    raise ValueError(
        f"{file} holds the weights of a ViT, but not its preprocessing. Rename it to timm's name of the model, such "
        "as deit_small_patch16_224.fb_in1k.safetensors; or so that its name begins with hydravit if it is a HydraViT, "
        "whose weights have the same names."
    )


def _build(name: str, origin: str, **arguments: Any) -> nn.Module:
    """A model of timm without weights, on the meta device."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Mapping deprecated model name")
            module: nn.Module = timm.create_model(name, pretrained=False, **arguments)
    except Exception as error:  # what timm raises depends on the model and the argument
        raise ValueError(
            f"timm cannot build {origin} ({_first_line(error)}); check the name, or the config.json of the folder."
        ) from error
    return module


def fill(module: nn.Module, weights: Mapping[str, Tensor], origin: str) -> ProgResViT:
    """Put weights into a model on the meta device, and convert it. Anything but a plain ViT is refused first."""
    _check_plain(module, origin)
    try:
        module.load_state_dict(dict(weights), assign=True)
    except RuntimeError as error:
        problems = " ".join(" ".join(str(error).split()).split(" ")[:60])
        raise ValueError(
            f"the weights of {origin} do not fit timm's {_name(module)}: {problems}; download them again, or check the "
            "name."
        ) from error
    return _convert(module, origin)


def _convert(module: nn.Module, origin: str) -> ProgResViT:
    config = config_of(module, origin)
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


def config_of(module: nn.Module, origin: str) -> ModelConfig:
    """The config of a plain ViT of timm; an error for other models, and for other ways to prepare images."""
    vit = _check_plain(module, origin)
    (height, width), patch_size = vit.patch_embed.img_size, vit.patch_embed.patch_size
    if height != width or patch_size[0] != patch_size[1]:
        raise ValueError(
            f"{origin} takes images of {height}x{width} pixels; only square images and patches are supported."
        )
    channels = vit.patch_embed.proj.in_channels
    cfg = getattr(vit, "pretrained_cfg", {})
    fields = preprocessing(cfg, origin, channels=channels, num_classes=vit.num_classes)
    try:
        return plain_vit(
            resolution=height,
            heads=vit.embed_dim // HEAD_WIDTH,
            depth=len(vit.blocks),
            patch_size=patch_size[0],
            layer_scale=LAYER_SCALE_START if "blocks.0.ls1.gamma" in vit.state_dict() else None,
            **fields,
        )
    except ValueError as error:  # the numbers of a config.json may be anything
        raise ValueError(f"{origin}: {error}") from error


def _check_plain(module: nn.Module, origin: str) -> VisionTransformer:
    """Refuse anything but a plain ViT; the error names the nearest plain ones."""
    difference = _difference(module)
    if difference is not None:
        raise ValueError(
            f"{origin} is not a plain ViT: {difference}. The nearest plain ViTs of timm are "
            f"{nearest_plain(_name(module) or origin)}."
        )
    assert isinstance(module, VisionTransformer), "it has no difference"
    return module


def _difference(module: nn.Module) -> str | None:
    """How a model differs from a plain ViT; None if it is one."""
    if type(module) is not VisionTransformer:
        return f"it is a {type(module).__name__}"
    weights = module.state_dict()
    others = [key for key in weights if not PLAIN_KEYS.fullmatch(key)]
    if others:
        return f"it has {', '.join(others[:3])}"
    if module.global_pool != "token":
        return f"its head reads tokens that are pooled by {module.global_pool!r}, not the class token"
    if not isinstance(module.norm, nn.LayerNorm):
        return "it has no norm before the head"
    needed = ("cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.0.attn.proj.bias")
    lacking = [key for key in needed if key not in weights]
    if lacking:
        return f"it lacks {', '.join(lacking)}"
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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
