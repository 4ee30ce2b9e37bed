"""What an engine can be made of, a model or an export, and the rounds that a backend makes of it."""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from progresvit.config import ModelConfig
from progresvit.engine.array_rounds import ArrayRounds
from progresvit.engine.buffers import Rounds
from progresvit.engine.export.manifest import MANIFEST_FILE, Manifest
from progresvit.engine.onnx_backend import GraphRounds
from progresvit.routing.decide import Policy
from progresvit.routing.settings import Setting, default_setting

if TYPE_CHECKING:
    import torch

    from progresvit.model import ProgResViT, RoundModel
    from progresvit.routing.router import Router

Backend = Literal["torch", "onnxruntime", "openvino"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
KERNELS = ("fused", "plain")


@dataclass(frozen=True, kw_only=True)
class How:
    """How an engine is to run; None leaves the choice to the backend."""

    device: str | torch.device | None
    precision: str
    batch: int | None
    kernels: str | None
    threads: int | None
    top_k: int
    """How many classes are named."""


class Source(Protocol):
    """A model as the engine sees it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def folder(self) -> Path | None:
        """Where its settings may lie."""
        ...

    @property
    def threshold(self) -> float | tuple[float, ...] | Setting | None:
        """One that it brings along."""
        ...

    @property
    def temperatures(self) -> Sequence[float] | None: ...

    @property
    def weights(self) -> str:
        """Their hash."""
        ...

    def precision_of(self, asked: str) -> str:
        """That of the answers: what a threshold must have been calibrated for."""
        ...

    @property
    def preprocessing(self) -> str:
        """Its hash."""
        ...

    def make_rounds(self, policy: Policy, temperatures: Sequence[float], how: How) -> tuple[str, Rounds, int]:
        """The backend's name, the rounds, and how many images at most are run at a time."""
        ...


def open_source(model: RoundModel | str | os.PathLike[str] | None, backend: Backend | None) -> Source:
    """A model, the folder or hub id of one, or an export; None is the model that ships."""
    folder: Path | None = None
    if model is None or isinstance(model, str | os.PathLike):
        if model is not None and (Path(model).expanduser() / MANIFEST_FILE).is_file():
            return ExportSource(Path(model).expanduser(), backend)
        from progresvit.api import load_with_folder

        model, folder = load_with_folder(None if model is None else os.fspath(model))
    from progresvit.api import as_progresvit

    model = as_progresvit(model, "the engine")
    if backend is None or backend == "torch":
        return ModelSource(model, folder)
    return ExportedSource(model, backend, folder)


class ModelSource:
    """A model under torch."""

    temperatures: Sequence[float] | None = None

    def __init__(self, model: ProgResViT, folder: Path | None = None) -> None:
        self.model, self.config, self.folder = model, model.config, folder

    @cached_property
    def threshold(self) -> Setting | None:
        return default_setting(self.folder)

    @cached_property
    def weights(self) -> str:
        from progresvit.checkpoint import weights_hash

        return weights_hash(self.model)

    @cached_property
    def preprocessing(self) -> str:
        from progresvit.data.crop import preprocessing_hash

        return preprocessing_hash(self.config)

    def precision_of(self, asked: str) -> str:
        return asked

    def make_rounds(self, policy: Policy, temperatures: Sequence[float], how: How) -> tuple[str, Rounds, int]:
        import torch

        from progresvit.engine.torch_backend import FusedRounds, TorchRounds

        place = torch.device(how.device) if how.device is not None else next(self.model.parameters()).device
        if how.threads is not None:
            torch.set_num_threads(how.threads)
        batch = how.batch or (512 if place.type == "cuda" else 64)
        kernels = _checked_kernels(how.kernels, place, how.precision)
        policy = _policy_on(policy, place)
        options: dict[str, Any] = {"device": place, "precision": how.precision, "top_k": how.top_k}
        if kernels == "fused":
            fused = FusedRounds(self.model, policy, temperatures, largest=batch, **options)
            return "torch", fused, batch
        return "torch", TorchRounds(self.model, policy, temperatures, **options), batch


class ExportSource:
    """Graphs that ``progresvit export`` wrote, under the backend that can read them. Needs no torch."""

    def __init__(self, folder: Path, backend: Backend | None) -> None:
        if backend == "torch":
            raise ValueError(f"{folder} is an export; torch runs models, not graphs. Give the model's folder.")
        self.folder, self.backend = folder, backend
        self.manifest = Manifest.read(folder)
        self.config = self.manifest.config
        self.threshold = self.manifest.setting or self.manifest.threshold
        self.temperatures = self.manifest.temperatures
        self.weights, self.preprocessing = self.manifest.weights, self.manifest.preprocessing

    def precision_of(self, asked: str) -> str:
        return "int8" if self.manifest.precision == "int8" else asked

    def make_rounds(self, policy: Policy, temperatures: Sequence[float], how: How) -> tuple[str, Rounds, int]:
        if str(how.device or "cpu") != "cpu":
            raise ValueError(f"graphs run on the CPU here, not on {how.device}; for a GPU, give the model itself.")
        if how.kernels is not None:
            raise ValueError("kernels= is a choice of torch's; graphs bring their own.")
        graphs = GraphRounds(self.folder, backend=self.backend, precision=how.precision, threads=how.threads)
        return graphs.backend, ArrayRounds(graphs, policy, temperatures, how.top_k), how.batch or 64


class ExportedSource(ModelSource):
    """A model that is exported on the spot, for a backend other than torch."""

    def __init__(self, model: ProgResViT, backend: Backend, folder: Path | None = None) -> None:
        super().__init__(model, folder)
        self.backend = backend

    def make_rounds(self, policy: Policy, temperatures: Sequence[float], how: How) -> tuple[str, Rounds, int]:
        from progresvit.engine.export.export import export

        with tempfile.TemporaryDirectory() as folder:
            export(self.model, Path(folder) / "export", format="onnx")
            return ExportSource(Path(folder) / "export", self.backend).make_rounds(policy, temperatures, how)


def _policy_on(policy: Policy, device: torch.device) -> Policy:
    """The same with routers of its own there: the caller's may be moved or trained on."""

    def own(router: Router | None) -> Router | None:
        return None if router is None else copy.deepcopy(router).to(device)

    abstention = replace(policy.abstention, router=own(policy.abstention.router))
    return replace(policy, router=own(policy.router), abstention=abstention)


def _checked_kernels(kernels: str | None, device: torch.device, precision: str) -> str:
    import torch

    from progresvit.model.precision import autocast

    if kernels not in (None, *KERNELS):
        raise ValueError(f"unknown kernels {kernels!r}; choose {' or '.join(KERNELS)}.")
    if kernels == "fused" and device.type != "cuda":
        raise ValueError(f"fused kernels are for a GPU, not for {device.type}; leave kernels out.")
    if kernels == "fused" and importlib.util.find_spec("triton") is None:
        raise ValueError("fused kernels need triton; install it, or ask for kernels='plain'.")
    if precision != "fp8":
        autocast(device, precision)
    elif device.type != "cuda" or kernels == "plain" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("fp8 needs a GPU of compute capability 8.9 or more and the fused kernels; use bf16.")
    if kernels is not None or device.type != "cuda":
        return kernels or "plain"
    if importlib.util.find_spec("triton") is None:
        warnings.warn("triton is not installed, so the engine runs plain kernels, which are slower.", stacklevel=4)
        return "plain"
    return "fused"
