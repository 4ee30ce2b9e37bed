"""Records: the predictions of a model on every image in every round, from which tables and thresholds are computed.

One Parquet file: a row per image, a few columns per round, and a header about the model, the data and the settings.
Letters: N images, S rounds, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from progresvit import compute
from progresvit.config import BaseConfig, ModelConfig
from progresvit.data.dataset import UNLABELLED
from progresvit.evaluation.record_files import (
    KEY,
    SEGMENTATION_KEY,
    check_rows,
    read_table,
    split_by_id,
    write_table,
)
from progresvit.model.registry import DEFAULT_KIND, parse_config
from progresvit.routing import Router, near_lossless
from progresvit.routing.scores import STATISTICS

TOP = 5
FORMAT = 1

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Header:
    """Which model was evaluated on which data, and how."""

    model: str
    """Name of the model as the user gave it."""
    weights: str
    """SHA-256 of the weights."""
    config: Mapping[str, Any]
    """The model's config as JSON holds it. Its kind may be unknown to this version."""
    gmacs: Mapping[str, Sequence[float]]
    """GMACs of an image that exits after each round, by convention."""
    routable: bool = True
    """False if the rounds are alternatives among which there is no routing."""
    preprocessing: Mapping[str, Any]
    preprocessing_hash: str
    precision: str
    """That of the arithmetic, or int8 for an export of int8 graphs."""
    device: str
    data: str
    split: str | None
    """None if the images have no labels."""
    images: int
    """Images that were found; unreadable ones are not among the records."""
    names: str
    """SHA-256 of their names, in order."""
    drawn_from: int | None = None
    """Number of images in the data, if it has no splits and these are a sample of it."""
    classes: tuple[int, ...] | None = None
    """Numbers of the data's classes, if predictions were restricted to them. Entropies are of all classes."""
    corruption: str | None = None
    """Corruption and severity, such as ``fog/3``."""
    corruption_source: str | None = None
    """SHA-256 of the file of a corruption of your own; None for the built-in ones."""
    masks: Mapping[str, Sequence[int]] | None = None
    """Raw values of the masks: those of the classes, in order, and those that are ignored; None in classification."""
    probe: Mapping[str, Any] | None = None
    """What predicts from the model's features in place of its head: ``task`` (``knn`` or ``linear``), its settings, the
    labelled images and their classes. None if the head predicts."""
    probe_result: Mapping[str, Any] | None = None
    """What was chosen on held-out images; None for k-NN and if the head predicts."""
    backend: str | None = None
    """What ran the graphs of an export (onnxruntime or openvino); None for a model in torch."""
    graphs: str | None = None
    """SHA-256 of int8 graphs whose ranges are those of calibration images; None if the weights determine them."""
    unreadable: tuple[str, ...] = ()
    """One line for each image that could not be read."""
    date: str = ""
    version: str = ""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.gmacs["paper"])

    def check_routable(self) -> None:
        """Refuse rounds that are alternatives."""
        if not self.routable:
            raise ValueError(
                f"the rounds of a model of kind {self.config.get('kind')!r} are alternatives, so there is no routing "
                "among them; compare the accuracy and the GMACs of its rounds."
            )

    def to_dict(self) -> dict[str, Any]:
        """As files hold it, without what is not of this evaluation: masks, probe, backend of an export."""
        optional = ("corruption_source", "masks", "probe", "probe_result", "backend", "graphs")
        return {key: value for key, value in asdict(self).items() if key not in optional or value is not None}

    def identity(self) -> dict[str, Any]:
        """All but the outcome and what follows from the rest: equal for two evaluations of one model on one data."""
        known = self.to_dict()
        for key in ("unreadable", "date", "version", "model", "device", "gmacs", "routable", "probe_result"):
            known.pop(key, None)
        return known


