"""The threshold of an engine: a number, a setting by name or file, or the default of the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from progresvit.engine.images import PathLike
from progresvit.routing.settings import Setting, SettingWarning, budget_setting, find_setting

if TYPE_CHECKING:
    from progresvit.engine.backends import ModelSource

ThresholdLike = float | Sequence[float] | Setting | PathLike


def find_threshold(
    threshold: ThresholdLike | None,
    source: ModelSource,
    *,
    budget_gmacs: float | None = None,
    use_default: bool = True,
) -> float | Sequence[float] | Setting:
    """The threshold that was asked for, by number, name, file or budget, or the default of the model.

    The default is for entropies, so an engine with a router does not use it. Without a default every round runs, with a
    warning. A setting of the model folder for other weights is refused here, where its file is known.
    """
    if budget_gmacs is not None:
        if threshold is not None:
            raise ValueError("threshold and budget_gmacs both determine the compute; give one of them.")
        return budget_setting(source.folder, budget_gmacs)
    if isinstance(threshold, str | os.PathLike):
        setting = find_setting(threshold, source.folder)
        setting.check_weights(source.weights_sha256, f"the setting {os.fspath(threshold)}")
        return setting
    if threshold is not None:
        return threshold
    if not use_default:
        raise ValueError(
            "an engine with a router needs a threshold: a number such as 0.5 (0 runs every round), or a setting that "
            "progresvit calibrate wrote for this router."
        )
    default = source.threshold
    if isinstance(default, Setting) and source.folder is not None:
        default.check_weights(source.weights_sha256, f"the default setting of {source.name}")
    if default is None and len(source.config.rounds) > 1:
        where = "this model" if source.folder is None else source.folder
        warnings.warn(
            f"every round runs, because {where} has no default setting. To exit early, run progresvit evaluate and "
            "progresvit calibrate, which writes settings/near-lossless.json into the model folder, or pass a "
            "threshold; pass threshold=0 to run every round without this note.",
            SettingWarning,
            stacklevel=3,  # the caller of the constructor
        )
    return 0.0 if default is None else default


def check_setting(
    setting: Setting,
    source: ModelSource,
    *,
    precision: str,
    preprocessing_sha256: str | None = None,
    router_sha256: str | None = None,
) -> None:
    """Refuse a setting for another model or router, and warn if it was calibrated under other conditions.

    Args:
        setting: The setting.
        source: The model.
        precision: The precision of the engine.
        preprocessing_sha256: By default the preprocessing of the source.
        router_sha256: The learned router; None if the threshold is compared with entropies.
    """
    setting.check_use(len(source.config.rounds), router_sha256)
    setting.check_weights(source.weights_sha256)
    caveat = setting.caveat(
        preprocessing_sha256=preprocessing_sha256 or source.preprocessing_sha256,
        precision=precision,
        backend=source.graph_backend,
        graphs_sha256=source.graphs_sha256,
    )
    if caveat is not None:
        warnings.warn(caveat, SettingWarning, stacklevel=3)  # the caller of the constructor
