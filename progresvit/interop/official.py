"""The authors' checkpoints, pickles with key names of their own, converted to models; their files have not been seen.

The tests use files that are made to the published key names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from timm.data import ImageNetInfo
from torch import Tensor

from progresvit.config import HEAD_WIDTH, OFFICIAL_MODELS, ModelConfig, make_rounds
from progresvit.io.model_folder import PICKLE_SUFFIXES, download
from progresvit.io.weights import read_pickle
from progresvit.model.saving import check_fit
from progresvit.model.vit import ProgResViT

_NEEDED = {
    "cls_token": 3,
    "pos_embed": 3,
    "patch_embed.proj.weight": 4,
    "blocks.0.norm1.weight": 1,
    "head.weight": 2,
}  # and their dimensions
_ROUNDS_OF_GRID = {240: (192, 240), 384: (160, 384)}  # stored position grid -> resolutions of the two rounds
_NUMBERS = re.compile(r"(progresvit(?:[_-]deit[_-]s)?[_-])?(?<![A-Za-z0-9])(\d{2,4}(?:[_-]\d{2,4})+)(?![A-Za-z0-9])")
_DISTILLED_INPUT = 384  # pixels that the KD models (those with LayerScale) are evaluated on
_LAYER_SCALE_START = 1e-6  # the start that the KD models trained from; the weights replace it

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
    )
)


def import_official(file: str | os.PathLike[str], *, resolutions: Sequence[int] | None = None) -> ProgResViT:
    """One of the authors' checkpoints as a model; tested on files with their published key names, not on theirs.

    Widths, depth, patch size and classes are derived from the weights.

    Args:
        file: The checkpoint, such as ``progresvit_192_240.pth.tar``.
        resolutions: Resolution of each round. By default they are derived from the file name, or from the stored
            position grid: 240 means 192→240, 384 means 160→384.
    """
    file = Path(file).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {file}; give the path of one of the authors' .pth.tar files.")
    weights = read_pickle(file)
    missing = [key for key in _NEEDED if key not in weights]
    if missing:
        raise ValueError(f"{file} is not a ProgResViT checkpoint of the authors: it lacks {', '.join(missing)}.")
    unfit = [key for key, dimensions in _NEEDED.items() if weights[key].ndim != dimensions]
    if unfit:
        raise ValueError(f"{file} is damaged: {', '.join(unfit[:4])} are not weights of this kind; download it again.")
    config = _config(weights, file.name, resolutions)
    renamed = {_rename(key): value for key, value in weights.items()}
    check_fit(renamed, config, origin=str(file))
    model = ProgResViT(config)
    model.load_state_dict(renamed)
    return model.eval()


def is_official_file(file: str | os.PathLike[str]) -> bool:
    """Whether a file is one of the authors' checkpoints, by the names of its weights."""
    path = Path(file).expanduser()
    return path.is_file() and path.suffix in PICKLE_SUFFIXES and "cond_mlp.net.0.weight" in read_pickle(path)


def load_official(repo_id: str, *, revision: str | None = None) -> ProgResViT:
    """One of the authors' four hub models, converted in the same way."""
    folder = download(repo_id, revision=revision, patterns=("*.pth.tar", "*.pth"))
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".pth.tar", ".pth")))
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise ValueError(f"{repo_id} should hold one .pth.tar file and holds: {names}; see progresvit import-official.")
    config = OFFICIAL_MODELS[repo_id]
    return import_official(files[0], resolutions=[round_.resolution for round_ in config.rounds])


def _config(weights: Mapping[str, Tensor], name: str, resolutions: Sequence[int] | None) -> ModelConfig:
    """Derive the config from the weights."""
    width = weights["cls_token"].shape[-1]
    patch_size = weights["patch_embed.proj.weight"].shape[-1]
    grid = round((weights["pos_embed"].shape[1] - 1) ** 0.5)
    classes = weights["head.weight"].shape[0]
    widths = _round_widths(weights, width)
    resolutions = resolutions or _resolutions(name, grid * patch_size, rounds=len(widths), patch_size=patch_size)
    names = ImageNetInfo() if classes == 1000 else None
    distilled = "blocks.0.ls1.gamma" in weights
    return ModelConfig(
        rounds=make_rounds(resolutions, [round_width // HEAD_WIDTH for round_width in widths]),
        heads=width // HEAD_WIDTH,
        depth=1 + max(int(match[1]) for key in weights if (match := re.match(r"blocks\.(\d+)\.", key))),
        patch_size=patch_size,
        in_channels=weights["patch_embed.proj.weight"].shape[1],
        num_classes=classes,
        position_resolution=grid * patch_size,
        layer_scale=_LAYER_SCALE_START if distilled else None,
        input_resolution=max(_DISTILLED_INPUT, *resolutions) if distilled else None,
        class_ids=tuple(names.label_names()) if names else None,
        labels=tuple(names.label_descriptions()) if names else None,
    )


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