@dataclass(frozen=True, kw_only=True)
class Records:
    """The table."""

    header: Header
    ids: NDArray[np.str_]
    """(N,)"""
    labels: Ints
    """(N,), -1 where there is none."""
    top5_labels: Ints
    """(N, S, 5), -1 where there are fewer classes or the logits are not finite."""
    top5_probabilities: Floats
    """(N, S, 5), NaN there."""
    top10_entropy: Floats
    """(N, S), infinite where logits are not finite."""
    entropy: Floats
    """(N, S), of all classes."""
    statistics: Floats
    """(N, S, 23)"""
    log_probability: Floats | None = None
    """(N, S), natural logarithm of the label's probability, NaN where logits are not finite. None without labels and in
    records of version 0.1.0."""
    logits: Floats | None = None
    """(N, S, K), if they were kept."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rounds(self) -> int:
        return int(self.top10_entropy.shape[1])

    @cached_property
    def config(self) -> BaseConfig:
        """The model's config; an error if this version does not know the kind of model."""
        return parse_config(self.header.config)

    @property
    def labelled(self) -> bool:
        return bool((self.labels != UNLABELLED).all())

    @property
    def broken(self) -> int:
        """Images with a NaN or an infinity among the logits of any round."""
        return int(np.isinf(self.top10_entropy).any(axis=1).sum())

    @property
    def predictions(self) -> Ints:
        """(N, S)"""
        return self.top5_labels[..., 0]

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether each round is right: (N, S)."""
        right: NDArray[np.bool_] = self.predictions == self.need_labels()[:, None]
        return right

    @property
    def correct5(self) -> NDArray[np.bool_]:
        """Whether the label is among the five likeliest classes of each round: (N, S)."""
        right: NDArray[np.bool_] = (self.top5_labels == self.need_labels()[:, None, None]).any(axis=-1)
        return right

    def need_labels(self) -> Ints:
        """The labels, or an error if some are missing."""
        missing = int((self.labels == UNLABELLED).sum())
        if missing:
            raise ValueError(
                f"{missing} of {len(self)} images in these records have no label; evaluate on labelled images "
                "(<split>/<class>/<image>), or choose what needs none: a budget, an exit share, or a guarantee "
                "of progresvit calibrate --unlabelled."
            )
        return self.labels

    def gmacs(self, convention: compute.Convention = "paper") -> list[float]:
        """GMACs of an image that exits after each round."""
        return list(self.header.gmacs[convention])

    def scores(self, router: Router | None = None) -> Floats:
        """What thresholds are compared with: entropies, or a router's probabilities. (N, S)"""
        self.header.check_routable()
        return self.top10_entropy if router is None else router.scores(self.statistics)

    def near_lossless_threshold(self, router: Router | None = None) -> float:
        """The threshold at which routed predictions are reported by default."""
        point = near_lossless(self.scores(router), self.correct, self.gmacs())
        assert isinstance(point.threshold, float)
        return point.threshold

    def take(self, rows: NDArray[Any]) -> Records:
        """Some of the images, by index or by boolean mask."""
        chosen = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if field.name != "header" and getattr(self, field.name) is not None
        }
        return replace(self, **chosen)

    def split(self, share: float, seed: int = 0) -> tuple[Records, Records]:
        """Two disjoint parts. Which part an image is in depends on its id and the seed, not on the order."""
        first = split_by_id(self.ids, share, seed)
        return self.take(first), self.take(~first)


def check_records(records: Records) -> Records:
    """The same records, or an error that says what is wrong with them."""
    check_rows(records.ids, rounds=records.rounds, expected=records.header.rounds)
    return records


def write_records(records: Records, path: Path) -> None:
    """Write the file in one step: a reader finds no file or a whole one."""
    write_table(_to_table(check_records(records)), path)


