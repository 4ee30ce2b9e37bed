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

    The default is for entropies, so an engine with a router does not use it.
    """
    if budget_gmacs is not None:
        if threshold is not None:
            raise ValueError("threshold and budget_gmacs both determine the compute; give one of them.")
        return budget_setting(source.folder, budget_gmacs)
    if isinstance(threshold, str | os.PathLike):
        return find_setting(threshold, source.folder)
    if threshold is None and use_default:
        threshold = source.threshold
    if threshold is None:
        raise ValueError(
            "an engine needs a threshold: a number such as 0.5 (0 runs every round), or a setting that progresvit "
            "calibrate wrote; settings/near-lossless.json in the model folder is the default."
        )
    return threshold


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
