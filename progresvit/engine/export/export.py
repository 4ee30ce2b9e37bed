"""Export a model as one graph per round, for CPUs and for hosts without torch.

A graph takes the bytes of the evaluation crop, so that resizing and normalisation are part of it: ``pixels``
(B, C, r, r), and after the first round ``previous`` (B, N, d), the tokens of the previous round. It gives ``logits``
(B, K), and ``tokens`` for the next round. The host makes the exit decision. Letters: B images, C channels, r the side
of the model's input, R the resolution of a round, N tokens, d channels, K classes.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from progresvit.data.crop import preprocessing_hash
from progresvit.data.transforms import normalise
from progresvit.engine.backends import check_task
from progresvit.engine.export.int8 import Int8Check, quantise_export
from progresvit.engine.export.manifest import (
    MANIFEST_FILE,
    SUFFIXES,
    GraphFormat,
    Manifest,
    graph_files,
    write_manifest,
)
from progresvit.engine.fold import FoldedRound, fold
from progresvit.engine.onnx_backend import choose_backend
from progresvit.io.extras import not_installed
from progresvit.io.files import replacing_folder
from progresvit.io.model_folder import BUDGETS_FILE, SETTINGS, TRAINING_LISTS, copy_training_lists
from progresvit.io.parse import did_you_mean
from progresvit.io.weights import weights_hash
from progresvit.model import ProgResViT
from progresvit.model.backbone import resizing_matrix
from progresvit.routing.decide import as_thresholds
from progresvit.routing.settings import (
    DEFAULT,
    Setting,
    SettingWarning,
    find_setting,
    load_budgets,
    setting_names,
)

OPSET = 18
CONVERTERS = {"onnx": ("onnx", "onnxscript"), "openvino": ("openvino", "onnx", "onnxscript")}
"""The packages that each format needs."""
QUANTISERS = {"onnx": ("onnxruntime", "onnx"), "openvino": ("nncf", "nncf")}
"""The package that makes int8 graphs of each format, and its extra."""

StatusCallback = Callable[[str], None]
"""Called with a description of each step."""


def export(
    model: ProgResViT,
    folder: str | os.PathLike[str],
    *,
    format: GraphFormat = "onnx",
    threshold: float | Sequence[float] | Setting | None = None,
    temperatures: Sequence[float] | None = None,
    int8: Int8Check | None = None,
    settings_from: str | os.PathLike[str] | None = None,
    progress: StatusCallback | None = None,
) -> Manifest:
    """Write the graphs of a model and ``export.json`` to a folder, atomically.

    Args:
        model: The model; it is folded.
        folder: Created, or replaced if it holds an export; a folder with other files is refused, and so is an export
            with settings of its own.
        format: onnx or openvino.
        threshold: For the host: a number, one for each round but the last, or a ``Setting`` of the model for entropies.
        temperatures: One for each round, for the reported probabilities.
        int8: Quantise the graphs, and measure the cost on these images. OpenVINO's graphs take their ranges from a part
            of the images and are measured on the others.
        settings_from: The model folder whose settings and budgets the export gets.
        progress: Called with a description of each step.
    """
    if model.config.task != "classification":
        raise ValueError(
            f"there is no export for {model.config.task}; run the model with progresvit.SegmentationEngine, or "
            "progresvit segment."
        )
    check_task(model.config, "classification", "the export")
    report = progress or (lambda step: None)
    target = Path(os.path.expanduser(folder))
    _check_format(format, int8)
    source = None if settings_from is None else Path(settings_from).expanduser()
    settings = _read_settings(source)
    _check_target(target, settings)
    manifest = _describe(model, format, threshold, temperatures, "fp32" if int8 is None else "int8")
    manifest = manifest.model_copy(update={"setting_name": _name_of(manifest.setting, source)})
    rounds = fold(model).cpu()
    with replacing_folder(target) as staged, tempfile.TemporaryDirectory() as scratch:
        for name, content in settings.items():
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_bytes(content)
        copy_training_lists(model, staged)  # certificates of the export need them
        plain = Path(scratch) if format == "openvino" or int8 is not None else staged
        for s, round_ in enumerate(rounds):
            assert isinstance(round_, FoldedRound)
            report(f"round {s + 1} to ONNX")
            _write_onnx(RoundGraph(round_, model), plain / graph_files("onnx", s)[0], s)
        if int8 is not None:
            manifest = quantise_export(manifest, plain, staged, int8, report)
        elif format == "openvino":
            for s in range(len(rounds)):
                report(f"round {s + 1} to OpenVINO")
                _write_openvino(plain / graph_files("onnx", s)[0], staged / graph_files("openvino", s)[0])
        manifest = write_manifest(manifest, staged)
    if manifest.setting is not None:
        caveat = manifest.setting.caveat(
            preprocessing_sha256=manifest.preprocessing_sha256,
            precision=manifest.precision,
            backend=choose_backend(None, manifest.kind),
            graphs_sha256=manifest.graphs_sha256,
        )
        if caveat is not None:
            warnings.warn(caveat, SettingWarning, stacklevel=2)
    return manifest


class RoundGraph(nn.Module):
    """A folded round that takes bytes: it normalises them and resizes them with two constant matrix products.

    Backends differ in antialiasing (OpenVINO has none), but not in matrix products.
    """

    resizer: Tensor

    def __init__(self, round_: FoldedRound, model: ProgResViT) -> None:
        super().__init__()
        self.round, self.config = round_, model.config
        self.register_buffer("resizer", resizing_matrix(model.config.input_side, round_.resolution))

    def forward(self, pixels: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, ...]:
        images = normalise(pixels, self.config)  # (B, C, r, r)
        if self.round.resolution != self.config.input_side:
            images = self.resizer @ images @ self.resizer.mT  # (B, C, r, r) -> (B, C, R, R)
        output = self.round(images, tokens)
        return (output.logits,) if self.round.is_last else (output.logits, output.tokens)


def _describe(
    model: ProgResViT,
    format: GraphFormat,
    threshold: float | Sequence[float] | Setting | None,
    temperatures: Sequence[float] | None,
    precision: Any,
) -> Manifest:
    """The manifest without the hashes of the files."""
    config, rounds = model.config, len(model.config.rounds)
    setting = None
    if isinstance(threshold, Setting):
        setting, threshold = threshold, threshold.threshold
    if threshold is not None:
        row = as_thresholds([threshold], rounds)[0].tolist()
        threshold = tuple(row) if np.ndim(threshold) else float(threshold)  # type: ignore[arg-type]  # a number
    manifest = Manifest(
        kind=format,
        config=config,
        files=tuple(dict.fromkeys(graph_files(format, s), "") for s in range(rounds)),
        weights_sha256=weights_hash(model),
        preprocessing_sha256=preprocessing_hash(config),
        precision=precision,
        threshold=threshold,
        setting=setting,
        temperatures=(1.0,) * rounds if temperatures is None else tuple(temperatures),
    )
    if setting is not None:
        setting.check_weights(manifest.weights_sha256)
    return manifest


def _write_onnx(graph: RoundGraph, path: Path, s: int) -> None:
    config = graph.config
    pixels = torch.zeros(2, config.in_channels, config.input_side, config.input_side, dtype=torch.uint8)
    arguments: tuple[Tensor, ...] = (pixels,)
    names = ["pixels"]
    if graph.round.projector is not None:
        before = config.rounds[s - 1]
        arguments = (pixels, torch.zeros(2, config.grid(before) ** 2 + 1, before.width))
        names = ["pixels", "previous"]
    batch = torch.export.Dim("batch")
    with _quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            graph.eval(),
            arguments,
            dynamo=True,
            input_names=names,
            output_names=["logits"] if graph.round.is_last else ["logits", "tokens"],
            dynamic_shapes=tuple({0: batch} for _ in arguments),
            opset_version=OPSET,
            custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
            verbose=False,
        )
    assert program is not None
    program.save(path, external_data=False)


def _stable_sort(x: Any, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    """In ONNX, which torch's exporter does not know: TopK orders equal values by position. For token merging."""
    from onnxscript import opset18

    op: Any = opset18
    size = op.Constant(value_ints=[x.shape[dim]])
    return op.TopK(x, size, axis=dim, largest=int(descending), sorted=1)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporter warns about its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write_openvino(source: Path, path: Path) -> None:
    import openvino

    openvino.save_model(openvino.convert_model(source), path, compress_to_fp16=False)


