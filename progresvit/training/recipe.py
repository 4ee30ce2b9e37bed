"""Training recipes: YAML files, validated by pydantic, with overrides such as ``optimizer.batch=256``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from progresvit.config import (
    MAX_DEPTH,
    MAX_HEADS,
    MAX_ROUNDS,
    MAX_SIDE,
    BaseConfig,
    ModelConfig,
    ModelTask,
    make_rounds,
    preset,
)
from progresvit.data.augment.classification import Augmentation
from progresvit.io.parse import Section, parse
from progresvit.io.yaml_files import bundled_files, find_file, parse_yaml, read_mapping
from progresvit.model.psg import GateStart
from progresvit.model.registry import DEFAULT_KIND, config_class
from progresvit.training.tasks.registry import check_task

_RENAMED = {"own_pictures": "own_images"}
"""Earlier names of bundled recipes."""
_EARLIER: dict[str, dict[str, Any]] = {"model": {"start_gates": "torch"}, "augment": {"erase_before_mixing": True}}
"""By section, keys whose default is not what all runs did before the key existed, and what they did."""

_Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
_Heads = Annotated[int, Field(ge=1, le=MAX_HEADS)]
_PROGRESVIT_KEYS = (
    *("preset", "resolutions", "heads", "merge", "psg", "layer_scale", "depth", "patch_size"),
    *("position_resolution", "input_resolution"),
)


class Model(Section):
    """The network: a preset, your own rounds, or the network of ``start``, with changed fields of the config."""

    kind: str = DEFAULT_KIND
    """The kind of model, as in ``model/registry.py``."""
    fields: dict[str, Any] = Field(default_factory=dict)
    """More fields of the model's config. For another kind than progresvit, the whole config."""
    preset: str | None = None
    resolutions: tuple[_Side, ...] | None = Field(None, max_length=MAX_ROUNDS)
    heads: tuple[_Heads, ...] | None = Field(None, max_length=MAX_ROUNDS)
    """Heads of each round, with resolutions; the last number is the model's."""
    merge: tuple[int, ...] | None = Field(None, max_length=MAX_ROUNDS)
    """Number of patch tokens merged in each block, for each round; None merges none."""
    num_classes: int | None = Field(None, ge=1, le=1_000_000)
    """Number of classes of the head; None uses the data's."""
    psg: Literal[True, False, "static"] | None = None
    layer_scale: float | None = None
    depth: int | None = Field(None, ge=1, le=MAX_DEPTH)
    patch_size: _Side | None = None
    position_resolution: _Side | None = None
    input_resolution: _Side | None = None
    """Side of the images in training and evaluation. A teacher may need a higher resolution than the rounds."""
    drop_path: float = Field(0.0, ge=0, lt=1)
    start: str | None = None
    """Initial weights: the name of a timm model, a file of its weights, a model folder, the name of a bundled model, or
    a checkpoint of the authors (their files themselves have not been seen) as a file or hub id. Without preset and
    rounds, the network is the folder's, with the classes of the data."""
    start_fusion: Literal["paper", "quiet"] = "paper"
    """``quiet``: the last round begins as the pretrained ViT, without tokens from the previous round."""
    start_as_prefix: bool = False
    """The start is narrower than the model and becomes its leading heads and channels; other weights are new."""
    start_gates: GateStart = "paper"
    """Start of the hidden layers of PSG's block gates: the authors' (normal, deviation 0.02), or torch's default."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        config_class(kind)
        return kind

    @model_validator(mode="after")
    def _one_description(self) -> Model:
        if self.kind != DEFAULT_KIND:
            self._refuse_keys_of_progresvit(self.kind)
        elif self.is_of_start:
            if self.start is None:
                raise ValueError("give either preset, or resolutions and heads, or a model folder as start")
        elif (self.preset is None) == (not self.resolutions) or (not self.resolutions) != (not self.heads):
            raise ValueError("give either preset, or resolutions and heads")
        if self.start_fusion == "quiet" and self.start is None:
            raise ValueError("start_fusion: quiet needs a pretrained start; set start, or remove start_fusion")
        if self.start_as_prefix and self.start_fusion == "quiet":
            raise ValueError(
                "start_fusion: quiet begins the last round as the start, which is narrower with start_as_prefix; "
                "remove one of them"
            )
        return self

    def _refuse_keys_of_progresvit(self, kind: str) -> None:
        foreign = [key for key in _PROGRESVIT_KEYS if getattr(self, key) is not None]
        if foreign:
            raise ValueError(
                f"only models of the kind {DEFAULT_KIND} have {', '.join(foreign)}; "
                f"put the config of the kind {kind} under fields"
            )

    @property
    def is_of_start(self) -> bool:
        """Whether the recipe takes the network from the model folder that it starts from."""
        return self.kind == DEFAULT_KIND and self.preset is None and self.resolutions is None and self.heads is None

    def config(
        self,
        *,
        num_classes: int,
        class_ids: Sequence[str] | None,
        labels: Sequence[str] | None,
        task: ModelTask = "classification",
        start: BaseConfig | None = None,
    ) -> Any:
        """The config of this model for a task and its classes. ``start`` is the config of the folder to start from."""
        classes = {"num_classes": num_classes, "class_ids": class_ids, "labels": labels, "task": task}
        fields = {**self.fields, **classes}
        if self.kind != DEFAULT_KIND:
            return config_class(self.kind)(**fields)
        changed = {key: getattr(self, key) for key in _PROGRESVIT_KEYS[4:] if getattr(self, key) is not None}
        config: Any
        if self.is_of_start:
            assert start is not None
            if start.kind != DEFAULT_KIND:
                self._refuse_keys_of_progresvit(start.kind)
            config = start.replace(**{**changed, **fields})
        elif self.preset is not None:
            config = preset(self.preset, **{**changed, **fields})
        else:
            assert self.resolutions is not None
            assert self.heads is not None
            rounds = make_rounds(self.resolutions, self.heads)
            config = ModelConfig(**{"rounds": rounds, "heads": self.heads[-1], **changed, **fields})
        return config if self.merge is None else config.with_merge(self.merge)


def _changed(section: Section, keys: Sequence[str]) -> list[str]:
    return [key for key in keys if getattr(section, key) != type(section).model_fields[key].default]


def _refuse_foreign(section: Any, owners: Mapping[str, Sequence[str]]) -> None:
    """Refuse keys of a choice other than ``section.name``."""
    for owner, keys in owners.items():
        changed = _changed(section, keys)
        if changed and owner != section.name:
            raise ValueError(f"{' and '.join(changed)} belong to {owner}; set name: {owner} or remove them")


class Data(Section):
    """How images reach the device."""

    mode: Literal["loader", "in_memory"] = "loader"
    decode: Literal["auto", "gpu", "cpu"] = "auto"
    """Where the mode loader decodes and augments. auto uses the GPU if it decodes JPEGs and the task allows it."""
    workers: int = Field(8, ge=0, le=1024)
    """Processes that read images; with decode: cpu they also decode and augment them."""
    train: str = "train"
    val: str = "val"
    in_memory_side: _Side | None = None
    """Side of the images that the mode in_memory stores; None uses the model's input resolution."""
    in_memory_cache: str | None = None
    """Folder in which to keep decoded images for later runs; with None each run decodes."""

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, values: Any) -> Any:
        """Version 0.1.0 called the mode resident."""
        if not isinstance(values, dict):
            return values
        if {"resident_side", "in_memory_side"} <= values.keys():
            raise ValueError("resident_side is the former name of in_memory_side; set only one of them")
        values = {{"resident_side": "in_memory_side"}.get(key, key): value for key, value in values.items()}
        return {**values, "mode": "in_memory"} if values.get("mode") == "resident" else values

    @model_validator(mode="after")
    def _cache_in_memory(self) -> Data:
        if self.decode == "gpu" and self.mode != "loader":
            raise ValueError("decode: gpu is for mode: loader; the mode in_memory decodes once, on the CPU")
        if self.in_memory_cache is not None and self.mode != "in_memory":
            raise ValueError("in_memory_cache is for mode: in_memory; set that mode or remove it")
        return self


