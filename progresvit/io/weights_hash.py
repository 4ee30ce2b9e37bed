"""The hash of weights, by which a setting knows its model. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from progresvit.config import BaseConfig
from progresvit.io.model_folder import WEIGHTS_FILE


def hash_weights(config: BaseConfig, weights: Iterable[tuple[str, NDArray[np.float32]]]) -> str:
    """SHA-256 of the weights as float32, in the order of their names: the same wherever the model was loaded from.

    Token merging, static gates and the task change the answers of the same weights, so they are part of the hash unless
    they are the default.
    """
    digest = hashlib.sha256()
    if config.task != "classification":
        digest.update(config.task.encode())
    if getattr(config, "psg", None) == "static":
        digest.update(b"static gates")
    merge = [getattr(round_, "merge", 0) for round_ in config.rounds]
    if any(merge):
        digest.update(f"merge{merge}".encode())
    for name, values in weights:
        digest.update(f"{name}{values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def hash_of_folder(folder: Path, config: BaseConfig) -> str | None:
    """The hash of the weights in a model folder; None if they are missing or cannot be read as numpy arrays."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:  # a host of exports
        return None
    try:
        with safe_open(folder / WEIGHTS_FILE, "numpy") as file:
            names = sorted(file.keys())
            return hash_weights(config, ((name, file.get_tensor(name).astype(np.float32)) for name in names))
    except (OSError, SafetensorError, TypeError):  # numpy has no bfloat16
        return None