def _check_format(format: str, int8: Int8Check | None) -> None:
    if format not in SUFFIXES:
        raise ValueError(f"unknown format {format!r}; {did_you_mean(format, SUFFIXES)}")
    needed = [(package, format) for package in CONVERTERS[format]]
    if int8 is not None:
        needed.append(QUANTISERS[format])
    for package, extra in needed:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(not_installed(package, extra)) from error


def _read_settings(folder: Path | None) -> dict[str, bytes]:
    """The settings and budgets of a model folder, which can be read, by their paths in it."""
    if folder is None:
        return {}
    paths = []
    for name in setting_names(folder):
        find_setting(name, folder)
        paths.append(folder / SETTINGS / f"{name}.json")
    budgets = folder / BUDGETS_FILE
    if budgets.is_file():
        load_budgets(budgets)
        paths.append(budgets)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _name_of(setting: Setting | None, folder: Path | None) -> str | None:
    """The name of the setting in the model folder."""
    if setting is None:
        return None
    names = [name for name in setting_names(folder) if find_setting(name, folder) == setting]
    return DEFAULT if DEFAULT in names else next(iter(names), None)


def _check_target(target: Path, settings: Mapping[str, bytes]) -> None:
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give the name of a folder.")
    if not target.is_dir():
        return
    ours = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    foreign = sorted(
        path.name
        for path in target.iterdir()
        if path.name not in (MANIFEST_FILE, SETTINGS, BUDGETS_FILE, *TRAINING_LISTS)
        and not (path.name.startswith("round") and path.suffix in ours)
    )
    if foreign or (any(target.iterdir()) and not (target / MANIFEST_FILE).is_file()):
        other = f", such as {foreign[0]}" if foreign else ""
        raise ValueError(
            f"{target} holds files of other kinds than an export{other}; give a new folder, or one with an export."
        )
    for path in (*sorted((target / SETTINGS).rglob("*")), target / BUDGETS_FILE):
        if path.is_file() and settings.get(path.relative_to(target).as_posix()) != path.read_bytes():
            raise ValueError(
                f"{path} is not of the model but of the export that is there, and would be lost; move it away, or give "
                "a new folder."
            )
