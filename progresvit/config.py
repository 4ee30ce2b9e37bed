"""Model configs: rounds, backbone and preprocessing, as JSON in a model folder. No torch.

``BaseConfig`` holds what every kind of model has; ``ModelConfig`` is the config of ProgResViT.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from progresvit.io.parse import Section, did_you_mean, explain_all, parse_json

HEAD_WIDTH = 64
"""Channels per attention head. Every width in this library is a multiple of it."""

MLP_RATIO = 4
"""Hidden channels of a block's MLP per channel of its width."""

PSG_METADATA = 5
"""Numbers that describe the current stage to PSG (Progress-Conditioned Soft Gating)."""

PSG_WIDTH = 128
"""Width of PSG's encoder and of the hidden layer of each of its gates."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

ModelTask = Literal["classification", "segmentation"]
"""Whether the head predicts one class for the image, or one for each patch."""
Task = ModelTask  # its former name; training has a Task of its own

ARCHITECTURE = "progresvit"
"""The name under which timm's loader builds a folder of ours (see progresvit.interop.timm_registry)."""


def _finite_number(value: Any) -> Any:
    """An int stays an int: the hash of the preprocessing depends on how a number is written."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


Number = Annotated[float, PlainValidator(_finite_number)]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]

MAX_DEPTH, MAX_HEADS, MAX_SIDE = 512, 256, 4096
MAX_ROUNDS, MAX_TOKENS, MAX_PARAMETERS = 64, 65_536, 10_000_000_000
"""Limits of what a config may ask for, far above any model of the field: larger numbers are mistakes or attacks."""
Depth = Annotated[int, Field(strict=True, ge=1, le=MAX_DEPTH)]
Heads = Annotated[int, Field(strict=True, ge=1, le=MAX_HEADS)]
Side = Annotated[int, Field(strict=True, ge=1, le=MAX_SIDE)]


class _Checked(Section):
    """A section whose constructor raises a plain ``ValueError`` with one line for all problems."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(explain_all(error, type(self))) from None


class BaseRound(_Checked):
    """One round of any model. Kinds of models add what else sets their rounds apart."""

    resolution: Side
    """Side in pixels of the image that the round sees."""