class Mixing(Section):
    """Mixup, cutmix and label smoothing (timm), for classification tasks."""

    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)
    probability: float = Field(1.0, ge=0, le=1)
    switch: float = Field(0.5, ge=0, le=1)
    smoothing: float = Field(0.0, ge=0, lt=1)


class Optimizer(Section):
    """The optimizer, gradient clipping and frozen parameters."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(5e-4, gt=0)
    """Learning rate for a batch of ``lr_batch`` images; it grows with the batch."""
    lr_batch: int = Field(512, ge=1)
    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of AdamW."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    batch: int = Field(1024, ge=1, le=1_000_000)
    """Images per step, in all processes together."""
    accumulate: int = Field(1, ge=1)
    """Micro-batches per step in each process."""
    lr_scale: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Factors of the learning rate for parameters by name: ``{psg.*: 5}``. The last matching pattern decides."""
    clip: float | None = Field(None, gt=0)
    """Largest norm of the gradient; None does not clip."""
    clip_each: bool = False
    """Clip the gradient of each parameter by its own norm (DINO), not by the norm of all parameters together."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by name: ``blocks.0.*``; parameters of the task begin with ``task.``. A pattern
    that begins with ``!`` unfreezes parameters of earlier patterns: ``["*", "!head.*"]`` trains the head alone."""
    freeze_epochs: dict[str, PositiveInt] = Field(default_factory=dict)
    """Parameters that are not trained in the first epochs: ``{task.head.last.*: 1}``."""

    @model_validator(mode="after")
    def _own_keys(self) -> Optimizer:
        _refuse_foreign(self, {"adamw": ("betas", "eps"), "sgd": ("momentum",)})
        if self.clip_each and self.clip is None:
            raise ValueError("clip_each needs a norm; set clip, or remove clip_each")
        return self


