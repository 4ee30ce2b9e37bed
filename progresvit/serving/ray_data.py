"""Ray Data: bulk prediction over a dataset, with one pool of actors for each round.

    progresvit classify-ray photos --out predictions --model nettewoof-tiny
    progresvit classify-ray s3://bucket/photos --out s3://bucket/predictions --address ray://HEAD:10001

The rounds run at the same time on different blocks of the dataset, in pools of different sizes. Images that exit pass
through the later rounds unchanged. The blocks contain the pixels and tokens of the other images; Ray passes them on
through its object store. If an actor ends, Ray runs its blocks again, so each image has one row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.fs
from numpy.typing import NDArray
from PIL import Image

from progresvit.data.dataset import SUFFIXES, is_hidden
from progresvit.data.prepare import UnreadImage
from progresvit.engine import Engine
from progresvit.engine.backends import open_source
from progresvit.engine.images import ImageOpener
from progresvit.engine.options import EngineKeywords, EngineOptions
from progresvit.engine.prediction import Prediction
from progresvit.engine.rounds import RoundRunner
from progresvit.engine.thresholds import ThresholdLike, check_setting, find_threshold
from progresvit.io.extras import not_installed
from progresvit.routing.settings import Setting

if TYPE_CHECKING:
    import ray.data

COLUMNS = {
    "index": pa.int32(),
    "label": pa.string(),
    "probability": pa.float32(),
    "exit_round": pa.int8(),
    "entropy": pa.float32(),
    "gmacs": pa.float32(),
    "abstained": pa.bool_(),
    "error": pa.string(),
}
"""Columns of a prediction, as in the tables of the command ``progresvit classify``."""
STATE = PIXELS, TOKENS = ("_pixels", "_tokens")
"""Columns for the next round; null for images that have exited."""
CPU_ROWS, GPU_ROWS = 32, 512
"""Default rows of a batch. They include images that have exited, which need no compute."""

Cells = dict[str, list[Any]]
"""The prediction columns of a table."""


def classify_dataset(
    dataset: ray.data.Dataset,
    model: str | os.PathLike[str] | None = None,
    threshold: ThresholdLike | None = None,
    *,
    column: str = "bytes",
    actors: Sequence[int] = (1,),
    cpus: float | None = None,
    gpus: float = 0.0,
    options: EngineOptions | None = None,
    **keywords: Unpack[EngineKeywords],
) -> ray.data.Dataset:
    """The dataset with the prediction of each image instead of the image.

    Args:
        dataset: Rows with an image, as ``ray.data.read_binary_files`` or ``ray.data.read_images`` gives them.
        model: A model folder, bundled name, hub id or export, which every node must have; None is the default model.
        threshold: As for :class:`Engine`.
        column: Name of the column with the bytes of image files, or with uint8 arrays (H, W, C).
        actors: Actors of each round, or one number for all rounds.
        cpus: CPUs that an actor reserves; by default at most 1, and together at most half of the cluster.
        gpus: GPUs, or a fraction of one, that an actor reserves.
        options, keywords: Options of the engines, as for :class:`Engine`; images are decoded on the CPU. ``batch``, the
            rows of a batch, is 512 by default with a GPU, else 32.
    """
    options = EngineOptions.merge(options, keywords)
    batch = options.batch or (GPU_ROWS if gpus else CPU_ROWS)
    options = replace(options, device=options.device or ("cuda" if gpus else "cpu"), batch=batch)
    rounds = check_model(model, threshold, options.precision)
    sizes = for_each_round(actors, rounds, "actors")
    ray = _import_ray()
    if not ray.is_initialized():
        ray.init()
    if cpus is None:
        total = ray.cluster_resources().get("CPU", 1.0)
        free = total - max(1.0, total / 2)  # tasks that read and write the images need a whole CPU
        cpus = min(1.0, math.floor(1000 * free / sum(sizes)) / 1000)
    for s, size in enumerate(sizes):
        dataset = dataset.map_batches(
            RoundActor,
            fn_constructor_args=(s, column, model, threshold, options),
            batch_size=batch,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=size),
            num_cpus=cpus,
            num_gpus=gpus,
        )
    return dataset


classify = classify_dataset


def classify_folder(
    images: str,
    out: str,
    model: str | os.PathLike[str] | None = None,
    threshold: ThresholdLike | None = None,
    *,
    address: str | None = None,
    **arguments: Any,
) -> int:
    """Classify the image files of a folder, local or remote, and write Parquet files. Returns the number of images.

    Args:
        images, out: Folders, which all nodes of a cluster must share, or addresses such as ``s3://bucket/folder``.
        model, threshold: As for :func:`classify_dataset`.
        address: Address of a Ray cluster. By default the one in ``RAY_ADDRESS``, or a cluster on this machine, which is
            started if there is none.
        arguments: Further arguments of :func:`classify_dataset`.
    """
    files, filesystem = _list_images(images)
    if any(_list(out, allow_not_found=True)[0]):
        raise ValueError(f"{out} is not empty; name another folder.")
    find_threshold(threshold, open_source(model))  # report an unknown setting before Ray starts
    ray = _import_ray()
    ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    dataset = ray.data.read_binary_files(files, include_paths=True, filesystem=filesystem)
    classify_dataset(dataset, model, threshold, **arguments).write_parquet(out)
    return int(ray.data.read_parquet(out).count())


classify_files = classify_folder


def _list_images(folder: str) -> tuple[list[str], pa.fs.FileSystem]:
    """The image files below a folder, by the rules of the command ``progresvit classify``, and their file system."""
    if "://" not in folder and not Path(folder).is_dir():
        raise ValueError(f"{folder} is not a folder.")
    infos, filesystem, root = _list(folder)
    files = sorted(
        info.path
        for info in infos
        if info.is_file
        and info.path.lower().endswith(SUFFIXES)
        and not is_hidden(Path(info.path).relative_to(root).parts)
    )
    if not files:
        raise ValueError(f"{folder} contains no images ({', '.join(SUFFIXES[:4])}, …).")
    return files, filesystem


def _list(folder: str, *, allow_not_found: bool = False) -> tuple[list[pa.fs.FileInfo], pa.fs.FileSystem, str]:
    """Everything below a folder, local or remote; its file system; and its path in that file system."""
    address = folder if "://" in folder else Path(folder).expanduser().resolve().as_uri()
    filesystem, root = pa.fs.FileSystem.from_uri(address)
    selector = pa.fs.FileSelector(root, allow_not_found=allow_not_found, recursive=True)
    return filesystem.get_file_info(selector), filesystem, root


def check_model(model: str | os.PathLike[str] | None, threshold: ThresholdLike | None, precision: str) -> int:
    """Check the model and its threshold on this machine, before the nodes load them. Returns the number of rounds."""
    source = open_source(model)
    limit = find_threshold(threshold, source)
    if isinstance(limit, Setting):
        check_setting(limit, source, precision=source.precision or precision)
    return len(source.config.rounds)


def for_each_round(counts: Sequence[int], rounds: int, name: str) -> tuple[int, ...]:
    """One number for each round; a single number is repeated."""
    if len(counts) not in (1, rounds) or min(counts) < 1:
        raise ValueError(
            f"{name} takes one number of at least 1, or {rounds} of them, one for each round, got {list(counts)}."
        )
    return tuple(counts) * (rounds // len(counts))


def _import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ModuleNotFoundError as error:
        raise ValueError(not_installed(str(error.name), "ray")) from error
    return ray


class RoundActor:
    """An actor that runs a round on tables of images."""

    def __init__(
        self,
        s: int,
        column: str,
        model: str | os.PathLike[str] | None,
        threshold: ThresholdLike | None,
        options: EngineOptions,
    ) -> None:
        self.s, self.column = s, column
        self.engine = Engine(model, threshold, options=options)
        self.opener = ImageOpener(self.engine.config)
        self.runner = RoundRunner(self.engine)

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table after the round: with the columns of predictions, and with the state of images that continue."""
        if self.s == 0:
            cells, waiting = self._open(table)
            table = table.drop_columns([self.column])
        else:
            cells, waiting = self._unpack(table)
            table = table.drop_columns([*COLUMNS, *STATE])
        states: dict[str, list[Any]] = {name: [None] * table.num_rows for name in STATE}
        if len(waiting.rows):
            result = self.runner.run(self.s, waiting.pixels, waiting.tokens)
            for row, prediction in zip(waiting.rows.tolist(), result.predictions):
                if prediction is not None:  # else it continues
                    _fill(cells, row, prediction)
            for row, tokens in zip(result.rows.tolist(), () if result.tokens is None else result.tokens):
                place = int(waiting.rows[row])
                states[PIXELS][place], states[TOKENS][place] = waiting.pixels[row].tobytes(), tokens.tobytes()
        for name, kind in COLUMNS.items():
            table = table.append_column(name, pa.array(cells[name], kind))
        if self.s < len(self.engine.gmacs) - 1:
            for name in STATE:
                table = table.append_column(name, pa.array(states[name], pa.large_binary()))
        return table

    def _open(self, table: pa.Table) -> tuple[Cells, RoundInput]:
        """Decode the images of round 1; the cells of those that cannot be opened are filled."""
        from ray.data.block import BlockAccessor

        if self.column not in table.column_names:
            raise ValueError(f"the dataset has no column {self.column!r}; it has {', '.join(table.column_names)}.")
        if clash := sorted({*COLUMNS, *STATE} & {*table.column_names} - {self.column}):
            raise ValueError(f"the dataset has a column {clash[0]!r}, and so have the predictions; rename it.")
        cells: Cells = {name: [None] * table.num_rows for name in COLUMNS}
        values = BlockAccessor.for_block(table.select([self.column])).to_numpy(self.column)  # bytes or arrays
        opened = self.opener.open([image_of_cell(value) for value in values])
        for row, error in opened.errors.items():
            _fill(cells, row, Prediction.failed(error))
        rows = np.array([row for row in range(table.num_rows) if row not in opened.errors], np.int64)
        return cells, RoundInput(rows, np.asarray(opened.pixels), None)

    def _unpack(self, table: pa.Table) -> tuple[Cells, RoundInput]:
        """The cells and the state that the previous round left."""
        config = self.engine.config
        cells = {name: table.column(name).to_pylist() for name in COLUMNS}
        pixels, tokens = (table.column(name).to_pylist() for name in STATE)
        rows = np.array([row for row, content in enumerate(pixels) if content is not None], np.int64)
        shape = (len(rows), config.in_channels, config.input_side, config.input_side)
        images = np.frombuffer(b"".join(pixels[row] for row in rows), np.uint8).reshape(shape)
        flat = np.frombuffer(b"".join(tokens[row] for row in rows), np.float32)
        width = config.rounds[self.s - 1].width
        return cells, RoundInput(rows, images, flat.reshape(len(rows), -1, width) if len(rows) else None)


class RoundInput(NamedTuple):
    """The images of a table that run a round: their rows, pixels (B, C, R, R) and tokens (B, N, d)."""

    rows: NDArray[np.int64]
    pixels: NDArray[np.uint8]
    tokens: NDArray[np.float32] | None


def _fill(cells: Cells, row: int, prediction: Prediction) -> None:
    for name, values in cells.items():
        values[row] = getattr(prediction, name)


def image_of_cell(value: Any) -> Any:
    """A cell of the column of images for the opener: bytes unchanged, and an array (H, W, C) as an image.

    Any other value gives an :class:`UnreadImage` with the reason.
    """
    if isinstance(value, bytes):
        return value
    if not isinstance(value, np.ndarray):
        return UnreadImage(f"not an image, but {type(value).__name__}")
    array = value[..., 0] if value.ndim == 3 and value.shape[-1] == 1 else value
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (3, 4))):
        return UnreadImage(f"an array of type {value.dtype} and shape {value.shape}, not uint8 (H, W, C)")
    return Image.fromarray(array)