def read_records(path: str | Path) -> Records:
    """Records that ``write_records`` wrote."""
    table = read_table(path)
    if SEGMENTATION_KEY in (table.schema.metadata or {}):
        raise ValueError(
            f"{path} holds records of a segmentation model; progresvit frontier and progresvit calibrate take them, "
            "and other commands take those of a classification model."
        )
    try:
        return check_records(_from_table(table))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no records of this library (it lacks {error}); evaluate again.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _to_table(records: Records) -> pa.Table:
    columns: dict[str, Any] = {"id": pa.array(records.ids.tolist(), pa.string())}
    columns["label"] = pa.array(records.labels, pa.int32(), mask=records.labels == UNLABELLED)
    for s in range(records.rounds):
        name = f"round{s + 1}"
        columns[f"{name}_top5_labels"] = _lists(records.top5_labels[:, s].astype(np.int32))
        columns[f"{name}_top5_probabilities"] = _lists(records.top5_probabilities[:, s])
        columns[f"{name}_top10_entropy"] = pa.array(records.top10_entropy[:, s])
        columns[f"{name}_entropy"] = pa.array(records.entropy[:, s])
        columns[f"{name}_statistics"] = _lists(records.statistics[:, s])
        if records.log_probability is not None:
            columns[f"{name}_log_probability"] = pa.array(records.log_probability[:, s])
        if records.logits is not None:
            columns[f"{name}_logits"] = _lists(records.logits[:, s])
    about = {"format": FORMAT, "rounds": records.rounds, "statistics": STATISTICS, "header": records.header.to_dict()}
    return pa.table(columns).replace_schema_metadata({KEY: json.dumps(about).encode()})


def _from_table(table: pa.Table) -> Records:
    about = json.loads((table.schema.metadata or {})[KEY])
    if about["format"] != FORMAT or tuple(about["statistics"]) != STATISTICS:
        raise ValueError("these records are of another version of the library; evaluate again.")
    table = table.combine_chunks()

    def rounds_of(name: str) -> NDArray[Any]:
        columns = [table[f"round{s + 1}_{name}"] for s in range(about["rounds"])]
        return np.stack([_to_array(column) for column in columns], axis=1)

    return Records(
        header=read_header(about["header"]),
        ids=np.array(table["id"].to_pylist(), dtype=np.str_),
        labels=table["label"].fill_null(UNLABELLED).to_numpy().astype(np.int64),
        top5_labels=rounds_of("top5_labels").astype(np.int64),
        top5_probabilities=rounds_of("top5_probabilities"),
        top10_entropy=rounds_of("top10_entropy"),
        entropy=rounds_of("entropy"),
        statistics=rounds_of("statistics"),
        log_probability=rounds_of("log_probability") if "round1_log_probability" in table.column_names else None,
        logits=rounds_of("logits") if "round1_logits" in table.column_names else None,
    )


def read_header(values: Mapping[str, Any]) -> Header:
    """A header; one of version 0.1.0 has ``pictures`` for ``images``, no kind of model and no GMACs."""
    known = {"images" if key == "pictures" else key: value for key, value in values.items()}
    known["config"] = {"kind": DEFAULT_KIND, **known["config"]}
    if "gmacs" not in known:
        config = ModelConfig.from_dict(known["config"])
        known["gmacs"] = {
            convention: compute.cumulative_gmacs(config, convention) for convention in compute.CONVENTIONS
        }
    lists = {key: tuple(value) for key, value in known.items() if isinstance(value, list)}
    return Header(**{**known, **lists})


def _lists(values: NDArray[Any]) -> pa.Array:
    """(N, M) -> N lists of M numbers."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).ravel()), values.shape[1])


def _to_array(column: pa.ChunkedArray) -> NDArray[Any]:
    """N numbers -> (N,), N lists of M numbers -> (N, M)."""
    if not pa.types.is_fixed_size_list(column.type):
        values: NDArray[Any] = column.to_numpy()
        return values
    flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    return (np.concatenate(flat) if flat else np.zeros(0)).reshape(-1, column.type.list_size)