class Schedule(Section):
    """Learning rate and weight decay over time: warm-up, decay, then a cooldown at the minimum."""

    name: Literal["cosine", "poly"] = "cosine"
    by: Literal["epoch", "step"] = "epoch"
    """Whether the values change after every epoch or after every step."""
    epochs: int = Field(300, ge=1, le=1_000_000)
    cooldown: int = Field(10, ge=0, le=1_000_000)
    warmup: int = Field(5, ge=0, le=1_000_000)
    """Number of warm-up epochs; half of the epochs if the whole run would be warm-up."""
    warmup_prefix: bool = False
    """Begin the decay after the warm-up (DINO); otherwise it starts with the first epoch, under the warm-up (DeiT)."""
    warmup_lr: float = Field(1e-6, ge=0)
    min_lr: float = Field(1e-5, ge=0)
    power: float = Field(0.9, gt=0)
    """Exponent of the poly schedule."""
    weight_decay_end: float | None = Field(None, ge=0)
    """The weight decay follows a cosine from ``optimizer.weight_decay`` to this value; None keeps it constant."""

    @model_validator(mode="after")
    def _own_keys(self) -> Schedule:
        _refuse_foreign(self, {"poly": ("power",)})
        if self.warmup_prefix and self.warmup >= self.epochs:
            raise ValueError(f"{self.warmup} warm-up epochs leave nothing of {self.epochs} to decay in; shorten it")
        return self


class DistillationOptions(Section):
    """Options of the task ``distillation``: a frozen teacher."""

    teacher: str | tuple[str, ...] = Field(min_length=1)
    """The name of a pretrained timm model, a model folder, or efficientnet-lite2. Several teachers predict the mean of
    their probabilities."""
    kind: Literal["hard", "soft"] = "hard"
    """Learn the teacher's label, as in the paper, or its probabilities."""
    weight: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the loss; the labels have 1 - weight."""
    resolution: _Side | None = None
    """Resolution of the teacher's images; None uses its own."""
    temperature: float = Field(1.0, gt=0)
    """Soft: divides the logits of teacher and student."""
    classes: Literal["data", "teacher"] = "data"
    """Soft: classes of the head in training. With ``teacher``, the saved model keeps only the data's classes."""
    map_weight: float = Field(0.0, ge=0)
    """Soft: weight of the first teacher's map, which the patch tokens learn."""

    @property
    def teachers(self) -> tuple[str, ...]:
        """The teachers' names."""
        return (self.teacher,) if isinstance(self.teacher, str) else self.teacher

    @model_validator(mode="after")
    def _soft_alone(self) -> DistillationOptions:
        changed = _changed(self, ("temperature", "classes", "map_weight"))
        if self.kind == "hard" and changed:
            raise ValueError(f"{' and '.join(changed)} are for soft distillation; add kind: soft or remove them")
        return self


class RunOptions(Section):
    """How the run is executed. Only precision and patience change what is learned."""

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """``tf32``: float32 whose matrix products round their inputs to 10 bits, on a GPU. The paper's fp32 is this."""
    compile: bool | Literal["blocks"] = False
    """Compile the whole model, or one block for all blocks, which takes seconds; the teacher is compiled too."""
    cuda_graphs: bool = False
    """Record the rounds and replay them as one CUDA graph; small models are limited by the host otherwise."""
    grad_checkpointing: bool = False
    log_every: int = Field(50, ge=1)
    """Log every N steps."""
    evaluate_every: int = Field(1, ge=1)
    """Evaluate every N epochs."""
    patience: int | None = Field(None, ge=1)
    """Stop after this number of evaluations in a row without a better one; None trains all epochs."""
    save_every: int = Field(1, ge=1)
    """Write a checkpoint every N epochs."""
    save_minutes: float = Field(15, gt=0)
    """Write a checkpoint at least every N minutes, also within an epoch."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep."""
    wandb: str | None = Field(None, min_length=1)
    """Project of Weights & Biases that gets the log too; None logs to the run's folder only."""


