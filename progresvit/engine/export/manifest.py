"""What an exported model is: ``export.json``, which tells a host everything it needs. No torch.

The file repeats what follows from the model's config (sides, crop, mean, names, …), so that a host in another language
needs no arithmetic of ours; read here, it must not contradict itself. JSON has no infinity: a threshold may be "inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from progresvit import compute
from progresvit.config import ModelConfig
from progresvit.data.crop import INTERPOLATION
from progresvit.routing.decide import as_thresholds
from progresvit.routing.settings import Setting, setting_from_dict

MANIFEST_FILE = "export.json"
FORMAT = "progresvit-export"
VERSION = 1

Kind = Literal["onnx", "openvino"]
SUFFIXES: Mapping[str, tuple[str, ...]] = {"onnx": (".onnx",), "openvino": (".xml", ".bin")}
"""The files of a round; the first is the one to open."""

Precision = Literal["fp32", "int8"]
Threshold = float | tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An export, described."""

    kind: Kind
    config: ModelConfig
    files: tuple[dict[str, str], ...]
    """For each round, its files by name and the SHA-256 of each."""
    weights: str
    """Hash of the model's weights."""
    preprocessing: str
    """Hash of the preprocessing."""
    precision: Precision = "fp32"
    threshold: Threshold | None = None
    """For all rounds, or one for each round but the last; None if the host is to bring one."""
    setting: Setting | None = None
    """Where the threshold comes from, if it was calibrated."""
    temperatures: tuple[float, ...] = ()
    """By which the logits of each round are divided for the reported probability; none given becomes 1."""
    int8: dict[str, Any] | None = None
    """What int8 costs, measured against float32."""

    def __post_init__(self) -> None:
        rounds = len(self.config.rounds)
        if self.kind not in SUFFIXES:
            raise ValueError(f"unknown format {self.kind!r}; choose {' or '.join(SUFFIXES)}.")
        if self.precision not in ("fp32", "int8"):
            raise ValueError(f"unknown precision {self.precision!r} of the graphs; they are fp32 or int8.")
        if len(self.files) != rounds:
            raise ValueError(f"{len(self.files)} graphs for a model of {rounds} rounds; there is one for each round.")
        for s, files in enumerate(self.files):
            if set(files) != set(graph_files(self.kind, s)):
                raise ValueError(
                    f"round {s + 1} is in {', '.join(files) or 'no file'}, and should be in "
                    f"{' and '.join(graph_files(self.kind, s))}."
                )
        if self.threshold is not None:
            as_thresholds([self.threshold], rounds)
        if self.setting is not None:
            self.setting.check_use(rounds, None)
            if self.threshold != self.setting.threshold:
                raise ValueError(f"threshold {self.threshold} is not that of its setting, {self.setting.threshold}.")
        temperatures = tuple(float(one) for one in self.temperatures) or (1.0,) * rounds
        if len(temperatures) != rounds or not all(one > 0 and math.isfinite(one) for one in temperatures):
            raise ValueError(f"temperatures are {rounds} numbers above 0, one for each round, not {temperatures}.")
        object.__setattr__(self, "temperatures", temperatures)

    @property
    def gmacs(self) -> list[float]:
        """Compute up to and with each round, in the paper's convention."""
        return compute.cumulative_gmacs(self.config)

    def tokens_shape(self, s: int) -> tuple[int, int]:
        """Tokens and channels that round s, from 0, hands on: (N, d)."""
        round_ = self.config.rounds[s]
        return self.config.grid(round_) ** 2 + 1, round_.width

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain JSON types."""
        config, last = self.config, len(self.config.rounds) - 1
        rounds = [
            {
                "files": self.files[s],
                "resolution": round_.resolution,
                "width": round_.width,
                "tokens": None if s == last else list(self.tokens_shape(s)),
                "cumulative_gmacs": self.gmacs[s],
            }
            for s, round_ in enumerate(config.rounds)
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "precision": self.precision,
            "rounds": rounds,
            "input_side": config.input_side,
            "channels": config.in_channels,
            "crop": config.crop,
            "interpolation": INTERPOLATION,
            "mean": list(config.mean),
            "std": list(config.std),
            "class_ids": None if config.class_ids is None else list(config.class_ids),
            "labels": None if config.labels is None else list(config.labels),
            "threshold": _threshold_to_json(self.threshold),
            "setting": None if self.setting is None else json.loads(self.setting.to_json()),
            "temperatures": list(self.temperatures),
            "weights": self.weights,
            "preprocessing": self.preprocessing,
            "int8": self.int8,
            "config": config.to_dict(),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Manifest:
        """The inverse of :meth:`to_dict`; what is missing, unknown or contradicts the config is refused."""
        if not isinstance(values, Mapping) or values.get("format") != FORMAT:
            raise ValueError("it does not describe an export of this library.")
        if values.get("version") != VERSION:
            raise ValueError(
                f"it is of version {values.get('version')!r} and this library reads version {VERSION}; "
                "export the model again with it, or install the version that wrote it."
            )
        missing = [key for key in _KEYS if key not in values]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}.")
        if not isinstance(values["rounds"], Sequence) or not all("files" in round_ for round_ in values["rounds"]):
            raise ValueError("its rounds are no list of objects with files.")
        setting = values["setting"]
        found = cls(
            kind=values["kind"],
            config=ModelConfig.from_dict(values["config"]),
            files=tuple(dict(round_["files"]) for round_ in values["rounds"]),
            weights=values["weights"],
            preprocessing=values["preprocessing"],
            precision=values["precision"],
            threshold=_threshold_from_json(values["threshold"]),
            setting=None if setting is None else setting_from_dict(setting),
            temperatures=tuple(values["temperatures"]),
            int8=values["int8"],
        )
        own = json.loads(found.to_json())
        wrong = [key for key in {**own, **values} if own.get(key) != values.get(key)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not what follows from the rest of it.")
        return found

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """That of an export's folder; errors name the file."""
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no {MANIFEST_FILE}; give a folder that this wrote: "
                "progresvit export MODEL --format onnx --out DIR"
            )
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            why = str(error).rstrip(".")
            raise ValueError(f"{path}: {why}. If the file was changed by hand, export the model again.") from error


def graph_files(kind: str, s: int) -> tuple[str, ...]:
    """Names of the files of round s, from 0."""
    return tuple(f"round{s + 1}{suffix}" for suffix in SUFFIXES[kind])


def _threshold_to_json(threshold: Threshold | None) -> Any:
    if isinstance(threshold, tuple):
        return [_threshold_to_json(one) for one in threshold]
    return "inf" if threshold == math.inf else threshold


def _threshold_from_json(value: Any) -> Threshold | None:
    if isinstance(value, list):
        return tuple(float(one) for one in value)
    return None if value is None else float(value)


_KEYS = (
    *("kind", "precision", "rounds", "input_side", "channels", "crop", "interpolation", "mean", "std", "class_ids"),
    *("labels", "threshold", "setting", "temperatures", "weights", "preprocessing", "int8", "config"),
)
