"""A model's weights, to a folder and back: model.safetensors beside config.json, and nothing that can run code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from progresvit.config import ModelConfig
from progresvit.io.files import replacing_folder
from progresvit.io.model_folder import CONFIG_FILE, WEIGHTS_FILE, find_pickles, read_config, refuse_pickle
from progresvit.model import ProgResViT

ARCHITECTURE = "progresvit"
"""The name under which timm's loader builds any of our folders (see progresvit.interop.timm_registry)."""

_LISTED = 8  # keys that an error message names before it counts the rest


def save(model: ProgResViT, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> Path:
    """Write a model folder in one step: a crash leaves the old folder or the new one.

    Other files of an existing model folder are kept. ``dtype=torch.float16`` halves the file and rounds the weights:
    what ``load`` gives back is another model, with another hash, so evaluate and calibrate that one.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"weights are written as floating-point numbers, not as {dtype}; use torch.float16.")
    if not isinstance(model, ProgResViT):
        raise ValueError(
            f"save takes a ProgResViT, not {type(model).__name__}; "
            "unwrap a compiled model with model._orig_mod and a distributed one with model.module."
        )
    target = Path(os.path.expanduser(folder))
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give the name of a folder.")
    if target.is_dir() and any(target.iterdir()) and not (target / CONFIG_FILE).exists():
        raise ValueError(f"{target} holds other files and no model; give a new folder, or one that holds a model.")
    check_fit(model.state_dict(), model.config, origin="this model, of which a part was exchanged by hand,")
    weights = {
        key: value if dtype is None else _rounded(key, value, dtype) for key, value in model.state_dict().items()
    }
    with replacing_folder(target) as staged:
        _write(weights, model.config, staged)
        if target.is_dir():
            _keep_other_files(target, staged)
    return target


def load_folder(folder: Path) -> ProgResViT:
    """The model of a folder, in float32 whatever the precision on the disk, ready to predict."""
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickles = find_pickles(folder)
        raise ValueError(refuse_pickle(pickles[0]) if pickles else f"{folder} has no {WEIGHTS_FILE}; save it again.")
    weights = read_safetensors(path)
    check_fit(weights, config, origin=str(path))
    model = ProgResViT(config)
    model.load_state_dict(weights)
    return model.eval()


def push_to_hub(model: ProgResViT, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload the model folder to the Hugging Face hub; returns the address of the commit."""
    from huggingface_hub import HfApi

    api = HfApi(token=token, library_name="progresvit")
    repo = api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save(model, Path(scratch) / "model")
        commit = api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Upload ProgResViT model")
    return str(commit.commit_url)


def weights_hash(model: ProgResViT) -> str:
    """A fingerprint of the weights, as float32 and by name: the same wherever the model came from."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key}{tuple(value.shape)}".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or an error that says it is damaged."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no whole safetensors file ({error}); it was cut short or is of another format. "
            "Copy or download it again."
        ) from error


def check_fit(weights: Mapping[str, Tensor], config: ModelConfig, *, origin: str) -> None:
    """Weights must have exactly the keys and shapes of the config's model, which is not built for it."""
    with torch.device("meta"):
        own = ProgResViT(config).state_dict()
    problems = {
        "lack": [key for key in own if key not in weights],
        "have unknown": [key for key in weights if key not in own],
        "have other shapes for": [
            f"{key} {tuple(weights[key].shape)} instead of {tuple(own[key].shape)}"
            for key in own
            if key in weights and weights[key].shape != own[key].shape
        ],
        "have no floating-point numbers for": [key for key, value in weights.items() if not value.is_floating_point()],
    }
    found = "; ".join(f"{what} {_some(keys)}" for what, keys in problems.items() if keys)
    if found:
        raise ValueError(
            f"the weights of {origin} do not fit the config: they {found}. Use the {CONFIG_FILE} that was saved with "
            "them (and reset_classifier to give a model another head)."
        )


def write_safetensors(weights: Mapping[str, Tensor], path: Path) -> None:
    """A file that is as readable as any other file here (safetensors would keep it to its owner)."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({key: value.contiguous() for key, value in weights.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it speaks of full disks and missing rights so
        raise OSError(f"{path} could not be written: {error}") from error
    path.chmod(mode)


def timm_pretrained_cfg(config: ModelConfig) -> dict[str, Any]:
    """The same model as timm describes it: what its loader and its data pipeline ask for."""
    return {
        "num_classes": config.num_classes,
        "input_size": (config.in_channels, config.input_side, config.input_side),
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": config.crop,
        "crop_mode": "center",
        "mean": config.mean,
        "std": config.std,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


def _rounded(key: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = value.to(dtype)
    if not torch.equal(rounded.isfinite(), value.isfinite()):
        raise ValueError(f"{key} has numbers too large for {dtype}; save with torch.bfloat16, or leave dtype out.")
    return rounded


def _write(weights: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> None:
    known = {"architecture": ARCHITECTURE, **config.to_dict(), "pretrained_cfg": timm_pretrained_cfg(config)}
    (folder / CONFIG_FILE).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    write_safetensors(weights, folder / WEIGHTS_FILE)


def _keep_other_files(source: Path, target: Path) -> None:
    def ours(folder: str, names: list[str]) -> set[str]:
        return {CONFIG_FILE, WEIGHTS_FILE} & set(names) if Path(folder) == source else set()

    shutil.copytree(source, target, ignore=ours, symlinks=True, dirs_exist_ok=True, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    """The same file under a second name, so that what others write to it is not lost; a copy where links cannot be."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _some(keys: list[str]) -> str:
    more = len(keys) - _LISTED
    return ", ".join(keys[:_LISTED]) + (f" and {more} more" if more > 0 else "")
