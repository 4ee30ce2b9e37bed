"""Weights as safetensors files, weights of other projects as pickles too, and the hash of weights.

``read_pickle`` is the only function that opens a pickle of a user, always with ``weights_only=True``: tensors and plain
containers are read, code is refused. One more class is allowed, ``argparse.Namespace``, in which timm's training script
stores its options; it holds values and runs nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from progresvit.io.model_folder import PICKLE_SUFFIXES
from progresvit.io.weights_hash import hash_weights

WEIGHT_SUFFIXES = (".safetensors", *PICKLE_SUFFIXES)

_WEIGHTS_UNDER = ("state_dict_ema", "model_ema", "state_dict", "model")  # the first found; else the file itself


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a safetensors file or a PyTorch checkpoint."""
    if not path.is_file():
        raise ValueError(f"there is no file or folder {path}; check the path, which begins in the working directory.")
    if path.suffix not in WEIGHT_SUFFIXES:
        raise ValueError(f"{path} is not a file of weights; give one that ends in .safetensors, .pth, .pt or .bin.")
    return read_safetensors(path) if path.suffix == ".safetensors" else read_pickle(path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); it is truncated or has another format. "
            "Copy or download it again."
        ) from error


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, the EMA's if it has them.

    The ``module.`` of a distributed run and the ``_orig_mod.`` of a compiled model are removed from the names.
    """
    return read_checkpoint(file)[0]


def read_checkpoint(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of a checkpoint as ``read_pickle`` gives them, and the options that timm's training script stored."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            stored = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise nearly anything on damaged files
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked:
            raise ValueError(
                f"{file} contains {asked[1]}, which could run code, so it was not opened. Only tensors are read; save "
                "the weights alone with torch.save({'state_dict': model.state_dict()}, FILE)."
            ) from error
        raise ValueError(
            f"{file} is damaged or not a PyTorch checkpoint ({type(error).__name__}); copy or download it again."
        ) from error
    options = stored.get("args") if isinstance(stored, Mapping) else None
    for name in _WEIGHTS_UNDER:
        if isinstance(stored, Mapping) and isinstance(stored.get(name), Mapping):
            stored = stored[name]
            break
    if not isinstance(stored, Mapping) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise ValueError(f"{file} holds no weights under {', '.join(_WEIGHTS_UNDER)} nor at its top level.")
    unfit = [str(key) for key, value in stored.items() if value.layout != torch.strided or value.is_meta]
    if unfit:
        raise ValueError(f"{file} is damaged: {', '.join(unfit[:4])} hold no weights; download it again.")
    weights = {str(key).removeprefix("module.").removeprefix("_orig_mod."): value for key, value in stored.items()}
    return weights, dict(vars(options)) if isinstance(options, argparse.Namespace) else {}


def write_safetensors(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write a file with the usual permissions; safetensors alone would make it readable by its owner only."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({key: value.contiguous() for key, value in weights.items()}, path, metadata={"format": "pt"})
    except RuntimeError as error:
        if "share memory" not in str(error):
            raise
        raise ValueError(
            f"{path.name} cannot be written: {error} Store one of the tensors that share memory."
        ) from error
    except SafetensorError as error:  # how safetensors reports a full disk or missing permissions
        failed = OSError(f"{path} could not be written: {error}")
        code = re.search(r"os error (\d+)", str(error))
        failed.errno = int(code[1]) if code else None
        raise failed from error
    path.chmod(mode)


def weights_hash(model: Any) -> str:
    """The hash of a model's weights. An export knows the hash of its model (``exported_weights_sha256``)."""
    exported: str | None = getattr(model, "exported_weights_sha256", None)
    if exported is not None:
        return exported
    weights = sorted(model.state_dict().items())
    return hash_weights(model.config, ((key, value.detach().float().cpu().numpy()) for key, value in weights))
