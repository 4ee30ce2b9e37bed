"""Weights as safetensors files, and their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); it is truncated or has another format. "
            "Copy or download it again."
        ) from error


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
        raise OSError(f"{path} could not be written: {error}") from error
    path.chmod(mode)


def weights_hash(model: Any) -> str:
    """SHA-256 of the weights as float32, by name: the same wherever the model was loaded from.

    Token merging changes the answers of the same weights, so it is part of the hash if it is on.
    """
    digest = hashlib.sha256()
    merge = [getattr(round_, "merge", 0) for round_ in model.config.rounds]
    if any(merge):
        digest.update(f"merge{merge}".encode())
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key}{tuple(value.shape)}".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
