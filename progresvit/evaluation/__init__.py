"""One pass over the data gives records; everything else is read from them."""

import progresvit._torchvision  # noqa: F401  (ahead of timm)
from progresvit.evaluation.abstention import RiskCoverage, risk_coverage, risk_coverage_curves
from progresvit.evaluation.hopeless import equal_accuracy_table
from progresvit.evaluation.one_pass import DataSource, HowToRun, evaluate
from progresvit.evaluation.records import Header, Records, read_records, write_records
from progresvit.evaluation.routing_tables import frontier_table, matched_table
from progresvit.evaluation.settings import (
    calibrate_budget,
    calibrate_exit_share,
    calibrate_guarantee,
    calibrate_near_lossless,
)
from progresvit.evaluation.trust import Reliability, fit_temperatures, reliabilities, reliability

__all__ = [
    "DataSource",
    "Header",
    "HowToRun",
    "Records",
    "Reliability",
    "RiskCoverage",
    "calibrate_budget",
    "calibrate_exit_share",
    "calibrate_guarantee",
    "calibrate_near_lossless",
    "equal_accuracy_table",
    "evaluate",
    "fit_temperatures",
    "frontier_table",
    "matched_table",
    "read_records",
    "reliabilities",
    "reliability",
    "risk_coverage",
    "risk_coverage_curves",
    "write_records",
]
