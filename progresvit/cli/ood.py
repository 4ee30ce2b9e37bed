"""``progresvit ood``: how well scores tell images of other classes from images of the model's own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from progresvit.cli import options, output


def ood(
    known: Annotated[Path, typer.Argument(help="Records on images of the model's classes.")],
    unknown: Annotated[Path, typer.Argument(help="Records on images of other classes (evaluate --unlabelled).")],
    threshold: options.Threshold = None,
    router: options.RouterFile = None,
    out: options.Tables = None,
) -> None:
    """Print AUROC and FPR95 of each out-of-distribution score, routed and for the last round.

    With a setting of calibrate --ood-share as --threshold, also print the shares that it rejects.
    """
    from progresvit.evaluation import measure_ood, read_records
    from progresvit.evaluation.ood import ood_table, rejected_share
    from progresvit.routing import load_setting
    from progresvit.table import check_outputs

    check_outputs(out or [], plots=False)
    records, limit, fitted = options.open_records(known, threshold, router)
    others = read_records(unknown)
    lines = []
    setting = load_setting(threshold) if threshold is not None and threshold.endswith(".json") else None
    if setting is not None and setting.ood is not None:
        shares = [rejected_share(images, setting, fitted) for images in (records, others)]
        lines.append(
            f"{setting.ood.score} below {setting.ood.limit:.4g}: {shares[0]:.1%} of the known images and "
            f"{shares[1]:.1%} of the unknown ones are rejected"
        )
    output.publish(ood_table(measure_ood(records, others, limit, fitted)), out, lines=lines)
