"""Options that several commands share: help texts, parsing, and opening what they name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from progresvit.cli import output
from progresvit.io.model_folder import find_folder, is_foreign, is_local
from progresvit.io.parse import parse_limit

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from progresvit.config import BaseConfig
    from progresvit.data.dataset import Entries, Entry
    from progresvit.data.segmentation.windows import WindowOptions
    from progresvit.engine.onnx_backend import GraphRuntime
    from progresvit.evaluation import Header, Records
    from progresvit.model import RoundModel
    from progresvit.routing import Router

MODEL_HELP = "Model folder, bundled model (imagenet-tiny, nettewoof-tiny), hub id, or plain ViT of timm."
EXPORT_HELP = f"{MODEL_HELP} Or an export folder."
DEVICE_HELP = "cpu or cuda; cuda by default if available."
DECODE_HELP = "Processes that decode images; 0 decodes in the main process."
LIMIT_HELP = (
    "Threshold, one per round except the last (0.2,0.4), a setting file, or the name of a setting in the model folder."
)
BACKEND_HELP = "torch, onnxruntime, openvino, or your own, my_module:MyBackend."
TABLE_HELP = "Output file of the table; repeatable: .csv, .json, .md, .tex."

# The options of an engine (engine/options.py), for the commands that run one
Limit = Annotated[str | None, typer.Option(help=LIMIT_HELP)]
Backend = Annotated[str | None, typer.Option(help=BACKEND_HELP)]
Device = Annotated[str | None, typer.Option(help=DEVICE_HELP)]
Precision = Annotated[str, typer.Option(help="fp32, bf16, fp16 or fp8.")]
TorchPrecision = Annotated[str, typer.Option(help="fp32, bf16 or fp16.")]
EvaluationPrecision = Annotated[str, typer.Option(help="fp32, tf32, bf16 or fp16.")]
Batch = Annotated[int | None, typer.Option(help="Images per batch; 512 by default on a GPU, fewer on a CPU.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the backend.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes or threads that decode images; one per CPU core by default.")
]
FewWorkers = Annotated[int, typer.Option(help="Threads that decode images.")]
DecodeProcesses = Annotated[int, typer.Option(help=DECODE_HELP)]
Decode = Annotated[str, typer.Option(help="Where JPEGs are decoded: gpu (nvJPEG), cpu or auto (gpu where possible).")]
MaxPixels = Annotated[
    int | None,
    typer.Option(help="Most pixels to decode of a file; 89 million by default. Larger JPEGs are reduced.", min=1),
]
TopK = Annotated[int, typer.Option(help="Number of classes to report, most likely first.")]

# The options of commands that read records or write them
RecordsFile = Annotated[Path, typer.Argument(help="Records of the model.")]
Threshold = Annotated[
    str | None,
    typer.Option(
        help="Threshold of the routed answers, a setting file, or the name of a setting in the model folder; by "
        "default near-lossless on these images."
    ),
]
RouterFile = Annotated[
    Path | None,
    typer.Option(
        help="Compare thresholds with this router's probabilities and not entropies: a file, or your own, "
        "my_module:my_router."
    ),
]
Outputs = Annotated[
    list[Path] | None,
    typer.Option(help="Output file; repeatable. Table: .csv, .json, .md, .tex. Plot: .png, .svg, .pdf."),
]
Tables = Annotated[list[Path] | None, typer.Option(help=TABLE_HELP)]
OverwriteRecords = Annotated[bool, typer.Option("--overwrite", help="Replace existing records.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")]

NOT_FOR_SEGMENTATION_RECORDS = "for records of classification models, and these are of a segmentation model"


def used_options(context: typer.Context, names: Collection[str]) -> list[str]:
    """The options among these that the command was called with; unused ones are None or False."""
    values = {name: value for name, value in context.params.items() if value is not None and value is not False}
    return [option.opts[0] for option in context.command.params if option.name in names and option.name in values]


def refuse_options(context: typer.Context, names: Collection[str], why: str) -> None:
    """An error if the command was called with any of these options; ``why`` says what they are for."""
    used = used_options(context, names)
    if used:
        verb, them = ("is", "it") if len(used) == 1 else ("are", "them")
        raise ValueError(f"{' and '.join(used)} {verb} {why}; leave {them} out.")


def parse_numbers(text: str, option: str) -> list[float]:
    """Parse comma-separated numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes comma-separated numbers, such as 0,0.1,0.5, not {text!r}.") from None


