"""Evaluation: one pass over the data gives records, from which everything else is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from progresvit._lazy import lazily

if TYPE_CHECKING:
    from progresvit.evaluation.iso_accuracy import equal_accuracy_table
    from progresvit.evaluation.knn_run import evaluate_knn
    from progresvit.evaluation.linear_probe import LinearProbe, train_linear_probe
    from progresvit.evaluation.linear_run import evaluate_linear
    from progresvit.evaluation.ood import OODResult, auroc, fpr95, measure_ood
    from progresvit.evaluation.records import Header, Records, read_records, write_records
    from progresvit.evaluation.reliability import Reliability, fit_temperatures, reliabilities, reliability_bins
    from progresvit.evaluation.routing_tables import frontier_table, matched_table
    from progresvit.evaluation.run import DataSource, EvalOptions, evaluate
    from progresvit.evaluation.segmentation_records import (
        SegmentationRecords,
        is_segmentation,
        read_segmentation_records,
        write_segmentation_records,
    )
    from progresvit.evaluation.segmentation_run import evaluate_segmentation
    from progresvit.evaluation.segmentation_settings import (
        calibrate_segmentation_budget,
        calibrate_segmentation_exit_share,
        calibrate_segmentation_guarantee,
        calibrate_segmentation_near_lossless,
    )
    from progresvit.evaluation.segmentation_tables import class_table, segmentation_frontier_table
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
    "LinearProbe",
    "OODResult",
    "Records",
    "Reliability",
    "RiskCoverage",
    "SegmentationRecords",
    "auroc",
    "calibrate_budget",
    "calibrate_exit_share",
    "calibrate_guarantee",
    "calibrate_near_lossless",
    "calibrate_segmentation_budget",
    "calibrate_segmentation_exit_share",
    "calibrate_segmentation_guarantee",
    "calibrate_segmentation_near_lossless",
    "class_table",
    "equal_accuracy_table",
    "evaluate",
    "evaluate_knn",
    "evaluate_linear",
    "evaluate_segmentation",
    "fit_temperatures",
    "fpr95",
    "frontier_table",
    "is_segmentation",
    "matched_table",
    "measure_budgets",
    "measure_ood",
    "read_records",
    "read_segmentation_records",
    "reliabilities",
    "reliability_bins",
    "risk_coverage",
    "risk_coverage_curves",
    "segmentation_frontier_table",
    "train_linear_probe",
    "with_abstention",
    "with_ood",
    "write_records",
    "write_segmentation_records",
]

if not TYPE_CHECKING:  # type checkers see the names above and no others
    __getattr__, __dir__ = lazily(
        __name__,
        homes={
            "DataSource": "run",
            "EvalOptions": "run",
            "Header": "records",
            "LinearProbe": "linear_probe",
            "OODResult": "ood",
            "Records": "records",
            "Reliability": "reliability",
            "RiskCoverage": "selective",
            "SegmentationRecords": "segmentation_records",
            "auroc": "ood",
            "calibrate_budget": "settings",
            "calibrate_exit_share": "settings",
            "calibrate_guarantee": "settings",
            "calibrate_near_lossless": "settings",
            "calibrate_segmentation_budget": "segmentation_settings",
            "calibrate_segmentation_exit_share": "segmentation_settings",
            "calibrate_segmentation_guarantee": "segmentation_settings",
            "calibrate_segmentation_near_lossless": "segmentation_settings",
            "class_table": "segmentation_tables",
            "equal_accuracy_table": "iso_accuracy",
            "evaluate": "run",
            "evaluate_knn": "knn_run",
            "evaluate_linear": "linear_run",
            "evaluate_segmentation": "segmentation_run",
            "fit_temperatures": "reliability",
            "fpr95": "ood",
            "frontier_table": "routing_tables",
            "is_segmentation": "segmentation_records",
            "matched_table": "routing_tables",
            "measure_budgets": "settings",
            "measure_ood": "ood",
            "read_records": "records",
            "read_segmentation_records": "segmentation_records",
            "reliabilities": "reliability",
            "reliability_bins": "reliability",
            "risk_coverage": "selective",
            "risk_coverage_curves": "selective",
            "segmentation_frontier_table": "segmentation_tables",
            "train_linear_probe": "linear_probe",
            "with_abstention": "settings",
            "with_ood": "settings",
            "write_records": "records",
            "write_segmentation_records": "segmentation_records",
        },
    )
