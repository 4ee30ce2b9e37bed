"""When to stop."""

from progresvit.routing.calibration import threshold_for_budget, threshold_for_exit_share
from progresvit.routing.entropy import HIGHEST, full_entropy, top10_entropy
from progresvit.routing.frontier import (
    NEAR_LOSSLESS_DROP,
    PAPER_THRESHOLDS,
    TENTHS,
    OperatingPoint,
    frontier,
    near_lossless,
    operating_point,
)
from progresvit.routing.guarantee import (
    CertifiedThreshold,
    certified_threshold,
    certified_thresholds,
    needed_images,
)
from progresvit.routing.policy import Abstention, Policy, Routed, route_records
from progresvit.routing.router import Router, fit_router, load_router, save_router
from progresvit.routing.setting import Setting, SettingWarning, load_setting
from progresvit.routing.statistics import STATISTICS, logit_statistics

__all__ = [
    "HIGHEST",
    "NEAR_LOSSLESS_DROP",
    "PAPER_THRESHOLDS",
    "STATISTICS",
    "TENTHS",
    "Abstention",
    "CertifiedThreshold",
    "OperatingPoint",
    "Policy",
    "Routed",
    "Router",
    "Setting",
    "SettingWarning",
    "certified_threshold",
    "certified_thresholds",
    "fit_router",
    "frontier",
    "full_entropy",
    "load_router",
    "load_setting",
    "logit_statistics",
    "near_lossless",
    "needed_images",
    "operating_point",
    "route_records",
    "save_router",
    "threshold_for_budget",
    "threshold_for_exit_share",
    "top10_entropy",
]
