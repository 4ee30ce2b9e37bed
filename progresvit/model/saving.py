"""A model folder, written and read: config.json beside model.safetensors, and nothing that can run code."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from progresvit.config import BaseConfig, parse_object
from progresvit.io.files import replacing_folder
from progresvit.io.model_folder import (
    BUDGETS_FILE,
    CARD_FILE,
    CONFIG_FILE,
    MODEL_FILES,
    SETTINGS,
    TRAINING_LISTS,
    WEIGHTS_FILE,
    Source,
    copy_training_lists,
    find_folder,
    find_pickles,
    refuse_pickle,
)
from progresvit.io.weights import read_safetensors, weights_hash, write_safetensors
from progresvit.model.card import CARD_NAME, GENERATED, make_card
from progresvit.model.interface import RoundModel
from progresvit.model.registry import build, model_class, read_config

_LISTED = 8  # keys that an error message lists before it counts the rest


def save(
    model: RoundModel,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write a model folder in one step: a crash leaves either the complete old folder or the complete new one.

    Args:
        model: A model of any registered kind.
        folder: A new folder or one that holds a model. Its other files are kept.
        dtype: Precision of the file; by default the model's. ``torch.float16`` halves the file and rounds the
            weights: the model that ``load`` returns has another hash, so evaluate and calibrate that one.
        extra: More safetensors files of the folder, by name.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"weights are written as floating-point numbers, not as {dtype}; use torch.float16.")
    config = getattr(model, "config", None)
    if not isinstance(config, BaseConfig) or not isinstance(model, model_class(config.kind)):
        raise ValueError(
            f"save takes a model such as ProgResViT, not {type(model).__name__}; "
            "unwrap a compiled model with model._orig_mod and a distributed one with model.module."
        )
    target = Path(os.path.expanduser(folder))
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give the name of a folder.")
    if target.is_dir() and any(target.iterdir()) and not (target / CONFIG_FILE).exists():
        raise ValueError(f"{target} holds other files and no model; give a new folder, or one that holds a model.")
    weights = model.state_dict()
    check_fit(weights, model.config, origin="this model, a part of which was replaced by hand,")
    if dtype is not None:
        weights = {key: _rounded(key, value, dtype) for key, value in weights.items()}
    with replacing_folder(target) as staged:
        values = {**model.config.to_dict(), **model.config.foreign_keys()}
        (staged / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        files = {WEIGHTS_FILE: weights, **(extra or {})}
        for name, tensors in files.items():
            write_safetensors(tensors, staged / name)
        copy_training_lists(model, staged)
        if target.is_dir():
            _keep_other_files(target, staged, written={CONFIG_FILE, *TRAINING_LISTS, *files})
    return target


def load_folder(folder: Path) -> RoundModel:
    """The model of a folder, in float32 whatever the precision on disk, in evaluation mode.

    No initial weights are made, and no random numbers are drawn.
    """
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickles = find_pickles(folder)
        raise ValueError(refuse_pickle(pickles[0]) if pickles else f"{folder} has no {WEIGHTS_FILE}; save it again.")
    model = with_weights(config, read_safetensors(path), origin=str(path))
    cast(Any, model).loaded_from = folder  # it may hold the list of the training images
    return model


def with_weights(config: BaseConfig, weights: Mapping[str, Tensor], *, origin: str) -> RoundModel:
    """The model of a config with copies of these weights, in float32 and in evaluation mode."""
    model = check_fit(weights, config, origin=origin)  # on the meta device
    own, module = model.state_dict(), cast(nn.Module, model)
    module.load_state_dict({key: value.to(own[key].dtype, copy=True) for key, value in weights.items()}, assign=True)
    tensors = [*module.buffers(), *(value for part in module.modules() for value in vars(part).values())]
    if any(isinstance(value, Tensor) and value.is_meta for value in tensors):  # it has tensors that no file holds
        model = build(config)
        model.load_state_dict(weights)
    return model.eval()


def push_to_hub(model: RoundModel | Source, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a model to the Hugging Face hub; returns the address of the commit.

    Args:
        model: A model folder (or the name of a bundled model), whose card, settings and budgets are uploaded with
            config and weights; or a model in memory, which has only these two. A repository without a card gets a
            short one, or the card that the training wrote; a card on the hub is replaced by one written by hand only.
        repo_id: The hub id. The repository is created if it does not exist.
        private: Whether a new repository is private.
        token: Access token of the hub; by default the one that ``hf auth login`` stored.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch) / "model"
        if isinstance(model, str | os.PathLike):
            source = find_folder(model)
            model = load_folder(source)
            _check_settings(model, source)
            for path in (path for pattern in MODEL_FILES for path in source.glob(pattern)):
                target = staged / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        else:
            save(model, staged)
        api = HfApi(token=token, library_name="progresvit")
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        card = staged / CARD_FILE
        text = card.read_text(encoding="utf-8", errors="replace") if card.exists() else ""
        if (not text or GENERATED in text) and api.file_exists(repo_id, CARD_FILE):
            card.unlink(missing_ok=True)  # the repository keeps its own
        elif GENERATED in text:
            card.write_text(text.replace(f'"{CARD_NAME}"', f'"{repo_id}"'), encoding="utf-8")
        elif not text:
            settings = sorted(path.stem for path in (staged / SETTINGS).glob("*.json"))
            card.write_text(make_card(model, repo_id, settings), encoding="utf-8")
        message = f"Upload {type(model).__name__} model"
        commit = api.upload_folder(repo_id=repo_id, folder_path=staged, commit_message=message)
    return str(commit.commit_url)


def _check_settings(model: RoundModel, folder: Path) -> None:
    """Refuse settings and budgets of other weights, with which the engine would refuse the uploaded model."""
    own = weights_hash(model)
    for path in sorted([*(folder / SETTINGS).glob("*.json"), *folder.glob(BUDGETS_FILE)]):
        if parse_object(path.read_text(encoding="utf-8")).get("weights") != own:
            raise ValueError(
                f"{path} was not calibrated with the weights of this model; calibrate again, or delete it."
            )


def check_fit(weights: Mapping[str, Tensor], config: BaseConfig, *, origin: str) -> RoundModel:
    """Refuse weights without exactly the keys and shapes of the config's model; returns that model on "meta"."""
    with torch.device("meta"):
        model = build(config)
    own = model.state_dict()
    shared = [key for key in own if key in weights]
    problems = {
        "lack": [key for key in own if key not in weights],
        "have unknown": [key for key in weights if key not in own],
        "have other shapes for": [
            f"{key} {tuple(weights[key].shape)} instead of {tuple(own[key].shape)}"
            for key in shared
            if weights[key].shape != own[key].shape
        ],
        "have no floating-point numbers for": [
            key for key in shared if own[key].is_floating_point() and not weights[key].is_floating_point()
        ],
    }
    described = "; ".join(f"{what} {_first_keys(keys)}" for what, keys in problems.items() if keys)
    if described:
        raise ValueError(
            f"the weights of {origin} do not fit the config: they {described}. Use the {CONFIG_FILE} that was saved "
            "with them (and reset_classifier to give a model another head)."
        )
    return model


def _rounded(key: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    if not value.is_floating_point():
        return value
    rounded = value.to(dtype)
    if not torch.equal(rounded.isfinite(), value.isfinite()):
        raise ValueError(f"{key} has numbers too large for {dtype}; save with torch.bfloat16, or leave dtype out.")
    return rounded


def _keep_other_files(source: Path, target: Path, *, written: set[str]) -> None:
    def ours(folder: str, names: list[str]) -> set[str]:
        return written & set(names) if Path(folder) == source else set()

    shutil.copytree(source, target, ignore=ours, symlinks=True, dirs_exist_ok=True, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    """A hard link, so that later writes to an open file are not lost; a copy where links are not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _first_keys(keys: list[str]) -> str:
    more = len(keys) - _LISTED
    return ", ".join(keys[:_LISTED]) + (f" and {more} more" if more > 0 else "")