def parse_integers(text: str, option: str, example: str = "1,3,5") -> list[int]:
    """Parse comma-separated whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} takes comma-separated whole numbers, such as {example}, not {text!r}.") from None


def find_images(arguments: list[str]) -> tuple[Entries, list[tuple[str, str]]]:
    """The images that the arguments name, and the arguments that name none, each with the reason."""
    from progresvit.data.dataset import Entries, Entry, find_unlabelled
    from progresvit.data.prepare import NO_FILE, ON_THE_WEB, is_web_address

    bad: list[tuple[str, str]] = []
    others: Counter[str] = Counter()

    def find() -> Iterator[Entry]:
        for argument in arguments:
            path = Path(argument).expanduser()
            if is_web_address(argument):
                bad.append((argument, ON_THE_WEB))
            elif path.is_dir() or path.suffix == ".tar":
                try:
                    inside = find_unlabelled(path, others).entries
                except ValueError as error:
                    bad.append((argument, str(error).removeprefix(f"{path} ").removesuffix(".")))
                    continue
                prefix = "" if len(arguments) == 1 else f"{argument}/"
                yield from (replace(entry, name=f"{prefix}{entry.name}") for entry in inside)
            elif not path.exists():
                bad.append((argument, NO_FILE))
            else:
                yield Entry(str(path), argument)

    entries = Entries(find())
    output.report_other_files(others)
    return entries, bad


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

        with output.setting_notes():
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
            output.echo(f"note: {caveat}", err=True)
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
        output.echo(f"note: {path} was fitted on the records of another model; expect worse results.", err=True)
    seen = 0 if ids is None else router.count_seen(ids)
    if seen:
        output.echo(
            f"note: {path} was fitted on {seen} of these images, so its results here are too optimistic.", err=True
        )
    return router


def open_records(
    path: Path, threshold: str | None, router: Path | None
) -> tuple[Records, float | tuple[float, ...] | None, Router | None]:
    """Records of a classification model, and the threshold and the router with which they are routed."""
    from progresvit.evaluation import read_records

    records = read_records(path)
    fitted = open_router(router, records.header, records.ids)
    return records, parse_threshold(threshold, records.header, fitted), fitted


def config_and_hash(folder: Path) -> tuple[BaseConfig, str | None]:
    """The config of a model folder, and the hash of its weights if they can be read without torch.

    The model of timm or another project is loaded for them.
    """
    if is_foreign(folder):
        from progresvit.api import load
        from progresvit.io.weights import weights_hash

        model = load(folder)
        return model.config, weights_hash(model)
    from progresvit.io.weights_hash import hash_of_folder
    from progresvit.model.registry import read_config

    config = read_config(folder)
    return config, hash_of_folder(folder, config)


class OpenedModel(NamedTuple):
    """A model or an export to evaluate."""

    model: RoundModel
    folder: Path | None
    device: str | None
    """The requested device; cpu for an export."""
    is_export: bool
    batch: int
    """Images per batch by default."""


def open_model(name: str, *, precision: str, backend: str | None = None, device: str | None = None) -> OpenedModel:
    """Open a model or an export to evaluate it."""
    from progresvit.engine.export.manifest import is_export

    if not is_export(name):
        if backend not in (None, "torch"):
            raise ValueError(
                f"--backend {backend} runs exports, and {name} is a model; make one with progresvit export {name} "
                "--out DIR, and evaluate DIR."
            )
        from progresvit.api import load_with_folder
        from progresvit.distributed import choose_device
        from progresvit.evaluation.source import default_batch

        return OpenedModel(*load_with_folder(name), device, False, default_batch(choose_device(device)))
    if backend == "torch" or device not in (None, "cpu"):
        raise ValueError(
            f"{name} is an export, which onnxruntime and OpenVINO run on the CPU; leave out --backend torch and "
            "--device cuda, or give the model that it was made from."
        )
    from progresvit.engine.array_backend import GRAPH_BATCH
    from progresvit.engine.graph_model import GraphModel
    from progresvit.engine.onnx_backend import GraphRounds

    folder = Path(name).expanduser()
    graphs = GraphRounds(folder, backend=cast("GraphRuntime | None", backend), precision=precision)
    return OpenedModel(GraphModel(graphs), folder, "cpu", True, GRAPH_BATCH)
