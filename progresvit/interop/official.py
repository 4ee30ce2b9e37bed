"""Checkpoints and folders of other projects, converted to models: ProgResViT, ThinkingViT and HydraViT, and plain ViTs.

A project is recognised by the names of the weights. They were read in the public repositories, which also say how a
folder on the hub is laid out:

- ProgResViT: ds-kiel/ProgResViT, ``timm/models/progresvit_deit.py`` and ``validate.py``;
- ThinkingViT: ds-kiel/ThinkingViT, ``timm/models/vision_transformer.py`` and ``scripts/export_hf_models.py``. A ViT has
  ``alpha.0``, ``proj_layer`` and ``proj_layer2`` besides. Crop 0.9, ImageNet's mean and standard deviation;
- HydraViT: ds-kiel/HydraViT, ``timm/models/hydravit.py`` and ``README.md``. It names its weights as a plain ViT
  does. It has 3 to 12 heads, and the preprocessing of timm's deit_small_patch16_224.

No checkpoint of these projects has been seen. The tests use files that are made to these names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from progresvit.baselines.hydravit import HydraViTConfig
from progresvit.baselines.thinkingvit import ThinkingViTConfig
from progresvit.config import HEAD_WIDTH, OFFICIAL_MODELS, ModelConfig, make_rounds
from progresvit.interop.plain import LAYER_SCALE_START, PLAIN_KEYS, build_folder, config_of, fill, load_timm_file
from progresvit.interop.timm_config import folder_cfg, preprocessing, read_arguments, trained_cfg
from progresvit.io.model_folder import (
    CONFIG_FILE,
    MODEL_FILES,
    PICKLE_SUFFIXES,
    WEIGHTS_FILE,
    Source,
    download,
    find_folder,
    is_foreign,
    read_config_values,
)
from progresvit.io.weights import read_checkpoint, read_pickle, read_safetensors
from progresvit.model.interface import RoundModel
from progresvit.model.saving import with_weights
from progresvit.model.vit import ProgResViT

PROJECTS = {"ProgResViT": "cond_mlp.net.0.weight", "ThinkingViT": "proj_layer.weight"}
"""Projects and a weight that only their checkpoints have."""
HYDRAVIT = "hydravit"
"""The beginning of the name of a HydraViT checkpoint, or of the model in its options: its weights have timm's names."""

_NEEDED = {
    "cls_token": 3,
    "pos_embed": 3,
    "patch_embed.proj.weight": 4,
    "blocks.0.norm1.weight": 1,
    "head.weight": 2,
}  # and their dimensions
_CROP = 0.9  # of the projects, where a folder has none
_ROUNDS_OF_GRID = {240: (192, 240), 384: (160, 384)}  # stored position grid -> resolutions of the two rounds
_NUMBERS = re.compile(r"(progresvit(?:[_-]deit[_-]s)?[_-])?(?<![A-Za-z0-9])(\d{2,4}(?:[_-]\d{2,4})+)(?![A-Za-z0-9])")
_DISTILLED_INPUT = 384  # pixels that the KD models (those with LayerScale) are evaluated on

_RENAMES = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"^cond_mlp\.net\.0\.", "psg.encoder."),
        (r"^blocks\.(\d+)\.prog_ls1\.gamma$", r"psg.blocks.\1.attn_scale"),
        (r"^blocks\.(\d+)\.prog_ls2\.gamma$", r"psg.blocks.\1.mlp_scale"),
        (r"^blocks\.(\d+)\.gate_(attn|mlp|out)\.net\.0\.", r"psg.blocks.\1.\2_gate.hidden."),
        (r"^blocks\.(\d+)\.gate_(attn|mlp|out)\.net\.2\.", r"psg.blocks.\1.\2_gate.delta."),
        (r"^fusion_input_delta\.(\d+)\.net\.0\.", r"psg.fusions.\1.image_gate.hidden."),
        (r"^fusion_input_delta\.(\d+)\.net\.2\.", r"psg.fusions.\1.image_gate.delta."),
        (r"^fusion_prev_delta\.(\d+)\.net\.0\.", r"psg.fusions.\1.previous_gate.hidden."),
        (r"^fusion_prev_delta\.(\d+)\.net\.2\.", r"psg.fusions.\1.previous_gate.delta."),
        (r"^token_projectors\.(\d+)\.depthwise_proj\.", r"projectors.\1.depthwise."),
        (r"^token_projectors\.(\d+)\.spatial_proj\.", r"projectors.\1.widen_patches."),
        (r"^token_projectors\.(\d+)\.prefix_proj\.", r"projectors.\1.widen_class."),
        (r"^alpha\.(\d+)$", r"transitions.\1.alpha"),
        (r"^proj_layer\.", "transitions.0.widen."),
        (r"^proj_layer2\.", "transitions.1.widen."),
    )
)


