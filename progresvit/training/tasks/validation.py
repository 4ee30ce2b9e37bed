"""The validation of a training: the columns of a predictor in memory, and the metrics that follow from them.

Letters: B images of a batch, N images, d channels, S rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from progresvit import compute
from progresvit.data.augment.classification import Batch
from progresvit.distributed import Processes
from progresvit.model.interface import RoundModel
from progresvit.predict.features import KNN, Features
from progresvit.predict.head import score_columns
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
    """One line about an evaluation: the accuracy of every round, and the near-lossless point if the model has one.

    Args:
        values: The values of the evaluation.
        name: What the accuracies are called.
        accuracies: The accuracy of each round.
        metric: Key of the near-lossless point's accuracy.
        threshold: Whether the line ends with the point's threshold.
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


@torch.no_grad()
def knn_metrics(
    model: RoundModel,
    bank: Iterator[Batch],
    val: Iterator[Batch],
    *,
    processes: Processes,
    dtype: torch.dtype | None,
    k: int,
    temperature: float,
) -> Metrics:
    """Top-1 of a k-NN classifier on the class tokens of each round, and of its near-lossless routed point.

    Args:
        model: The model, whose class tokens are compared.
        bank: This process's share of the images that vote.
        val: This process's share of the validation images.
        processes: The processes of the run.
        dtype: Precision of autocast; None: float32.
        k: Number of neighbours.
        temperature: Temperature of the neighbours' weights.
    """
    features, device = Features(cast(Any, cast(nn.Module, model).eval()), dtype=dtype), processes.device

    def tokens_of(batches: Iterator[Batch]) -> tuple[list[Tensor], Tensor]:
        """Class tokens and labels of the images of all processes: S times (N, d), and (N,)."""
        columns = gather_columns(
            ({**features.columns(*batch), "target": batch.targets} for batch in batches), processes
        )
        targets = torch.from_numpy(columns.pop("target")).to(device)
        return [torch.from_numpy(tokens).to(device) for tokens in columns.values()], targets

    (bank_tokens, bank_targets), (tokens, targets) = tokens_of(bank), tokens_of(val)
    classes = int(max(bank_targets.max(), targets.max())) + 1
    knn = KNN(bank_tokens, bank_targets, classes=classes, k=k, temperature=temperature, make=score_columns)
    columns = {name: column.cpu().numpy() for name, column in knn.columns(tokens, targets).items()}
    return top1_metrics(model, columns, "knn")
