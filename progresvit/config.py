"""What a model is: its rounds, its backbone, its preprocessing. Plain data, JSON in and out, no torch."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEAD_WIDTH = 64
"""Channels per attention head. Every width in this library is a multiple of it."""

MLP_RATIO = 4
"""Hidden channels of a block's MLP per channel of its width."""

PSG_METADATA = 5
"""Numbers that tell PSG (Progress-Conditioned Soft Gating) where inference stands."""

PSG_WIDTH = 128
"""Width of PSG's encoder and of the hidden layer of each of its gates."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

TIMM_KEYS = ("architecture", "pretrained_cfg")
"""Keys of config.json that belong to timm. We write them for timm's loader and pass over them ourselves."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One pass over the backbone: how much of it runs, and on what image."""

    resolution: int
    """Image side in pixels, a multiple of the patch size."""
    heads: int
    """Leading attention heads; the active width is heads * 64."""

    def __post_init__(self) -> None:
        _require_int("resolution", self.resolution, minimum=1)
        _require_int("heads", self.heads, minimum=1)

    @property
    def width(self) -> int:
        """Active channels, d in the paper."""
        return self.heads * HEAD_WIDTH


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything needed to build the network and to feed it; validated on creation."""

    rounds: tuple[Round, ...]
    """First to last. Neither resolution nor heads may shrink on the way."""
    heads: int
    """Attention heads of the whole backbone: 3 is Ti, 6 is S, 12 is B."""
    depth: int = 12
    """Transformer blocks; every round runs all of them."""
    patch_size: int = 16
    in_channels: int = 3
    num_classes: int = 1000
    """0 builds no head: a round's logits are then its class token."""
    position_resolution: int | None = None
    """Resolution whose grid the position embedding is stored for; None becomes the highest of the rounds."""
    input_resolution: int | None = None
    """Side of the image that preprocessing gives and every round is resized from; None becomes the highest of the
    rounds. The authors' distilled models see 384 pixels even where their rounds end at 240."""
    psg: bool = True
    """Progress-Conditioned Soft Gating on or off."""
    layer_scale: float | None = None
    """Start value of the backbone's LayerScale; None leaves LayerScale out."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Per-channel mean that preprocessing subtracts, for pixels in 0..1."""
    std: tuple[float, ...] = IMAGENET_STD
    """Per-channel deviation that preprocessing divides by."""
    crop: float = 0.9
    """Share of the resized image's side that the evaluation crop keeps."""
    class_ids: tuple[str, ...] | None = None
    """Folder name of each class in index order."""
    labels: tuple[str, ...] | None = None
    """Human-readable name of each class in index order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", _as_rounds(self.rounds))
        for name in ("mean", "std", "class_ids", "labels"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        for name, minimum in _INTEGER_FIELDS.items():
            _require_int(name, getattr(self, name), minimum=minimum)
        for name in ("position_resolution", "input_resolution"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.resolution)
        self._check_geometry()
        self._check_preprocessing()
        self._check_classes()

    @property
    def width(self) -> int:
        """Channels of the whole backbone."""
        return self.heads * HEAD_WIDTH

    @property
    def resolution(self) -> int:
        """The highest resolution of the rounds: the least that an image needs."""
        return max(round_.resolution for round_ in self.rounds)

    @property
    def input_side(self) -> int:
        """Side of the image that preprocessing gives."""
        assert self.input_resolution is not None, "resolved in __post_init__"
        return self.input_resolution

    @property
    def stored_grid(self) -> int:
        """Side of the stored position grid, in patches."""
        assert self.position_resolution is not None, "resolved in __post_init__"
        return self.position_resolution // self.patch_size

    def grid(self, round_: Round) -> int:
        """Side of a round's patch grid."""
        return round_.resolution // self.patch_size

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed; new rounds bring their own position grid and input unless given."""
        _refuse_unknown(changes, known=_FIELDS, what="ModelConfig")
        if "rounds" in changes:
            changes = {"position_resolution": None, "input_resolution": None, **changes}
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the inverse of :meth:`from_dict`."""
        return dataclasses.asdict(self, dict_factory=_json_types)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read what :meth:`to_dict` wrote. Every key must be there, except ``class_ids`` and ``labels``."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a model config is a JSON object, not {_describe(values)}.")
        own = {key: value for key, value in values.items() if key not in TIMM_KEYS}
        _refuse_unknown(own, known=_FIELDS, what="the model config")
        missing = [key for key in _FIELDS if key not in own and key not in ("class_ids", "labels")]
        if missing:
            raise ValueError(
                f"the model config lacks {', '.join(missing)}; "
                "progresvit.save writes every key, so save the model again or add what is missing."
            )
        return cls(**own)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        try:
            values = json.loads(text, object_pairs_hook=_each_key_once)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"the model config is not JSON ({error}); save the model again.") from error
        return cls.from_dict(values)

    def _check_geometry(self) -> None:
        assert self.position_resolution is not None
        for resolution in (*(round_.resolution for round_ in self.rounds), self.position_resolution):
            _require_patches(resolution, self.patch_size)
        for number, round_ in enumerate(self.rounds, start=1):
            if round_.heads > self.heads:
                raise ValueError(
                    f"round {number} asks for {round_.heads} heads but the model has {self.heads}; "
                    f"use at most {self.heads} or build a model with heads={round_.heads}."
                )
        for number, (previous, round_) in enumerate(zip(self.rounds, self.rounds[1:]), start=2):
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
        if not isinstance(self.psg, bool):
            raise ValueError(f"psg is true or false, not {_describe(self.psg)}.")
        if self.layer_scale is not None and not (_is_number(self.layer_scale) and self.layer_scale > 0):
            raise ValueError(
                f"layer_scale is a start value above 0 (DeiT-III uses 1e-6) or null for none, "
                f"not {_describe(self.layer_scale)}."
            )

    def _check_preprocessing(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != self.in_channels or not all(_is_number(value) for value in values):
                raise ValueError(f"{name} needs {self.in_channels} numbers, one per input channel, not {values!r}.")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"every value of std must be above 0, not {self.std!r}.")
        _require_int("input_resolution", self.input_resolution, minimum=1)
        if self.input_side < self.resolution:
            raise ValueError(
                f"input_resolution {self.input_side} is below the {self.resolution} that the rounds look at; "
                f"give at least {self.resolution}, or null."
            )
        if not (_is_number(self.crop) and 0 < self.crop <= 1):
            raise ValueError(f"crop is the share of the side to keep, above 0 and at most 1, not {self.crop!r}.")

    def _check_classes(self) -> None:
        for name in ("class_ids", "labels"):
            values = getattr(self, name)
            if values is None:
                continue
            if not all(isinstance(value, str) for value in values):
                raise ValueError(f"{name} are strings, one per class.")
            if len(values) != self.num_classes:
                raise ValueError(f"{len(values)} {name} for {self.num_classes} classes; give one per class.")


_FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
_LARGEST = 1_000_000
_INTEGER_FIELDS = {"heads": 1, "depth": 1, "patch_size": 1, "in_channels": 1, "num_classes": 0}


def make_rounds(resolutions: Sequence[int], heads: Sequence[int]) -> tuple[Round, ...]:
    """Rounds from two lists of equal length: ``make_rounds([192, 240], [3, 6])``."""
    if len(resolutions) != len(heads):
        raise ValueError(f"{len(resolutions)} resolutions for {len(heads)} head counts; give one of each per round.")
    return tuple(Round(resolution=r, heads=h) for r, h in zip(resolutions, heads))


def plain_vit(*, resolution: int, heads: int, **fields: Any) -> ModelConfig:
    """A plain ViT as a one-round model without PSG: ``plain_vit(resolution=224, heads=6)`` is DeiT-S."""
    return ModelConfig(rounds=make_rounds([resolution], [heads]), heads=heads, psg=False, **fields)


def _as_rounds(rounds: Any) -> tuple[Round, ...]:
    """Rounds from Rounds, or from the {"resolution", "heads"} objects that JSON holds."""
    made = []
    for number, round_ in enumerate(_as_tuple("rounds", rounds), start=1):
        if isinstance(round_, Mapping):
            if set(round_) != {"resolution", "heads"}:
                raise ValueError(f"round {number} needs exactly the keys resolution and heads, not {sorted(round_)}.")
            round_ = Round(**round_)
        if not isinstance(round_, Round):
            raise ValueError(f"round {number} is {_describe(round_)}; write Round(resolution=192, heads=3).")
        made.append(round_)
    if not made:
        raise ValueError("a model needs at least one round, such as Round(resolution=224, heads=6).")
    return tuple(made)


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is a list, not {_describe(values)}.")
    return tuple(values)


def _require_int(name: str, value: Any, *, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _LARGEST:
        raise ValueError(f"{name} must be a whole number from {minimum} to {_LARGEST:,}, not {_describe(value)}.")


def _require_patches(resolution: Any, patch_size: int) -> None:
    """A resolution is a positive multiple of the patch size."""
    _require_int("resolution", resolution, minimum=1)
    if resolution % patch_size:
        below = resolution // patch_size * patch_size
        nearest = f"the nearest are {below} and {below + patch_size}" if below else f"the nearest is {patch_size}"
        raise ValueError(f"resolution {resolution} is not a multiple of patch size {patch_size}; {nearest}.")


def _refuse_unknown(values: Mapping[str, Any], *, known: Sequence[str], what: str) -> None:
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known)}."
            raise ValueError(f"{what} has no key {key!r}; {hint}")


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"the model config has the key {key!r} twice; keep one.")
    return dict(pairs)


def _json_types(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _describe(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


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
        nearest = difflib.get_close_matches(str(name), PRESETS, n=2, cutoff=0.5)
        hint = f"the nearest are {' and '.join(nearest)}" if nearest else f"choose one of {', '.join(PRESETS)}"
        raise ValueError(f"unknown preset {name!r}; {hint}.")
    return PRESETS[name].replace(**changes)