def import_official(source: str | os.PathLike[str], *, resolutions: Sequence[int] | None = None) -> RoundModel:
    """A checkpoint or a folder of another project as a model.

    Tested on files with the published key names, not on the projects' own files. Widths, depth, patch size and classes
    are derived from the weights.

    Args:
        source: A checkpoint of ProgResViT, ThinkingViT or HydraViT, such as ``progresvit_192_240.pth.tar``; a file of
            the weights of a plain ViT, named as timm names it; or a folder with timm's config.json.
        resolutions: Resolution of each round of a ProgResViT. By default they are derived from the file name, or from
            the stored position grid: 240 means 192→240, 384 means 160→384.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        values = read_config_values(path)
        if not is_foreign(path) and "rounds" in values:
            raise ValueError(f"{path} is a model folder already; give it to progresvit.load and to commands as it is.")
        return load_foreign_folder(path, resolutions=resolutions)
    check_no_folder(path)
    if not path.is_file():
        raise ValueError(
            f"there is no file {path}; give the path of a checkpoint, such as one of the authors' .pth.tar files."
        )
    weights, options = _read(path)
    trained = str(options.get("model", ""))
    if any(mark in weights for mark in PROJECTS.values()) or _is_hydravit(trained) or _is_hydravit(path.name):
        return _convert(weights, trained_cfg(options), origin=path, options=options, resolutions=resolutions)
    if not all(PLAIN_KEYS.fullmatch(key) for key in weights) or "cls_token" not in weights:
        others = [key for key in weights if not PLAIN_KEYS.fullmatch(key)] or list(weights)
        raise ValueError(
            f"{path} is not a checkpoint of a known project: it has {', '.join(others[:4]) or 'no weights'}. Known are "
            f"{', '.join(PROJECTS)}, HydraViT and the plain ViTs of timm."
        )
    _refuse_resolutions(resolutions)
    return load_timm_file(path, weights, options)


def check_no_folder(file: Path) -> None:
    """Refuse the weights in a model folder, which do not say what config.json says."""
    if file.name == WEIGHTS_FILE and (file.parent / CONFIG_FILE).is_file():
        raise ValueError(f"{file} is a part of the model folder {file.parent}; give the folder.")


def find_foreign(source: Source, *, revision: str | None = None, cache_dir: Source | None = None) -> Path:
    """The folder that ``source`` names, whose config.json is judged before weights are downloaded.

    Pickles are downloaded only if the repository has no safetensors file.
    """
    folder = find_folder(source, revision=revision, files=(CONFIG_FILE,), cache_dir=cache_dir)
    foreign_config(folder)
    safe = (*MODEL_FILES, "*.safetensors")
    folder = find_folder(source, revision=revision, files=safe, cache_dir=cache_dir)
    if not any(folder.glob("*.safetensors")):
        pickles = (*MODEL_FILES, *(f"*{suffix}" for suffix in PICKLE_SUFFIXES))
        folder = find_folder(source, revision=revision, files=pickles, cache_dir=cache_dir)
    return folder


def foreign_config(folder: Path) -> ModelConfig | None:
    """The config that a folder's config.json describes: a plain ViT, or an error.

    None for the projects, whose config follows from the weights.
    """
    values = read_config_values(folder)
    if not _of_project(values):
        return config_of(build_folder(folder, values), str(folder))
    _read_project(folder, values)
    return None


def load_foreign_folder(folder: Path, *, resolutions: Sequence[int] | None = None) -> RoundModel:
    """The model in a folder of timm or one of the projects: config.json with ``architecture``, and weights."""
    values = read_config_values(folder)
    if not _of_project(values):
        _refuse_resolutions(resolutions)
        module = build_folder(folder, values)
        return fill(module, _read(_weights_file(folder))[0], str(folder))
    cfg, arguments = _read_project(folder, values)
    file = _weights_file(folder)
    weights, _ = _read(file)
    head = weights.get("head.weight")
    for stated in (cfg.get("num_classes"), arguments.get("num_classes")):
        if head is not None and head.ndim and stated not in (None, len(head)):
            raise ValueError(
                f"{folder / CONFIG_FILE} says num_classes {stated}, but {file.name} has {len(head)} classes; correct "
                "it, or download the folder again."
            )
    return _convert(weights, cfg, origin=file, options=arguments, resolutions=resolutions)


def _of_project(values: Mapping[str, Any]) -> bool:
    """Whether config.json names the architecture of a project."""
    architecture = str(values.get("architecture"))
    return architecture.lower() in map(str.lower, PROJECTS) or _is_hydravit(architecture)


def _read_project(folder: Path, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``pretrained_cfg`` and ``model_args`` of a project's folder."""
    cfg, arguments = folder_cfg(folder, values), read_arguments(folder, values)
    preprocessing(cfg, str(folder / CONFIG_FILE), channels=3, num_classes=0)  # an error before weights are read
    stored = arguments.get("progress_img_sizes")
    if stored is not None and not (isinstance(stored, list) and all(type(side) is int for side in stored)):
        raise ValueError(
            f"{folder / CONFIG_FILE} is damaged: progress_img_sizes is a list of numbers; download it again."
        )
    return cfg, arguments


