"""One pass over the data gives records; everything else is read from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
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
        measure_budgets,
        with_abstention,
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
    "measure_budgets",
    "read_records",
    "reliabilities",
    "reliability",
    "risk_coverage",
    "risk_coverage_curves",
    "with_abstention",
    "write_records",
]

if not TYPE_CHECKING:  # a checker shall see the names above and no others
    __getattr__, __dir__ = lazily(
        __name__,
        homes={
            "DataSource": "one_pass",
            "Header": "records",
            "HowToRun": "one_pass",
            "Records": "records",
            "Reliability": "trust",
            "RiskCoverage": "abstention",
            "calibrate_budget": "settings",
            "calibrate_exit_share": "settings",
            "calibrate_guarantee": "settings",
            "calibrate_near_lossless": "settings",
            "equal_accuracy_table": "hopeless",
            "evaluate": "one_pass",
            "fit_temperatures": "trust",
            "frontier_table": "routing_tables",
            "matched_table": "routing_tables",
            "measure_budgets": "settings",
            "read_records": "records",
            "reliabilities": "trust",
            "reliability": "trust",
            "risk_coverage": "abstention",
            "risk_coverage_curves": "abstention",
            "with_abstention": "settings",
            "write_records": "records",
        },
    )