class BaseConfig(_Checked):
    """Fields that every kind of model has: its rounds, its preprocessing and its classes.

    A kind of model extends it with fields of its own, its own type of rounds, and its name as the default of ``kind``:
    ``kind: Literal["my_kind"] = "my_kind"``. See :mod:`progresvit.model.registry`.
    """

    kind: str
    """Name of the model class that builds the network (see progresvit.model.registry)."""
    rounds: tuple[BaseRound, ...]
    """First to last."""
    in_channels: Count = 3
    num_classes: CountOrZero = 1000
    """0 builds no head: a round's logits are then its features."""
    task: ModelTask = "classification"
    """``segmentation``: the head is Segmenter's linear decoder, which classifies every patch; left out of the JSON of a
    classification model."""
    input_resolution: Side | None = None
    """Side of the image that preprocessing gives and every round is resized from; None becomes the highest of the
    rounds. The authors' distilled models take 384 pixels even where their rounds end at 240."""
    mean: tuple[Number, ...] = IMAGENET_MEAN
    """Per-channel mean that preprocessing subtracts, for pixels in 0..1."""
    std: tuple[Number, ...] = IMAGENET_STD
    """Per-channel deviation that preprocessing divides by."""
    crop: Number = 0.9
    """Share of the resized image's side that the evaluation crop keeps."""
    class_ids: tuple[str, ...] | None = None
    """Folder name of each class in index order."""
    labels: tuple[str, ...] | None = None
    """Human-readable name of each class in index order."""

    tasks: ClassVar[tuple[ModelTask, ...]] = ("classification",)
    """Tasks that the kind of model can be built for."""
    routable: ClassVar[bool] = True
    """Whether an image may exit after any round. False if the rounds are alternatives, one of which is chosen before
    inference (HydraViT's widths): GMACs then count each round alone, and there is no routing."""
    resolved_from_rounds: ClassVar[tuple[str, ...]] = ("input_resolution",)
    """Fields whose default follows from the rounds."""
    optional_keys: ClassVar[frozenset[str]] = frozenset({"kind", "task", "class_ids", "labels"})
    """Keys that config.json may lack; any other missing key is an error."""
    ignored_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of config.json that :meth:`foreign_keys` writes."""

    @property
    def resolution(self) -> int:
        """The highest resolution of the rounds, and so the smallest image that a model takes."""
        return max(round_.resolution for round_ in self.rounds)

    @property
    def input_side(self) -> int:
        """Side of the image that preprocessing gives."""
        assert self.input_resolution is not None, "resolved on creation"
        return self.input_resolution

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; with new rounds, ``resolved_from_rounds`` follow from them unless given."""
        if "rounds" in changes:
            changes = {**dict.fromkeys(self.resolved_from_rounds), **changes}
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the inverse of :meth:`from_dict`."""
        values: dict[str, Any] = json.loads(self.to_json())  # keeps 1 and 1.0 apart, unlike pydantic's JSON mode
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` wrote. All keys are required except ``optional_keys``."""
        own = {key: value for key, value in values.items() if key not in cls.ignored_keys}
        missing = [key for key in cls.model_fields if key not in own and key not in cls.optional_keys]
        if missing:
            raise ValueError(
                f"the model config lacks {', '.join(missing)}; "
                "progresvit.save writes every key, so save the model again or add what is missing."
            )
        return cls(**own)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(parse_object(text))

    def foreign_keys(self) -> dict[str, Any]:
        """Keys of config.json for other libraries. Reading it skips ``ignored_keys``."""
        return {}

    @model_serializer(mode="wrap")
    def _without_default_task(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The config of a classification model stays as it was before segmentation existed."""
        return {key: value for key, value in write(self).items() if key != "task" or value != "classification"}

    @model_validator(mode="before")
    @classmethod
    def _limit_rounds(cls, values: Any) -> Any:
        """Before they are read, one by one."""
        rounds = values.get("rounds") if isinstance(values, Mapping) else None
        if isinstance(rounds, Sequence) and len(rounds) > MAX_ROUNDS:
            raise ValueError(f"rounds: {len(rounds)} rounds; a model has at most {MAX_ROUNDS}.")
        return values

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        if self.task not in self.tasks:
            raise ValueError(
                f"a model of kind {self.kind} cannot be built for {self.task}; use another kind, such as progresvit or "
                "thinkingvit."
            )
        if self.task == "segmentation" and not self.num_classes:
            raise ValueError("a segmentation model needs classes; give num_classes of 1 or more.")
        if not self.rounds:
            raise ValueError("a model needs at least one round, such as Round(resolution=224, heads=6).")
        if self.input_resolution is None:
            object.__setattr__(self, "input_resolution", self.resolution)
        if self.input_side < self.resolution:
            raise ValueError(
                f"input_resolution {self.input_side} is below the {self.resolution} of the rounds; "
                f"give at least {self.resolution}, or null."
            )
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.in_channels:
                raise ValueError(
                    f"{name} needs {self.in_channels} numbers, one per input channel, not {getattr(self, name)!r}."
                )
        if not all(value > 0 for value in self.std):
            raise ValueError(f"every value of std must be above 0, not {self.std!r}.")
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop is the share of the side to keep, above 0 and at most 1, not {self.crop!r}.")
        for name in ("class_ids", "labels"):
            names = getattr(self, name)
            if names is not None and len(names) != self.num_classes:
                raise ValueError(f"{len(names)} {name} for {self.num_classes} classes; give one per class.")
        return self


class Round(BaseRound):
    """One pass over the backbone: how much of it runs, and on what image."""

    resolution: Side
    """Image side in pixels, a multiple of the patch size."""
    heads: Heads
    """Leading attention heads; the active width is heads * 64."""
    merge: CountOrZero = 0
    """Patch tokens merged in each block of the round (ToMe's r); left out of the JSON if it is 0."""

    @property
    def width(self) -> int:
        """Active channels, d in the paper."""
        return self.heads * HEAD_WIDTH

    @model_serializer(mode="wrap")
    def _without_zero(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The config of a model that does not merge stays as it was before merging existed."""
        return {key: value for key, value in write(self).items() if key != "merge" or value}


class BackboneConfig(BaseConfig):
    """Base of the configs of ProgResViT and the baselines: rounds of one ViT backbone.

    A kind of model names its type of rounds and sets ``kind``.
    """

    heads: Heads
    """Attention heads of the whole backbone: 3 is Ti, 6 is S, 12 is B."""
    depth: Depth = 12
    """Transformer blocks of the whole backbone."""
    patch_size: Side = 16
    position_resolution: Side | None = None
    """Resolution whose grid the position embedding is stored for; None becomes the highest of the rounds."""
    layer_scale: Number | None = None
    """Start value of the backbone's LayerScale; None omits LayerScale."""

    tasks: ClassVar[tuple[ModelTask, ...]] = ("classification", "segmentation")
    resolved_from_rounds: ClassVar[tuple[str, ...]] = ("position_resolution", "input_resolution")
    can_merge: ClassVar[bool] = False
    """Whether the model merges tokens (``Round.merge``)."""

    @property
    def width(self) -> int:
        """Channels of the whole backbone."""
        return self.heads * HEAD_WIDTH

    @property
    def stored_grid(self) -> int:
        """Side of the stored position grid, in patches."""
        assert self.position_resolution is not None, "resolved on creation"
        return self.position_resolution // self.patch_size

    def grid(self, round_: BaseRound) -> int:
        """Side of a round's patch grid."""
        return round_.resolution // self.patch_size

    @model_validator(mode="after")
    def _check_backbone(self) -> Self:
        if self.position_resolution is None:
            object.__setattr__(self, "position_resolution", self.resolution)
        patch = self.patch_size
        for resolution in (*(round_.resolution for round_ in self.rounds), self.position_resolution):
            assert resolution is not None
            if resolution % patch:
                below = resolution // patch * patch
                nearest = f"the nearest are {below} and {below + patch}" if below else f"the nearest is {patch}"
                raise ValueError(f"resolution {resolution} is not a multiple of patch size {patch}; {nearest}.")
        for number, round_ in enumerate(self.rounds, start=1):
            if not isinstance(round_, Round):
                continue
            if round_.heads > self.heads:
                raise ValueError(
                    f"round {number} asks for {round_.heads} heads but the model has {self.heads}; "
                    f"use at most {self.heads} or build a model with heads={round_.heads}."
                )
            if round_.merge and not self.can_merge:
                raise ValueError(
                    f"a model of kind {self.kind} does not merge tokens; remove merge from round {number}."
                )
            patches = self.grid(round_) ** 2
            if patches > MAX_TOKENS:
                raise ValueError(
                    f"round {number} has {patches} patch tokens; at most {MAX_TOKENS} are allowed, so lower its "
                    "resolution or raise patch_size."
                )
            largest = patches // (self.depth + 1)  # so that the last block, which has the fewest, can merge them too
            if round_.merge > largest:
                raise ValueError(
                    f"round {number} has {patches} patch tokens, and each of {self.depth} blocks can merge at most "
                    f"half of those left, so it cannot merge {round_.merge} in each; set merge to {largest} or less."
                )
        inputs = self.stored_grid**2 + self.in_channels * patch**2 + self.num_classes * len(self.rounds)
        parameters = 12 * self.depth * self.width**2 + inputs * self.width
        if parameters > MAX_PARAMETERS:
            raise ValueError(
                f"the model would have {parameters:.2g} parameters; at most {MAX_PARAMETERS:.2g} are allowed, so lower "
                "heads or depth, or position_resolution or num_classes."
            )
        if self.layer_scale is not None and self.layer_scale <= 0:
            raise ValueError(
                f"layer_scale is a start value above 0 (DeiT-III uses 1e-6) or null for none, not {self.layer_scale!r}."
            )
        return self


class ModelConfig(BackboneConfig):
    """Everything needed to build a ProgResViT and to preprocess its images; validated on creation."""

    kind: Literal["progresvit"] = "progresvit"
    rounds: tuple[Round, ...]
    """First to last. Neither resolution nor heads may shrink on the way."""
    psg: Literal[True, False, "static"] = True
    """Progress-Conditioned Soft Gating on or off; ``static`` gates see the same metadata in every round, so they are
    learned scales that do not depend on the round (the control of the construction study)."""

    can_merge: ClassVar[bool] = True
    ignored_keys: ClassVar[frozenset[str]] = frozenset({"architecture", "pretrained_cfg"})

    def with_merge(self, merge: Sequence[int]) -> Self:
        """A copy that merges this many tokens in each block of each round: ``with_merge([0, 8])``."""
        if len(merge) != len(self.rounds):
            raise ValueError(
                f"{len(merge)} numbers of merged tokens for {len(self.rounds)} rounds; give one per round."
            )
        rounds = tuple(
            Round(resolution=round_.resolution, heads=round_.heads, merge=r) for round_, r in zip(self.rounds, merge)
        )
        sides = {name: getattr(self, name) for name in self.resolved_from_rounds}
        return self.replace(rounds=rounds, **sides)

    def foreign_keys(self) -> dict[str, Any]:
        """Keys that timm's loader reads; it builds classification models only."""
        if self.task != "classification":
            return {}
        return {"architecture": ARCHITECTURE, "pretrained_cfg": self.timm_pretrained_cfg()}

    def timm_pretrained_cfg(self) -> dict[str, Any]:
        """The same model as timm describes it, for its loader and its data pipeline."""
        return {
            "num_classes": self.num_classes,
            "input_size": (self.in_channels, self.input_side, self.input_side),
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": self.crop,
            "crop_mode": "center",
            "mean": self.mean,
            "std": self.std,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }

    @model_validator(mode="after")
    def _check_rounds(self) -> Self:
        check_growing(self.rounds)
        return self


def check_growing(rounds: Sequence[Round]) -> None:
    """Refuse rounds that become narrower or coarser on the way."""
    for number, (previous, round_) in enumerate(pairwise(rounds), start=2):
        if round_.heads < previous.heads:
            raise ValueError(
                f"round {number} is narrower than the one before ({round_.heads} after {previous.heads} heads); "
                "order the rounds from narrow to wide."
            )
        if round_.resolution < previous.resolution:
            raise ValueError(
                f"round {number} is coarser than the one before "
                f"({round_.resolution} after {previous.resolution} pixels); order the rounds from coarse to fine."
            )


def check_one_resolution(rounds: Sequence[BaseRound]) -> None:
    """Refuse rounds that see the image at different resolutions."""
    resolutions = sorted({round_.resolution for round_ in rounds})
    if len(resolutions) > 1:
        raise ValueError(
            f"this kind of model sees every image at one resolution, not at {' and '.join(map(str, resolutions))}; "
            "give all rounds the same, or use the kind progresvit."
        )


def parse_object(text: str) -> dict[str, Any]:
    """Parse the text of a config.json, which must be an object."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"the model config is not JSON that can be read ({error}); save the model again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"a model config is a JSON object, not {values!r:.60}.")
    return values


def make_rounds(resolutions: Sequence[int], heads: Sequence[int]) -> tuple[Round, ...]:
    """Rounds from two lists of equal length: ``make_rounds([192, 240], [3, 6])``."""
    if len(resolutions) != len(heads):
        raise ValueError(f"{len(resolutions)} resolutions for {len(heads)} head counts; give one of each per round.")
    return tuple(Round(resolution=r, heads=h) for r, h in zip(resolutions, heads))


def plain_vit(*, resolution: int, heads: int, **fields: Any) -> ModelConfig:
    """A plain ViT as a one-round model without PSG: ``plain_vit(resolution=224, heads=6)`` is DeiT-S."""
    return ModelConfig(rounds=make_rounds([resolution], [heads]), heads=heads, psg=False, **fields)


PRESETS: Mapping[str, ModelConfig] = {
    "progresvit_small_192_240": ModelConfig(rounds=make_rounds([192, 240], [3, 6]), heads=6),
    "progresvit_small_160_240": ModelConfig(rounds=make_rounds([160, 240], [3, 6]), heads=6),
    "progresvit_small_160_384": ModelConfig(rounds=make_rounds([160, 384], [3, 6]), heads=6),
    "progresvit_small_128_192_240": ModelConfig(rounds=make_rounds([128, 192, 240], [2, 4, 6]), heads=6),
    "progresvit_tiny_160_224": ModelConfig(rounds=make_rounds([160, 224], [2, 3]), heads=3),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """A named config, with fields changed on request: ``preset("progresvit_small_192_240", num_classes=20)``."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {did_you_mean(name, PRESETS)}")
    return PRESETS[name].replace(**changes)


OFFICIAL_MODELS: Mapping[str, ModelConfig] = {
    f"NCPS/progresvit-deit-s-{resolutions}{kd}-imagenet1k": preset(
        f"progresvit_small_{resolutions.replace('-', '_')}",
        layer_scale=1e-6 if kd else None,
        input_resolution=384 if kd else None,
    )
    for resolutions in ("192-240", "160-384")
    for kd in ("", "-kd")
}
"""Hub ids of the authors' ImageNet models and their configs."""
