"""Former home of :mod:`progresvit.model.saving` and :mod:`progresvit.io.weights`."""

from progresvit.io.weights import read_safetensors, weights_hash, write_safetensors
from progresvit.model.saving import check_fit, load_folder, push_to_hub, save

__all__ = [
    "check_fit",
    "load_folder",
    "push_to_hub",
    "read_safetensors",
    "save",
    "weights_hash",
    "write_safetensors",
]
