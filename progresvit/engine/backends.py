"""The sources of an engine, a model or an export, and the choice of the backend that runs them."""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from progresvit.config import ModelConfig, ModelTask
from progresvit.engine.array_backend import GRAPH_BATCH, ArrayBackend
from progresvit.engine.buffers import RoundBackend
from progresvit.engine.export.manifest import Manifest, is_export
from progresvit.engine.onnx_backend import GraphRounds, check_installed, choose_backend
from progresvit.engine.options import BACKENDS, Backend, BackendName, EngineOptions
from progresvit.io.imports import check_name
from progresvit.io.model_folder import DEFAULT_MODEL
from progresvit.io.parse import did_you_mean
from progresvit.routing.decide import Policy, Threshold
from progresvit.routing.settings import Setting, default_setting, find_setting, setting_names

if TYPE_CHECKING:
    import torch

    from progresvit.model import ProgResViT, RoundModel

KERNELS = ("fused", "plain")


def open_source(
    model: RoundModel | ModelSource | str | os.PathLike[str] | None,
    backend: Backend | None = None,
    *,
    task: ModelTask | None = "classification",
) -> ModelSource:
    """Open a model, the folder, bundled name or hub id of one, or an export; None is the default bundled model.

    A source that is open already is returned.

    A model for another task is refused, and so is one without a head. None takes models for any task, with or without a
    head.
    """
    source = _open(model, backend, remedy=None if task else "call model.features(images)")
    if task is not None:
        check_task(source.config, task, "Engine" if task == "classification" else "SegmentationEngine")
    return source


def check_task(config: ModelConfig, task: ModelTask, what: str) -> None:
    """Refuse a model for another task, or without a head; ``what`` takes models for ``task``."""
    if config.task != task:
        if task == "classification":
            does, other, remedy = "classify", "segments", "progresvit.SegmentationEngine, or progresvit segment"
        else:
            does, other, remedy = "segment", "classifies", "progresvit.Engine, or progresvit classify"
        raise ValueError(f"{what} takes models that {does}, and this one {other}; use {remedy}.")
    if not config.num_classes:
        raise ValueError(
            "this model has no head, so it cannot classify; embed images with progresvit.EmbeddingEngine or progresvit "
            "embed, or give it a head with reset_classifier and train it."
        )


def _open(
    model: RoundModel | ModelSource | str | os.PathLike[str] | None, backend: Backend | None, *, remedy: str | None
) -> ModelSource:
    """``remedy`` ends the error for a model of another kind."""
    if isinstance(model, TorchSource | ExportSource):
        return model
    folder: Path | None = None
    name: str | None = None
    exported = isinstance(model, str | os.PathLike) and is_export(model)
    built_in = _check_backend(backend)
    if built_in not in (None, "torch"):
        check_installed(built_in, converts=not exported)
    if model is None or isinstance(model, str | os.PathLike):
        name = DEFAULT_MODEL if model is None else os.fspath(model)
        if model is not None and exported:
            if backend is not built_in:
                raise ValueError(f"{model} is an export, and a backend of your own takes a model; give its folder.")
            return ExportSource(Path(model).expanduser(), built_in)
        from progresvit.api import load_with_folder

        model, folder = load_with_folder(None if model is None else os.fspath(model))
    from progresvit.api import as_progresvit

    model = as_progresvit(model, "the engine", remedy)
    if backend is not None and backend is not built_in:
        from progresvit.engine.custom_backend import CustomSource

        return CustomSource(model, backend, folder, name)
    if built_in is None or built_in == "torch":
        return TorchSource(model, folder, name)
    return ConvertedSource(model, built_in, folder, name)


def _check_backend(backend: Backend | None) -> BackendName | None:
    """The backend, if it is a built-in one; None for a backend of your own. Unknown names and modules are errors."""
    if backend is None or not isinstance(backend, str):
        return None
    if backend in BACKENDS:
        return backend
    check_name(backend, BACKENDS, what="backend", example="my_module:MyBackend")
    from progresvit.engine.custom_backend import find_backend

    find_backend(backend)  # an error before the model is loaded
    return None


