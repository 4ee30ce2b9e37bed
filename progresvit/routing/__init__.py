"""When to stop.

Importing this is light: what is about plain arrays needs no torch, which comes with the names that do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily
from progresvit.routing.frontier import (  # at once: the function has the name of its module
    NEAR_LOSSLESS_DROP,
    PAPER_THRESHOLDS,
    TENTHS,
    OperatingPoint,
    frontier,
    near_lossless,
    operating_point,
)

if TYPE_CHECKING:
    from progresvit.routing.arrays import HIGHEST
    from progresvit.routing.budgets import Budgets, load_budgets
    from progresvit.routing.calibrate import threshold_for_budget, threshold_for_exit_share
    from progresvit.routing.certify import CertifiedThreshold, certified_threshold, certified_thresholds, needed_images
    from progresvit.routing.decide import Abstention, Policy, Routed, route_records
    from progresvit.routing.named import find_setting, setting_names
    from progresvit.routing.router import Router, fit_router, load_router, save_router
    from progresvit.routing.scores import full_entropy, top10_entropy
    from progresvit.routing.settings import Setting, SettingWarning, load_setting
    from progresvit.routing.statistics import STATISTICS, logit_statistics

_HOME_OF = {
    "HIGHEST": "arrays",
    "Budgets": "budgets",
    "load_budgets": "budgets",
    "threshold_for_budget": "calibrate",
    "threshold_for_exit_share": "calibrate",
    "full_entropy": "scores",
    "top10_entropy": "scores",
    "CertifiedThreshold": "certify",
    "certified_threshold": "certify",
    "certified_thresholds": "certify",
    "needed_images": "certify",
    "find_setting": "named",
    "setting_names": "named",
    "Abstention": "decide",
    "Policy": "decide",
    "Routed": "decide",
    "route_records": "decide",
    "Router": "router",
    "fit_router": "router",
    "load_router": "router",
    "save_router": "router",
    "Setting": "settings",
    "SettingWarning": "settings",
    "load_setting": "settings",
    "STATISTICS": "statistics",
    "logit_statistics": "statistics",
}

__all__ = [
    "HIGHEST",
    "NEAR_LOSSLESS_DROP",
    "PAPER_THRESHOLDS",
    "STATISTICS",
    "TENTHS",
    "Abstention",
    "Budgets",
    "CertifiedThreshold",
    "OperatingPoint",
    "Policy",
    "Routed",
    "Router",
    "Setting",
    "SettingWarning",
    "certified_threshold",
    "certified_thresholds",
    "find_setting",
    "fit_router",
    "frontier",
    "full_entropy",
    "load_budgets",
    "load_router",
    "load_setting",
    "logit_statistics",
    "near_lossless",
    "needed_images",
    "operating_point",
    "route_records",
    "save_router",
    "setting_names",
    "threshold_for_budget",
    "threshold_for_exit_share",
    "top10_entropy",
]

if not TYPE_CHECKING:  # a checker shall see the names above and no others
    __getattr__, __dir__ = lazily(__name__, homes=_HOME_OF, more=__all__)
