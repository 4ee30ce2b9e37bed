"""Options that several commands share: help texts, parsing, and opening what they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from progresvit.io.model_folder import find_folder, is_local
from progresvit.io.parse import parse_limit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from progresvit.data.segmentation.windows import WindowOptions
    from progresvit.engine.onnx_backend import GraphRuntime
    from progresvit.evaluation import Header
    from progresvit.model import RoundModel
    from progresvit.routing import Router

MODEL_HELP = "Model folder, bundled model (imagenet-tiny, nettewoof-tiny), or hub id."
EXPORT_HELP = f"{MODEL_HELP} Or an export folder."
DEVICE_HELP = "cpu or cuda; cuda by default if available."
PRECISION_HELP = "fp32, bf16 or fp16."
BATCH_HELP = "Images per batch."
MAX_PIXELS_HELP = "Most pixels to decode of a file; 89 million by default. Larger JPEGs are reduced."
DECODE_HELP = "Processes that decode images; 0 decodes in the main process."
ROUTER_HELP = (
    "Compare thresholds with this router's probabilities and not entropies: a file, or your own, my_module:my_router."
)
THRESHOLD_HELP = (
    "Threshold of the routed answers, a setting file, or the name of a setting in the model folder; by default "
    "near-lossless on these images."
)
LIMIT_HELP = (
    "Threshold, one per round except the last (0.2,0.4), a setting file, or the name of a setting in the model folder."
)
BACKEND_HELP = "torch, onnxruntime, openvino, or your own, my_module:MyBackend."
# The options of an engine (engine/options.py), for the commands that run one
Backend = Annotated[str | None, typer.Option(help=BACKEND_HELP)]
Device = Annotated[str | None, typer.Option(help=DEVICE_HELP)]
Precision = Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8.")]
TorchPrecision = Annotated[str, typer.Option(help=PRECISION_HELP)]
Batch = Annotated[int | None, typer.Option(help="Images per batch; 512 by default on a GPU, fewer on a CPU.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the backend.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes or threads that decode images; one per CPU core by default.")
]
FewWorkers = Annotated[int, typer.Option(help="Threads that decode images.")]
Decode = Annotated[str, typer.Option(help="Where JPEGs are decoded: gpu (nvJPEG), cpu or auto (gpu where possible).")]
MaxPixels = Annotated[int | None, typer.Option(help=MAX_PIXELS_HELP, min=1)]
TopK = Annotated[int, typer.Option(help="Number of classes to report, most likely first.")]

OUT_HELP = "Output file; repeatable. Table: .csv, .json, .md, .tex. Plot: .png, .svg, .pdf."
TABLE_HELP = "Output file of the table; repeatable: .csv, .json, .md, .tex."
NOT_FOR_SEGMENTATION_RECORDS = "for records of classification models, and these are of a segmentation model"


def refuse_options(options: Mapping[str, object], why: str) -> None:
    """An error if any of these options is used; ``why`` says what they are for. Unused ones are None or False."""
    used = [name for name, value in options.items() if value is not None and value is not False]
    if used:
        verb, them = ("is", "it") if len(used) == 1 else ("are", "them")
        raise ValueError(f"{' and '.join(used)} {verb} {why}; leave {them} out.")


def parse_numbers(text: str, option: str) -> list[float]:
    """Parse comma-separated numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes comma-separated numbers, such as 0,0.1,0.5, not {text!r}.") from None


