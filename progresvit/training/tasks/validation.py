"""The validation of a training: the columns of a predictor in memory, and the metrics that follow from them.

Letters: N images, S rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from progresvit import compute
from progresvit.distributed import Processes
from progresvit.model.interface import RoundModel
from progresvit.routing import Metric, Top1, metric_near_lossless
from progresvit.training.tasks.task import Metrics

CONVENTION: compute.Convention = "paper"


def gather_columns(batches: Iterable[Mapping[str, Any]], processes: Processes) -> dict[str, NDArray[Any]]:
    """The columns of all batches of all processes, (N, …) each, in the order of the processes."""
    pieces: dict[str, list[Tensor]] = {}
    for columns in batches:
        for name, column in columns.items():
            pieces.setdefault(name, []).append(column)
    mine = {name: torch.cat(columns).cpu().numpy() for name, columns in pieces.items()}
    shares = [share for share in processes.gather(mine) if share]  # a process may have no images
    return {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}


def routed_metrics(
    model: RoundModel, scores: NDArray[Any], metric: Metric[Any], gmacs: NDArray[Any], values: Mapping[str, Any]
) -> Metrics:
    """The accuracy of every round and the near-lossless point; the last round's accuracy selects the best model.

    A model whose rounds are alternatives (``config.routable`` is false) has no near-lossless point.

    Args:
        model: The model.
        scores: The uncertainty of each image after each round, (N, S).
        metric: The accuracy.
        gmacs: Cumulative GMACs of the rounds, (S,); (N, S) if images differ.
        values: The accuracies of the rounds, by the names of the history.
    """
    accuracy = next(iter(metric.single_rounds().values()))  # (S,)
    values = {"images": len(scores), **values}
    if model.config.routable:
        values["near_lossless"] = asdict(metric_near_lossless(scores, metric, gmacs))
    full = float(gmacs[:, -1].mean() if gmacs.ndim == 2 else gmacs[-1])
    return Metrics(primary=float(accuracy[-1]), values={**values, "full_gmacs": full, "convention": CONVENTION})


def top1_metrics(model: RoundModel, columns: Mapping[str, NDArray[Any]], name: str = "top1") -> Metrics:
    """The metrics of the columns ``top10_entropy`` and ``correct``; ``name`` is the key of the rounds' top-1."""
    metric = Top1(columns["correct"])
    top1 = metric.single_rounds()["top1"].tolist()
    return routed_metrics(model, columns["top10_entropy"], metric, np.asarray(model.gmacs(CONVENTION)), {name: top1})


def summarize_rounds(
    values: Mapping[str, Any], name: str, accuracies: Iterable[float], *, metric: str, threshold: bool = True
) -> str:
    """One line about an evaluation: the accuracies of the rounds, called ``name``, and the near-lossless point, if any.

    ``metric`` is the key of the point's accuracy. With ``threshold``, the line ends with the point's threshold.
    """
    rounds = f"{name} of the rounds {' '.join(f'{accuracy:.2%}' for accuracy in accuracies)}"
    point = values.get("near_lossless")
    if point is None:
        return rounds
    line = (
        f"{rounds}; near-lossless {point[metric]:.2%} at {point['gmacs']:.3f} of {values['full_gmacs']:.3f} GMACs "
        f"({values['convention']})"
    )
    return f"{line}, threshold {point['threshold']:.4f}" if threshold else line
