"""When to exit: scores, the exit rule, thresholds, and learned routers.

Importing this needs no torch; it is imported with the names that need it.
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
    routed_sums,
)

if TYPE_CHECKING:
    from progresvit.routing.calibrate import threshold_for_budget, threshold_for_exit_share
    from progresvit.routing.certify import (
        CertifiedThreshold,
        certified_threshold,
        certified_thresholds,
        hoeffding_bentkus,
        needed_images,
    )
    from progresvit.routing.custom_router import CustomRouter, ExitScore, open_router
    from progresvit.routing.decide import Abstention, OODRule, Policy, Routed, route_records
    from progresvit.routing.per_round import PerRoundFrontier, cross_fitted_exits, per_round_frontier
    from progresvit.routing.router import Router, fit_router, load_router, save_router
    from progresvit.routing.scores import (
        HIGHEST,
        OOD_SCORES,
        STATISTICS,
        full_entropy,
        logit_statistics,
        ood_score,
        patch_entropy,
        top10_entropy,
        uncertain_entropy,
    )
    from progresvit.routing.settings import (
        Budgets,
        Setting,
        SettingWarning,
        find_setting,
        load_budgets,
        load_setting,
        setting_names,
    )

_HOME_OF = {
    "threshold_for_budget": "calibrate",
    "threshold_for_exit_share": "calibrate",
    "CertifiedThreshold": "certify",
    "certified_threshold": "certify",
    "certified_thresholds": "certify",
    "hoeffding_bentkus": "certify",
    "needed_images": "certify",
    "CustomRouter": "custom_router",
    "ExitScore": "custom_router",
    "open_router": "custom_router",
    "Abstention": "decide",
    "OODRule": "decide",
    "Policy": "decide",
    "Routed": "decide",
    "route_records": "decide",
    "PerRoundFrontier": "per_round",
    "cross_fitted_exits": "per_round",
    "per_round_frontier": "per_round",
    "Router": "router",
    "fit_router": "router",
    "load_router": "router",
    "save_router": "router",
    "HIGHEST": "scores",
    "OOD_SCORES": "scores",
    "STATISTICS": "scores",
    "full_entropy": "scores",
    "logit_statistics": "scores",
    "ood_score": "scores",
    "patch_entropy": "scores",
    "top10_entropy": "scores",
    "uncertain_entropy": "scores",
    "Budgets": "settings",
    "Setting": "settings",
    "SettingWarning": "settings",
    "find_setting": "settings",
    "load_budgets": "settings",
    "load_setting": "settings",
    "setting_names": "settings",
}

__all__ = [
    "HIGHEST",
    "NEAR_LOSSLESS_DROP",
    "OOD_SCORES",
    "PAPER_THRESHOLDS",
    "STATISTICS",
    "TENTHS",
    "Abstention",
    "Budgets",
    "CertifiedThreshold",
    "CustomRouter",
    "ExitScore",
    "OODRule",
    "OperatingPoint",
    "PerRoundFrontier",
    "Policy",
    "Routed",
    "Router",
    "Setting",
    "SettingWarning",
    "certified_threshold",
    "certified_thresholds",
    "cross_fitted_exits",
    "find_setting",
    "fit_router",
    "frontier",
    "full_entropy",
    "hoeffding_bentkus",
    "load_budgets",
    "load_router",
    "load_setting",
    "logit_statistics",
    "near_lossless",
    "needed_images",
    "ood_score",
    "open_router",
    "operating_point",
    "patch_entropy",
    "per_round_frontier",
    "route_records",
    "routed_sums",
    "save_router",
    "setting_names",
    "threshold_for_budget",
    "threshold_for_exit_share",
    "top10_entropy",
    "uncertain_entropy",
]

if not TYPE_CHECKING:  # a checker shall see the names above and no others
    __getattr__, __dir__ = lazily(__name__, homes=_HOME_OF, more=__all__)