class Recipe(Section):
    """A training run."""

    task: str = "supervised"
    """The method: supervised, distillation, segmentation, dino, subnetworks, dynabert, or your own,
    ``my_module:MyTask``."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """Options of segmentation, dino, subnetworks, dynabert or your own task; the task's class validates them."""
    model: Model
    data: Data = Data()
    augment: Augmentation = Augmentation()
    mixing: Mixing = Mixing()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    distillation: DistillationOptions | None = None
    ema: float = Field(0.99996, ge=0, lt=1)
    """Decay per step of the moving average of the weights."""
    ema_warmup: bool = False
    """Increase the decay from 0 to ``ema``, so that the average of a short run does not keep the initial weights."""
    seed: int = Field(42, ge=0)
    run: RunOptions = RunOptions()

    @model_validator(mode="before")
    @classmethod
    def _default_task(cls, values: Any) -> Any:
        """Recipes written before ``task`` existed name their method by the section ``distillation``."""
        if isinstance(values, Mapping) and values.get("task") is None:
            return {**values, "task": "supervised" if values.get("distillation") is None else "distillation"}
        return values

    @field_validator("task")
    @classmethod
    def _known_task(cls, name: str) -> str:
        check_task(name)
        return name

    @model_validator(mode="after")
    def _check_sections(self) -> Recipe:
        if self.data.decode == "gpu" and self.task in ("dino", "segmentation"):
            raise ValueError(f"the loader of the task {self.task} decodes on the CPU; remove data.decode")
        wide = self.distillation is not None and self.distillation.classes == "teacher"
        if wide and self.model.num_classes is not None:
            raise ValueError("with distillation.classes=teacher the head has the teacher's; remove model.num_classes")
        return self

    @property
    def epochs(self) -> int:
        """Number of epochs, with cooldown."""
        return self.schedule.epochs + self.schedule.cooldown

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_recipe(source: str, overrides: Sequence[str] = (), *, stored: bool = False) -> Recipe:
    """Load a bundled recipe by name, or a file by path. ``overrides`` are ``a.b=value`` with a YAML value.

    ``stored`` is that of ``make_recipe``.
    """
    path = find_file(_RENAMED.get(source, source), bundled_recipes(), "recipe")
    values = read_mapping(path, "recipe", "model: and schedule:")
    for override in overrides:
        _override(values, override)
    return make_recipe(values, origin=f"{path} with overrides" if overrides else str(path), stored=stored)


def make_recipe(values: Mapping[str, Any], *, origin: str, stored: bool = False) -> Recipe:
    """Validate a recipe. Errors name the key, and for an unknown key the nearest known key.

    ``stored``: a run wrote the recipe, with all keys. A key that is missing is newer than the run, and gets the value
    that all runs had before it.
    """
    if stored:
        values = {**values, **_before(values)}
    return parse(Recipe, values, origin=origin)


def as_began(recipe: Recipe, began: Recipe) -> Recipe:
    """The recipe of a run that goes on. ``_EARLIER`` keys that it does not set keep what the run began with."""
    changes = {}
    for name, keys in _EARLIER.items():
        section, before = getattr(recipe, name), getattr(began, name)
        kept = {key: getattr(before, key) for key in keys if key not in section.model_fields_set}
        changes[name] = section.model_copy(update=kept)
    return recipe.model_copy(update=changes)


def _before(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of a stored recipe that lack an ``_EARLIER`` key, with its earlier value."""
    sections = {name: stored[name] for name in _EARLIER if isinstance(stored.get(name), Mapping)}
    if not sections.get("augment", {}).get("erasing"):
        sections.pop("augment", None)  # nothing was erased, so there is no order
    return {name: {**_EARLIER[name], **section} for name, section in sections.items()}


def bundled_recipes() -> dict[str, Path]:
    """Names and paths of the bundled recipes."""
    return bundled_files("recipes")


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"a recipe value is changed by key=value, such as optimizer.batch=256, got {text!r}.")
    section = values
    for part in parts[:-1]:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    section[parts[-1]] = _parse_value(value)


def _parse_value(value: str) -> Any:
    try:
        parsed = parse_yaml(value)
    except ValueError as error:
        raise ValueError(f"{value!r:.60} is not a YAML value ({error}); write lists as [0.9, 0.999].") from error
    try:  # YAML 1.1 reads 1e-3 as text
        return float(parsed) if isinstance(parsed, str) else parsed
    except ValueError:
        return parsed
