"""What a training run is: a YAML file, validated, with overrides from the command line."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from progresvit.config import ModelConfig, make_rounds, preset
from progresvit.data.transforms import Augmentation
from progresvit.io.yaml_files import find_file, read_mapping, shipped_files


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Section):
    """The network: a preset or rounds of one's own, with fields of the config changed."""

    preset: str | None = None
    resolutions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    """Heads of each round, with resolutions; the last one is the model's."""
    num_classes: int | None = Field(None, ge=1)
    """None: as many as the data has."""
    psg: bool | None = None
    layer_scale: float | None = None
    depth: int | None = None
    patch_size: int | None = None
    position_resolution: int | None = None
    input_resolution: int | None = None
    """Side of the images that training and evaluation give; a teacher may want them larger than the rounds do."""
    drop_path: float = Field(0.0, ge=0, lt=1)
    start: str | None = None
    """Weights to start from: a timm model's name, a model folder, or shipped, the model inside the package."""

    @model_validator(mode="after")
    def _one_description(self) -> Model:
        if (self.preset is None) == (not self.resolutions) or (not self.resolutions) != (not self.heads):
            raise ValueError("give either preset, or resolutions and heads")
        return self

    def config(self, *, num_classes: int, class_ids: Sequence[str] | None, labels: Sequence[str] | None) -> ModelConfig:
        """The config of this model for a set of classes."""
        names = ("psg", "layer_scale", "depth", "patch_size", "position_resolution", "input_resolution")
        fields = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        fields |= {"num_classes": num_classes, "class_ids": class_ids, "labels": labels}
        if self.preset is not None:
            return preset(self.preset, **fields)
        assert self.resolutions is not None
        assert self.heads is not None
        return ModelConfig(rounds=make_rounds(self.resolutions, self.heads), heads=self.heads[-1], **fields)


class Data(_Section):
    """How pictures reach the device."""

    mode: Literal["loader", "resident"] = "loader"
    workers: int = Field(8, ge=0)
    train: str = "train"
    val: str = "val"
    resident_side: int | None = Field(None, ge=1)
    """Side of the pictures that the resident mode stores; None: the model's input resolution."""


class Mixing(_Section):
    """Mixup, cutmix and label smoothing, by timm."""

    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)
    probability: float = Field(1.0, ge=0, le=1)
    switch: float = Field(0.5, ge=0, le=1)
    smoothing: float = Field(0.0, ge=0, lt=1)


class Optimizer(_Section):
    """AdamW. The learning rate is for ``lr_batch`` pictures and grows with the batch."""

    lr: float = Field(5e-4, gt=0)
    lr_batch: int = Field(512, ge=1)
    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    batch: int = Field(1024, ge=1)
    """Pictures of one step, over all processes."""
    accumulate: int = Field(1, ge=1)


class Schedule(_Section):
    """Warm-up, cosine by the epoch, cooldown at the minimum."""

    epochs: int = Field(300, ge=1)
    cooldown: int = Field(10, ge=0)
    warmup: int = Field(5, ge=0)
    warmup_lr: float = Field(1e-6, ge=0)
    min_lr: float = Field(1e-5, ge=0)


class Distillation(_Section):
    """A frozen teacher."""

    teacher: str
    """A pretrained timm model's name, a model folder, or efficientnet-lite2."""
    kind: Literal["hard", "soft"] = "hard"
    """Its label alone, as in the paper, or its whole answer."""
    weight: float = Field(0.5, ge=0, le=1)
    """Share of the teacher in the loss; the labels have the rest."""
    resolution: int | None = Field(None, ge=1)
    """At which the teacher looks; None: its own."""
    temperature: float = Field(1.0, gt=0)
    """Soft: divides both sides' logits."""
    classes: Literal["data", "teacher"] = "data"
    """Soft: those of the data, or all that the teacher knows; of that wider head the model keeps the data's rows."""
    map_weight: float = Field(0.0, ge=0)
    """Soft: weight of what the teacher says of each place, which the patch tokens learn."""

    @model_validator(mode="after")
    def _soft_alone(self) -> Distillation:
        plain = Distillation.model_fields
        changed = [
            name for name in ("temperature", "classes", "map_weight") if getattr(self, name) != plain[name].default
        ]
        if self.kind == "hard" and changed:
            raise ValueError(f"{' and '.join(changed)} are for soft distillation; add kind: soft or leave them out")
        return self


class Run(_Section):
    """How the run is carried out; none of this changes what is learned, apart from precision."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool | Literal["blocks"] = False
    """The model as a whole, or one block for all of them, which is ready in seconds; and the teacher."""
    cuda_graphs: bool = False
    """Replay the rounds' work as one recorded piece: small models are bound by the host otherwise."""
    grad_checkpointing: bool = False
    log_every: int = Field(50, ge=1)
    """Steps."""
    evaluate_every: int = Field(1, ge=1)
    """Epochs."""
    save_every: int = Field(1, ge=1)
    """Epochs."""
    save_minutes: float = Field(15, gt=0)
    """And at least this often, in the middle of an epoch too."""
    keep: int = Field(2, ge=1)
    """Checkpoints."""


class Recipe(_Section):
    """A named run."""

    model: Model
    data: Data = Data()
    augment: Augmentation = Augmentation()
    mixing: Mixing = Mixing()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    distillation: Distillation | None = None
    ema: float = Field(0.99996, ge=0, lt=1)
    """Decay of the moving average of the weights, by the step."""
    ema_warmup: bool = False
    """The decay begins at 0 and grows to ``ema``, so that a short run does not keep its start."""
    seed: int = Field(42, ge=0)
    run: Run = Run()

    @model_validator(mode="after")
    def _one_head(self) -> Recipe:
        wide = self.distillation is not None and self.distillation.classes == "teacher"
        if wide and self.model.num_classes is not None:
            raise ValueError(
                "with distillation.classes=teacher the head has the teacher's; leave model.num_classes out"
            )
        return self

    @property
    def epochs(self) -> int:
        """All of them, cooldown included."""
        return self.schedule.epochs + self.schedule.cooldown

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by the name of one that ships, or by a path; ``overrides`` are ``a.b=value``, the value in YAML."""
    path = find_file(source, shipped_recipes(), "recipe")
    values = read_mapping(path, "recipe", "model: and schedule:")
    for override in overrides:
        _override(values, override)
    return make_recipe(values, origin=str(path))


def make_recipe(values: Mapping[str, Any], *, origin: str) -> Recipe:
    """Validate; every error names its key, and an unknown key what comes nearest."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise ValueError(f"{origin}: {problems}.") from error


def shipped_recipes() -> dict[str, Path]:
    """Names of the recipes that ship, and where they are."""
    return shipped_files("recipes")


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"--set takes key=value, such as --set optimizer.batch=256, not {text!r}.")
    section = values
    for part in parts[:-1]:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    section[parts[-1]] = _parse(value)


def _parse(value: str) -> Any:
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"--set: {value!r} is no YAML value; lists are written [0.9, 0.999].") from error
    try:  # YAML 1.1 reads 1e-3 as text
        return float(parsed) if isinstance(parsed, str) else parsed
    except ValueError:
        return parsed


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg'].removeprefix('Value error, ')}"
    known = _known_keys(problem["loc"][:-1])
    nearest = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}"
    return f"{key}: there is no such key, {hint}"


def _known_keys(path: Sequence[Any]) -> list[str]:
    section: Any = Recipe
    for part in path:
        annotation = section.model_fields[part].annotation
        section = Distillation if part == "distillation" else annotation
    return list(section.model_fields)
