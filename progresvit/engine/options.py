"""How an engine runs: device, precision, batch, decoding. One declaration for all engines and commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

if TYPE_CHECKING:
    import torch

    from progresvit.engine.custom_backend import CustomBackend

BackendName = Literal["torch", "onnxruntime", "openvino"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
Backend: TypeAlias = "BackendName | CustomBackend | str"
"""A built-in backend by name, or one of your own: an object, a class, or its import string."""
COUNTS = ("batch", "threads", "workers", "max_pixels", "top_k", "pending")
"""The options that are numbers."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine runs. Engines take it as ``options``, or the same options by keyword.

    ``progresvit.Engine(model, 0.35, device="cuda", precision="bf16")`` equals
    ``progresvit.Engine(model, 0.35, options=EngineOptions(device="cuda", precision="bf16"))``. ``SegmentationEngine``
    and ``EmbeddingEngine`` take device, precision, batch and workers only.
    """

    backend: Backend | None = None
    """torch, onnxruntime or openvino, or your own (``buffers.ArrayRounds``): an object, a class that is made with the
    model, or its import string, ``my_module:MyBackend``. By default torch for a model, and for an export the runtime of
    its format."""
    device: str | torch.device | None = None
    """For torch: cpu, cuda, ``cuda:1`` or mps. By default the device of a model object; a model given by name or folder
    runs on the GPU if there is one."""
    precision: str = "fp32"
    """fp32, bf16, fp16 (GPU) or fp8 (recent GPUs, large matrix products only)."""
    batch: int | None = None
    """Largest batch. By default 512 images on a GPU and 64 on a CPU; to segment, 64 and 16 windows."""
    kernels: str | None = None
    """fused (our kernels in CUDA graphs, the default on a GPU) or plain (the kernels of torch). A model that merges
    tokens always runs plain ones."""
    threads: int | None = None
    """Threads of the backend on a CPU; by default its own choice."""
    workers: int | None = None
    """Threads that decode images, or processes for many files; by default one for each CPU core, and two to embed and
    to segment."""
    decode: str = "auto"
    """Where JPEGs are decoded: gpu (nvJPEG), cpu, or auto (the GPU if the model is there and it can)."""
    max_pixels: int | None = None
    """The most pixels of a file that are decoded; by default ``PIL.Image.MAX_IMAGE_PIXELS``, 89 million. Larger JPEGs
    are decoded at a smaller scale if they are not progressive; other images are refused."""
    top_k: int = 1
    """Number of classes in ``Prediction.top``."""
    pending: int | None = None
    """The most images of ``classify``, ``submit`` and ``aclassify`` that wait or run, of all callers; a single call may
    have more. By default 16 batches, and at least 1024."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}.")

    @classmethod
    def merge(cls, options: EngineOptions | None, keywords: Mapping[str, Any]) -> EngineOptions:
        """The options with these keywords in place of theirs."""
        return replace(options or cls(), **keywords)

    def check_only(self, names: tuple[str, ...], engine: str) -> None:
        """Refuse all options but these, which ``engine`` has."""
        for field in fields(self):
            if field.name not in names and getattr(self, field.name) != field.default:
                raise ValueError(f"{engine} has no option {field.name}=; leave it out. It has {', '.join(names)}.")


class EngineKeywords(TypedDict, total=False):
    """The fields of :class:`EngineOptions` as keyword arguments, for editors and type checkers."""

    backend: Backend | None
    device: str | torch.device | None
    precision: str
    batch: int | None
    kernels: str | None
    threads: int | None
    workers: int | None
    decode: str
    max_pixels: int | None
    top_k: int
    pending: int | None


class TorchKeywords(TypedDict, total=False):
    """The options of engines that run on torch only."""

    device: str | torch.device | None
    precision: str
    batch: int | None
    workers: int | None
