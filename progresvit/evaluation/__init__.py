"""Evaluation: one pass over the data gives records, from which everything else is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
    from progresvit.evaluation.iso_accuracy import equal_accuracy_table
    from progresvit.evaluation.ood import OODResult, auroc, fpr95, measure_ood
    from progresvit.evaluation.records import Header, Records, read_records, write_records
    from progresvit.evaluation.reliability import Reliability, fit_temperatures, reliabilities, reliability_bins
    from progresvit.evaluation.routing_tables import frontier_table, matched_table
    from progresvit.evaluation.run import DataSource, EvalOptions, evaluate
    from progresvit.evaluation.selective import RiskCoverage, risk_coverage, risk_coverage_curves
    from progresvit.evaluation.settings import (
        calibrate_budget,
        calibrate_exit_share,
        calibrate_guarantee,
        calibrate_near_lossless,
        measure_budgets,
        with_abstention,
        with_ood,
    )

__all__ = [
    "DataSource",
    "EvalOptions",
    "Header",
    "OODResult",
    "Records",
    "Reliability",
    "RiskCoverage",
    "auroc",
    "calibrate_budget",
    "calibrate_exit_share",
    "calibrate_guarantee",
    "calibrate_near_lossless",
    "equal_accuracy_table",
    "evaluate",
    "fit_temperatures",
    "fpr95",
    "frontier_table",
    "matched_table",
    "measure_budgets",
    "measure_ood",
    "read_records",
    "reliabilities",
    "reliability_bins",
    "risk_coverage",
    "risk_coverage_curves",
    "with_abstention",
    "with_ood",
    "write_records",
]

if not TYPE_CHECKING:  # type checkers see the names above and no others
    __getattr__, __dir__ = lazily(
        __name__,
        homes={
            "DataSource": "run",
            "EvalOptions": "run",
            "Header": "records",
            "OODResult": "ood",
            "Records": "records",
            "Reliability": "reliability",
            "RiskCoverage": "selective",
            "auroc": "ood",
            "calibrate_budget": "settings",
            "calibrate_exit_share": "settings",
            "calibrate_guarantee": "settings",
            "calibrate_near_lossless": "settings",
            "equal_accuracy_table": "iso_accuracy",
            "evaluate": "run",
            "fit_temperatures": "reliability",
            "fpr95": "ood",
            "frontier_table": "routing_tables",
            "matched_table": "routing_tables",
            "measure_budgets": "settings",
            "measure_ood": "ood",
            "read_records": "records",
            "reliabilities": "reliability",
            "reliability_bins": "reliability",
            "risk_coverage": "selective",
            "risk_coverage_curves": "selective",
            "with_abstention": "settings",
            "with_ood": "settings",
            "write_records": "records",
        },
    )
