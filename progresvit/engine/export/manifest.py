"""The description of an export: ``export.json``, which contains everything that a host needs. Needs no torch.

The file repeats what follows from the model's config (sides, crop, mean, labels, …), so that a host in another language
has to compute nothing. When it is read, a repeated value that differs from the config is an error.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from progresvit import compute
from progresvit.config import ModelConfig
from progresvit.data.crop import INTERPOLATION
from progresvit.io.parse import Section, dump_json, file_key, former_name, parse, parse_json, read_text
from progresvit.routing.decide import Threshold, as_thresholds
from progresvit.routing.settings import DEFAULT, Setting

MANIFEST_FILE = "export.json"
FORMAT = "progresvit-export"
VERSION = 1

GraphFormat = Literal["onnx", "openvino"]
SUFFIXES: Mapping[str, tuple[str, ...]] = {"onnx": (".onnx",), "openvino": (".xml", ".bin")}
"""The files of a round; a backend opens the first."""

Precision = Literal["fp32", "int8"]


def _to_config(value: Any) -> Any:
    return ModelConfig.from_dict(value) if isinstance(value, Mapping) else value


class Manifest(Section):
    """The description of an export."""

    kind: GraphFormat
    config: Annotated[InstanceOf[ModelConfig], BeforeValidator(_to_config)]
    files: tuple[dict[str, str], ...]
    """The files of each round, by name, with their SHA-256."""
    weights_sha256: str = Field(validation_alias="weights")
    preprocessing_sha256: str = Field(validation_alias="preprocessing")
    precision: Precision = "fp32"
    threshold: Threshold | None = None
    """None if the host has to choose one."""
    setting: Setting | None = None
    """The setting of the threshold, if it was calibrated."""
    setting_name: str | None = None
    """Its name in ``settings/``. A setting of that name that was calibrated on the export itself replaces it."""
    temperatures: tuple[float, ...]
    """The logits of each round are divided by these for the reported probability."""
    int8: dict[str, Any] | None = None
    """The cost of int8, measured against float32."""

    weights: ClassVar = former_name("weights_sha256")
    preprocessing: ClassVar = former_name("preprocessing_sha256")

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        rounds = len(self.config.rounds)
        if len(self.files) != rounds:
            raise ValueError(f"{len(self.files)} graphs for a model of {rounds} rounds; there is one for each round")
        for s, files in enumerate(self.files):
            if set(files) != set(graph_files(self.kind, s)):
                raise ValueError(
                    f"round {s + 1} is in {', '.join(files) or 'no file'}, and should be in "
                    f"{' and '.join(graph_files(self.kind, s))}"
                )
        if self.threshold is not None:
            as_thresholds([self.threshold], rounds)
        if self.setting is not None:
            self.setting.check_use(rounds, None)
            if self.threshold != self.setting.threshold:
                raise ValueError(
                    f"threshold {self.threshold} differs from the threshold of its setting, {self.setting.threshold}"
                )
        if len(self.temperatures) != rounds or not all(0 < value < math.inf for value in self.temperatures):
            raise ValueError(f"temperatures are {rounds} numbers above 0, one for each round, not {self.temperatures}")
        return self

    @property
    def default_name(self) -> str | None:
        """The name of the setting that is used by default; None if the threshold has none."""
        return self.setting_name or (DEFAULT if self.threshold is None else None)

    @property
    def gmacs(self) -> list[float]:
        """Cumulative GMACs of the rounds, in the paper's convention."""
        return compute.cumulative_gmacs(self.config)

    @property
    def graphs_sha256(self) -> str | None:
        """For int8 graphs whose ranges are from calibration images; None if the weights determine them."""
        if (self.precision, self.kind) != ("int8", "openvino"):
            return None
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        config, last = self.config, len(self.config.rounds) - 1
        rounds = [
            {
                "files": self.files[s],
                "resolution": round_.resolution,
                "width": round_.width,
                "tokens": None if s == last else list(tokens_shape(config, s)),
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
            "threshold": self.threshold,
            "setting": None if self.setting is None else json.loads(self.setting.to_json()),
            "setting_name": self.setting_name,
            "temperatures": self.temperatures,
            "weights": self.weights_sha256,
            "preprocessing": self.preprocessing_sha256,
            "int8": self.int8,
            "config": config.to_dict(),
        }

    def to_json(self) -> str:
        """The text of the file."""
        return dump_json(self.to_dict()) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the description in the folder of an export; errors name the file."""
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no {MANIFEST_FILE}; give a folder that the command progresvit export wrote."
            )
        try:
            return cls._from_dict(parse_json(read_text(path)), origin=str(path))
        except ValueError as error:
            why = str(error).removeprefix(f"{path}: ")
            end = "" if why.endswith((".", "?")) else "."
            raise ValueError(f"{path}: {why}{end} If it was changed by hand, export the model again.") from error

    @classmethod
    def _from_dict(cls, values: Any, *, origin: str) -> Manifest:
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("it does not describe an export of this library.")
        if values.get("version") != VERSION:
            raise ValueError(
                f"it is of version {values.get('version')!r} and this library reads version {VERSION}; "
                "export the model again with it, or install the version that wrote it."
            )
        rounds = values.get("rounds")
        if not isinstance(rounds, list):
            raise ValueError("its rounds must be a list.")
        files = [round_.get("files") if isinstance(round_, dict) else None for round_ in rounds]
        keys = {file_key(cls, name) for name in cls.model_fields}
        fields = {key: value for key, value in values.items() if key in keys}
        manifest = parse(cls, {**fields, "files": files}, origin=origin)
        own = json.loads(manifest.to_json())
        for key in own.keys() - keys:
            if values.get(key, own[key]) != own[key]:
                raise ValueError(f"{key!r} differs from what its config gives.")
        return manifest


def write_manifest(manifest: Manifest, folder: Path) -> Manifest:
    """Write the manifest next to the graphs, with the hashes of their files."""
    files = tuple({name: hash_file(folder / name) for name in files} for files in manifest.files)
    manifest = manifest.model_copy(update={"files": files})
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def is_export(source: str | os.PathLike[str] | None) -> bool:
    """Whether ``source`` is a folder that ``progresvit export`` wrote."""
    return source is not None and (Path(source).expanduser() / MANIFEST_FILE).is_file()


def graph_files(kind: str, s: int) -> tuple[str, ...]:
    """Names of the files of round s, from 0."""
    return tuple(f"round{s + 1}{suffix}" for suffix in SUFFIXES[kind])


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokens_shape(config: ModelConfig, s: int) -> tuple[int, int]:
    """Tokens and channels that round s, from 0, passes on: (N, d)."""
    round_ = config.rounds[s]
    return config.grid(round_) ** 2 + 1, round_.width
