"""Evaluation: one pass over the data gives records, from which everything else is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
    from progresvit.evaluation.iso_accuracy import equal_accuracy_table
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
    )

__all__ = [
    "DataSource",
    "EvalOptions",
    "Header",
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
    "measure_budgets",
    "read_records",
    "reliabilities",
    "reliability_bins",
    "risk_coverage",
    "risk_coverage_curves",
    "with_abstention",
    "write_records",
]

if not TYPE_CHECKING:  # type checkers see the names above and no others
    __getattr__, __dir__ = lazily(
        __name__,
        homes={
            "DataSource": "run",
            "EvalOptions": "run",
            "Header": "records",
            "Records": "records",
            "Reliability": "reliability",
            "RiskCoverage": "selective",
            "calibrate_budget": "settings",
            "calibrate_exit_share": "settings",
            "calibrate_guarantee": "settings",
            "calibrate_near_lossless": "settings",
            "equal_accuracy_table": "iso_accuracy",
            "evaluate": "run",
            "fit_temperatures": "reliability",
            "frontier_table": "routing_tables",
            "matched_table": "routing_tables",
            "measure_budgets": "settings",
            "read_records": "records",
            "reliabilities": "reliability",
            "reliability_bins": "reliability",
            "risk_coverage": "selective",
            "risk_coverage_curves": "selective",
            "with_abstention": "settings",
            "write_records": "records",
        },
    )
