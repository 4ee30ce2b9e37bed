"""Records that are kept in a file, so that an evaluation runs once."""

from __future__ import annotations

from pathlib import Path

import torch

from progresvit import evaluation
from progresvit.distributed import Processes
from progresvit.evaluation import DataSource, EvalOptions, Records
from progresvit.evaluation.source import intended_header
from progresvit.model import RoundModel

SAME = ("weights_sha256", "preprocessing_sha256", "precision", "names_sha256", "classes", "corruption")
"""Fields of a header by which records are of a model on some images, wherever these lie."""


def evaluate_once(model: RoundModel, source: DataSource, path: Path, *, workers: int, device: str) -> Records:
    """The records in the file, if they are of this model on these images, or new ones, in fp32."""
    processes = Processes(0, 1, torch.device(device))
    options = EvalOptions(precision="fp32", workers=workers)
    if not path.exists():
        return evaluation.evaluate(model, source, path, name=path.stem, processes=processes, options=options)
    records = evaluation.read_records(path)
    intended = intended_header(model, source, path.stem, options, processes)
    differing = [
        field.removesuffix("_sha256") for field in SAME if getattr(records.header, field) != getattr(intended, field)
    ]
    if differing:
        raise ValueError(f"{path} is of other {' and '.join(differing)}; delete it, or name another folder.")
    return records
