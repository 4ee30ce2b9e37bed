"""The graphs of an export: one per round, run by onnxruntime or OpenVINO on numpy arrays. Needs no torch.

The exit decision is made in numpy (``routing.decide``). Letters: B images, C channels, r the side of the model's input,
N tokens, d channels of a round, K classes, s a round from 0.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from progresvit.engine.export.manifest import MANIFEST_FILE, Manifest, graph_files, hash_file, tokens_shape
from progresvit.io.extras import not_installed
from progresvit.io.parse import did_you_mean
from progresvit.metrics.arrays import Float32s

GraphRuntime = Literal["onnxruntime", "openvino"]

READS: Mapping[str, tuple[str, ...]] = {"onnxruntime": ("onnx",), "openvino": ("onnx", "openvino")}
"""The formats that each backend reads."""
OPENVINO_PRECISIONS = {"fp32": "f32", "bf16": "bf16"}
"""The precisions, by the names of OpenVINO."""

PACKAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "onnxruntime": ("onnx", ("onnxruntime", "onnx", "onnxscript")),
    "openvino": ("openvino", ("openvino", "onnx", "onnxscript")),
}
"""The extra of each backend, the package that runs graphs, and those that convert a model to graphs."""
Signature = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each input or output, without the batch."""


def check_installed(backend: str | None, *, converts: bool = False) -> None:
    """Refuse a backend whose packages are missing, before anything slow; ``converts``: also those that make graphs."""
    if backend is None or backend not in PACKAGES:  # torch, or the default
        return
    extra, packages = PACKAGES[backend]
    for package in packages if converts else packages[:1]:
        if importlib.util.find_spec(package) is None:
            raise ValueError(not_installed(package, extra))


class Graph(Protocol):
    """The loaded graph of a round."""

    inputs: Signature
    outputs: Signature

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Float32s]:
        """Arrays by name -> arrays by name."""
        ...