def parse_integers(text: str, option: str) -> list[int]:
    """Parse comma-separated whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes comma-separated whole numbers, such as 1,3,5, not {text!r}.") from None


def parse_windows(stride: float | None, scales: str | None, flip: bool) -> WindowOptions:
    """How images are divided into windows; by default next to each other, at one scale."""
    from progresvit.data.segmentation.windows import WindowOptions

    return WindowOptions(
        stride=1.0 if stride is None else stride,
        scales=(1.0,) if scales is None else tuple(parse_numbers(scales, "--scales")),
        flip=flip,
    )


def parse_threshold(text: str | None, header: Header, router: Router | None = None) -> float | tuple[float, ...] | None:
    """Parse a threshold for the model of ``header``: numbers, a setting file, or the name of a setting of the model.

    A setting for other weights or another router is an error; one for another preprocessing, precision or backend
    prints a note.
    """
    if text is None:
        return None
    header.check_routable()
    rounds = header.rounds
    named = isinstance(parse_limit(text), str) and is_local(header.model)
    if Path(text).suffix == ".json" or named:
        from progresvit.routing.router import router_hash
        from progresvit.routing.settings import find_setting

        setting = find_setting(text, find_folder(header.model) if named else None)
        setting.check_use(rounds, None if router is None else router_hash(router))
        setting.check_weights(header.weights_sha256)
        caveat = setting.caveat(
            preprocessing_sha256=header.preprocessing_sha256,
            precision=header.precision,
            backend=header.backend,
            graphs_sha256=header.graphs_sha256,
        )
        if caveat:
            typer.echo(f"note: {caveat}", err=True)
        return setting.threshold
    from progresvit.routing.decide import as_thresholds

    try:
        numbers = parse_numbers(text, "--threshold")
    except ValueError:
        raise ValueError(
            f"--threshold takes a number (or one for each round but the last: 0.2,0.4), a setting file, such as "
            f"MODEL/settings/careful.json, or the name of a setting if the model, {header.model}, is on this machine; "
            f"not {text!r}."
        ) from None

    threshold = numbers[0] if len(numbers) == 1 else tuple(numbers)
    as_thresholds([threshold], rounds)
    return threshold


def open_settings(
    paths: Sequence[Path], header: Header, router: Router | None = None
) -> dict[str, float | tuple[float, ...]]:
    """Thresholds of setting files by short name, checked like :func:`parse_threshold`."""
    thresholds: dict[str, float | tuple[float, ...]] = {}
    for name, path in zip(short_names(paths) if paths else [], paths):
        if path.suffix != ".json":
            raise ValueError(f"{path}: a setting is a .json file written by progresvit calibrate --out.")
        threshold = parse_threshold(str(path), header, router)
        assert threshold is not None
        thresholds[name] = threshold
    return thresholds


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest path endings that are unique."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.with_suffix("").parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError(
        f"{paths[0]} is given twice, or differs from another file only in its suffix; remove or rename one."
    )


def open_router(path: Path | None, header: Header, ids: ArrayLike | None = None) -> Router | None:
    """Load a router; print a note if it was fitted on another model or on images in ``ids``."""
    if path is None:
        return None
    header.check_routable()
    from progresvit.routing.custom_router import open_router

    router = open_router(path, header.rounds)
    if router.origin.model_sha256 not in (None, header.weights_sha256):
        typer.echo(f"note: {path} was fitted on the records of another model; expect worse results.", err=True)
    seen = 0 if ids is None else router.count_seen(ids)
    if seen:
        typer.echo(
            f"note: {path} was fitted on {seen} of these images, so its results here are too optimistic.", err=True
        )
    return router


def open_model(
    model: str, *, precision: str, backend: str | None = None, device: str | None = None
) -> tuple[RoundModel, Path | None, str | None]:
    """A model or an export, to be evaluated; its folder, and the device that was asked for (cpu for an export)."""
    from progresvit.engine.export.manifest import is_export

    if not is_export(model):
        if backend not in (None, "torch"):
            raise ValueError(
                f"--backend {backend} runs exports, and {model} is a model; make one with progresvit export {model} "
                "--out DIR, and evaluate DIR."
            )
        from progresvit.api import load_with_folder

        return *load_with_folder(model), device
    if backend == "torch" or device not in (None, "cpu"):
        raise ValueError(
            f"{model} is an export, which onnxruntime and OpenVINO run on the CPU; leave out --backend torch and "
            "--device cuda, or give the model that it was made from."
        )
    from progresvit.engine.graph_model import GraphModel
    from progresvit.engine.onnx_backend import GraphRounds

    folder = Path(model).expanduser()
    graphs = GraphRounds(folder, backend=cast("GraphRuntime | None", backend), precision=precision)
    return GraphModel(graphs), folder, "cpu"