def is_official_file(file: str | os.PathLike[str]) -> bool:
    """Whether a file is a checkpoint with rounds, ProgResViT's or ThinkingViT's, by the names of its weights."""
    path = Path(file).expanduser()
    if not (path.is_file() and path.suffix in PICKLE_SUFFIXES):
        return False
    weights = read_pickle(path)
    return any(mark in weights for mark in PROJECTS.values())


def load_official(repo_id: str, *, revision: str | None = None) -> ProgResViT:
    """One of the authors' four hub models, converted in the same way."""
    folder = download(repo_id, revision=revision, patterns=(CONFIG_FILE, "*.safetensors", "*.pth.tar", "*.pth"))
    resolutions = [round_.resolution for round_ in OFFICIAL_MODELS[repo_id].rounds]
    source = folder if is_foreign(folder) else _weights_file(folder)
    model = import_official(source, resolutions=resolutions)
    assert isinstance(model, ProgResViT), "only a ProgResViT has resolutions"
    return model


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, and the options of the training if the file has them."""
    return (read_safetensors(path), {}) if path.suffix == ".safetensors" else read_checkpoint(path)


def _weights_file(folder: Path) -> Path:
    """The file of weights in a folder of timm or another project; a pickle only if there is no safetensors file."""
    files: list[Path] = []
    for name, suffixes in ((WEIGHTS_FILE, (".safetensors",)), ("pytorch_model.bin", PICKLE_SUFFIXES)):
        if (folder / name).is_file():
            return folder / name
        files = sorted(path for path in folder.iterdir() if path.suffix in suffixes)
        if files:
            break
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise ValueError(
            f"{folder} should hold {WEIGHTS_FILE}, or one other file of weights, and holds: {names}; download it again."
        )
    return files[0]


def _is_hydravit(name: str) -> bool:
    return name.lower().startswith(HYDRAVIT)


def _refuse_resolutions(resolutions: Sequence[int] | None) -> None:
    if resolutions is not None:
        raise ValueError("only a ProgResViT takes resolutions; other models have one resolution, so leave them out.")


def _convert(
    weights: Mapping[str, Tensor],
    cfg: Mapping[str, Any],
    *,
    origin: Path,
    options: Mapping[str, Any],
    resolutions: Sequence[int] | None,
) -> RoundModel:
    """The model of a project's weights.

    Args:
        weights: Under the project's names.
        cfg: timm's ``pretrained_cfg`` of them, or a part of it.
        origin: Their file.
        options: Of its training or its model.
        resolutions: Of the rounds of a ProgResViT.
    """
    missing = [key for key in _NEEDED if key not in weights]
    if missing:
        raise ValueError(f"{origin} is not a complete checkpoint: it lacks {', '.join(missing)}; download it again.")
    unfit = [key for key, dimensions in _NEEDED.items() if weights[key].ndim != dimensions]
    if unfit:
        raise ValueError(
            f"{origin} is damaged: {', '.join(unfit[:4])} are not weights of this kind; download it again."
        )
    try:
        config = _config(weights, {"crop_pct": _CROP, **cfg}, origin, options, resolutions)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error
    renamed = {_rename(key): value for key, value in weights.items()}
    for key in [key for key in renamed if key.endswith(".alpha") and renamed[key].shape == (1,)]:
        renamed[key] = renamed[key].reshape(())  # (1,) -> ()
    return with_weights(config, renamed, origin=str(origin))


def _config(
    weights: Mapping[str, Tensor],
    cfg: Mapping[str, Any],
    origin: Path,
    options: Mapping[str, Any],
    resolutions: Sequence[int] | None,
) -> ModelConfig | ThinkingViTConfig | HydraViTConfig:
    """The config of a project's model."""
    shared = _backbone(weights, cfg, origin)
    if PROJECTS["ProgResViT"] in weights:
        return _progresvit(weights, shared, origin.name, resolutions or options.get("progress_img_sizes"))
    _refuse_resolutions(resolutions)
    side = shared["position_resolution"]
    if PROJECTS["ThinkingViT"] in weights:  # what widens the tokens of a round is as wide as these tokens
        widening = [weights[key] for key in ("proj_layer.weight", "proj_layer2.weight") if key in weights]
        heads = [*(weight.shape[-1] // HEAD_WIDTH for weight in widening), shared["heads"]]
        return ThinkingViTConfig(rounds=make_rounds([side] * len(heads), heads), **shared)
    heads = _trained_heads(options.get("heads")) or [*range(min(3, shared["heads"]), shared["heads"] + 1)]
    return HydraViTConfig(rounds=make_rounds([side] * len(heads), heads), **shared)


def _progresvit(
    weights: Mapping[str, Tensor], shared: Mapping[str, Any], name: str, resolutions: Sequence[int] | None
) -> ModelConfig:
    patch_size, stored = shared["patch_size"], shared["position_resolution"]
    widths = _round_widths(weights, shared["heads"] * HEAD_WIDTH)
    resolutions = resolutions or _resolutions(name, stored, rounds=len(widths), patch_size=patch_size)
    distilled = shared["layer_scale"] is not None
    return ModelConfig(
        rounds=make_rounds(resolutions, [width // HEAD_WIDTH for width in widths]),
        input_resolution=max(_DISTILLED_INPUT, *resolutions) if distilled else None,
        **shared,
    )


def _trained_heads(heads: Any) -> list[int]:
    """The heads that a HydraViT was trained with, ``[1, 2]`` or ``"1,2"``; empty if the options do not say."""
    if isinstance(heads, str):
        heads = [int(part) if part.isdecimal() else part for part in re.findall(r"[^\s,\[\]]+", heads)]
    if not isinstance(heads, list | None) or not all(type(count) is int for count in heads or ()):
        raise ValueError(f"the option heads is a list of numbers such as [3, 6, 12], not {heads!r:.60}; correct it.")
    return sorted(set(heads or ()))


def _backbone(weights: Mapping[str, Tensor], cfg: Mapping[str, Any], origin: Path) -> dict[str, Any]:
    """The fields of a config that follow from the weights of its ViT, and from timm's ``pretrained_cfg``."""
    patch_size, classes = weights["patch_embed.proj.weight"].shape[-1], weights["head.weight"].shape[0]
    grid = round((weights["pos_embed"].shape[1] - 1) ** 0.5)
    channels = weights["patch_embed.proj.weight"].shape[1]
    return {
        "heads": weights["cls_token"].shape[-1] // HEAD_WIDTH,
        "depth": 1 + max(int(match[1]) for key in weights if (match := re.match(r"blocks\.(\d+)\.", key))),
        "patch_size": patch_size,
        "position_resolution": grid * patch_size,
        "layer_scale": LAYER_SCALE_START if "blocks.0.ls1.gamma" in weights else None,
        **preprocessing(cfg, origin.name, channels=channels, num_classes=classes),
    }


def _round_widths(weights: Mapping[str, Tensor], width: int) -> list[int]:
    """The active width of every round, from the shapes of the projectors between rounds."""
    shapes: list[torch.Size] = []
    while (key := f"token_projectors.{len(shapes)}.prefix_proj.weight") in weights and weights[key].ndim == 2:
        shapes.append(weights[key].shape)  # (target, source)
    return [shapes[0][1], *(target for target, _ in shapes)] if shapes else [width]


def _resolutions(name: str, stored: int, *, rounds: int, patch_size: int) -> Sequence[int]:
    """Resolutions from the file name, else from the stored position grid.

    Numbers in a name may be a date or a batch size. Numbers after ``progresvit`` are taken as resolutions, others only
    if the last one equals the resolution of the stored grid.
    """
    named = [(match[2], bool(match[1])) for match in _NUMBERS.finditer(name)]
    parsed = [([int(number) for number in re.split("[_-]", text)], after_name) for text, after_name in named]
    candidates = [numbers for numbers, after_name in parsed if after_name or numbers[-1] == stored]
    for resolutions in (*candidates, _ROUNDS_OF_GRID.get(stored, ())):
        if len(resolutions) == rounds and not any(resolution % patch_size for resolution in resolutions):
            return resolutions
    raise ValueError(
        f"the resolutions of the {rounds} rounds follow neither from the name {name!r} nor from the stored position "
        f"grid of {stored}; convert it with progresvit import-official and give them, coarse to fine: "
        "resolutions=(192, 240)"
    )


def _rename(key: str) -> str:
    for pattern, ours in _RENAMES:
        renamed, count = pattern.subn(ours, key)
        if count:
            return renamed
    return key