class GraphRounds:
    """The rounds of an export. Not thread-safe: make one for each thread.

    Args:
        folder: The folder that ``progresvit export`` wrote.
        backend: onnxruntime or openvino; by default the one that runs the format.
        precision: Precision of the arithmetic: fp32, or bf16 with OpenVINO and float32 graphs.
        threads: Number of threads; by default the choice of the backend.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        backend: GraphRuntime | None = None,
        precision: str = "fp32",
        threads: int | None = None,
    ) -> None:
        root = Path(os.path.expanduser(folder))
        self.folder, self.manifest = root, (manifest := Manifest.read(root))
        self.backend = choose_backend(backend, manifest.kind)
        check_installed(self.backend)
        _check_precision(precision, self.backend, manifest)
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}; None is the choice of the backend.")
        self.precision = "int8" if manifest.precision == "int8" else precision
        """The precision of the answers, for which a threshold must be calibrated."""
        load = _onnxruntime(threads) if self.backend == "onnxruntime" else _openvino(precision, threads)
        self._graphs = [self._load(root, s, load) for s in range(len(manifest.config.rounds))]

    def run(
        self, s: int, pixels: NDArray[np.uint8], tokens: Float32s | None = None
    ) -> tuple[NDArray[np.float32], Float32s | None]:
        """Run round s: bytes (B, C, r, r), and after the first round tokens (B, N, d) -> logits (B, K) and tokens.

        ``tokens`` come from the previous round; the returned ones go to the next round (None after the last).
        """
        self._check_feeds(s, pixels, tokens)
        feeds: dict[str, NDArray[Any]] = {"pixels": np.ascontiguousarray(pixels)}
        if tokens is not None:
            feeds["previous"] = np.ascontiguousarray(tokens)
        outputs = self._graphs[s].run(feeds)
        return outputs["logits"], outputs.get("tokens")

    def _load(self, root: Path, s: int, load: Any) -> Graph:
        names = graph_files(self.manifest.kind, s)
        for name in names:
            _check_file(root / name, self.manifest.files[s][name])
        path = root / names[0]
        try:
            graph: Graph = load(path)
        except Exception as error:  # the backends raise different exceptions
            raise ValueError(f"{self.backend} cannot read {path} ({_first_line(error)}); export again.") from error
        for what, ends, expected in (
            ("inputs", graph.inputs, _inputs(self.manifest, s)),
            ("outputs", graph.outputs, _outputs(self.manifest, s)),
        ):
            if ends != expected:
                raise ValueError(f"{path} is another graph: its {what} are {ends}, not {expected}; export again.")
        return graph

    def _check_feeds(self, s: int, pixels: NDArray[Any], tokens: NDArray[Any] | None) -> None:
        rounds = len(self._graphs)
        if not 0 <= s < rounds:
            raise ValueError(f"there is no round {s}; this export has rounds 0 to {rounds - 1}.")
        expected = _inputs(self.manifest, s)
        for name, end, value in (("pixels", "pixels", pixels), ("tokens", "previous", tokens)):
            if end not in expected:
                if value is not None:
                    raise ValueError("round 0 takes the image only; run it without tokens.")
                continue
            kind, shape = expected[end]
            if value is None or value.dtype != kind or value.shape != (len(pixels), *shape) or not len(pixels):
                got = "nothing" if value is None else f"{value.dtype} of shape {value.shape}"
                source = "crop images with data.crop" if name == "pixels" else f"take the tokens of round {s - 1}"
                sides = ", ".join(map(str, shape))
                raise ValueError(f"{name} of round {s} are {kind} of shape (B, {sides}), not {got}; {source}.")


def _inputs(manifest: Manifest, s: int) -> Signature:
    config = manifest.config
    inputs: Signature = {"pixels": ("uint8", (config.in_channels, config.input_side, config.input_side))}
    if s:
        inputs["previous"] = ("float32", tokens_shape(config, s - 1))
    return inputs


def _outputs(manifest: Manifest, s: int) -> Signature:
    outputs: Signature = {"logits": ("float32", (manifest.config.num_classes,))}
    if s < len(manifest.config.rounds) - 1:
        outputs["tokens"] = ("float32", tokens_shape(manifest.config, s))
    return outputs


def choose_backend(backend: str | None, kind: str) -> GraphRuntime:
    """The backend that was asked for, or the default of the format; it must be able to read the format."""
    if backend is None:
        return "onnxruntime" if kind == "onnx" else "openvino"
    if backend not in READS:
        raise ValueError(f"unknown backend {backend!r}; {did_you_mean(backend, READS)}")
    if kind not in READS[backend]:
        raise ValueError(
            f"{backend} does not read the {kind} format; use backend='openvino', or export again with format='onnx'."
        )
    return backend  # type: ignore[return-value]  # one of the keys


def _check_precision(precision: str, backend: str, manifest: Manifest) -> None:
    if precision not in OPENVINO_PRECISIONS:
        raise ValueError(f"unknown precision {precision!r} of graphs; {did_you_mean(precision, OPENVINO_PRECISIONS)}")
    if precision == "bf16" and backend == "onnxruntime":
        raise ValueError("onnxruntime does not compute these graphs in bf16; use backend='openvino', or fp32.")
    if precision == "bf16" and manifest.precision == "int8":
        raise ValueError("int8 graphs do not run in bf16; use precision='fp32', or export the model without int8.")


def _check_file(path: Path, sha256: str) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing; copy the whole folder, or export the model again.")
    if hash_file(path) != sha256:
        raise ValueError(
            f"{path} is not the graph that {MANIFEST_FILE} describes; copy the whole folder again, or "
            "export the model again."
        )


def _onnxruntime(threads: int | None) -> Any:
    """A function that loads a graph."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    if threads is not None:
        options.intra_op_num_threads = threads
    return lambda path: _OnnxRuntimeGraph(onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"]))


class _OnnxRuntimeGraph:
    def __init__(self, session: Any) -> None:
        self.session = session
        self.inputs, self.outputs = (
            {end.name: (_ORT_TYPES.get(end.type, end.type), tuple(end.shape[1:])) for end in ends}
            for ends in (session.get_inputs(), session.get_outputs())
        )
        self.names = list(self.outputs)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Float32s]:
        return dict(zip(self.names, self.session.run(self.names, dict(feeds))))


_ORT_TYPES = {"tensor(uint8)": "uint8", "tensor(float)": "float32"}


@cache
def _openvino_core() -> Any:
    """OpenVINO's devices, kept until the process ends.

    The CPU device sets the stack for signals of the thread that makes it, and frees that stack in the thread that drops
    it. If the two differ, the next signal, such as Ctrl-C, ends the process with a segmentation fault.
    """
    import openvino

    return openvino.Core()


def _openvino(precision: str, threads: int | None) -> Any:
    """A function that loads a graph."""
    core = _openvino_core()
    if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise ValueError("this CPU has no bf16 arithmetic; use precision='fp32'.")
    hint = OPENVINO_PRECISIONS[precision]
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    return lambda path: _OpenVinoGraph(core.compile_model(str(path), "CPU", settings))


class _OpenVinoGraph:
    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.inputs, self.outputs = _ends(compiled.inputs), _ends(compiled.outputs)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, Float32s]:
        results = self.compiled(dict(feeds))
        return {name: results[name] for name in self.outputs}


def _ends(ports: Sequence[Any]) -> Signature:
    ends: Signature = {}
    for port in ports:
        shape = port.get_partial_shape()
        sides = tuple(-1 if side.is_dynamic else side.get_length() for side in shape) if shape.rank.is_static else ()
        ends[port.get_any_name()] = (np.dtype(port.get_element_type().to_dtype()).name, sides[1:])
    return ends


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
