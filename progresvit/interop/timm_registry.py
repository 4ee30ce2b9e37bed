"""The presets in timm's registry, with the interface of timm's models.

``timm.create_model("progresvit_small_192_240")`` builds a preset, with any field of the config as a keyword;
``timm.create_model("local-dir:FOLDER", pretrained=True)`` and ``"hf-hub:ID"`` read what ``progresvit.save`` wrote. They
read the folders of the ProgResViT authors too, whose config.json names the same architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from progresvit.config import ARCHITECTURE, PRESETS, ModelConfig
from progresvit.interop.official import find_foreign, load_foreign_folder
from progresvit.interop.timm_config import read_arguments
from progresvit.io.model_folder import CONFIG_FILE, find_folder, is_foreign, read_config_values
from progresvit.model import ProgResViT, slicing
from progresvit.model.registry import read_config

_KEPT_ARGUMENTS = ("num_classes", "in_chans", "global_pool")
"""The ``model_args`` of an authors' folder that the model takes; its weights say the others too."""


class TimmProgResViT(ProgResViT):
    """ProgResViT with timm's interface: ``forward`` returns the last round's logits as one tensor."""

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        num_classes: int,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        global_pool: str = "token",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **fields: Any,
    ) -> None:
        in_chans = fields.pop("in_channels", in_chans)
        if "rounds" in fields and _sides(img_size) == {cfg.input_side}:
            img_size = None  # timm passed the preset's size
        if num_classes != cfg.num_classes:
            fields = {"class_ids": None, "labels": None, **fields}
        if in_chans != cfg.in_channels:
            fields = {"mean": _spread(cfg.mean, in_chans), "std": _spread(cfg.std, in_chans), **fields}
        config = cfg.replace(num_classes=num_classes, in_channels=in_chans, **fields)
        _check_pool(global_pool)
        if _sides(img_size) - {config.input_side}:
            raise ValueError(
                f"img_size={img_size} does not fit a model that takes {config.input_side}; "
                "the rounds set the resolutions, so pass rounds=make_rounds([...], [...]) instead."
            )
        super().__init__(config, drop_path=drop_path_rate)
        self.global_pool = global_pool
        self.pretrained_cfg: dict[str, Any] = {}
        self.num_prefix_tokens = 1
        self.num_features = self.head_hidden_size = self.embed_dim = config.rounds[-1].width
        self.head_drop = nn.Dropout(drop_rate)

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens of the last round after the final norm, class token first: (B, N, d)."""
        return super().forward(x)[-1].tokens

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of the class token, or the token alone: (B, N, d) -> (B, K) or (B, d); of all tokens unpooled."""
        x = self.head_drop(x[:, 0] if self.global_pool == "token" else x)
        return x if pre_logits or not isinstance(self.head, nn.Linear) else slicing.linear(x, self.head)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Logits of the last round: (B, K)."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head on the class token (``token``), or on every token (the empty string)."""
        if global_pool is not None:
            _check_pool(global_pool)
            self.global_pool = global_pool
        super().reset_classifier(num_classes)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise learning-rate decay; projectors and fusion gates belong to the last group."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^(?:psg\.)?blocks\.(\d+)", None), (r"^norm|^projectors|^psg\.(?:encoder|fusions)", (99999,))],
        }


def _stored_config(kwargs: dict[str, Any]) -> ModelConfig:
    """The config of the folder or hub repository that timm loads.

    From a folder of the authors, timm gets config and weights that are converted, and not what the folder says.
    """
    cfg = kwargs.get("pretrained_cfg") or {}
    source = cfg.get("source") if isinstance(cfg, dict) else None
    if source == "local-dir":
        folder = Path(cfg["file"])
    elif source == "hf-hub":
        repo_id, _, revision = cfg["hf_hub_id"].partition("@")
        cache = kwargs.get("cache_dir")
        folder = find_folder(repo_id, revision=revision or None, files=(CONFIG_FILE,), cache_dir=cache)
    else:
        raise ValueError(
            f"{ARCHITECTURE!r} is the name of a saved model; create it with 'local-dir:FOLDER' or 'hf-hub:ID', "
            f"or name a preset: {', '.join(PRESETS)}."
        )
    if not is_foreign(folder):
        config = read_config(folder)
        assert isinstance(config, ModelConfig), "timm comes here only for folders that name this architecture"
        return config
    if source == "hf-hub":
        folder = find_foreign(repo_id, revision=revision or None, cache_dir=cache)
    model = load_foreign_folder(folder)
    assert isinstance(model, ProgResViT), "timm comes here only for folders that name this architecture"
    for key, value in read_arguments(folder, read_config_values(folder)).items():
        if key not in _KEPT_ARGUMENTS and kwargs.get(key) == value:
            del kwargs[key]
    kwargs.pop("pretrained_model_args", None)  # where timm keeps them
    kwargs["pretrained_cfg"] = {**model.config.timm_pretrained_cfg(), "state_dict": model.state_dict()}
    return model.config


def _check_pool(global_pool: str) -> None:
    if global_pool not in ("token", ""):
        raise ValueError(f"global_pool={global_pool!r} is not supported; the head reads the class token ('token').")


def _sides(img_size: int | tuple[int, int] | None) -> set[int]:
    return {img_size} if isinstance(img_size, int) else set(img_size or ())


def _spread(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Normalisation for another number of channels: each gets the average of the colours."""
    return (sum(values) / len(values),) * channels


def _entry_point(variant: str) -> Callable[..., ProgResViT]:
    """The function that timm calls to build a preset, or a saved model."""

    def create(pretrained: bool = False, **kwargs: Any) -> ProgResViT:
        if kwargs.pop("features_only", False):
            raise ValueError("features_only is not supported; forward_features gives the tokens of the last round.")
        config = PRESETS.get(variant) or _stored_config(kwargs)
        model: TimmProgResViT = build_model_with_cfg(TimmProgResViT, variant, pretrained, model_cfg=config, **kwargs)
        model.pretrained_cfg.pop("state_dict", None)
        cfg = model.config.timm_pretrained_cfg()
        model.pretrained_cfg.update({key: cfg[key] for key in ("input_size", "mean", "std", "crop_pct")})
        return model

    create.__name__ = create.__qualname__ = variant
    create.__doc__ = f"{variant} for timm."
    return create


default_cfgs = generate_default_cfgs({name: config.timm_pretrained_cfg() for name, config in PRESETS.items()})

for _variant in (*PRESETS, ARCHITECTURE):
    register_model(_entry_point(_variant))