class TorchSource:
    """A model, run by torch. ``name`` is what it was loaded by; None for a model object.

    Answers are in the precision that an engine asks for, so that ``precision`` is None.
    """

    temperatures: Sequence[float] | None = None
    precision: str | None = None
    graph_backend: str | None = None
    graphs_sha256: str | None = None

    def __init__(self, model: ProgResViT, folder: Path | None = None, name: str | None = None) -> None:
        from progresvit.data.crop import preprocessing_hash

        self.model, self.config, self.folder = model, model.config, folder
        self.is_loaded = name is not None
        self.name = type(model).__name__ if name is None else name
        self.preprocessing_sha256 = preprocessing_hash(model.config)

    def device(self, asked: str | torch.device | None) -> torch.device:
        """The device that was asked for; by default the device of a model object, and the GPU for a loaded model."""
        from progresvit.distributed import choose_device

        if asked is None and not self.is_loaded:
            return next(self.model.parameters()).device
        return choose_device(asked)

    @cached_property
    def threshold(self) -> Setting | None:
        """The default threshold."""
        return default_setting(self.folder)

    @cached_property
    def weights_sha256(self) -> str:
        from progresvit.io.weights import weights_hash

        return weights_hash(self.model)

    def make_backend(
        self, policy: Policy, temperatures: Sequence[float], options: EngineOptions
    ) -> tuple[str, RoundBackend, int]:
        """The name of the backend, the backend, and the largest batch."""
        import torch

        from progresvit.engine.torch_backend import FusedBackend, TorchBackend

        device = self.device(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        batch = options.batch or (512 if device.type == "cuda" else 64)
        merges = any(round_.merge for round_ in self.config.rounds)
        kernels = _choose_kernels(options.kernels, device, options.precision, merges=merges)
        policy = copy.deepcopy(policy)  # the caller may move or train its routers
        for router in policy.routers:
            router.to(device)
        shared: dict[str, Any] = {"device": device, "precision": options.precision, "top_k": options.top_k}
        if kernels == "fused":
            return "torch", FusedBackend(self.model, policy, temperatures, largest=batch, **shared), batch
        return "torch", TorchBackend(self.model, policy, temperatures, **shared), batch


class ExportSource:
    """An export, run by onnxruntime or OpenVINO. Needs no torch. It has the attributes of a ``TorchSource``."""

    def __init__(self, folder: Path, backend: BackendName | None) -> None:
        if backend == "torch":
            raise ValueError(f"{folder} is an export; torch runs models, not graphs. Give the model's folder.")
        self.folder, self.backend, self.name = folder, backend, str(folder)
        self.manifest = Manifest.read(folder)
        self.config = self.manifest.config
        self.threshold: Threshold | Setting | None = self.manifest.setting or self.manifest.threshold
        name = self.manifest.default_name
        if name in setting_names(folder):  # calibrating the export replaces it there
            self.threshold = find_setting(name, folder)
        self.temperatures = self.manifest.temperatures
        self.weights_sha256 = self.manifest.weights_sha256
        self.preprocessing_sha256 = self.manifest.preprocessing_sha256
        self.graph_backend = choose_backend(backend, self.manifest.kind)
        self.graphs_sha256 = self.manifest.graphs_sha256
        self.precision = "int8" if self.manifest.precision == "int8" else None
        """The precision of the answers, whatever an engine asks for."""

    def make_backend(
        self, policy: Policy, temperatures: Sequence[float], options: EngineOptions
    ) -> tuple[str, RoundBackend, int]:
        if str(options.device or "cpu") != "cpu":
            raise ValueError(f"exports run on the CPU, not on {options.device}; for a GPU, give the model itself.")
        if options.kernels is not None:
            raise ValueError("kernels= is an option of torch; leave it out for an export.")
        graphs = GraphRounds(self.folder, backend=self.backend, precision=options.precision, threads=options.threads)
        made = ArrayBackend(graphs, self.config, policy, temperatures, options.top_k)
        return graphs.backend, made, options.batch or GRAPH_BATCH


ModelSource: TypeAlias = TorchSource | ExportSource
"""What an engine needs to know of a model or an export."""


class ConvertedSource(TorchSource):
    """A model that is exported to a temporary folder, for another backend than torch."""

    def __init__(
        self, model: ProgResViT, backend: BackendName, folder: Path | None = None, name: str | None = None
    ) -> None:
        super().__init__(model, folder, name)
        self.backend = self.graph_backend = backend

    def make_backend(
        self, policy: Policy, temperatures: Sequence[float], options: EngineOptions
    ) -> tuple[str, RoundBackend, int]:
        from progresvit.engine.export.export import export

        with tempfile.TemporaryDirectory() as folder:
            export(self.model, Path(folder) / "export", format="onnx")
            return ExportSource(Path(folder) / "export", self.backend).make_backend(policy, temperatures, options)


def _choose_kernels(kernels: str | None, device: torch.device, precision: str, *, merges: bool = False) -> str:
    """The kernels that were asked for, else fused on a GPU; a model that merges tokens runs plain ones."""
    import torch

    from progresvit.model.precision import autocast

    if kernels not in (None, *KERNELS):
        raise ValueError(f"unknown kernels {kernels!r}; {did_you_mean(kernels, KERNELS)}")
    if kernels == "fused" and device.type != "cuda":
        raise ValueError(f"fused kernels are for a GPU, not for {device.type}; leave kernels out.")
    if merges and (kernels == "fused" or precision == "fp8"):
        raise ValueError(
            "fused kernels and fp8 are not available for a model that merges tokens; use kernels='plain' and bf16, "
            "or switch merging off with model.set_merge."
        )
    if kernels == "fused" and importlib.util.find_spec("triton") is None:
        raise ValueError("fused kernels need triton; run: pip install triton, or ask for kernels='plain'.")
    if precision != "fp8":
        autocast(device, precision)
    elif device.type != "cuda" or kernels == "plain" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("fp8 needs a GPU of compute capability 8.9 or more and the fused kernels; use bf16.")
    if kernels is not None or device.type != "cuda" or merges:
        return kernels or "plain"
    if importlib.util.find_spec("triton") is None:
        warnings.warn("triton is not installed, so the engine runs plain kernels, which are slower.", stacklevel=4)
        return "plain"
    return "fused"
